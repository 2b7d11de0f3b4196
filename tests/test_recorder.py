"""What a recording holds, that it leaves the training as it was, and what remains of it when things go wrong."""

from __future__ import annotations

import contextlib
import copy
import json
import os
import pickle
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import duckdb
import polars as pl
import pytest
import torch
import torch.nn.functional as F
from compare_zoo import CASES, GPT, ConvNet, record
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import bitwitness as bw
from bitwitness import ConfigError, UsageError
from bitwitness.config.recording import read_msprobe
from bitwitness.record.meter import Meter
from bitwitness.stats import bit_hash, stats_of
from bitwitness.stats.sketch import block_sums
from bitwitness.store.run import RunSource
from bitwitness.store.tensorfile import TensorReader


def rows(folder: str | Path, where: str = "true") -> list[dict]:
    found = duckdb.sql(f"select * from '{folder}/rank*/stats-*.parquet' where {where} order by rank, seq")
    return [dict(zip(found.columns, row, strict=True)) for row in found.fetchall()]


def train(model: nn.Module, steps: int = 2, seed: int = 0, batch: int = 4) -> float:
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(steps):
        loss = model(torch.randn(batch, 8, generator=generator)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return float(loss.detach())


class Net(nn.Module):
    """In-place ReLU, a view, a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
        self.relu = nn.ReLU(inplace=True)
        self.checkpointed = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = checkpoint(self._inner, x, use_reentrant=False) if self.checkpointed else self._inner(x)
        return self.b(y) + x

    def _inner(self, x: torch.Tensor) -> torch.Tensor:
        return self.relu(self.a(x))


def test_every_operator_is_there_with_its_true_inputs_and_outputs(tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = Net()
    x = torch.randn(4, 8)
    with bw.Recorder(net, out=tmp_path / "run", content="tensors") as recorder:
        out = net(x)
        out.square().mean().backward()
    source = RunSource(recorder.folder)
    found = rows(recorder.folder, "kind = 'op'")
    ops = {(r["module"], r["op"], r["phase"], r["slot"]): r for r in found}
    kept = {key: source.tensor(0, r["tensor"], r["dtype"], tuple(r["shape"]), r["layout"]) for key, r in ops.items()}
    before, after = kept["relu", "relu_", "forward", "in0"], kept["relu", "relu_", "forward", "out0"]
    assert torch.equal(before, F.linear(x, net.a.weight, net.a.bias))  # the value before it was overwritten
    assert torch.equal(after, before.relu())
    assert torch.equal(kept["b", "addmm", "forward", "in2"], net.b.weight.T)
    grad = 2 * out.detach() / out.numel()
    made = rows(recorder.folder, "kind = 'op' and module = 'b' and op = 'mm' and phase = 'backward' and slot = 'out0'")
    values = [source.tensor(0, r["tensor"], r["dtype"], tuple(r["shape"]), r["layout"]) for r in made]
    by_shape = {tuple(value.shape): value for value in values}
    assert torch.equal(by_shape[8, 8], net.b.weight.grad)
    assert torch.allclose(by_shape[4, 8], grad @ net.b.weight)
    row = ops["b", "addmm", "forward", "out0"]
    expected = stats_of(kept["b", "addmm", "forward", "out0"])
    assert (row["count"], row["min"], row["max"], row["nan"]) == (expected.count, expected.min, expected.max, 0)
    assert row["mean"] == pytest.approx(expected.mean, rel=1e-5, abs=1e-7)
    assert row["l2"] == pytest.approx(expected.l2, rel=1e-6)
    assert {r["name"] for r in found} >= {"a.weight", "b.bias"}
    line = source.stacks(0)[row["stack"]].splitlines()[0]
    assert "test_recorder.py" in line


def test_training_under_a_recorder_is_bit_identical_and_leaves_nothing(tmp_path: Path) -> None:
    for case in ("conv", "gpt"):
        torch.manual_seed(3)
        plain = CASES[case].make()
        recorded = copy.deepcopy(plain)
        ends = []
        for model in (plain, recorded):
            torch.manual_seed(11)
            generator = torch.Generator().manual_seed(1)
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
            steps = 3
            with bw.Recorder(model, out=tmp_path / case, content="hash", recording=model is recorded):
                for _ in range(steps):
                    CASES[case].loss(model, generator).backward()
                    optimizer.step()
                    optimizer.zero_grad()
            ends.append((torch.get_rng_state(), [p.detach().clone() for p in model.parameters()]))
        assert torch.equal(ends[0][0], ends[1][0])
        assert all(torch.equal(a, b) for a, b in zip(ends[0][1], ends[1][1], strict=True))
        assert not any(m._forward_hooks or m._forward_pre_hooks for m in recorded.modules())
        assert not any(p._post_accumulate_grad_hooks for p in recorded.parameters())


def test_a_paused_recorder_counts_steps_and_hooks_nothing_else(tmp_path: Path) -> None:
    net = Net()
    backward = torch.autograd._engine_run_backward
    with bw.Recorder(net, out=tmp_path / "run", recording=False) as recorder:
        train(net, 1)
        assert torch.autograd._engine_run_backward is backward
        assert not any(m._forward_hooks or m._forward_pre_hooks for m in net.modules() if m is not net)
        recorder.resume()
        train(net, 1)
        recorder.pause()
        assert torch.autograd._engine_run_backward is backward
        train(net, 1)
    assert {r["step"] for r in rows(recorder.folder)} == {1}
    assert recorder.session.step == 2


def test_recomputation_is_recorded_and_told_apart(tmp_path: Path) -> None:
    net = Net()
    net.checkpointed = True
    with bw.Recorder(net, out=tmp_path / "run") as recorder:
        train(net)
    for step in (0, 1):
        out = f"step = {step} and kind = 'op' and phase = 'forward' and slot = 'out0'"
        assert [r["op"] for r in rows(recorder.folder, f"{out} and recomputed")] == ["addmm", "relu_"]
        first = [r["op"] for r in rows(recorder.folder, f"{out} and not recomputed")]
        assert first[:4] == ["addmm", "relu_", "addmm", "add"]


def test_gradients_optimizer_and_buffers(tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = ConvNet()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    with bw.Recorder(net, out=tmp_path / "run", optimizer_state=True) as recorder:
        for _ in range(2):
            F.cross_entropy(net(torch.randn(4, 3, 16, 16)), torch.randint(0, 10, (4,))).backward()
            torch.nn.utils.clip_grad_norm_(net.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
    found = rows(recorder.folder, "module = 'head.weight' and kind = 'optimizer' and step = 1")
    assert [r["slot"] for r in found][:2] == ["grad", "param"]
    assert {"state.exp_avg", "out", "out.exp_avg_sq"} <= {r["slot"] for r in found}
    assert json.loads(found[0]["args"])["k"]["lr"] == 1e-3
    raw = rows(recorder.folder, "kind = 'gradient' and module = 'head' and op = 'weight' and step = 1")[0]
    assert raw["l2"] > found[0]["l2"]  # before and after the clipping
    running = rows(recorder.folder, "op = 'native_batch_norm' and step = 0 and slot like 'running%'")
    before = rows(recorder.folder, "op = 'native_batch_norm' and step = 0 and slot in ('in3', 'in4')")
    assert len(running) == len(before) == 14
    assert all(a["l2"] != b["l2"] for a, b in zip(running, before, strict=True))


def test_micro_batches_steps_and_selection(tmp_path: Path) -> None:
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    settings = {"steps": "1-2", "sites": ["b.*", "b/*"], "phases": ["forward", "backward"]}
    with bw.Recorder(net, out=tmp_path / "run", **settings) as recorder:
        for _ in range(4):
            for _ in range(2):
                net(torch.randn(4, 8)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    found = rows(recorder.folder)
    assert {(r["step"], r["micro"]) for r in found} == {(1, 0), (1, 1), (2, 0), (2, 1)}
    assert {r["module"] for r in found} == {"b"}
    assert {r["phase"] for r in found} == {"forward", "backward"}


def test_a_recorder_whose_steps_never_came_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    net = Net()
    with bw.Recorder(net, out=tmp_path / "run", steps="100-110") as recorder:
        train(net, steps=3)
    recorder.close()  # again: it is said once
    said = capsys.readouterr().err
    assert (
        "run holds no rows: no step that was asked for (steps = '100-110') ended; 3 steps of the training did" in said
    )
    assert said.count("holds no rows") == 1
    with bw.Recorder(net, out=tmp_path / "other", steps="1"):
        train(net)
    assert capsys.readouterr().err == ""


def test_the_users_own_points_and_two_recorders_at_once(tmp_path: Path) -> None:
    first, second = Net(), Net()
    with bw.Recorder(first, out=tmp_path / "a") as one, bw.Recorder(second, out=tmp_path / "b") as two:
        y = first(torch.randn(4, 8))
        bw.save({"y": y}, "my point")
        loss = y.sum() + second(torch.randn(4, 8)).square().sum()
        loss.backward()
    saved = rows(one.folder, "kind = 'saved' and op = 'my point'")
    assert [(r["slot"], r["phase"]) for r in saved] == [("value.y", "forward"), ("grad_value.y", "backward")]
    assert saved[1]["min"] == saved[1]["max"] == 1.0
    for recorder in (one, two):
        ops = rows(recorder.folder, "kind = 'op' and phase = 'forward' and op = 'addmm' and slot = 'out0'")
        assert [r["module"] for r in ops] == ["a", "b"]


@pytest.mark.parametrize("content", ["stats", "hash", "structure", "tensors"])
@pytest.mark.parametrize("deferred", [False, True])
def test_numbers_of_all_dtypes(tmp_path: Path, content: str, deferred: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if deferred:  # as on an accelerator, where nothing may wait
        begin = Meter.__init__
        monkeypatch.setattr(Meter, "__init__", lambda self, **given: begin(self, **given | {"deferred": True}))
    values = [
        torch.tensor([1.5, -2.0, 0.0, 1e30]),
        torch.tensor([6e4, 6e4], dtype=torch.float16),
        torch.tensor([3.0, 1e30], dtype=torch.bfloat16),
        torch.tensor(1e200, dtype=torch.float64),
        torch.tensor([], dtype=torch.float32),
        torch.tensor([[True, False]]),
        torch.tensor([-5, 7], dtype=torch.int8),
        torch.tensor([float("nan"), float("inf"), 1.0]),
        torch.tensor([1 + 2j]),
        torch.arange(12.0).view(3, 4).T,
        torch.randn(4, 6)[:, ::2],
        torch.tensor([1.0, 2.0]).to(torch.float8_e4m3fn),
    ]
    net = Net()
    with bw.Recorder(net, out=tmp_path / "run", content=content, async_dump=deferred, zeros=True) as recorder:
        net(torch.randn(2, 8))
        for i, value in enumerate(values):
            bw.save(value, f"v{i}")
    source = RunSource(recorder.folder)
    for i, value in enumerate(values):
        (row,) = rows(recorder.folder, f"op = 'v{i}' and phase = 'forward'")
        assert tuple(row["shape"]) == tuple(value.shape)
        if content == "structure":
            assert row["l2"] is None
            continue
        expected = stats_of(value)
        assert (row["count"], row["nan"], row["pos_inf"], row["zeros"]) == (
            expected.count, expected.nan, expected.pos_inf, expected.zeros,
        )  # fmt: skip
        if expected.count and not (deferred and expected.nan):
            assert row["l2"] == pytest.approx(expected.l2, rel=1e-5)
            assert (row["min"], row["max"]) == (expected.min, expected.max)
        if content == "hash":
            plain = value if row["layout"] is None else value.T
            assert row["hash"] == int(bit_hash(plain))
        if content == "tensors":
            kept = source.tensor(0, row["tensor"], row["dtype"], tuple(row["shape"]), row["layout"])
            assert torch.equal(bit_hash(kept), bit_hash(value))
            assert kept.dtype == value.dtype


def test_large_tensors_may_be_sampled(tmp_path: Path) -> None:
    net = Net()
    with bw.Recorder(net, out=tmp_path / "run", content="tensors", max_elements=10) as recorder:
        net(torch.randn(4, 8))
    (row,) = rows(recorder.folder, "kind = 'op' and module = 'a' and slot = 'in2'")
    assert row["tensor"].endswith("|every=7")
    kept = RunSource(recorder.folder).tensor(0, row["tensor"], row["dtype"], tuple(row["shape"]), row["layout"])
    assert torch.equal(kept, net.a.weight.flatten()[::7])


def test_safetensors_are_what_any_reader_reads(tmp_path: Path) -> None:
    from safetensors import safe_open

    folder = record(tmp_path / "run", CASES["vit"], content="tensors")
    (row, *_) = rows(folder, "kind = 'op' and op = 'addmm' and slot = 'out0'")
    file, _, key = row["tensor"].partition("|")
    with safe_open(folder / "rank00000" / "tensors" / file, "pt") as opened:
        theirs = opened.get_tensor(key)
    assert torch.equal(theirs, TensorReader(folder / "rank00000" / "tensors" / file).read(key))
    assert len(list((folder / "rank00000" / "tensors").iterdir())) <= 2 * 3  # files of two steps


def test_duckdb_and_polars_read_the_statistics(tmp_path: Path) -> None:
    net = Net()
    with bw.Recorder(net, out=tmp_path / "run") as recorder:
        with torch.no_grad():
            net.b.weight[0, 0] = float("nan")
        train(net, 1)
    glob = f"{recorder.folder}/rank*/stats-*.parquet"
    query = "select rank, step, module, op, phase, slot, nan from '{}' where nan > 0 order by step, seq limit 1"
    first = duckdb.sql(query.format(glob)).fetchall()
    assert first == [(0, 0, "b", "weight", "param", "value", 1)]
    frame = pl.scan_parquet(glob).filter(pl.col("nan") > 0).sort("step", "seq").first().collect()
    assert frame["module"].to_list() == ["b"]


def test_kill_9_leaves_what_was_flushed(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        textwrap.dedent("""
        import sys, time, torch, bitwitness as bw
        net = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
        opt = torch.optim.SGD(net.parameters(), lr=0.1)
        with bw.Recorder(net, out=sys.argv[1], content="tensors") as r:
            for i in range(1000):
                net(torch.randn(4, 8)).sum().backward(); opt.step(); opt.zero_grad()
                if i == 5:
                    r.flush(); print("flushed", flush=True)
                if i > 5: time.sleep(0.01)
        """)
    )
    job = subprocess.Popen([sys.executable, script, tmp_path / "run"], stdout=subprocess.PIPE, text=True)
    assert job.stdout is not None
    assert job.stdout.readline().strip() == "flushed"
    time.sleep(0.2)
    job.send_signal(signal.SIGKILL)
    job.communicate()
    source = RunSource(tmp_path / "run")
    assert source.steps(0)[:5] == [0, 1, 2, 3, 4]
    # what was being written at that moment is missing, and said to be: never what was flushed before
    assert all("or was being written at the end" in problem for problem in source.problems)
    assert len(source.problems) <= 2  # a file of statistics, and one of tensors
    for step in range(5):
        for row in source.table(0, step).to_pylist():
            source.tensor(0, row["tensor"], row["dtype"], tuple(row["shape"]), row["layout"])


def test_a_full_disk_ends_the_recording_and_not_the_training(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    if os.geteuid() == 0 and not Path("/dev/full").exists():
        pytest.skip("needs a device that is full")
    net = Net()
    with bw.Recorder(net, out=tmp_path / "run", content="tensors") as recorder:
        folder = Path(recorder.folder) / "rank00000"
        (folder / "tensors").mkdir()
        (folder / "tensors" / "step00000000-000001.safetensors.part").symlink_to("/dev/full")
        train(net, 3)
    said = capfd.readouterr().err
    assert "the recording in" in said
    assert "No space left on device" in said
    assert "The training goes on" in said
    assert not any(m._forward_hooks for m in net.modules())
    assert "No space left" in (folder / "events.jsonl").read_text()


def test_msprobes_config_is_read_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({
        "task": "statistics", "dump_path": str(tmp_path / "out"), "rank": [], "step": [0, "2-3"], "level": "mix",
        "async_dump": True, "statistics": {"scope": [], "list": ["Module.b.Linear.forward.0", "relu"],
                                           "data_mode": ["forward"], "summary_mode": "md5"},
    }))  # fmt: skip
    found = read_msprobe(path)
    assert (found.config.content, found.config.level, found.config.steps) == ("hash", "mix", "0,2-3")
    assert found.config.async_dump
    assert found.config.phases == ("forward",)
    assert found.dump_path == str(tmp_path / "out")
    net = Net()
    with bw.Recorder(net, out=tmp_path / "run", config=found.config) as recorder:
        train(net, 2)
    assert {(r["module"], r["phase"]) for r in rows(recorder.folder)} == {("b", "forward"), ("relu", "forward")}
    for wrong, said in (
        ({"task": "overflow_check"}, "bitwitness trace"),
        ({"level": "L9"}, "L0, L1 or mix"),
        ({"step": ["x"]}, "a list of numbers"),
        ([], "holds no JSON object"),
    ):
        path.write_text(json.dumps(wrong))
        with pytest.raises(ConfigError, match=said):
            read_msprobe(path)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"level": "module"}, "nearest known key is 'modules'"),
        ({"content": "all"}, "one of structure, stats, hash, tensors"),
        ({"steps": "3-1"}, "numbers and ranges a-b"),
        ({"sites": "layers.*"}, "a list of texts"),
        ({"phases": ["up"]}, "some of forward"),
        ({"levels": "mix"}, "the settings are level, content"),
        ({"max_elements": -1}, "0 for all"),
    ],
)
def test_wrong_settings_are_named(settings: dict, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        bw.Recorder(Net(), **settings)


def test_a_compiled_model_is_recorded_eagerly(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = GPT(layers=1)
    tokens = torch.randint(0, 96, (2, 16))
    compiled = torch.compile(model, backend="eager")
    plain = copy.deepcopy(model)
    found = []
    for which in (compiled, plain):
        with bw.Recorder(which, out=tmp_path / "run") as recorder:
            which(tokens).backward()
        found.append(
            [(r["module"], r["op"], r["phase"], r["slot"], r["l2"]) for r in rows(recorder.folder, "kind = 'op'")]
        )
    assert len(found[0]) > 100
    assert found[0] == found[1]


def test_gradients_per_sample_are_recorded_around(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    net = nn.Sequential(nn.Linear(4, 3), nn.Tanh())
    optimizer = torch.optim.SGD(net.parameters(), 0.1)

    def loss(parameters: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(net, parameters, (x[None],)).square().sum()

    with bw.Recorder(net, out=tmp_path / "run") as recorder:
        for _ in range(2):
            x = torch.randn(5, 4)
            each = torch.func.vmap(torch.func.grad(loss), (None, 0))(dict(net.named_parameters()), x)
            assert len(each["0.weight"]) == 5
            net(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert recorder.problem is None
    assert "ended" not in capsys.readouterr().err
    assert bw.Run(tmp_path / "run").steps() == [0, 1]


def test_what_is_measured_under_autocast_is_not_narrowed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: set[torch.dtype] = set()

    def listened(part: torch.Tensor) -> list[float]:
        seen.add((part.view(1, -1) @ part.view(-1, 1)).dtype)
        return block_sums(part)

    monkeypatch.setattr("bitwitness.stats.reader.built", lambda: None)  # which knows nothing of autocast
    monkeypatch.setattr("bitwitness.stats.parts.block_sums", listened)
    model = torch.nn.Linear(64, 64)
    with bw.Recorder(model, out=tmp_path / "run"), torch.autocast("cpu", dtype=torch.bfloat16):
        model(torch.randn(4, 64)).sum().backward()
    assert seen == {torch.float32}


def test_steps_of_an_optimizer_that_holds_new_parameters_alone_are_steps(tmp_path: Path) -> None:
    """A model is trained, frozen, given an adapter, and the adapter trained by an optimizer of its own."""

    class Adapted(nn.Module):
        def __init__(self, base: nn.Module) -> None:
            super().__init__()
            self.base, self.adapter = base.requires_grad_(requires_grad=False), nn.Linear(8, 3, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.base(x) + self.adapter(x)

    net = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 3))

    def train(steps: int) -> None:
        optimizer = torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], 1e-2)
        for _ in range(steps):
            optimizer.zero_grad()
            net(torch.randn(4, 6)).square().mean().backward()
            optimizer.step()

    with bw.Recorder(net, out=tmp_path / "run"):
        train(3)
        net.requires_grad_(requires_grad=False)
        net[1] = Adapted(net[1])
        train(4)
    run = bw.Run(tmp_path / "run")
    assert run.steps() == list(range(7))
    assert {row["module"] for row in run.rows(step=6).to_pylist() if row["kind"] == "optimizer"} == {"1.adapter.weight"}


def test_an_output_without_a_gradient_behind_a_backward_hook_ends_no_recording(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    net = nn.GRU(4, 4)
    net.register_full_backward_hook(lambda *_: None)
    with bw.Recorder(net, out=tmp_path / "run"):
        net(torch.randn(3, 2, 4, requires_grad=True))[0].square().mean().backward()  # the last state is not used
    assert "ended at step" not in capsys.readouterr().err
    assert bw.Run(tmp_path / "run").problems == []


def test_what_is_measured_together_at_a_steps_end_reaches_no_mode_of_the_scripts(tmp_path: Path) -> None:
    class Counts(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.seen: list[str] = []

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.seen.append(str(func))
            return func(*args, **(kwargs or {}))

    def train(*, recorded: bool) -> list[str]:
        torch.manual_seed(0)
        net = nn.Linear(4, 4)
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        recorder = bw.Recorder(net, out=tmp_path / "run", level="modules") if recorded else contextlib.nullcontext()
        with Counts() as counts, recorder:
            for _ in range(3):
                counts.seen.clear()  # the first step's environment is looked at with hashes
                optimizer.zero_grad()
                net(torch.randn(2, 4)).sum().backward()
                optimizer.step()
            return counts.seen

    assert train(recorded=True) == train(recorded=False)


@pytest.mark.parametrize("dtype", [torch.int64, torch.float32, torch.bfloat16])
def test_a_single_element_of_any_stride_is_kept(dtype: torch.dtype, tmp_path: Path) -> None:
    """``y[:, 0]`` of one row: torch calls it contiguous, though its stride is 6, and refuses to view it as bytes."""

    class Shifts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(9, 4)

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            shifted = torch.zeros(1, 6, dtype=dtype)
            shifted[:, 1:] = tokens[:, :-1].to(dtype)
            shifted[:, 0] = 1
            return self.embed(shifted.long()).sum()

    model = Shifts()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with bw.Recorder(model, out=str(tmp_path / "run"), content="tensors") as recorder:
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.arange(6)[None]).backward()
            optimizer.step()
    assert recorder.problem is None
    run = bw.Run(tmp_path / "run")
    assert run.steps() == [0, 1]
    run.check()
    assert run.problems == []


@pytest.mark.parametrize("level", ["modules", "mix"])
def test_a_gradient_that_comes_back_to_the_models_own_input_is_recorded(tmp_path: Path, level: str) -> None:
    before, model = nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    optimizer = torch.optim.SGD([*before.parameters(), *model.parameters()], lr=0.1)
    with bw.Recorder(model, out=tmp_path / "run", level=level):
        for _ in range(2):
            model(before(torch.randn(3, 4))).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    rows = bw.Run(tmp_path / "run").rows().to_pylist()
    back = [row["step"] for row in rows if (row["module"], row["kind"], row["slot"]) == (".", "module", "grad_in0")]
    assert back == [0, 1]


def test_what_is_unpickled_in_a_step_computes_nothing(tmp_path: Path) -> None:
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with bw.Recorder(model, out=tmp_path / "run"):
        loss = model(torch.randn(3, 4)).sum()
        pickle.loads(pickle.dumps(torch.get_rng_state()))
        loss.backward()
        optimizer.step()
    rows = bw.Run(tmp_path / "run").rows().to_pylist()
    assert "sum" in {row["op"] for row in rows}
    assert "set_" not in {row["op"] for row in rows}
