"""``torch.compile`` under guard: the compiled bits, nothing compiled anew, what is seen and what is said not to be."""

from __future__ import annotations

import copy
import json
import os
import shutil
import textwrap
from pathlib import Path

import pytest
import torch
from extent import chosen
from ranks import forked, script
from torch import nn

import bitwitness as bw
from bitwitness.testing import EVERY_STEP

pytest.importorskip("torch._dynamo", reason="this torch has no compiler")
from torch._dynamo.utils import counters

JOBS = Path(__file__).parent / "jobs"
ALWAYS = {**EVERY_STEP, "self_test": True}
KERNELS_UNSEEN = (
    "compiled kernels themselves are not checked on deep steps; their matrix products were checked in an eager"
)
COMPILER = ("functorch.compile", "torch._dynamo.backends.debugging")
FORMS = ("wrapped", "in place", "submodule", "submodule in place", "function", "optimizer")

# What torch itself says while it compiles, about nobody's code.
pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.drop, self.down = nn.Linear(8, 16), nn.Dropout(0.3), nn.Linear(16, 8)

    def forward(self, x):
        return x + self.down(self.drop(torch.tanh(self.up(x))))


class Net(nn.Module):
    """A block, BatchNorm (buffers), a head; returns its loss."""

    def __init__(self, function=torch.sin) -> None:
        super().__init__()
        self.block, self.norm, self.head = Block(), nn.BatchNorm1d(8), nn.Linear(8, 1)
        self.function = function

    def forward(self, x):
        return self.function(self.head(self.norm(self.block(x)))).square().mean()


def doubled_tanh(x):
    return torch.tanh(x) * 2


def build(form: str, backend) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    net = Net(torch.compile(doubled_tanh, backend=backend) if form == "function" else torch.sin)
    model: nn.Module = net
    if form == "wrapped":
        model = torch.compile(net, backend=backend)
    if form == "in place":
        net.compile(backend=backend)
    if form == "submodule":
        net.block = torch.compile(net.block, backend=backend)
    if form == "submodule in place":
        net.block.compile(backend=backend)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def train(form: str, backend, guarded=None, steps: int = 6, **settings) -> tuple[list, bw.Guard | None]:
    """Train; return losses, all state at the end, the random state and what was compiled; and the guard."""
    torch.compiler.reset()
    counters.clear()
    model, optimizer = build(form, backend)
    step = torch.compile(optimizer.step, backend=backend) if form == "optimizer" else optimizer.step
    generator = torch.Generator().manual_seed(1)
    guard = guarded(model, optimizer, **settings).__enter__() if guarded else None
    losses = []
    try:
        for _ in range(steps):
            loss = model(torch.randn(4, 8, generator=generator))
            loss.backward()
            step()
            optimizer.zero_grad()
            losses.append(loss.item())
    finally:
        if guard is not None:
            guard.close()
    compiled = (counters["frames"]["ok"], counters["stats"]["unique_graphs"], counters["stats"]["calls_captured"])
    model(torch.randn(4, 8, generator=generator)).backward()  # unguarded now; nothing is compiled anew
    assert counters["stats"]["unique_graphs"] == compiled[1]
    state = [*model.parameters(), *model.buffers(), *(v for s in optimizer.state.values() for v in s.values())]
    return [losses, [value.tolist() for value in state], torch.get_rng_state().tolist(), compiled], guard


def same_bits(form: str, backend) -> dict:
    """Compare a training with its guarded twin, of which each step is replayed; return the coverage table."""
    plain, _ = train(form, backend)
    watched, guard = train(form, backend, bw.Guard, deep_every=2, **ALWAYS)
    assert watched == plain
    assert plain[3][1] > 0, "nothing was compiled"
    table = guard.coverage()
    assert table["failures"] == {}
    assert table["verdicts"] == []
    assert table["suspicions"] >= 4
    assert table["dismissed"] + table["left_open"] == table["suspicions"]
    return table


@pytest.mark.parametrize("form", FORMS)
def test_same_bits_and_nothing_compiled_anew(form: str) -> None:
    table = same_bits(form, "aot_eager")
    if form != "optimizer":  # whose first step ran before anything was compiled
        assert any(gap.startswith(KERNELS_UNSEEN) for gap in table["not_covered"]), table["not_covered"]
    assert table["operators"]["share_checked"] == 1.0
    assert table["replay"]["this_step"] == "can be run again"


@pytest.mark.skipif(shutil.which(os.environ.get("CXX", "g++")) is None, reason="inductor needs a C++ compiler")
def test_same_bits_of_inductors_kernels() -> None:
    same_bits("wrapped", "inductor")


class Language(nn.Module):
    """Returns what it computes its loss from, too, as many language models do."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.block, self.head = nn.Embedding(12, 8), Block(), nn.Linear(8, 12)

    def forward(self, x, y):
        logits = self.head(self.block(self.words(x)))
        return logits, nn.functional.cross_entropy(logits, y)


def test_an_output_that_the_script_does_not_use_is_no_obstacle() -> None:
    def run(guarded: bool) -> tuple[list[float], bw.Guard | None]:
        torch.compiler.reset()
        torch.manual_seed(0)
        model = torch.compile(Language(), backend="aot_eager")
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        guard = bw.Guard(model, optimizer, **ALWAYS).__enter__() if guarded else None
        losses = []
        for _ in range(5):
            for _ in range(2):
                x = torch.randint(0, 12, (4,))
                _, loss = model(x, (x + 1) % 12)
                (loss / 2).backward()
                losses.append(loss.item())
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        if guard is not None:
            guard.close()
        return losses, guard

    losses, guard = run(guarded=True)
    assert losses == run(guarded=False)[0]
    table = guard.coverage()
    assert table["failures"] == {}
    assert table["dismissed"] == table["suspicions"] >= 4
    assert not any("cannot be run again" in gap for gap in table["not_covered"])


def test_the_hooks_go_and_a_copy_is_free_of_them() -> None:
    for form in ("wrapped", "in place"):
        torch.compiler.reset()
        model, optimizer = build(form, "aot_eager")
        inner = model._orig_mod if form == "wrapped" else model
        call = inner._compiled_call_impl
        with bw.Guard(model, optimizer) as guard:
            twin = copy.deepcopy(inner)
            twin(torch.randn(4, 8)).backward()
            assert guard.coverage()["steps"]["training_forwards"] == 0
            assert not inner._forward_hooks
        assert inner._compiled_call_impl is call
        assert not model._forward_hooks
        assert not model._forward_pre_hooks


def test_a_guard_made_before_compiling_says_that_it_sees_gradients_alone(capsys: pytest.CaptureFixture) -> None:
    torch.compiler.reset()
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with bw.Guard(net, optimizer) as guard:
        model = torch.compile(net, backend="aot_eager", fullgraph=True)
        for _ in range(4):
            model(torch.randn(4, 8)).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert any("the model's own forward is not called" in gap for gap in guard.coverage()["not_covered"])
        assert guard.coverage()["steps"]["held"] == 4
    assert "gradients are sensed, but there is nothing to run again" in capsys.readouterr().err


def test_the_users_stance_stands() -> None:
    torch.compiler.reset()
    model, optimizer = build("wrapped", "aot_eager")
    counters.clear()
    with bw.Guard(model, optimizer, deep_every=1, **ALWAYS) as guard, torch.compiler.set_stance("force_eager"):
        for _ in range(4):
            model(torch.randn(4, 8)).backward()
            optimizer.step()
            optimizer.zero_grad()
        table = guard.coverage()
    assert counters["frames"]["total"] == 0
    assert table["dismissed"] + table["left_open"] == table["suspicions"] > 0


def faulty_backend(graph: torch.fx.GraphModule, _inputs):
    """A mock of a compiler (or of the device its kernels run on) that always computes a sine too large."""
    for node in list(graph.graph.nodes):
        if node.op == "call_function" and "sin" in str(node.target):
            with graph.graph.inserting_after(node):
                spoiled = graph.graph.call_function(torch.mul, (node, 50.0))
            node.replace_all_uses_with(spoiled, delete_user_cb=lambda user, s=spoiled: user is not s)
    graph.recompile()
    return graph.forward


def test_compiled_code_that_contradicts_its_operators_convicts_nobody_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """One device, the same wrong result every time: neither dismissed nor convicted, and said what contradicts what."""
    monkeypatch.setattr(Block, "forward", lambda self, x: x + self.down(torch.tanh(self.up(x))))
    _, guard = train("wrapped", faulty_backend, bw.Guard, steps=3, **ALWAYS)
    verdicts = guard.verdicts
    assert {str(verdict.cause) for verdict in verdicts} == {"inconclusive"}
    assert "this device or the compiler is wrong" in verdicts[0].message


def test_a_script_whose_model_is_compiled(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(
        textwrap.dedent("""
        import sys, torch
        from torch import nn
        from torch._dynamo.utils import counters
        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.a, self.b = nn.Linear(8, 16), nn.Linear(16, 1)
            def forward(self, x):
                return self.b(torch.tanh(self.a(x))).square().mean()
        for form in ("wrapped", "in place"):
            torch.manual_seed(0)
            net = Net()
            if form == sys.argv[1]:
                if form == "wrapped":
                    net = torch.compile(net, backend="aot_eager")
                else:
                    net.compile(backend="aot_eager")
                optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
                for _ in range(4):
                    net(torch.randn(4, 8)).backward(); optimizer.step(); optimizer.zero_grad()
                print(net.b.bias.item(), dict(counters["frames"]), dict(counters["stats"]))
    """)
    )
    for form in ("wrapped", "in place"):
        plain = script([path, form], tmp_path, imported=COMPILER)
        assert plain.returncode == 0, plain.stderr
        run = ["-m", "bitwitness", "run", path, form]
        watched = script(run, tmp_path, warn=("error::UserWarning",), imported=COMPILER)
        assert watched.returncode == 0, watched.stderr
        assert watched.stdout == plain.stdout
        assert "4 of 4 parameters, 4 steps" in watched.stderr


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict]]:
    job = [str(JOBS / "compiled.py"), chosen("all", "some")]
    launched = forked(3, job, tmp_path_factory.mktemp("compiled"), imported=COMPILER)
    text = "\n".join(log.read_text() for log in launched.logs)
    assert launched.code == 0, text[-4000:]
    cases = [json.loads(line) for line in text.splitlines() if line.startswith('{"case"')]
    return {case["case"]: case["ranks"] for case in cases}


@pytest.mark.ranks
@pytest.mark.parametrize("form", ["below", "around", *chosen(["below in place", "below gradient_as_bucket_view"], [])])
def test_ranks_keep_the_compiled_bits(told, form: str) -> None:
    for rank in told[f"identity {form}"]:
        assert rank["same"]
        assert rank["failures"] == {}
        assert rank["verdicts"] == []
        assert rank["dismissed"] == rank["suspicions"] >= 5
        assert any(gap.startswith(KERNELS_UNSEEN) for gap in rank["gaps"])


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("form", "reason"),
    [
        ("around in place", "DistributedDataParallel.compile(): compile the module inside it instead"),
        ("below odd_shapes", "it would have to be compiled anew"),
    ],
)
def test_what_cannot_be_replayed_is_named_and_left_alone(told, form: str, reason: str) -> None:
    for rank in told[f"identity {form}"]:
        assert rank["same"]
        assert rank["failures"] == {}
        assert rank["verdicts"] == []
    assert any(reason in gap for gap in told[f"identity {form}"][0]["gaps"])


@pytest.mark.ranks
@pytest.mark.parametrize("form", chosen(["below", "around"], ["below"]))
def test_a_transient_in_a_compiled_kernel_is_healed_to_the_very_bits(told, form: str) -> None:
    ranks = told[f"fault {form} 1"]
    assert [rank["struck"] for rank in ranks] == [0, 1, 0]
    for rank in ranks:
        assert [verdict[:4] for verdict in rank["verdicts"]] == [[4, "transient_hardware", [1], "healed"]]
        assert rank["weights"]
        assert rank["failures"] == {}


@pytest.mark.ranks
@pytest.mark.parametrize("form", chosen(["below", "around"], ["below"]))
def test_a_compiled_kernel_that_is_always_wrong_convicts_its_device(told, form: str) -> None:
    for rank in told[f"fault {form} 1000000"]:
        (verdict,) = rank["verdicts"]
        assert verdict[:4] == [4, "persistent_hardware", [1], "stopped"]
        assert "compiled code produced it, and no operator can be named" in verdict[4]
        assert rank["stopped"] == 17
