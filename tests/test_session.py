"""One session for all that watches a model: one count of steps, one pair of hooks, no harm to the training."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Self

import pytest
import torch
from small_training import Training
from torch import nn

import bitwitness as bw
from bitwitness.capture.surroundings import Surroundings
from bitwitness.tap.compat import dispatch_modes

QUIET = {"self_test": False}


class Watchers:
    """A recorder, a tracer and a guard on one model, in an order of their own."""

    def __init__(self, training: Training, folder: Path, order: str = "rtg") -> None:
        self.stack = ExitStack()
        make: dict[str, Callable[[], object]] = {
            "r": lambda: bw.Recorder(training.net, out=folder / "recording", level="mix"),
            "t": lambda: bw.NonfiniteTracer(training.net, training.optimizer),
            "g": lambda: bw.Guard(training.net, training.optimizer, out=folder / "guard", **QUIET),
        }
        self.made = {key: self.stack.enter_context(make[key]()) for key in order}
        self.recorder, self.tracer, self.guard = (self.made[key] for key in "rtg")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.stack.__exit__(*error)

    def steps(self) -> set[int]:
        return {one.session.step for one in self.made.values()}


@pytest.mark.parametrize("order", ["rtg", "gtr", "tgr"])
def test_three_at_once_share_a_session_and_change_no_bit(tmp_path: Path, order: str) -> None:
    plain, watched = Training(), Training()
    for _ in range(5):
        plain.step()
    with Watchers(watched, tmp_path, order) as all_three:
        assert len({id(one.session) for one in all_three.made.values()}) == 1
        hooks = [*watched.net._forward_pre_hooks.values()]
        assert len(hooks) == 1, "one hook for all"
        for number in range(5):
            watched.step()
            assert all_three.steps() == {number}
            assert not dispatch_modes(), "each takes its own tap away, whoever came first"
    assert all(map(torch.equal, plain.bits(), watched.bits()))
    assert all_three.guard.coverage()["steps"]["held"] == all_three.tracer.coverage()["steps"]["held"] == 5
    assert all_three.guard.coverage()["failures"] == all_three.tracer.coverage()["failures"] == {}
    assert bw.Run(all_three.recorder.folder).steps() == [0, 1, 2, 3, 4]
    assert not watched.net._forward_pre_hooks
    assert not watched.net._forward_hooks


@pytest.mark.parametrize("order", ["rtg", "gtr"])
def test_a_nan_is_named_by_the_tracer_also_beside_a_guard(tmp_path: Path, order: str) -> None:
    training = Training()
    with Watchers(training, tmp_path, order) as all_three:
        for number in range(4):
            training.spoil = number == 2
            training.step()
    found = all_three.tracer.findings
    assert found
    assert {finding.step for finding in found} >= {2}
    assert "mul" in found[0].message
    assert any(finding.sensor == "nonfinite" and finding.step == 2 for finding in all_three.guard.findings)


def test_a_guard_that_comes_later_does_not_disturb_the_tracer(tmp_path: Path) -> None:
    training = Training()
    with bw.NonfiniteTracer(training.net) as tracer:
        training.step()
        with bw.Guard(training.net, training.optimizer, **QUIET) as guard:
            training.step()
            training.step()
            assert guard.session.step == 2
        training.step()
    assert tracer.coverage()["steps"]["held"] == 4
    assert guard.coverage()["steps"]["held"] == 2
    assert not tracer.coverage()["failures"]
    assert not any(parameter._post_accumulate_grad_hooks for parameter in training.net.parameters())


def test_the_closures_of_one_step_are_one_step(tmp_path: Path) -> None:
    training = Training("LBFGS")

    def closure() -> torch.Tensor:
        training.optimizer.zero_grad()
        loss = training.loss()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(training.net.parameters(), 10.0)
        return loss

    with Watchers(training, tmp_path) as all_three:
        for number in range(3):
            training.optimizer.step(closure)
            assert all_three.steps() == {number}
    assert bw.Run(all_three.recorder.folder).steps() == [0, 1, 2]
    assert all_three.guard.coverage()["steps"]["judged"] > 3
    assert all_three.guard.coverage()["steps"]["held"] == 3


def test_gradients_clipped_between_micro_batches_are_of_one_step(tmp_path: Path) -> None:
    training = Training()
    with Watchers(training, tmp_path) as all_three:
        for number in range(3):
            training.optimizer.zero_grad()
            for _ in range(2):
                training.loss().backward()
                torch.nn.utils.clip_grad_norm_(training.net.parameters(), 1.0)
            training.optimizer.step()
            assert all_three.steps() == {number}
    assert all_three.guard.coverage()["steps"]["judged"] == 6
    assert all_three.guard.coverage()["steps"]["held"] == 3
    assert bw.Run(all_three.recorder.folder).steps() == [0, 1, 2]


def test_a_step_that_the_script_skips_counts(tmp_path: Path) -> None:
    training = Training()
    with Watchers(training, tmp_path) as all_three:
        for number in range(5):
            training.optimizer.zero_grad()
            training.loss().backward()
            torch.nn.utils.clip_grad_norm_(training.net.parameters(), 1.0)
            if number != 2:
                training.optimizer.step()
            assert all_three.steps() == {number}
    assert bw.Run(all_three.recorder.folder).steps() == [0, 1, 2, 3, 4]


def test_a_skipped_step_counts_also_where_gradients_are_zeroed_after_the_forward(tmp_path: Path) -> None:
    training = Training()
    with Watchers(training, tmp_path) as all_three:
        for number in range(5):
            loss = training.loss()
            training.optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(training.net.parameters(), 1.0)
            if number != 2:
                training.optimizer.step()
            assert all_three.steps() == {number}
    assert bw.Run(all_three.recorder.folder).steps() == [0, 1, 2, 3, 4]
    assert all_three.guard.coverage()["steps"]["held"] == 5


def test_clipping_another_model_is_no_step_of_this_one(tmp_path: Path) -> None:
    generator, critic = Training(), Training()
    with bw.Guard(generator.net, **QUIET) as first, bw.Guard(critic.net, **QUIET) as second:
        for number in range(3):
            critic.step()
            generator.optimizer.zero_grad()
            (generator.loss() + critic.loss()).backward()
            torch.nn.utils.clip_grad_norm_(generator.net.parameters(), 1.0)
            generator.optimizer.step()
            critic.optimizer.zero_grad()
            # the critic's next step has begun: its forward ran in the generator's loss
            assert (first.session.step, second.session.step) == (number, number + 1)
    assert first.coverage()["failures"] == second.coverage()["failures"] == {}


def test_a_scaler_ends_the_steps_of_its_own_model_alone() -> None:
    one, other = Training(), Training()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    with bw.Guard(one.net, **QUIET) as first, bw.Guard(other.net, **QUIET) as second:
        for number in range(3):
            loss = other.loss()
            one.optimizer.zero_grad()
            scaler.scale(one.loss()).backward()
            scaler.step(one.optimizer)
            scaler.update()
            other.optimizer.zero_grad()
            (loss + other.loss()).backward()
            other.optimizer.step()
            assert (first.session.step, second.session.step) == (number, number)


def test_the_user_numbers_the_steps_after_a_resume(tmp_path: Path) -> None:
    training = Training()
    with Watchers(training, tmp_path) as all_three:
        all_three.recorder.session.step = 1000
        training.step()
        assert all_three.steps() == {1000}
        training.step()
        all_three.guard.session.step = 5000
        training.step()
        training.step()
        assert all_three.steps() == {5001}
    assert bw.Run(all_three.recorder.folder).steps() == [1000, 1001, 5000, 5001]


@pytest.mark.parametrize("wrong", [-1, 1.5, "7", True, None])
def test_a_step_that_is_no_number_is_refused(wrong: object) -> None:
    with (
        bw.Session(nn.Linear(2, 2)) as session,
        pytest.raises(bw.UsageError, match=r"session\.step = .*expected the number"),
    ):
        session.step = wrong


def test_a_check_before_the_first_step_is_an_evaluation(tmp_path: Path) -> None:
    training = Training()
    with bw.Recorder(training.net, out=tmp_path / "recording") as recorder:
        training.net.eval()
        with torch.no_grad():
            training.loss()
        training.net.train()
        training.step()
        assert recorder.session.step == 0
    assert bw.Run(recorder.folder).steps() == [0]


@pytest.mark.parametrize("guarded", [False, True])
def test_a_training_that_forgot_to_leave_evaluation_mode(tmp_path: Path, guarded: bool) -> None:
    plain, watched = Training(), Training()
    out = tmp_path / "recording"

    def train(training: Training) -> None:
        for number in range(8):
            if number == 3:
                training.net.eval()
                with torch.no_grad():
                    training.net(torch.ones(4, 6))
            training.step()

    train(plain)
    with ExitStack() as stack:
        guard = None
        if guarded:
            guard = stack.enter_context(bw.Guard(watched.net, watched.optimizer, out=tmp_path / "guard", **QUIET))
        stack.enter_context(bw.Recorder(watched.net, out=out))
        train(watched)
        assert guard is None or guard.coverage()["steps"]["held"] == 8
    assert all(map(torch.equal, plain.bits(), watched.bits()))
    rows = bw.Run(out).rows().to_pylist()
    modes = {row["step"]: row["args"] for row in rows if row["op"] == "loss"}
    assert sorted(modes) == [0, 1, 2, 4, 5, 6, 7], "the optimizer's step tells that the fourth was no evaluation"
    assert ["false" in modes[number] for number in (2, 4)] == [False, True]
    assert {row["step"] for row in rows if row["kind"] == "optimizer"} == set(range(8))
    assert len({sum(row["step"] == number for row in rows) for number in (0, 1, 2)}) == 1
    if guard is not None:
        told = str(guard.coverage())
        assert "was model.train() forgotten" in told
        assert "own forward is not called" not in told


def test_gradients_of_an_evaluation_between_steps_are_none_of_a_steps(tmp_path: Path) -> None:
    training = Training()
    with bw.Recorder(training.net, out=tmp_path / "r", level="mix") as recorder:
        for _ in range(3):
            training.step()
            training.net.eval()
            image = torch.ones(4, 6, requires_grad=True)
            torch.autograd.grad(training.net(image).sum(), image)
            training.net.train()
        assert recorder.session.step == 2
    rows = bw.Run(tmp_path / "r").rows().to_pylist()
    assert len({sum(row["step"] == number for row in rows) for number in range(3)}) == 1


def test_two_in_one_folder_are_one_run(tmp_path: Path) -> None:
    training = Training()
    with bw.Recorder(training.net, out=tmp_path / "run") as recorder:
        with bw.Guard(training.net, training.optimizer, out=tmp_path / "run", **QUIET):
            training.step()
        training.step()
    run = bw.Run(recorder.folder)
    assert run.steps() == [0, 1]
    assert Path(recorder.folder) == tmp_path / "run"
    assert not (tmp_path / "run-2").exists()
    assert any(event.message == "coverage" for event in run.events(rank=0))


class Losses(bw.Instrument):
    """The example of the documentation, nearly."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, float]] = []

    @contextmanager
    def around_backward(self, call: object) -> Iterator[None]:
        self.seen.append((self.session.step, call.roots[0].item()))
        yield


def test_an_instrument_of_ones_own() -> None:
    training, losses = Training(), Losses()
    with bw.Session(training.net) as session:
        session.add(losses)
        training.step()
        session.pause(losses)
        training.step()
        session.resume(losses)
        training.step()
        session.remove(losses)
        training.step()
        assert session.step == 3
    assert [step for step, _ in losses.seen] == [0, 2]
    assert not training.net._forward_pre_hooks


class Broken(bw.Instrument):
    def __init__(self, moment: str) -> None:
        self.moment, self.told = moment, 0

    def fails(self, *_: object, **__: object) -> None:
        self.told += 1
        raise RuntimeError("broken")

    def __getattribute__(self, name: str) -> object:
        moment = object.__getattribute__(self, "moment") if name not in ("moment", "told", "fails") else ""
        return self.fails if name == moment else object.__getattribute__(self, name)


@pytest.mark.parametrize(
    "moment",
    [
        "added",
        "around_forward",
        "around_backward",
        "gradients_ready",
        "step_begins",
        "optimizer_stepped",
        "zeroing",
        "zeroed",
    ],
)
def test_an_instrument_that_fails_is_taken_off_and_named(moment: str, capsys: pytest.CaptureFixture[str]) -> None:
    plain, watched, broken, losses = Training(), Training(), Broken(moment), Losses()
    for _ in range(3):
        plain.step()
    with bw.Session(watched.net) as session:
        session.add(broken)
        session.add(losses)
        for _ in range(3):
            watched.step()
        assert session.step == 2
    assert all(map(torch.equal, plain.bits(), watched.bits()))
    assert broken.told == 1
    assert [step for step, _ in losses.seen] == [0, 1, 2], "the others go on"
    said = capsys.readouterr().err
    assert f"Broken failed in {moment} and is off; the training is untouched: RuntimeError('broken')" in said


def test_an_error_of_the_trainings_own_passes_through() -> None:
    training = Training()
    with bw.Session(training.net) as session:
        session.add(Losses())
        with pytest.raises(RuntimeError, match="mat1 and mat2"):
            training.net(torch.ones(1, 5))
        training.step()
        assert session.step == 0


def test_a_model_has_one_session() -> None:
    net = nn.Linear(2, 2)
    with bw.Session(net) as session:
        assert bw.Session.of(net) is session
        with pytest.raises(bw.UsageError, match="has a session already"):
            bw.Session(net)
    bw.Session(net)  # it has ended
    with pytest.raises(bw.UsageError, match=r"expects a torch.nn.Module, not str"):
        bw.Session("net")


def test_a_session_takes_all_that_was_added_away() -> None:
    training, losses = Training(), Losses()
    backward = torch.autograd._engine_run_backward
    with bw.Session(training.net) as session:
        session.add(losses)
        training.step()
    assert not training.net._forward_pre_hooks
    assert torch.autograd._engine_run_backward is backward
    training.step()
    assert [step for step, _ in losses.seen] == [0]


def test_what_is_no_instrument_is_refused() -> None:
    with bw.Session(nn.Linear(2, 2)) as session, bw.Session(nn.Linear(2, 2)) as other:
        with pytest.raises(bw.UsageError, match="expects a bitwitness.Instrument, not object"):
            session.add(object())
        losses = Losses()
        session.add(losses)
        with pytest.raises(bw.UsageError, match="takes part in a session already"):
            other.add(losses)
        assert session.instruments == (losses,)


def test_a_guard_with_its_arguments_swapped_says_what_it_expects() -> None:
    training = Training()
    for kind in (bw.Guard, bw.NonfiniteTracer):
        with pytest.raises(
            bw.UsageError, match=f"{kind.__name__} expects a torch.nn.Module as its first argument, not SGD"
        ):
            kind(training.optimizer, training.net)
    with pytest.raises(bw.UsageError, match="Guard expects torch optimizers, not Linear"):
        bw.Guard(training.net, nn.Linear(2, 2))


def test_a_recorders_own_hooks_are_no_other_code_to_a_guard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    original = Surroundings.__init__

    def counted(self: Surroundings, *args: object) -> None:
        made.append(self)
        original(self, *args)

    monkeypatch.setattr(Surroundings, "__init__", counted)
    training = Training()
    with Watchers(training, tmp_path):
        for _ in range(3):
            training.step()
        searched = len(made)
        for _ in range(6):
            training.step()
    assert searched
    assert len(made) == searched, "the code around the model was searched again, in steps that change nothing"
