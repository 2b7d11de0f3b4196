"""The recording of one model as an instrument of its session: what is recorded at which moment of a step."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.amp import GradScaler
from torch.optim.optimizer import Optimizer

from bitwitness.config.recording import RecordConfig
from bitwitness.record.log import Log, Selection
from bitwitness.record.meter import Meter
from bitwitness.record.modules import ModuleRecorder, mode_text
from bitwitness.record.operators import OperatorRecorder
from bitwitness.record.saved import SavedGradient, as_operator, recording
from bitwitness.record.state import StateRecorder
from bitwitness.record.updates import UpdateRecorder
from bitwitness.record.values import Keeper, Values
from bitwitness.session.instrument import Forward, Instrument, Kind
from bitwitness.session.problems import Problems
from bitwitness.session.session import Session
from bitwitness.site import Site
from bitwitness.store import RunWriter
from bitwitness.store.background import advice
from bitwitness.store.environment import hyperparameters
from bitwitness.store.recording import RecordingWriter
from bitwitness.tap.compat import in_transform
from bitwitness.tap.compiled import distributed
from bitwitness.tap.frames import Stacks
from bitwitness.tap.modules import ModuleTracker
from bitwitness.tap.moments import BackwardCall
from bitwitness.tap.opwindow import OperatorWindow, run_eagerly
from bitwitness.tap.slots import named_tensors


class ModelRecording(Instrument):
    """Hands each moment of a step to the part that records it: modules, operators, state.

    Parameters
    ----------
    session
        Whose steps these are.
    config
        What to record.
    run
        The run folder's writer.
    rank
        Whose recording this is.

    """

    def __init__(self, session: Session, config: RecordConfig, run: RunWriter, rank: int) -> None:
        self.session, self.config = session, config
        self._run = run
        self._problems = Problems(run, rank, lambda: session.step, source="record", failing="the recording of {} ended")
        fail, self._safely = self._problems.fail, self._problems.safely
        self._writing = RecordingWriter(run.path / f"rank{rank:05d}", rank, self._ended)
        content, wait = config.content, not config.async_dump
        self._meter = Meter(stats=content != "structure", hashed=content == "hash", zeros=config.zeros)
        self._keeper = Keeper(self._writing, config.max_elements, waits=wait) if content == "tensors" else None
        self._values = Values(self._meter, self._keeper)
        self._log = Log(session.clock, self._values, Selection(config.sites, config.phases))
        self._stacks = Stacks() if config.stacks else None
        self._tracker = ModuleTracker()
        root = session.root
        self._state = StateRecorder(root, self._log, fail)
        self._updates = UpdateRecorder(self._state, self._log, optimizer_state=config.optimizer_state)
        what = {"enabled": config.modules, "operators": config.operators}
        self._modules = ModuleRecorder(root, self._log, self._stacks, fail, state=self._state, **what)
        self._operators = OperatorRecorder(self._log, self._tracker, self._stacks, fail)
        self._window = OperatorWindow(self._operators.tap())
        self._eager = ExitStack()
        self._optimizers: list[Optimizer] = []
        self.records = False
        """Whether the step that runs is recorded."""
        self._gradients_recorded = self._focused = False
        self._hooked_now = False  # in the call that runs, whose list of hooks torch has made before

    # -- being on ------------------------------------------------------------------------------------------------

    def added(self) -> None:
        """Record from the next forward on: of the model, or of its parts where the script calls these."""
        self.session.hook_parts(in_doubt=True)
        self.resumed()

    def resumed(self) -> None:
        """Record from the next forward on."""
        self._mind_compiled(self.session.step)
        self._state.hear_buffers(self.session.model)
        recording.add(self)

    def paused(self) -> None:
        """Write what there is."""
        recording.discard(self)
        self.close_step()
        self._state.close()
        self._eager.close()
        if sys.exc_info()[0] is None:
            self.flush()

    def flush(self) -> None:
        """Write what was recorded of whole steps; return when it is on disk."""
        self._writing.flush()

    def finish(self) -> None:
        """Write what was recorded of whole steps, and take nothing more, while the training may still go on."""
        self._writing.close()

    def removed(self) -> None:
        """Write what there is, and end."""
        self.paused()
        self._writing.close()

    def drop(self) -> None:
        """End, and leave nothing of what was recorded."""
        self.session.remove(self)
        self._writing.delete()

    def forked(self) -> None:
        """Let the parent write."""
        recording.discard(self)
        self._window.close()
        self._modules.detach()
        self._state.detach()
        self._eager.close()

    def _mind_compiled(self, step: int) -> None:
        """Have compiled code run eagerly in a step that is recorded, and as compiled in others."""
        self._eager.close()
        if self.config.wants_step(step):
            run_eagerly(self._eager)

    # -- values of the user's own --------------------------------------------------------------------------------

    def save(self, value: Any, name: str) -> None:
        """Record a value of the user's own, and its gradient; see `saved.save`."""
        if not self.records:
            return
        differentiable = torch.is_grad_enabled()
        with self._safely("saved values"):
            for slot, tensor in named_tensors(value, "value"):
                site = Site(".", as_operator(name), 0, "forward", slot)
                self._log.record(site, tensor, self._log.node(), "saved")
                if tensor.requires_grad and differentiable:
                    tensor.register_hook(
                        SavedGradient(self, Site(".", as_operator(name), 0, "backward", f"grad_{slot}"))
                    )

    def record_gradient(self, site: Site, grad: torch.Tensor) -> None:
        """Record the gradient of a saved value."""
        with self._safely("saved values"):
            self._log.record(site, grad, self._log.node(), "saved")

    # -- moments -------------------------------------------------------------------------------------------------

    def step_begins(self, step: int) -> None:
        """Write the step before; hook the modules, before anybody looks at what the step starts from."""
        del step
        self.close_step()
        if not in_transform():  # where what stands in the parameters' place has no values of its own
            with self._safely("steps"):
                self._open_step()
        if not self.records:
            self._state.detach()

    @contextmanager
    def around_forward(self, forward: Forward) -> Iterator[None]:
        """Record a call of the model, but for evaluations."""
        if forward.kind is Kind.EVALUATION:
            with self._window.interrupted(), self._modules.evaluated():
                yield
            return
        if forward.kind in (Kind.TRAINING, Kind.INFERENCE):
            with self._safely("steps"):
                self._begin_forward(forward)
        yield
        self._modules.end(forward.part, forward.result)
        if forward.is_detached:
            self._window.close()

    def _begin_forward(self, forward: Forward) -> None:
        if not self.records:
            self._open_step()
        if self.records:
            if self.config.operators:
                if not self._focused:  # a step may have several forwards before its backward
                    self._tracker.focus_on(self.session.root)
                    self._focused = True
                self._window.open()
                self._tracker.begin(self.session.root)
            self._modules.begin(forward, listed=not self._hooked_now)
            self._hooked_now = False

    def _open_step(self) -> None:
        if not self.config.wants_step(self.session.step) or self._writing.broken is not None:
            return
        self.records, self._gradients_recorded, self._focused = True, False, False
        if self._keeper is not None:
            self._keeper.begin_step(self.session.step)
        self._values.new_step()
        self._operators.new_step()
        self._modules.attach()
        self._hooked_now = self.session.in_forward
        self._state.begin_step(reduced=distributed(self.session.model) is not None)

    def close_step(self) -> None:
        """Write what was recorded of the step."""
        self._window.close()
        if not self.records:
            return
        self.records = False
        self._modules.detach()
        with self._safely("rows"):
            self._state.read_by_none()
            self._values.end_step()
            stacks = [] if self._stacks is None else self._stacks.take_new()
            self._writing.rows(self._log.take(), self._meter.drain(), stacks)
            self._writing.step_ended()

    @contextmanager
    def around_backward(self, call: BackwardCall) -> Iterator[None]:
        """Record a backward; one inside another is part of it, and an evaluation's is none of the step's."""
        if self.session.backward_depth > 1 or self.session.evaluated:
            yield
            return
        if self.records and self.session.clock.begun:  # else another model's, after this one's step
            with self._safely("loss"):
                self._state.read_by_none()
                for i, root in enumerate(call.roots):
                    if isinstance(root, torch.Tensor):
                        site = Site(".", "loss", i, "forward", "value")
                        self._log.record(site, root, self._log.node(), "saved", args=mode_text(self.session.root))
            self._log.backward, self._log.twice = True, call.create_graph
            self._window.mend()
        try:
            yield
        finally:
            self._log.backward = False
            if not call.retains:
                self._window.close()

    def gradients_ready(self, *, scaler: GradScaler | None = None, optimizer: Optimizer | None = None) -> None:
        """Record the complete gradients, and what an optimizer is about to read."""
        self._window.close()
        if not self.records and self.session.clock.begun:  # inside a transform
            with self._safely("steps"):
                self._open_step()
        if not self.records or (optimizer is not None and not self.session.owns(optimizer)):
            return
        with self._safely("gradients"):
            known = {}
            if not self._gradients_recorded:
                self._gradients_recorded = True
                known = self._state.gradients()
            elif optimizer is not None and scaler is None:
                self._updates.reread(optimizer)
            if optimizer is not None and scaler is None:
                self._updates.begin(optimizer, known)

    def closure_ended(self, optimizer: Optimizer) -> None:
        """Record the gradients that it completed."""
        self.gradients_ready(optimizer=optimizer)

    def optimizer_stepped(self, optimizer: Optimizer) -> None:
        """Record what an optimizer made of the parameters; the step may end here."""
        if self.session.owns(optimizer):
            if self.config.steps is not None:
                self._mind_compiled(self.session.step + 1)
            if self.records:
                self._note_update(optimizer)

    def _note_update(self, optimizer: Optimizer) -> None:
        with self._safely("optimizer"):
            self._updates.end(optimizer)
            if all(optimizer is not known for known in self._optimizers):
                self._optimizers.append(optimizer)
                self._run.describe(optimizers=hyperparameters(self._optimizers))

    # -- failing open --------------------------------------------------------------------------------------------

    @property
    def problem(self) -> str | None:
        """What kept something from being recorded, the first of it."""
        return self._problems.first

    def _ended(self, problem: str) -> None:
        """Say that nothing can be written any more; called on the writer's thread."""
        self._problems.note(
            f"the recording in {self._run.path} ended at step {self.session.step}: {problem}. The training goes on; what was "
            f"written before is readable. {advice(problem)}"
        )

    def failed(self, moment: str, error: Exception) -> None:
        """Say what ended the recording."""
        self._problems.fail(moment, error)
