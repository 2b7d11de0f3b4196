"""`bw.Recorder`: records one model's training while entered."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict
from types import TracebackType
from typing import Any, Self

import torch
from torch import nn
from torch.amp import GradScaler
from torch.optim.optimizer import Optimizer

from bitwitness.config.recording import RecordConfig
from bitwitness.errors import UsageError
from bitwitness.finding import Note, Severity
from bitwitness.ranks import Ranks
from bitwitness.record.log import Log, Selection
from bitwitness.record.meter import Meter
from bitwitness.record.modules import ModuleRecorder, named_tensors
from bitwitness.record.operators import OperatorRecorder
from bitwitness.record.saved import SavedGradient, as_operator, recording
from bitwitness.record.state import StateRecorder
from bitwitness.record.values import Keeper, Values
from bitwitness.site import Site
from bitwitness.store import RunWriter, claim_folder
from bitwitness.store.environment import describe, hyperparameters
from bitwitness.store.recording import RecordingWriter
from bitwitness.tap.clock import StepClock, TrainingForwards
from bitwitness.tap.company import join_ranks
from bitwitness.tap.compiled import HookedCall, distributed, find_entry
from bitwitness.tap.frames import Stacks
from bitwitness.tap.holdpoints import BackwardCall, HoldPoints, StepListener
from bitwitness.tap.hooks import ModuleHook
from bitwitness.tap.modules import ModuleTracker, in_backward, own_work, unwrap
from bitwitness.tap.opwindow import OperatorWindow, run_eagerly
from bitwitness.tap.owners import Owners
from bitwitness.tap.randomness import in_replay
from bitwitness.tap.stepcount import StepCounter

_DEADLINE_S = 60.0


class Recorder(StepListener):
    """Records what a model computes, step by step, into a run folder.

    Parameters
    ----------
    model
        The module that the training calls; wrapped by DistributedDataParallel or ``torch.compile`` if it is there.
    out
        The run folder; where it holds a run already, the recording goes beside it (``RUN-2``).
    config
        What to record; or give its fields as keywords.

    Raises
    ------
    UsageError
        If the model has no modules that can be hooked.
    ConfigError
        For settings that are not understood.

    """

    def __init__(
        self,
        model: nn.Module,
        *,
        out: str | os.PathLike[str] = "recording",
        config: RecordConfig | None = None,
        **settings: Any,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise UsageError(f"Recorder(model): expected an nn.Module, got {type(model).__name__}")
        if config is not None and settings:
            raise UsageError(f"give either config or its fields as keywords, not both ({', '.join(settings)})")
        try:
            self.config = config or RecordConfig(**settings)
        except TypeError as error:
            known = ", ".join(RecordConfig.__dataclass_fields__)
            raise UsageError(f"Recorder: {error}; the settings are {known}") from error
        self.model = model
        self.root = unwrap(model)
        self.folder: str | None = None
        self._out = os.fspath(out)
        self._stack = ExitStack()
        self._on = ExitStack()
        self._eager = ExitStack()
        self._running = False
        self._steps = TrainingForwards(self.root)
        self._writing: RecordingWriter | None = None
        self._run: RunWriter | None = None
        self._owners = Owners(self.root.parameters(), None)
        self._optimizers: list[Optimizer] = []
        self._problem: str | None = None

    # -- being on ------------------------------------------------------------------------------------------------

    def __enter__(self) -> Self:
        if self.folder is not None:
            raise UsageError("this Recorder was used before; make a new one for another recording")
        ranks = join_ranks(self.model, _DEADLINE_S)
        self.folder = ranks.tell(str(claim_folder(self._out)) if ranks.rank == 0 else "", 0)
        self._stack.callback(ranks.close)
        self._prepare(ranks)
        if self.config.wants_rank(self._rank):
            (self.resume if self.config.recording else self.pause)()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._leave()
        if self._writing is not None:
            self._writing.close()
        self._stack.close()

    def _prepare(self, ranks: Ranks) -> None:
        self._rank = ranks.rank
        self._run = run = RunWriter(self.folder or "", ranks.rank, ranks.size)
        self._stack.callback(run.close)
        run.describe(recording=asdict(self.config), model=type(self.root).__name__, environment=describe(self.root))
        config = self.config
        self.clock = StepClock()
        self._writing = RecordingWriter(run.path / f"rank{ranks.rank:05d}", ranks.rank, self._ended)
        content = config.content
        self._meter = Meter(stats=content != "structure", hashed=content == "hash", zeros=config.zeros)
        tensors = content == "tensors"
        self._keeper = Keeper(self._writing, config.max_elements, waits=not config.async_dump) if tensors else None
        self._values = Values(self._meter, self._keeper)
        self._log = Log(self.clock, self._values, Selection(config.sites, config.phases))
        self._stacks = Stacks() if config.stacks else None
        self._tracker = ModuleTracker()
        self._state = StateRecorder(self.root, self._log, self._fail, optimizer_state=config.optimizer_state)
        what = {"enabled": config.modules, "operators": config.operators}
        self._modules = ModuleRecorder(
            self.root, self._log, self._stacks, self._fail, reads=self._state.read_by, **what
        )
        operators = OperatorRecorder(self._log, self._tracker, self._stacks, self._fail)
        self._window = OperatorWindow(operators.tap())
        self._depth = 0
        self._backpropagated = False
        self._step_open = False
        self._held = False

    def resume(self) -> None:
        """Record from the next forward on."""
        if self._running or self.folder is None or not self.config.wants_rank(self._rank):
            return
        self._leave()
        self._running = True
        self._mind_compiled(self.clock.step)
        self._hook(ModuleHook(self._forward_begins), ModuleHook(self._forward_ended))
        self._on.enter_context(HoldPoints(self))
        recording.add(self)
        self._on.callback(recording.discard, self)

    def pause(self) -> None:
        """Record nothing until `resume`; steps are counted meanwhile, and no more."""
        if self.folder is None or not self.config.wants_rank(self._rank):
            return
        self._leave()
        self._hook(ModuleHook(self._forward_passes), ModuleHook())
        self._on.enter_context(HoldPoints(StepCounter(self.clock, self._owners.ours), counting=True))

    def _leave(self) -> None:
        """Write what there is; no hook and nothing patched stays."""
        if self._running:
            self._running = False
            self._close_step()
            self._eager.close()
        self._on.close()
        if self._writing is not None and sys.exc_info()[0] is None:
            self._writing.flush()

    def _hook(self, *hooks: ModuleHook) -> None:
        """Have the root's forwards told, before and after."""
        for hook in hooks:
            self._on.callback(hook.let_go)
        # Where the training enters compiled code, not inside: on leaving it dynamo puts back the dispatch state of before.
        entry = find_entry(self.model, self.root)
        if entry.in_place:
            self._on.callback(HookedCall(entry.module, *hooks).remove)
        else:
            self._on.callback(entry.module.register_forward_pre_hook(hooks[0], prepend=True, with_kwargs=True).remove)
            self._on.callback(entry.module.register_forward_hook(hooks[1], with_kwargs=True, always_call=True).remove)

    def _mind_compiled(self, step: int) -> None:
        """Have compiled code run eagerly in a step that is recorded, and as compiled in others."""
        self._eager.close()
        if self.config.wants_step(step):
            run_eagerly(self._eager)

    def step(self) -> None:
        """Say that a step ended, where no optimizer tells it (inference)."""
        self._close_step()
        self.clock.end_step()

    @property
    def records(self) -> bool:
        """Whether the step that runs is recorded."""
        return self._step_open

    def save(self, value: Any, name: str) -> None:
        """Record a value of the user's own, and its gradient; see `save`."""
        if not self._step_open:
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

    @property
    def is_first_rank(self) -> bool:
        """Whether this process speaks for all ranks."""
        return self._rank == 0

    def join(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Record a call of the root that has just begun, whose pre-hooks torch had already listed when ours was made."""
        if not self._running:
            return
        entry = find_entry(self.model, self.root)
        if entry.module is module and not entry.in_place:
            self._forward_begins(module, args, kwargs)
        if module is self.root:
            self._modules.join(module, args, kwargs)

    # -- the root's hooks ----------------------------------------------------------------------------------------

    def _forward_begins(self, _root: nn.Module, _args: tuple[Any, ...], _kwargs: dict[str, Any]) -> None:
        if self._depth or in_replay():  # recomputed: a checkpoint around the whole root; or the guard runs a step again
            return
        evaluates = self._steps.evaluates()
        with self._safely("steps"):
            if evaluates:
                self._window.close()
                self._modules.evaluating = True
                return
            if self._steps.inferring and self.clock.begun:
                self.step()
            if self.clock.begin_forward():
                self._close_step()
            if not self._step_open:
                self._open_step()
            elif self._backpropagated:
                self.clock.micro += 1
                self._backpropagated = False
            if self._step_open:
                self._modules.new_forward()
                if self.config.operators:
                    self._tracker.settle(self.root)
                    self._window.open()
                    self._tracker.begin(self.root)

    def _forward_ended(self, _root: nn.Module, _args: Any, _kwargs: Any, _result: Any) -> None:
        self._modules.evaluating = False
        if not self._depth and not torch.is_grad_enabled():
            self._window.close()

    def _forward_passes(self, _root: nn.Module, _args: tuple[Any, ...], _kwargs: dict[str, Any]) -> None:
        """Count the step of a forward that is not recorded."""
        if in_backward() or in_replay() or self._steps.evaluates():
            return
        if self._steps.inferring and self.clock.begun:
            self.clock.end_step()
        self.clock.begin_forward()

    def _open_step(self) -> None:
        self._backpropagated = False
        if not self.config.wants_step(self.clock.step) or self._problem is not None:
            return
        self._step_open, self._held = True, False
        if self._keeper is not None:
            self._keeper.begin_step(self.clock.step)
        self._values.new_step()
        self._modules.attach()
        self._state.attach_local(reduced=distributed(self.model) is not None)
        self._state.begin_step()

    def _close_step(self) -> None:
        self._window.close()
        if not self._step_open:
            return
        self._step_open = False
        self._modules.detach()
        self._state.detach()
        with self._safely("rows"):
            self._state.read_by_none()
            self._hand_over()
            if self._writing is not None:
                self._writing.step_ended()

    def _hand_over(self) -> None:
        if self._writing is not None:
            stacks = [] if self._stacks is None else self._stacks.take_new()
            self._writing.rows(self._log.take(), self._meter.drain(), stacks)

    # -- what HoldPoints tells -----------------------------------------------------------------------------------

    @contextmanager
    def around_backward(self, call: BackwardCall) -> Iterator[None]:
        """Record a backward."""
        if in_replay():
            yield
            return
        self._depth += 1
        outermost = self._depth == 1
        if outermost and self._step_open:
            with self._safely("loss"):
                self._state.read_by_none()
                for i, root in enumerate(call.roots):
                    if isinstance(root, torch.Tensor):
                        self._log.record(Site(".", "loss", i, "forward", "value"), root, self._log.node(), "saved")
            self._log.backward = True
        try:
            yield
        finally:
            self._depth -= 1
            if outermost:
                self._backpropagated = True
                self._log.backward = False
                if not call.retains:
                    self._window.close()

    def hold(self, *, scaler: GradScaler | None = None, optimizer: Optimizer | None = None) -> None:
        """Record the complete gradients, and what an optimizer is about to read."""
        self._window.close()
        if not self._step_open or (optimizer is not None and not self._owners.ours(optimizer)):
            return
        with self._safely("gradients"):
            if not self._held:
                self._held = True
                self._state.gradients()
            if optimizer is not None and scaler is None:
                self._state.before_optimizer(optimizer)

    def closure_ended(self, optimizer: Optimizer) -> None:
        """Record the gradients that it completed."""
        self.hold(optimizer=optimizer)

    def optimizer_stepped(self, optimizer: Optimizer) -> None:
        """Record what an optimizer made of the parameters; the step may end here."""
        if not self._owners.ours(optimizer):
            return
        self.clock.end_step()
        if self.config.steps is not None:
            self._mind_compiled(self.clock.step + 1)
        if not self._step_open:
            return
        with self._safely("optimizer"):
            self._state.after_optimizer(optimizer)
            if self._run is not None and not any(optimizer is known for known in self._optimizers):
                self._optimizers.append(optimizer)
                self._run.describe(optimizers=hyperparameters(self._optimizers))

    def scaler_updated(self) -> None:
        """A scaler ended the step; its optimizers may have been skipped."""
        self.clock.end_step()

    # -- failing open --------------------------------------------------------------------------------------------

    @contextmanager
    def _safely(self, part: str) -> Iterator[None]:
        try:
            with own_work(), torch.no_grad():
                yield
        except Exception as error:
            self._fail(part, error)

    def _fail(self, part: str, error: BaseException) -> None:
        self._note(f"the recording of {part} ended at step {self.clock.step}: {type(error).__name__}: {error}")

    def _ended(self, problem: str) -> None:
        """Say that nothing can be written any more; called on the writer's thread."""
        self._problem = problem
        self._note(
            f"the recording in {self.folder} ended at step {self.clock.step}: {problem}. The training goes on; what was "
            "written before is readable. Free the space or give another --out"
        )

    def _note(self, text: str) -> None:
        with suppress(Exception):
            sys.stderr.write(f"bitwitness: rank {self._rank}: {text}\n")
        if self._run is not None:
            self._run.event(Note(text, self.clock.step, self._rank, "record", Severity.WARNING))
