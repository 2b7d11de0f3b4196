"""``bitwitness record``: which of a script's calls are models of its own, and where each is recorded."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from jobs import dry_run
from ranks import forked
from torch import nn

import bitwitness as bw
from bitwitness.config.recording import RecordConfig
from bitwitness.record.auto import AutoRecorder


def recorded(
    script: Callable[[], None], out: Path, capsys: pytest.CaptureFixture[str], **settings: object
) -> list[str]:
    """Run a script under a search; return the folders that are named at its end."""
    search = AutoRecorder(RecordConfig(**settings), str(out))
    with search:
        script()
    search.say()
    said = capsys.readouterr().err
    return said.partition("recorded in ")[2].split()


def train(net: nn.Module, steps: int = 2, inputs: int = 4) -> None:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        net(torch.randn(3, inputs)).square().mean().backward()
        optimizer.step()


class Sized(nn.Module):
    """Looks in its constructor for the size of what its first part gives."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(4, 6)
        self.head = nn.Linear(self.body(torch.zeros(1, 4)).shape[1], 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x))


def test_a_model_that_looks_for_a_size_is_one_recording(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "run"
    assert recorded(lambda: train(Sized()), out, capsys) == [str(out)]
    assert bw.Run(out).steps() == [0, 1]


def test_the_first_step_of_a_model_that_runs_in_a_closure_is_whole(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def script() -> None:
        net = nn.Linear(4, 2)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = net(torch.randn(3, 4)).square().mean()
            loss.backward()
            nn.utils.clip_grad_norm_(net.parameters(), 0.1)
            return loss

        for _ in range(2):
            optimizer.step(closure)

    out = tmp_path / "run"
    recorded(script, out, capsys)
    rows = bw.Run(out).rows().to_pylist()
    slots = [
        sorted((row["module"], row["slot"]) for row in rows if row["step"] == step and row["phase"] == "optim")
        for step in (0, 1)
    ]
    assert slots[0] == slots[1]
    assert ("weight", "grad") in slots[0]


def test_the_dry_run_of_lazy_modules_is_no_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def script() -> None:
        net = nn.Sequential(nn.LazyLinear(6), nn.Linear(6, 2))
        net(torch.zeros(1, 4))
        train(net)

    out = tmp_path / "run"
    assert recorded(script, out, capsys) == [str(out)]
    assert bw.Run(out).steps() == [0, 1]


def test_two_models_have_a_folder_each(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def script() -> None:
        train(nn.Linear(4, 2))
        train(nn.Linear(4, 3))

    out = tmp_path / "run"
    assert recorded(script, out, capsys) == [f"{out},", f"{out}-2"]


def test_a_part_that_was_called_first_is_recorded_with_its_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What was recorded of the part alone is of no step, and goes, tensors and all."""

    def script() -> None:
        net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
        net[0](torch.zeros(1, 4)).sum().backward()
        net.zero_grad()
        train(net)

    out = tmp_path / "run"
    assert recorded(script, out, capsys, content="tensors") == [str(out)]
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    assert bw.Run(out).steps() == [0, 1]
    assert "0" in {row["module"] for row in bw.Run(out).rows().to_pylist()}


def test_optimizers_inside_the_backward_leave_a_whole_recording(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def script() -> None:
        net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))
        optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in net.parameters()}

        def use(parameter: torch.Tensor) -> None:
            optimizers[parameter].step()
            optimizers[parameter].zero_grad()

        for parameter in net.parameters():
            parameter.register_post_accumulate_grad_hook(use)
        for _ in range(4):
            net(torch.randn(3, 4)).square().mean().backward()

    assert recorded(script, tmp_path / "run", capsys) == [str(tmp_path / "run")]
    rows = bw.Run(tmp_path / "run").rows().to_pylist()
    products = [row["step"] for row in rows if (row["op"], row["phase"], row["slot"]) == ("addmm", "forward", "out0")]
    assert products == [0, 0, 1, 1, 2, 2, 3, 3]
    assert not torch.utils._python_dispatch._get_current_dispatch_mode_stack()


def test_what_is_on_the_meta_device_is_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def script() -> None:
        train(nn.Linear(4, 2))
        with torch.device("meta"):
            nn.Linear(4, 2)(torch.ones(3, 4))
        with torch.device("meta"):
            train(nn.Linear(4, 2))

    assert recorded(script, tmp_path / "run", capsys) == [str(tmp_path / "run")]
    assert bw.Run(tmp_path / "run").steps() == [0, 1]


def test_a_model_that_infers_is_recorded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def script() -> None:
        net = nn.Linear(4, 2).eval().requires_grad_(requires_grad=False)
        with torch.no_grad():
            net(torch.ones(1, 4))

    out = tmp_path / "run"
    assert recorded(script, out, capsys) == [str(out)]
    assert bw.Run(out).steps() == [0]


@pytest.mark.ranks
def test_a_dry_run_before_the_wrapper_leaves_one_recording_of_all_ranks(tmp_path: Path) -> None:
    out = tmp_path / "run"
    arguments = ["-m", "bitwitness", "record", "--out", str(out), dry_run.__file__]
    launched = forked(2, arguments, tmp_path / "logs")
    assert launched.code == 0, launched.text
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["logs", "run"]
    run = bw.Run(out)
    assert run.steps() == list(range(dry_run.STEPS))
    assert sorted(path.name for path in out.glob("rank*")) == ["rank00000", "rank00001"]


@pytest.mark.parametrize("way", ["per sample", "per sample alone", "inner step"])
def test_gradients_by_transforms_are_recorded_as_the_optimizer_reads_them(
    way: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Inside a transform of ``torch.func`` other tensors stand in the parameters' place, or such that are no leaves."""

    def script() -> None:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

        def loss(parameters: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
            return torch.func.functional_call(net, parameters, (x,)).square().mean()

        for _ in range(2):
            x, parameters = torch.randn(3, 4), dict(net.named_parameters())
            optimizer.zero_grad()
            if way.startswith("per sample"):
                found = torch.func.vmap(torch.func.grad(loss), (None, 0))(parameters, x)
                for name, p in net.named_parameters():
                    p.grad = found[name].detach().mean(0)
                if way == "per sample":
                    net(x)
            else:
                first = torch.autograd.grad(loss(parameters, x), list(parameters.values()), create_graph=True)
                moved = {name: p - 0.1 * g for (name, p), g in zip(parameters.items(), first, strict=True)}
                loss(moved, x).backward()
            optimizer.step()

    for name in "ab":
        search = AutoRecorder(RecordConfig(), str(tmp_path / name))
        with search:
            script()
        search.say()
        said = capsys.readouterr().err
        assert "ended" not in said, said
    rows = bw.Run(tmp_path / "a").rows().to_pylist()
    updated = {row["module"] for row in rows if row["kind"] == "optimizer"}
    assert updated == {"0.weight", "0.bias", "2.weight", "2.bias"}
    if way != "inner step":  # whose inner gradients count as a step's
        assert bw.Run(tmp_path / "a").steps() == [0, 1]
    assert bw.compare(tmp_path / "a", tmp_path / "b").status == "fine"


def test_a_part_that_the_script_calls_first_is_none_of_the_step_before(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An encoder called by itself, whose result the model is given, as translation models allow."""

    class Encoder(nn.Module):
        def __init__(self, words: nn.Embedding) -> None:
            super().__init__()
            self.words, self.mix = words, nn.Linear(6, 6)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.mix(self.words(ids)).tanh()

    class Translator(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Embedding(30, 6)
            self.encoder, self.decoder = Encoder(self.words), nn.Linear(6, 30)

        def forward(
            self, ids: torch.Tensor | None, labels: torch.Tensor, encoded: torch.Tensor | None = None
        ) -> torch.Tensor:
            encoded = self.encoder(ids) if encoded is None else encoded
            return self.decoder(encoded + self.words(labels.flip(1))).logsumexp(-1).mean()

    def script(*, first: bool) -> None:
        torch.manual_seed(0)
        net = Translator()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for step in range(3):
            ids, labels = torch.randint(0, 30, (2, 8, 5), generator=torch.Generator().manual_seed(step))
            (net(None, labels, encoded=net.encoder(ids)) if first else net(ids, labels)).backward()
            optimizer.step()
            optimizer.zero_grad()

    a, b = (tmp_path / name for name in "ab")
    for out, first in ((a, False), (b, True)):
        recorded(lambda first=first: script(first=first), out, capsys)  # type: ignore[misc]
    report = bw.compare(a, b)
    assert report.status == "fine", report.conclusion


def test_a_prototype_without_numbers_for_which_stacked_weights_stand_in_keeps_nothing_from_being_recorded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Ensemble(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            members = [nn.Linear(4, 2) for _ in range(3)]
            stacked, _ = torch.func.stack_module_state(members)
            for name, weights in stacked.items():
                self.register_parameter(name, nn.Parameter(weights.detach().clone()))
            self.prototype = [nn.Linear(4, 2).to("meta")]  # no part of this one, as torch's own ensembles have it

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            def one(weights: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
                return torch.func.functional_call(self.prototype[0], weights, (x,))

            return torch.vmap(one, (0, None))(dict(self.named_parameters()), x)

    search = AutoRecorder(RecordConfig(), str(tmp_path / "run"))
    with search:
        train(Ensemble())
    search.say()
    assert "NOT ALL" not in capsys.readouterr().err
    assert bw.Run(tmp_path / "run").steps() == [0, 1]


class Penalised(nn.Module):
    """A loss without parameters of its own, as `nn.CrossEntropyLoss` is; ``judge``: a model that it asks, and does not own."""

    def __init__(self, judge: nn.Module | None = None) -> None:
        super().__init__()
        self.judge = [judge]

    def forward(self, out: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        loss = nn.functional.cross_entropy(out, target)
        return loss if self.judge[0] is None else loss + self.judge[0](out).sigmoid().mean()


@pytest.mark.parametrize("command", [True, False])
def test_the_operators_of_a_loss_that_is_a_module_are_recorded(tmp_path: Path, command: bool) -> None:
    torch.manual_seed(0)
    net, judge = nn.Linear(4, 3), nn.Sequential(nn.Linear(3, 2), nn.Hardswish(), nn.Linear(2, 1))
    optimizer = torch.optim.SGD([*net.parameters(), *judge.parameters()], lr=0.1)
    out = tmp_path / "run"
    with AutoRecorder(RecordConfig(), str(out)) if command else bw.Recorder(net, out=out):
        for criterion in (nn.CrossEntropyLoss(), Penalised(), Penalised(judge)):
            optimizer.zero_grad()
            criterion(net(torch.randn(5, 4)), torch.arange(5) % 3).backward()
            optimizer.step()
    rows = [row for row in bw.Run(out).rows().to_pylist() if row["kind"] == "op"]
    for step in range(3):
        ops = {row["op"] for row in rows if row["step"] == step}
        assert {"nll_loss_forward", "nll_loss_backward", "_log_softmax"} <= ops
        assert not {"hardswish", "hardswish_backward"} & ops, "what another model computes is in its own recording"


def test_what_is_hashed_as_a_second_model_begins_is_no_operator_of_the_first(tmp_path: Path) -> None:
    torch.manual_seed(0)
    maker, judge = nn.Linear(4, 3), nn.Linear(3, 1)
    optimizer = torch.optim.SGD([*maker.parameters(), *judge.parameters()], lr=0.1)
    with AutoRecorder(RecordConfig(), str(tmp_path / "run")):
        for _ in range(2):
            optimizer.zero_grad()
            judge(maker(torch.randn(5, 4)).tanh()).mean().backward()
            optimizer.step()
    rows = bw.Run(tmp_path / "run").rows().to_pylist()
    steps = [
        [row["op"] for row in rows if (row["kind"], row["phase"], row["step"]) == ("op", "forward", n)] for n in (0, 1)
    ]
    assert steps[0] == steps[1]


@pytest.mark.parametrize("command", [True, False])
def test_weights_that_an_inner_loop_adapts_end_no_step(tmp_path: Path, command: bool) -> None:
    torch.manual_seed(0)
    net, out = nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1)), tmp_path / "run"
    meta = torch.optim.Adam(net.parameters())
    with AutoRecorder(RecordConfig(), str(out)) if command else bw.Recorder(net, out=out):
        for _ in range(3):
            total = torch.zeros(())
            for _task in range(2):
                x, weights = torch.randn(10, 1), dict(net.named_parameters())
                for _inner in range(2):
                    loss = torch.func.functional_call(net, weights, (x,)).square().mean()
                    grads = torch.autograd.grad(loss, list(weights.values()), create_graph=True)
                    weights = {name: w - 0.1 * g for (name, w), g in zip(weights.items(), grads, strict=True)}
                total = total + torch.func.functional_call(net, weights, (x,)).sub(1).square().mean()
            meta.zero_grad()
            total.backward()
            meta.step()
    rows = bw.Run(out).rows().to_pylist()
    assert sorted({row["step"] for row in rows}) == [0, 1, 2]
    assert sum(row["kind"] == "gradient" for row in rows) == 3 * 4
