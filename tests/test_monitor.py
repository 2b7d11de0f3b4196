"""The monitor in trainings: the series are right, the training's bits untouched, ranks and scripts are followed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import forked
from small_training import Training
from torch import nn

import bitwitness as bw
from bitwitness.cli import main
from bitwitness.config.monitoring import MonitorConfig
from bitwitness.config.msprobe_monitor import read_monitor_config
from bitwitness.monitor.sinks import sink_of
from bitwitness.store.monitored import is_monitored, read_series

Row = dict[str, Any]


def rows_of(folder: str | Path | None, rank: int = 0, **where: object) -> list[Row]:
    assert folder is not None
    table, problems = read_series(folder, rank)
    assert not problems
    return [row for row in table.to_pylist() if all(row[name] == value for name, value in where.items())]


def events_of(folder: Path, rank: int = 0) -> list[Row]:
    file = folder / f"rank{rank:05d}" / "events.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def check(row: Row, tensor: torch.Tensor) -> None:
    values = tensor.detach().double()
    assert row["count"] == values.numel()
    assert (row["nan"], row["inf"]) == (0, 0)
    expected = values.min(), values.max(), values.mean(), values.norm()
    found = row["min"], row["max"], row["mean"], row["l2"]
    assert found == pytest.approx([float(x) for x in expected], rel=2e-5, abs=1e-7)


def monitored(tmp_path: Path, count: int = 3, **settings: Any) -> tuple[bw.Monitor, Training]:
    training = Training("AdamW")
    with bw.Monitor(training.net, out=tmp_path / "run", **settings) as monitor:
        for _ in range(count):
            training.step()
    assert monitor.problem is None
    return monitor, training


def test_the_series_are_what_the_tensors_hold(tmp_path: Path) -> None:
    training = Training("AdamW")
    seen: dict[str, torch.Tensor] = {}
    with bw.Monitor(training.net, out=tmp_path / "run", zeros=True) as monitor:
        training.step()
        training.optimizer.zero_grad()

        def keep(_module: nn.Module, _args: object, out: torch.Tensor) -> None:
            out.register_hook(lambda grad: seen.update(out=grad.clone()))

        handle = training.net[0].register_forward_hook(keep)
        loss = training.loss()
        loss.backward()
        handle.remove()
        seen |= {f"grad {name}": p.grad.clone() for name, p in training.net.named_parameters()}
        before = {name: p.detach().clone() for name, p in training.net.named_parameters()}
        nn.utils.clip_grad_norm_(training.net.parameters(), 1e-3)
        training.optimizer.step()
        after = dict(training.net.named_parameters())
        folder = monitor.folder
    for name, parameter in after.items():
        check(rows_of(folder, step=1, kind="grad", name=name)[0], seen[f"grad {name}"])
        check(rows_of(folder, step=1, kind="grad_reduced", name=name)[0], parameter.grad)
        check(rows_of(folder, step=1, kind="param", name=name)[0], parameter)
        state = training.optimizer.state[parameter]
        check(rows_of(folder, step=1, kind="moment1", name=name)[0], state["exp_avg"])
        check(rows_of(folder, step=1, kind="moment2", name=name)[0], state["exp_avg_sq"])
        ratio = (parameter.detach() - before[name]).norm() / before[name].norm()
        assert rows_of(folder, step=1, kind="update", name=name)[0]["value"] == pytest.approx(float(ratio), rel=1e-4)
    check(rows_of(folder, step=1, kind="activation_grad", name="0", slot="out0")[-1], seen["out"])
    norm = torch.stack([grad.norm() for name, grad in seen.items() if name.startswith("grad ")]).norm()
    told = {row["metric"]: row["value"] for row in rows_of(folder, step=1, kind="training")}
    assert told == pytest.approx({"loss": float(loss.detach()), "lr": 0.1, "grad_norm": float(norm)}, rel=1e-5)
    relu = rows_of(folder, step=1, kind="activation", name="3", slot="out0")[0]
    assert relu["zeros"] > 0  # what dropout left out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("shape", [(7,), (3, 5), (700, 801), (0,), ()])
def test_figures_of_any_tensor(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    from bitwitness.stats import figures_of, stats_of

    plain = (torch.randn(shape) * 3).to(dtype)
    spoiled = plain.clone()
    if plain.numel():
        spoiled.view(-1)[0], spoiled.view(-1)[-1] = float("inf"), float("nan")
    tensors = [plain, plain * 2, spoiled]
    for tensor, row in zip(tensors, figures_of(tensors, zeros=True).tolist(), strict=True):
        s = stats_of(tensor)
        finite = s.count - s.nan - s.pos_inf - s.neg_inf
        expected = [s.nan, s.pos_inf + s.neg_inf, s.zeros, s.min, s.max, s.mean * finite if finite else 0.0, s.l2]
        assert row == pytest.approx([float(x) for x in expected], rel=1e-4, abs=1e-2, nan_ok=True)


@pytest.mark.parametrize("optimizer", ["SGD", "AdamW"])
def test_a_monitored_training_has_the_bits_of_one_that_is_not(tmp_path: Path, optimizer: str) -> None:
    def run(watch: Callable[[nn.Module], Any] | None) -> tuple[list[torch.Tensor], list[torch.Tensor], torch.Tensor]:
        training, losses = Training(optimizer), []
        monitor = watch(training.net) if watch else None
        for _ in range(12):
            training.optimizer.zero_grad()
            losses.append(training.loss())
            losses[-1].backward()
            training.optimizer.step()
        if monitor is not None:
            monitor.close()
            assert monitor.problem is None
        return losses, training.bits(), torch.get_rng_state()

    def watch(net: nn.Module) -> bw.Monitor:
        return bw.Monitor(net, out=tmp_path / "run", metrics=("attention", "router", "stable_rank", "kurtosis")).start()

    for plain, with_monitor in zip(run(None), run(watch), strict=True):
        pairs = zip(plain, with_monitor, strict=True) if isinstance(plain, list) else [(plain, with_monitor)]
        assert all(torch.equal(a, b) for a, b in pairs)


def test_what_is_looked_at_is_chosen(tmp_path: Path) -> None:
    monitor, _ = monitored(
        tmp_path, 6, targets=("0", "4*"), kinds=("grad", "activation"), steps="1-5", interval=2, times=2
    )
    rows = rows_of(monitor.folder)
    assert {row["step"] for row in rows} == {1, 3}
    assert {(row["kind"], row["name"]) for row in rows} == {
        *((kind, name) for kind in ("activation",) for name in ("0", "4")),
        *(("grad", f"{module}.{name}") for module in "04" for name in ("weight", "bias")),
    }


def test_evaluations_and_pauses_are_no_steps(tmp_path: Path) -> None:
    training = Training()
    with bw.Monitor(training.net, out=tmp_path / "run") as monitor:
        training.step()
        training.evaluate(grad=False)
        monitor.pause()
        training.step()
        monitor.resume()
        training.step()
        count = len(training.net._forward_hooks) + len(training.net[0]._forward_hooks)
    assert {row["step"] for row in rows_of(monitor.folder)} == {0, 2}
    assert len(rows_of(monitor.folder, step=0, kind="activation", name="0", slot="out0")) == 1
    assert len(training.net[0]._forward_hooks) == 0 <= count


def test_what_goes_wrong_is_said_and_recorded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    training = Training("AdamW")
    with bw.Monitor(training.net, out=tmp_path / "run") as monitor:
        for step in range(40):
            training.optimizer.zero_grad()
            training.loss().backward()
            if step == 30:
                training.net[4].weight.grad.view(-1)[1] = float("inf")
            training.optimizer.step()
        found = [finding for finding in monitor.findings if finding.sensor == "monitor.nonfinite"]
    assert (found[0].step, found[0].site.module, found[0].rank) == (30, "4", 0)
    told = [event for event in events_of(tmp_path / "run") if event["sensor"] == "monitor.nonfinite"]
    assert told[0]["site"].startswith("4/weight#0:grad.local@r0.s30")
    assert "step 30: nonfinite: local gradient of 4.weight: 0 NaN and 1 Inf of 24 values" in capsys.readouterr().err


def test_an_error_inside_never_breaks_a_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_args: object, **_settings: object) -> None:
        raise RuntimeError("on purpose")

    monkeypatch.setattr("bitwitness.monitor.sheet.figures_of", broken)
    training = Training()
    with bw.Monitor(training.net, out=tmp_path / "run", sinks=[broken]) as monitor:
        for _ in range(3):
            training.step()
    assert "on purpose" in (monitor.problem or "")


def test_sinks_get_the_numbers(tmp_path: Path) -> None:
    got: list[tuple[int, dict[str, float]]] = []
    monitored(tmp_path, 3, sinks=[lambda metrics, step: got.append((step, metrics))])
    assert [step for step, _ in got] == [0, 1, 2]
    assert {"training/loss", "training/grad_norm", "training/0/lr", "grad/0.weight/l2", "activation/0/out0/l2"} <= set(
        got[0][1]
    )


class Mixture(nn.Module):
    """Attention, and two experts behind a router."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(8, 24)
        self.router = nn.Linear(8, 2)
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        x = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        share = self.router(x).softmax(-1)
        return sum(expert(x) * share[..., i, None] for i, expert in enumerate(self.experts))


def test_metrics_on_request(tmp_path: Path) -> None:
    net = Mixture()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    x = torch.randn(2, 5, 8)
    settings: dict[str, Any] = {"metrics": ("attention", "router", "stable_rank", "kurtosis"), "kinds": ("training",)}
    with bw.Monitor(net, out=tmp_path / "run", **settings) as monitor:
        net(x).square().mean().backward()
        with torch.no_grad():
            q, k, v = net.qkv(x).chunk(3, -1)
            logits = (q @ k.mT / 8**0.5).masked_fill(torch.ones(5, 5).triu(1).bool(), float("-inf"))
            weights = logits.softmax(-1)
            chosen = net.router(weights @ v).argmax(-1)
        optimizer.step()
    told = {(r["name"], r["metric"], r["slot"]): r["value"] for r in rows_of(monitor.folder, kind="module")}
    assert told[".", "max_logit", None] == pytest.approx(float(logits.max()), rel=1e-5)
    assert told[".", "entropy", None] == pytest.approx(
        float(-torch.special.xlogy(weights, weights).sum(-1).mean()), rel=1e-4
    )
    assert told["router", "expert_share", "e0"] == pytest.approx(float((chosen == 0).float().mean()))
    values = torch.linalg.svdvals(net.qkv.weight.detach())
    assert told["qkv.weight", "stable_rank", None] == pytest.approx(float((values**2).sum() / values[0] ** 2), rel=0.1)
    assert 1 < told["qkv", "kurtosis", "out0"] < 20


JOB = """
import sys, torch, torch.distributed as dist
from torch import nn
import bitwitness as bw
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
net = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2)))
optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
data = torch.Generator().manual_seed(rank)
kept = {}
with bw.Monitor(net, out=sys.argv[1]) as monitor:
    for step in range(30):
        x = torch.randn(64, 6, generator=data)
        optimizer.zero_grad()
        net(x).sub(x[:, :2]).square().mean().backward()
        seen = torch.full((3,), float(rank))
        dist.all_reduce(seen)
        if step == 5:
            kept = {name: p.grad.clone() for name, p in net.module.named_parameters()}
            local = torch.autograd.grad(net.module(x).sub(x[:, :2]).square().mean(), list(net.module.parameters()))
        optimizer.step()
torch.save({"reduced": kept, "local": dict(zip(kept, local))}, f"{sys.argv[1]}/expected{rank}.pt")
assert monitor.problem is None, monitor.problem
dist.destroy_process_group()
"""


@pytest.mark.ranks
def test_two_ranks_before_and_after_their_reduction(tmp_path: Path) -> None:
    script = tmp_path / "job.py"
    script.write_text(JOB)
    done = forked(2, [str(script), str(tmp_path / "run")], tmp_path / "logs")
    assert done.code == 0, done
    for rank in (0, 1):
        expected = torch.load(tmp_path / "run" / f"expected{rank}.pt")
        for name in expected["local"]:
            check(rows_of(tmp_path / "run", rank, step=5, kind="grad", name=name)[0], expected["local"][name])
            check(rows_of(tmp_path / "run", rank, step=5, kind="grad_reduced", name=name)[0], expected["reduced"][name])
        given, got = rows_of(tmp_path / "run", rank, step=5, kind="comm", name="all_reduce#0")
        assert (given["slot"], given["max"], got["slot"], got["max"]) == ("in0", rank, "out0", 1)
        assert not [event for event in events_of(tmp_path / "run", rank) if event["type"] == "finding"]


SCRIPT = """
import torch
from torch import nn
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
for step in range(25):
    optimizer.zero_grad()
    net(torch.randn(16, 4)).square().mean().backward()
    if step == 20:
        net[2].weight.grad.fill_(float("nan"))
    optimizer.step()
"""


def test_a_script_that_knows_nothing_of_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    assert main(["monitor", "--out", str(tmp_path / "run"), "--kinds", "training,grad", str(script)]) == 0
    said = capsys.readouterr().err
    assert "step 20: nonfinite: local gradient of 2.weight: 8 NaN and 0 Inf of 8 values" in said
    assert "monitored in" in said
    assert is_monitored(tmp_path / "run")
    assert {row["kind"] for row in rows_of(tmp_path / "run")} == {"training", "grad"}


def test_msprobes_configuration_is_read_as_it_is(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    settings = {
        "targets": {"language_model.encoder.layers.0": {}},
        "xy_distribution": True, "wg_distribution": True, "mv_distribution": True, "print_struct": False,
        "module_ranks": [0, 2], "ops": ["norm", "min", "max", "nans", "zeros"], "eps": 1e-8, "ndigits": 12, "format": "csv",
        "alert": {"rules": [{"rule_name": "AnomalyTurbulence", "args": {"threshold": 0.5}}], "dump": False},
        "start_step": 10, "step_interval": 5, "collect_times": 7, "cc_distribution": {"enable": False},
    }  # fmt: skip
    file.write_text(json.dumps(settings))
    found = read_monitor_config(file)
    assert found.config == MonitorConfig(
        targets=("language_model.encoder.layers.0", "language_model.encoder.layers.0.*"),
        kinds=("training", "activation", "activation_grad", "grad", "grad_reduced", "moment1", "moment2"),
        steps="10-100000000", interval=5, times=7, ranks="0,2", zeros=True, digits=12,
    )  # fmt: skip
    assert len(found.warnings) == 2
    second = {
        "output_dir": "there",
        "rank": [1],
        "monitors": {"module": {"targets": ["a"]}, "weight_grad": {"enabled": True}},
    }
    file.write_text(json.dumps(second))
    read = read_monitor_config(file)
    assert (read.output_dir, read.config.kinds) == (
        "there",
        ("training", "activation", "activation_grad", "grad", "grad_reduced"),
    )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"xy_distributon": True}, "'xy_distributon' is no key of it; the nearest known key is 'xy_distribution'"),
        ({"ops": ["norms"]}, "ops = .*: expected a list of some of .*; the nearest known key is 'norm'"),
        ({"start_step": -1}, "start_step = -1: expected a number, 0 or more"),
        ({"start_step": 5, "stop_step": 5}, "stop_step = 5: expected more than start_step, which is 5"),
        ({"monitors": {"modul": {}}}, "monitors: 'modul' is no key of it; the nearest known key is 'module'"),
        ({"targets": "all"}, "targets = 'all': expected an object of module names, or a list of them"),
    ],
)
def test_a_configuration_that_is_not_understood(tmp_path: Path, settings: Row, message: str) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(settings))
    with pytest.raises(bw.ConfigError, match=message):
        read_monitor_config(file)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kinds": ("grads",)}, "kinds = 'grads': expected some of .*; the nearest known key is 'grad'"),
        ({"interval": 0}, "interval = 0: expected a number, 1 or more"),
        ({"steps": "5-1"}, "steps = '5-1': expected numbers and ranges"),
        ({"target": ("a",)}, "the settings are targets, kinds"),
        ({"sinks": [3]}, "sinks: expected callables"),
    ],
)
def test_a_setting_that_is_not_understood(settings: Row, message: str) -> None:
    with pytest.raises(bw.UsageError, match=message):
        bw.Monitor(nn.Linear(2, 2), **settings)


def test_a_sink_that_is_not_known() -> None:
    with pytest.raises(
        bw.UsageError, match="--sink 'tensorbord': expected one of .*; the nearest known key is 'tensorboard'"
    ):
        sink_of("tensorbord=x")


def run_of(
    folder: Path,
    seed: int = 0,
    change: Callable[[int, nn.Module], None] = lambda _step, _net: None,
    rate: float = 0.05,
) -> Path:
    torch.manual_seed(seed)
    net = nn.Sequential(*(nn.Linear(6, 6) for _ in range(6)))
    optimizer = torch.optim.SGD(net.parameters(), lr=rate)
    batches = torch.Generator().manual_seed(1)
    with bw.Monitor(net, out=folder, watch=False):
        for step in range(12):
            optimizer.zero_grad()
            change(step, net)
            net(torch.randn(16, 6, generator=batches)).square().mean().backward()
            optimizer.step()
    return folder


def test_two_runs_are_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from bitwitness.monitor.compare import compare_monitored

    def change(step: int, net: nn.Module) -> None:
        if step == 7:
            with torch.no_grad():
                net[3].weight.mul_(1.5)

    a, same, other = run_of(tmp_path / "a"), run_of(tmp_path / "same"), run_of(tmp_path / "other", change=change)
    fine = compare_monitored(a, same)
    assert (fine.status, fine.steps, fine.deviations) == ("fine", 12, [])
    report = compare_monitored(other, a)
    assert (report.first[0].step, report.first[0].kind, report.first[0].name) == (7, "activation", "3 (out0)")
    assert {(one.kind, one.step) for one in report.first} >= {("grad", 7), ("grad_reduced", 7), ("param", 7)}
    assert main(["compare", str(a), str(same)]) == 0
    assert main(["compare", str(other), str(a)]) == 1
    said = capsys.readouterr().out
    assert "series are equal to the last digit in 12 steps" in said
    assert "the runs part at step 7, in activation 3 (out0) of rank 0" in said
    slower = run_of(tmp_path / "slower", rate=0.049)
    assert main(["compare", str(a), str(slower)]) == 1
    said = capsys.readouterr().out
    assert said.startswith(
        "the learning rate is 0.05 in A and 0.049 in B at step 0; no series deviates by more than 5% of its"
    )
    assert main(["report", "--markdown", "-", str(a), str(slower)]) == 1
    assert (
        "Nothing unusual was seen in either run, but they are not the same: the learning rate"
        in capsys.readouterr().out
    )
    assert main(["compare", "--csv", "x.csv", str(other), str(a)]) == 2
    assert "--csv is for recordings" in capsys.readouterr().err


def test_sinks_with_their_libraries(tmp_path: Path) -> None:
    client = pytest.importorskip("prometheus_client", reason="prometheus-client is not installed")
    from bitwitness.monitor.sinks import Prometheus

    registry = client.CollectorRegistry()
    monitor, _ = monitored(tmp_path, 3, sinks=[Prometheus(None, registry=registry)])
    losses = [row["value"] for row in rows_of(monitor.folder, kind="training", metric="loss")]
    assert registry.get_sample_value("bitwitness_value", {"name": "training/loss"}) == pytest.approx(losses[-1])
    assert registry.get_sample_value("bitwitness_step") == 2


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tensorboard(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    from bitwitness.monitor.sinks import TensorBoard

    monitored(tmp_path, 3, sinks=[TensorBoard(str(tmp_path / "board"))])
    events = EventAccumulator(str(tmp_path / "board"))
    events.Reload()
    assert [event.step for event in events.Scalars("training/loss")] == [0, 1, 2]


def test_a_sink_whose_library_is_missing_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "trackio", None)
    with pytest.raises(bw.UsageError, match="needs trackio, which is not installed here: pip install trackio"):
        sink_of("trackio")
