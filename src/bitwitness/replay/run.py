"""Running a captured step again, locally: no gradient is accumulated, no communication of ours, nothing left changed.

`forwards` runs the model, `start` the loss code, `passes` the backward; here is what holds for the step as a whole: whether it
may be repeated, that nothing of it stays behind, and whether its result may be believed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext

import torch
from torch import nn

from bitwitness.capture.buffers import BufferKeeper
from bitwitness.capture.gradients import features_with_absent
from bitwitness.capture.heldstate import HeldState
from bitwitness.capture.lossgraph import LossGraph
from bitwitness.capture.randomness import randomness_kept
from bitwitness.capture.step import Pass, StepRecord, beside
from bitwitness.replay.conditions import check_kept, check_unchanged, check_unseen, shared_generators
from bitwitness.replay.errors import ReplayError
from bitwitness.replay.execution import Around, Execution
from bitwitness.replay.forwards import ForwardReplay
from bitwitness.replay.passes import PassReplay
from bitwitness.replay.start import Starts, starts_of
from bitwitness.replay.untouched import Untouched
from bitwitness.tap.compiled import CompiledRegions, EntryPoint, RecompileError
from bitwitness.tap.ownwork import own_work

__all__ = ["Around", "Execution", "ReplayError", "Replayer"]


class Replayer:
    """Runs captured steps of one root again.

    ``sharded`` tells that parameters are spread over the ranks.

    Parameters
    ----------
    root
        The user's module (not its DistributedDataParallel wrapper).
    parameters
        Those whose gradients are compared, by name, in a fixed order.
    entry
        How the training runs the root (in its compiled form, say); by its own call by default.
    regions
        Knows whether there is compiled code inside the root.
    held, keeper
        Know the root's other state, and its buffers.

    """

    sharded = False

    def __init__(
        self,
        root: nn.Module,
        parameters: dict[str, nn.Parameter],
        device: torch.device,
        *,
        entry: EntryPoint | None = None,
        regions: CompiledRegions | None = None,
        held: HeldState | None = None,
        keeper: BufferKeeper | None = None,
    ) -> None:
        self.root = root
        self.parameters = parameters
        self.device = device
        self._entry = EntryPoint(root, root) if entry is None else entry
        self._regions = CompiledRegions(root) if regions is None else regions
        self._held = HeldState(root) if held is None else held
        self.keeper = BufferKeeper(root) if keeper is None else keeper
        # Also those whose gradients nobody compares: what a backward adds to them is put back, too.
        every = {id(p): p for p in (*parameters.values(), *root.parameters())}
        self._untouched = Untouched(root, list(every.values()), self._held, self.keeper)
        self.shared = False
        """Whether ranks exchange something in the forwards of the step at hand; set by who knows of all ranks."""
        self._forwards = ForwardReplay(
            root, device, entry=self._entry, held=self._held, keeper=self.keeper, untouched=self._untouched
        )
        self._passes = PassReplay(root, parameters, self._forwards)

    @property
    def lockstep(self) -> bool:
        """Whether all ranks must run at the same time, and equally often."""
        return self.sharded or self.shared

    @property
    def compiled(self) -> bool:
        """Whether the training's own kernels are compiled ones, which no operator tap can see."""
        return self._regions.present()

    @property
    def refused(self) -> str | None:
        """Why no step may be run again any more; None if that is not so."""
        return self._untouched.refused

    def end(self, reason: str, *, disturbed: bool = False) -> None:
        """Run no step again any more; ``disturbed``: for re-executions have changed something of the training's."""
        if disturbed:
            self._held.disturbed(reason)
        self._held.refused = self._held.refused or reason

    @property
    def disturbance(self) -> str | None:
        """What re-executions have changed for good, so that the training may compute other numbers since."""
        return self._held.disturbance

    def run(
        self,
        record: StepRecord,
        passes: list[Pass] | None = None,
        *,
        keep: bool = False,
        around: Around = nullcontext,
        strict: bool = True,
    ) -> Execution:
        """Execute the step again and describe its local gradients.

        Parameters
        ----------
        record
            The step.
        passes
            What its backwards went through; another rank's, to run its batch on this device.
        keep
            Keep the gradients and the buffers as the replay left them.
        around
            Context for each forward and each backward (an operator tap). Compiled code then runs eagerly, with kernels
            (and, in a compiled dropout, with random numbers) other than the training's.
        strict
            Refuse to speak where not all that led to the gradients is repeated.

        Raises
        ------
        ReplayError
            If the step cannot be run again.

        """
        passes = record.passes() if passes is None else passes
        self.check(record, passes, strict=strict)
        self._demand(strict=strict)
        self._held.know(beside(passes))
        totals: list[torch.Tensor | None] = [None] * len(self.parameters)
        self._passes.begin(record.left)
        done = Execution(features_with_absent([], self.device), torch.zeros(0))
        outputs: list[torch.Tensor] = []
        self._forwards.results, self._forwards.changes = ([], set()) if keep else (None, None)
        with self._apart(passes), self._stance(around):
            for group in passes:
                self._passes.run(group, totals, outputs, done, around=around, zero_start=record.zero_start)
            after = [buffer.detach().clone() for buffer in self.keeper.tensors()] if keep else None
            done.state = self._held.volatile(places=self._forwards.changes) if keep else None
            with own_work(), torch.no_grad():
                done.features = features_with_absent(totals, self.device)
        if keep:
            done.results, self._forwards.results = self._forwards.results or [], None
            self._untouched.mind_static_gradients(totals, done.features, self.device)
        self._believe(done)
        with own_work(), torch.no_grad():
            done.outputs = torch.stack(outputs) if outputs else torch.zeros(0, dtype=torch.int64, device=self.device)
            done.grads, done.buffers = (totals if keep else None), after
        return done

    @contextmanager
    def _apart(self, passes: Sequence[Pass]) -> Iterator[None]:
        """Leave no trace of what runs inside."""
        shared = shared_generators(passes)
        self._forwards.begin()
        with self._untouched.watched(passes), randomness_kept(self.device, shared=shared), torch.enable_grad():
            yield

    def _demand(self, *, strict: bool) -> None:
        """Say what is asked of the forwards that are run next."""
        self._forwards.strict, self._forwards.alone = strict, not self.lockstep

    def _believe(self, done: Execution) -> None:
        """Refuse a result that repeats something else than the training, or was had by overwriting the training's own.

        Only now, when all is done: where ranks exchange something in a replay, none may leave it early. Which way the forwards
        went is noted, too.
        """
        done.other_way = self._forwards.other_way
        problem = self._untouched.refused or self._untouched.problem or done.unproven
        if problem is not None and self._forwards.strict:
            raise ReplayError(problem)

    def run_forward(self, record: StepRecord, graph: LossGraph, around: Around) -> list[torch.Tensor]:
        """Execute the forwards of a step that had no backward, and its loss code; return what that computed.

        Raises
        ------
        ReplayError
            If they cannot be run again.

        """
        if record.communicates:
            raise ReplayError("ranks exchange something in the forward, which one rank cannot run again by itself")
        group = Pass(0, [forward for forward in record.forwards if not forward.backpropagated], graph)
        self.check(record, [group] if group.forwards else [], strict=False)
        self._demand(strict=False)
        with self._apart([group]), self._stance(around):
            made = self._forwards.run(group, [], around, parameters=self.parameters.values(), leaves={})
            with around():
                found = starts_of(group, made, strict=False)
        return [root.detach() for root in found.roots]

    @contextmanager
    def _stance(self, around: Around) -> Iterator[None]:
        """Run compiled code eagerly where it is looked at, else as it is compiled."""
        if around is not nullcontext:
            with self._regions.replayed_eagerly():
                yield
            return
        if self._entry.problem is not None:
            raise ReplayError(self._entry.problem)
        try:
            with self._regions.as_compiled():
                yield
        except RecompileError as error:
            raise ReplayError(str(error)) from error

    def check(self, record: StepRecord, passes: list[Pass], *, strict: bool = True) -> None:
        """Raise `ReplayError` if the step cannot be run again or, where ``strict``, would not be the same."""
        if self.refused is not None:
            raise ReplayError(record.unreplayable or self.refused)
        check_kept(record, passes)
        shared_generators(passes)
        parameters = list(self.parameters.values())
        try:
            check_unchanged(record, self.root, parameters)
            if strict:
                check_unseen(record, parameters, self.device)
        except ReplayError as error:
            record.give_up(str(error))
            raise

    def starts_through(self, wrapper: nn.Module, group: Pass) -> Starts:
        """Run a pass's forwards through DistributedDataParallel, and its loss code; return what to go back from."""
        self._demand(strict=True)
        parameters = self.parameters.values()
        made = self._forwards.run(group, [], nullcontext, parameters=parameters, leaves={}, call=wrapper)
        return starts_of(group, made)
