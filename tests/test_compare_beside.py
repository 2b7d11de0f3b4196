"""Recordings of scripts that train several models: all of them are compared, and none is passed over in silence."""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm

import bitwitness as bw
from bitwitness.cli import main
from bitwitness.config.recording import RecordConfig
from bitwitness.record.auto import AutoRecorder


def record(out: Path, *rates: float) -> Path:
    """Train a model for each rate, one after the other, as folds of a cross-validation."""
    torch.manual_seed(0)
    for rate in rates:
        net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 1))
        optimizer = torch.optim.SGD(net.parameters(), lr=rate)
        with bw.Recorder(net, out=out):
            for _ in range(3):
                net(torch.randn(4, 6)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
    return out


def compared(a: Path, b: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    capsys.readouterr()
    code = main(["compare", str(a), str(b)])
    return code, capsys.readouterr().out


def test_what_differs_in_the_second_model_is_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = record(tmp_path / "a", 0.1, 0.1), record(tmp_path / "b", 0.1, 0.01)
    code, said = compared(a, b, capsys)
    assert code == 1
    first, second, *_ = said.splitlines()
    assert first.startswith("beside them, a-2 against b-2 (Sequential): the runs part at 0.weight/SGD#0:optim.out")
    assert second == "no difference: everything that was compared is equal"
    assert said.count("beside them") == 1
    assert "lr 0.1 against 0.01" in said
    main(["compare", "--json", "-", str(a), str(b)])
    told = json.loads(capsys.readouterr().out)
    assert told["status"] == "findings"
    assert told["conclusion"].startswith("beside them, a-2 against b-2 (Sequential): the runs part at")
    assert [one["status"] for one in told["beside"]] == ["findings"]


def test_models_that_agree_are_an_all_clear(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = record(tmp_path / "a", 0.1, 0.2, 0.3), record(tmp_path / "b", 0.1, 0.2, 0.3)
    code, said = compared(a, b, capsys)
    assert code == 0
    assert said.count("beside them") == 2


def test_a_model_that_only_one_run_has_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = record(tmp_path / "a", 0.1, 0.2), record(tmp_path / "b", 0.1)
    code, said = compared(a, b, capsys)
    assert code == 3
    assert "not compared: only the process of run A has a-2" in said


def test_a_second_model_that_cannot_be_read_is_no_all_clear(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = record(tmp_path / "a", 0.1, 0.2), record(tmp_path / "b", 0.1, 0.2)
    for file in (tmp_path / "b-2").rglob("*.parquet"):
        file.write_bytes(file.read_bytes()[:40])
    code, said = compared(a, b, capsys)
    assert code == 3
    assert "not compared: a-2 against b-2" in said


def test_two_models_of_one_process_are_compared_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a = record(tmp_path / "a", 0.1, 0.2)
    assert "beside" not in compared(a, tmp_path / "a-2", capsys)[1]
    shutil.rmtree(tmp_path / "a-2")
    assert compared(a, a, capsys)[0] == 0


def test_a_recording_holds_no_losses_of_what_is_trained_after_it(tmp_path: Path) -> None:
    def train(net: nn.Module) -> None:
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for _ in range(3):
            net(torch.randn(4, 6)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    first, second = nn.Linear(6, 1), nn.Linear(6, 1)
    with bw.Recorder(first, out=tmp_path / "run"):
        train(first)
        train(second)
    rows = bw.Run(tmp_path / "run").rows().to_pylist()
    assert [row["step"] for row in rows if row["op"] == "loss"] == [0, 1, 2]


def test_an_average_that_is_tried_behind_each_step_stands_behind_what_made_it_differ(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def train(out: Path, scale: float) -> Path:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 6))
        average = copy.deepcopy(net).requires_grad_(False)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        batches = [(x, x * scale) for x in torch.randn(3, 4, 6)]
        with AutoRecorder(RecordConfig(), str(out)):
            for x, target in batches:
                nn.functional.mse_loss(net(x), target).backward()
                optimizer.step()
                optimizer.zero_grad()
                with torch.no_grad():
                    for mean, now in zip(average.parameters(), net.parameters(), strict=True):
                        mean.lerp_(now, 0.1)
                    average(x)
        return out

    code, said = compared(train(tmp_path / "a", 1.0), train(tmp_path / "b", -1.0), capsys)
    assert code == 1
    assert said.startswith("the runs part at ./mse_loss#0:forward")
    assert said.count("beside them, a-2 against b-2 (Sequential): the runs part at 0/weight#0:param.value") == 1


class Read(nn.Module):
    """A judge whose weights a module may make, which torch calls once as it is built: for a time that is a model of its own."""

    def __init__(self, *, bound: bool) -> None:
        super().__init__()
        layers = [nn.Linear(6, 8), nn.Linear(8, 8)]
        self.layers = nn.ModuleList(map(spectral_norm, layers) if bound else layers)
        self.told = nn.Sequential(
            nn.LayerNorm(8), nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8), nn.GELU(), nn.Linear(8, 1)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.told(x)


def test_models_whose_numbers_are_others_are_found_by_their_classes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def train(out: Path, *, bound: bool) -> Path:
        with AutoRecorder(RecordConfig(), str(out)):
            torch.manual_seed(0)
            maker, judge = nn.Linear(4, 6), Read(bound=bound)
            optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in (judge, maker)]
            torch.manual_seed(1)
            for _ in range(3):
                made = maker(torch.randn(8, 4))
                (judge(torch.randn(8, 6)).mean() - judge(made.detach()).mean()).backward()
                optimizers[0].step()
                judge(made).mean().backward()
                optimizers[1].step()
                for optimizer in optimizers:
                    optimizer.zero_grad()
        return out

    a, b = train(tmp_path / "a", bound=True), train(tmp_path / "b", bound=False)
    assert [json.loads((run / "run.json").read_text())["model"] for run in (a, b)] == ["Read", "Linear"]
    assert sorted(path.name for path in tmp_path.iterdir() if list(path.glob("rank*"))) == ["a", "a-3", "b", "b-2"]
    code, said = compared(a, b, capsys)
    assert code == 1, said
    assert "a is held against b-2, which is its model, and so are the others" in said
    assert "not compared" not in said
    assert said.startswith("the runs part at layers.0.parametrizations.weight.0/")


class Critic(nn.Module):
    """Gives the loss itself, so that nothing of it is the generator's."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 64), nn.LeakyReLU(0.2), nn.Linear(64, 1))

    def forward(self, x: torch.Tensor, sign: float) -> torch.Tensor:
        return nn.functional.softplus(sign * self.net(x)).mean()


@pytest.mark.parametrize("content", ["stats", "tensors"])
def test_a_generator_is_not_cleared_whose_judge_is_trained_otherwise(tmp_path: Path, content: str) -> None:
    def train(out: Path, beta: float) -> Path:
        torch.manual_seed(0)
        maker = nn.Sequential(nn.Linear(8, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 16), nn.Tanh())
        judge = Critic()
        rates = {"lr": 2e-3}
        made_by = torch.optim.Adam(maker.parameters(), betas=(0.5, 0.999), **rates)
        judged_by = torch.optim.Adam(judge.parameters(), betas=(beta, 0.999), **rates)
        with bw.Recorder(maker, out=out, content=content):
            for _ in range(3):
                made = maker(torch.randn(32, 8))
                (judge(made.detach(), 1.0) + judge(torch.randn(32, 16), -1.0)).backward()
                judged_by.step()
                made_by.zero_grad()
                judge(maker(torch.randn(32, 8)), -1.0).backward()
                made_by.step()
                judged_by.zero_grad()
        return out

    report = bw.compare(train(tmp_path / "a", 0.5), train(tmp_path / "b", 0.9))
    assert report.status == "findings"
    assert report.conclusion.startswith("the runs part at ./loss#0:forward.value (rank 0, step 1): the loss differs")
    assert "in another model of the process, perhaps" in report.conclusion


def test_operators_of_a_loop_that_is_written_out_are_told_in_a_short_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Steps(nn.Module):
        def __init__(self, *, one_by_one: bool) -> None:
            super().__init__()
            self.layer, self.one_by_one = nn.Linear(6, 6), one_by_one

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if not self.one_by_one:
                return self.layer(x).tanh()
            return torch.stack([(row @ self.layer.weight.T + self.layer.bias).tanh() for row in x])

    def train(out: Path, *, one_by_one: bool) -> Path:
        torch.manual_seed(0)
        net = Steps(one_by_one=one_by_one)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        with bw.Recorder(net, out=out):
            net(torch.randn(40, 6)).square().mean().backward()
            optimizer.step()
        return out

    code, said = compared(train(tmp_path / "a", one_by_one=False), train(tmp_path / "b", one_by_one=True), capsys)
    assert code == 0, said
    (line, *_) = [line for line in said.splitlines() if line.startswith("equivalent: ")]
    assert ", …" in line
    assert len(line) < 400
