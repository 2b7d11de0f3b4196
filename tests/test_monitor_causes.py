"""What the monitor says of faults that users planted: a bad batch, a learning rate, an optimizer's state, a rank's replica."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from monitor_series import MODULES, PARAMETERS, Change, key_of, scaled, steps, watched
from ranks import forked
from torch import nn

import bitwitness as bw
from bitwitness import Finding
from bitwitness.finding import Severity
from bitwitness.monitor.sheet import Key
from bitwitness.stats import bit_hash
from bitwitness.store.monitored import read_series
from bitwitness.tap.loaded import LoadedBatches

AT, NAME, MODULE = 100, PARAMETERS[5], MODULES[5]
Rows = dict[Key, list[float]]


def number(rows: Rows, metric: str) -> list[float]:
    return rows[Key("training", ".", None, metric, -1)]


def told(change: Change) -> list[Finding]:
    return watched(steps(140, change))[0]


def test_a_bad_batch_of_half_a_loss_more_is_a_spike_of_the_data() -> None:
    def change(step: int, rows: Rows) -> None:
        if step == AT:
            number(rows, "loss")[0] *= 1.4

    spike, cause = told(change)
    assert (spike.sensor, spike.step, cause.evidence["cause"]) == ("monitor.spike", AT, "data")


def test_noise_with_heavy_tails_is_no_spike() -> None:
    draw = np.random.default_rng(3)

    def change(step: int, rows: Rows) -> None:
        number(rows, "loss")[0] += 0.05 * float(draw.pareto(3.0))

    findings, _ = watched(steps(600, change))
    assert len([one for one in findings if one.sensor == "monitor.spike"]) <= 1


def test_a_learning_rate_is_the_cause_and_not_the_layer_that_it_moved() -> None:
    def change(step: int, rows: Rows) -> None:
        rows[Key("training", "0", None, "lr", -1)] = [0.3 if step == AT - 1 else 0.002]
        if step == AT - 1:
            for name in PARAMETERS:
                rows[Key("update", name, None, "update_ratio", -1)][0] *= 150
        if step == AT:
            number(rows, "loss")[0] *= 2

    cause = told(change)[-1]
    assert cause.evidence["cause"] == "learning_rate"
    assert f"it was 0.3 at step {AT - 1}, from 0.002 before" in cause.message


@pytest.mark.parametrize("factor", [1e-5, 1e5])
def test_the_state_of_all_parameters_is_the_optimizers(factor: float) -> None:
    def change(step: int, rows: Rows) -> None:
        if step == AT - 1:
            for name in PARAMETERS:
                scaled("moment2", name, lambda _: factor)(step, rows)
        if step == AT:
            number(rows, "loss")[0] *= 2

    cause = told(change)[-1]
    assert cause.evidence["cause"] == "optimizer_state"
    assert f"at step {AT - 1} all second moments were" in cause.message


def test_a_weight_that_grows_at_each_step_is_named() -> None:
    findings = told(scaled("param", NAME, lambda s: 1.2 ** max(0, s - AT)))
    assert (findings[0].site.module, findings[0].step) == (NAME.removesuffix(".weight"), pytest.approx(AT + 4, abs=4))


def test_what_follows_an_alert_is_recorded_and_no_alert() -> None:
    def change(step: int, rows: Rows) -> None:
        if step == AT:
            number(rows, "loss")[0] *= 3
        if step == AT + 3:
            scaled("activation", MODULE, lambda _: 30.0)(step, rows)

    findings, watch = watched(steps(140, change))
    late = next(one for one in findings if one.sensor == "monitor.exploding")
    assert (late.severity, watch.alerts) == (Severity.INFO, 1)
    assert f"in the wake of step {AT}" in late.message


def test_values_that_are_all_nan_have_not_vanished() -> None:
    def change(step: int, rows: Rows) -> None:
        if step == AT:
            rows[key_of("grad", NAME)] = [100, 0, -1, np.nan, np.nan, 0.0, 0.0]

    assert [one.sensor for one in told(change)] == ["monitor.nonfinite"]


def test_gradients_that_all_vanish_while_the_loss_stays() -> None:
    def change(step: int, rows: Rows) -> None:
        if step >= AT:
            for name in PARAMETERS:
                scaled("grad", name, lambda _: 0.0)(step, rows)

    findings = told(change)
    assert findings[0].sensor == "monitor.vanished"
    assert "(and 11 more series)" in findings[0].message


def test_what_overflows_under_a_gradient_scaler_is_ordinary() -> None:
    def overflows(step: int, rows: Rows) -> None:
        if step in (0, AT):
            number(rows, "loss")[0], number(rows, "grad_norm")[0] = np.inf, np.nan

    def breaks(step: int, rows: Rows) -> None:
        if step == AT:
            number(rows, "loss")[0] = np.nan

    assert watched([replace(one, scaled=True) for one in steps(140, overflows)])[0] == []
    broken, _ = watched([replace(one, scaled=True) for one in steps(140, breaks)])
    assert [finding.sensor for finding in broken] == ["monitor.nonfinite"]


JOB = """
import sys, torch, torch.distributed as dist
from torch import nn
import bitwitness as bw
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))
by_hand = sys.argv[1] == "dead"
if not by_hand:
    net = nn.parallel.DistributedDataParallel(net)
optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
data = torch.Generator().manual_seed(rank)
with bw.Monitor(net, out=sys.argv[2]):
    for step in range(50):
        x = torch.randn(64, 6, generator=data)
        optimizer.zero_grad()
        net(x).sub(x[:, :2]).square().mean().backward()
        if rank == 1 and step >= 30 and by_hand:
            for p in net.parameters():
                p.grad.zero_()
        for p in net.parameters() if by_hand else ():
            dist.all_reduce(p.grad)
            p.grad /= 2
        optimizer.step()
        if rank == 1 and step >= 30 and sys.argv[1] == "astray":
            with torch.no_grad():
                net.module[2].weight.mul_(1.003)
dist.destroy_process_group()
"""


def findings_of(run: Path, rank: int) -> list[dict[str, Any]]:
    file = run / f"rank{rank:05d}" / "events.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    return [event for event in map(json.loads, lines) if event["type"] == "finding"]


@pytest.mark.ranks
@pytest.mark.parametrize("fault", ["dead", "astray", "none"])
def test_a_rank_that_sends_zeros_or_whose_replica_goes_astray(tmp_path: Path, fault: str) -> None:
    script = tmp_path / "job.py"
    script.write_text(JOB)
    run = tmp_path / "run"
    done = forked(2, [str(script), fault, str(run)], tmp_path / "logs")
    assert done.code == 0, done
    said = {rank: findings_of(run, rank) for rank in (0, 1)}
    if fault == "none":
        assert said == {0: [], 1: []}
    elif fault == "dead":
        assert not said[0]
        assert (said[1][0]["step"], said[1][0]["sensor"]) == (30, "monitor.vanished")
        assert "collective all_reduce#0 (in0) is zero" in said[1][0]["message"]
    else:
        for rank, factor in ((0, "0.9970"), (1, "1.0029")):
            first = said[rank][0]
            assert (first["step"], first["sensor"]) == (31, "monitor.replicas")
            assert f"weights of 2.weight are {factor}" in first["message"]
            assert "of two ranks either may be the one" in first["message"]


def test_targets_that_match_nothing_are_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    with bw.Monitor(net, out=tmp_path / "run", targets=("block.*",)) as monitor:
        net(torch.randn(2, 4)).sum().backward()
    assert "targets 'block.*' match no module and no parameter of Sequential (its modules: 0, 1, …; " in (
        capsys.readouterr().err
    )
    assert monitor.problem


@pytest.mark.parametrize("workers", [0, 2])
def test_the_samples_of_the_batch_behind_a_spike_are_named(tmp_path: Path, workers: int) -> None:
    torch.manual_seed(0)
    x = torch.randn(1600, 4)
    y = x.sum(1, keepdim=True)
    y[812] = 300.0  # one wrong label
    order = torch.randperm(1600, generator=torch.Generator().manual_seed(2)).tolist()
    order.remove(812)
    order.insert(1400, 812)
    net = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    loader = torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(x, y), batch_size=16, sampler=order, num_workers=workers
    )
    with bw.Monitor(net, out=tmp_path / "run") as monitor:
        for inputs, labels in loader:
            optimizer.zero_grad()
            (net(inputs) - labels).square().mean().backward()
            optimizer.step()
    cause = next(one for one in monitor.findings if one.sensor == "monitor.post_mortem")
    assert cause.step == 1400 // 16
    assert cause.evidence["indices"] == order[1392:1408]
    assert "; samples " in cause.message
    assert cause.message.endswith("of its data set)")


def test_a_loader_that_is_left_early_and_read_ahead(tmp_path: Path) -> None:
    loaded = LoadedBatches()
    data = torch.arange(40.0).view(20, 2)
    loader = torch.utils.data.DataLoader(data, batch_size=2, num_workers=1, persistent_workers=True)  # type: ignore[arg-type,var-annotated]
    before = torch.utils.data.dataloader._BaseDataLoaderIter.__next__
    loaded.attach()
    for stop in (3, 20):
        batches = [batch for _, batch in zip(range(stop), loader, strict=False)]  # ahead of whoever reads them
        for number, batch in enumerate(batches):
            name = f"{int(bit_hash(batch)) & (1 << 64) - 1:016x}"
            assert loaded.indices(["0" * 16, name]) == (2 * number, 2 * number + 1)
    loaded.detach()
    assert torch.utils.data.dataloader._BaseDataLoaderIter.__next__ is before


def test_an_alert_says_which_of_several_models_it_is_of(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    nets = [nn.Linear(4, 4), nn.Linear(4, 4)]
    monitors = [bw.Monitor(net, out=tmp_path / name) for net, name in zip(nets, ("one", "two"), strict=True)]
    with monitors[0], monitors[1]:
        nets[1](torch.full((2, 4), float("nan"))).sum().backward()
        torch.optim.SGD(nets[1].parameters(), lr=0.1).step()
    said = capsys.readouterr().err
    assert "bitwitness [rank 0, two] step 0: nonfinite: " in said
    with bw.Monitor(nets[0], out=tmp_path / "three"):
        nets[0](torch.full((2, 4), float("nan"))).sum().backward()
    assert "bitwitness [rank 0] step 0: nonfinite: " in capsys.readouterr().err


def test_a_closure_that_is_evaluated_many_times_is_one_step(tmp_path: Path) -> None:
    torch.manual_seed(0)
    net, x = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1)), torch.randn(64, 4)
    y = torch.sin(x.sum(1, keepdim=True))
    optimizer = torch.optim.LBFGS(net.parameters(), lr=0.5, max_iter=4)
    told: list[tuple[float, float]] = []

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = (net(x) - y).square().mean()
        loss.backward()
        return loss

    with bw.Monitor(net, out=tmp_path / "run"):
        for _ in range(4):
            before = net[0].weight.detach().clone()
            loss = optimizer.step(closure)
            moved = (net[0].weight.detach() - before).norm() / before.norm()
            told.append((loss.item(), moved.item()))
    rows = read_series(tmp_path / "run", 0)[0].to_pylist()
    losses = [row["value"] for row in rows if row["metric"] == "loss"]
    updates = [row["value"] for row in rows if row["kind"] == "update" and row["name"] == "0.weight"]
    assert list(zip(losses, updates, strict=True)) == [pytest.approx(one, rel=1e-5) for one in told]
