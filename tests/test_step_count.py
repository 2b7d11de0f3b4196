"""One count of steps, whoever looks: a step is what an optimizer's step ends, as the training sees it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from small_training import Training
from torch import nn

import bitwitness as bw

EVERY = {"self_test": False}


Instruments = Callable[[Training, Path], tuple[bw.Guard, bw.Recorder]]


@pytest.fixture
def training() -> Training:
    return Training()


@pytest.fixture
def both(training: Training, tmp_path: Path) -> Iterator[tuple[bw.Guard, bw.Recorder]]:
    with ExitStack() as stack:
        recorder = stack.enter_context(bw.Recorder(training.net, out=tmp_path / "recording", level="mix"))
        guard = stack.enter_context(bw.Guard(training.net, training.optimizer, **EVERY))
        yield guard, recorder


def recorded_steps(recorder: bw.Recorder) -> list[int]:
    return bw.Run(recorder.folder).steps()


def steps_of(guard: bw.Guard, recorder: bw.Recorder) -> tuple[int, int]:
    return guard.session.step, recorder.session.step


def test_paused_steps_count(training: Training, both: tuple[bw.Guard, bw.Recorder]) -> None:
    guard, recorder = both
    for number in range(10):
        if number == 3:
            guard.pause()
            recorder.pause()
        if number == 8:
            guard.resume()
            recorder.resume()
        training.step()
    assert steps_of(guard, recorder) == (9, 9)
    assert guard.coverage()["steps"]["held"] == 5
    table = guard.coverage()
    assert table["steps"]["paused"] == 5
    assert "5 steps went by while the guard was paused" in table["not_covered"]
    recorder.__exit__(None, None, None)
    assert recorded_steps(recorder) == [0, 1, 2, 8, 9]


@pytest.mark.parametrize("grad", [True, False])
def test_an_evaluation_is_no_step_and_no_part_of_one(
    training: Training, both: tuple[bw.Guard, bw.Recorder], *, grad: bool
) -> None:
    guard, recorder = both
    for _ in range(3):
        training.step()
        training.evaluate(grad=grad)
    assert steps_of(guard, recorder) == (2, 2)
    recorder.__exit__(None, None, None)
    run = bw.Run(recorder.folder)
    assert run.steps() == [0, 1, 2]
    for step in run.steps():
        rows = run.rows(step=step).to_pylist()
        first = [row for row in rows if row["kind"] == "module" and row["module"] == "0" and row["phase"] == "forward"]
        assert [row["slot"] for row in first] == ["in0", "weight", "bias", "out0"]
        products = [row for row in rows if row["op"] == "addmm" and row["phase"] == "forward" and row["slot"] == "out0"]
        assert len(products) == 2


def test_an_evaluation_while_paused_is_no_step(training: Training, both: tuple[bw.Guard, bw.Recorder]) -> None:
    guard, recorder = both
    training.step()
    guard.pause()
    recorder.pause()
    for _ in range(4):
        training.evaluate(grad=True)
        training.step()
    guard.resume()
    recorder.resume()
    training.evaluate(grad=False)
    training.step()
    assert steps_of(guard, recorder) == (5, 5)


def test_a_step_that_a_scaler_skips_while_paused_counts(training: Training, tmp_path: Path) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    with (
        bw.Recorder(training.net, out=tmp_path / "recording", recording=False) as recorder,
        bw.Guard(training.net, training.optimizer, **EVERY) as guard,
    ):
        guard.pause()
        for number in range(4):
            training.optimizer.zero_grad()
            scaler.scale(training.loss() * (float("inf") if number == 1 else 1.0)).backward()
            scaler.step(training.optimizer)
            scaler.update()
        assert steps_of(guard, recorder) == (3, 3)


def test_a_recorder_that_infers_counts_its_forwards_also_while_paused(tmp_path: Path) -> None:
    net = nn.Linear(3, 3)
    with bw.Recorder(net, out=tmp_path / "recording", recording=False) as recorder, torch.no_grad():
        for number in range(5):
            if number == 2:
                recorder.resume()
            if number == 4:
                recorder.pause()
            net(torch.ones(1, 3))
    assert recorder.session.step == 4
    assert recorded_steps(recorder) == [2, 3]


def test_pausing_changes_no_bit_and_leaves_nothing(tmp_path: Path) -> None:
    plain, watched = Training(), Training()
    update = torch.amp.GradScaler.update
    for _ in range(6):
        plain.step()
    with (
        bw.Recorder(watched.net, out=tmp_path / "recording") as recorder,
        bw.Guard(watched.net, watched.optimizer, **EVERY) as guard,
    ):
        for number in range(6):
            (guard.pause if number % 2 else guard.resume)()
            (recorder.resume if number % 3 else recorder.pause)()
            watched.step()
    assert all(map(torch.equal, plain.bits(), watched.bits()))
    assert torch.amp.GradScaler.update is update
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in watched.net.modules())
    guard.resume()  # after its end it stays off
    watched.step()
    assert torch.amp.GradScaler.update is update


@pytest.mark.parametrize("until", ["backward", "step"])
def test_a_step_that_a_pause_cuts_through_says_so(training: Training, until: str) -> None:
    with bw.Guard(training.net, training.optimizer, **EVERY) as guard:
        training.step()
        training.optimizer.zero_grad()
        loss = training.loss()
        guard.pause()
        loss.backward()
        if until == "step":
            training.optimizer.step()
        guard.resume()
        if until == "backward":
            training.optimizer.step()
        training.step()
        gaps = guard.coverage()["not_covered"]
    expected = "1 of 3 steps are sensed but cannot be run again: the guard was paused in them"
    assert (expected if until == "backward" else "1 steps went by while the guard was paused") in gaps
    assert not any("did not come from a backward" in gap for gap in gaps)


class Halves(nn.Module):
    """An autoencoder that the script calls, and a critic inside it that the script calls by itself, between two steps."""

    def __init__(self) -> None:
        super().__init__()
        self.coder = nn.Linear(6, 6)
        self.critic = nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.coder(x)

    def batches(self, number: int, *, retained: bool = False) -> None:
        coding, judging = torch.optim.Adam(self.coder.parameters()), torch.optim.Adam(self.critic.parameters())
        for x in torch.randn(number, 5, 6):
            made = self(x)
            loss, judged = (made - x).pow(2).mean(), self.critic(made.detach()).mean() if retained else None
            coding.zero_grad()
            loss.backward(retain_graph=retained)
            coding.step()
            judging.zero_grad()
            (self.critic(x).mean() - self.critic(made.detach()).mean() if judged is None else judged).backward()
            judging.step()


@pytest.mark.parametrize("watch", ["guard", "tracer", "recorder"])
def test_a_part_that_trains_between_two_steps_has_steps_of_its_own_whoever_watches(watch: str, tmp_path: Path) -> None:
    model = Halves()
    make = {
        "guard": lambda: bw.Guard(model, **EVERY),
        "tracer": lambda: bw.NonfiniteTracer(model),
        "recorder": lambda: bw.Recorder(model, out=tmp_path, level="mix"),
    }
    with make[watch]() as one:
        model.batches(4)
        assert one.session.step == 7
    if watch == "recorder":
        table = bw.Run(tmp_path).rows().to_pydict()
        calls = {
            s
            for s, phase, module in zip(*(table[k] for k in ("step", "phase", "module")), strict=True)
            if phase == "backward" and module.startswith("critic")
        }
        assert calls >= {3, 5, 7}, "from its second step on"


@pytest.mark.parametrize("watch", ["guard", "recorder"])
def test_two_losses_of_one_forward_are_one_step(watch: str, tmp_path: Path) -> None:
    model = Halves()
    with bw.Guard(model, **EVERY) if watch == "guard" else bw.Recorder(model, out=tmp_path, level="mix") as one:
        model.batches(4, retained=True)
        assert one.session.step == 3
