"""Running a captured step again, locally: no gradient is accumulated, no communication of ours, nothing left changed.

The replay calls ``torch.autograd.grad`` on the root's parameters (or, where a reentrant checkpoint refuses that, puts
leaves that share the parameters' memory in their place), so that neither ``p.grad`` nor any hook behind the accumulation
(DistributedDataParallel's reducer, an optimizer inside backward) takes part. Gradients of several micro-batches are added
in the order in which autograd added them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from bitwitness.replay.conditions import check_kept, check_unchanged, check_unseen
from bitwitness.replay.errors import ReplayError
from bitwitness.replay.execution import Execution
from bitwitness.replay.quiet import quiet, redirected
from bitwitness.replay.start import Replayed, Starts, starts_of
from bitwitness.replay.untouched import Untouched
from bitwitness.stats import bit_hash
from bitwitness.tap.buffers import BufferKeeper
from bitwitness.tap.capture import ForwardRecord, Pass, StepRecord, beside
from bitwitness.tap.compat import reparametrized, sequence_number
from bitwitness.tap.compiled import CompiledRegions, Entry, RecompileError
from bitwitness.tap.gradhooks import parameter_hooks
from bitwitness.tap.gradients import features_with_absent
from bitwitness.tap.graphwalk import ForwardSpan
from bitwitness.tap.heldstate import HeldState
from bitwitness.tap.lossgraph import LossGraph, Output
from bitwitness.tap.memory import Memory, still_used
from bitwitness.tap.modes import scripts_modes_back
from bitwitness.tap.modules import ROOT, own_work
from bitwitness.tap.randomness import RandomState, randomness_kept
from bitwitness.tap.reasons import DISPATCHING
from bitwitness.tap.structure import differentiable, fresh, map_tensors, tensors_of, tensors_within

__all__ = ["Around", "Execution", "ReplayError", "Replayer"]


Around = Callable[[], AbstractContextManager[object]]


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
        entry: Entry | None = None,
        regions: CompiledRegions | None = None,
        held: HeldState | None = None,
        keeper: BufferKeeper | None = None,
    ) -> None:
        self.root = root
        self.parameters = parameters
        self.device = device
        self._entry = Entry(root, root) if entry is None else entry
        self._regions = CompiledRegions(root) if regions is None else regions
        self._held = HeldState(root) if held is None else held
        self.keeper = BufferKeeper(root) if keeper is None else keeper
        # Also those whose gradients nobody compares: what a backward adds to them is put back, too.
        every = {id(p): p for p in (*parameters.values(), *root.parameters())}
        self._untouched = Untouched(root, list(every.values()), self._held, self.keeper)
        self.shared = False
        """Whether ranks exchange something in the forwards of the step at hand; set by who knows of all ranks."""
        self._through_leaves: bool | None = None
        self._had_gradients: list[bool] = []
        self._strict, self._latest = True, -1
        self._results: list[tuple[Memory, torch.Tensor]] | None = None

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
        self._strict = strict
        self._held.know(beside(passes))
        totals: list[torch.Tensor | None] = [None] * len(self.parameters)
        self._had_gradients = [p.grad is not None for p in self.parameters.values()]
        done = Execution(features_with_absent([], self.device), torch.zeros(0))
        outputs: list[torch.Tensor] = []
        self._results = [] if keep else None
        with self._apart(passes), self._stance(around):
            for group in passes:
                self._run_pass(group, totals, outputs, done, around=around, zero_start=record.zero_start)
            after = [buffer.detach().clone() for buffer in self.keeper.tensors()] if keep else None
            done.state = self._held.volatile() if keep else None
            with own_work(), torch.no_grad():
                done.features = features_with_absent(totals, self.device)
        if keep:
            done.results, self._results = self._results or [], None
            self._untouched.mind_static_gradients(totals, done.features, self.device)
        self._believe(done)
        with own_work(), torch.no_grad():
            done.outputs = torch.stack(outputs) if outputs else torch.zeros(0, dtype=torch.int64, device=self.device)
            done.grads, done.buffers = (totals if keep else None), after
        return done

    @contextmanager
    def _apart(self, passes: Sequence[Pass]) -> Iterator[None]:
        """Leave no trace of what runs inside."""
        self._latest = -1
        with self._untouched.watched(passes), randomness_kept(self.device), torch.enable_grad():
            yield

    def _believe(self, done: Execution) -> None:
        """Refuse a result that repeats something else than the training, or was had by overwriting the training's own.

        Only now, when all is done: where ranks exchange something in a replay, none may leave it early.
        """
        problem = self._untouched.refused or self._untouched.problem or done.unproven
        if problem is not None and self._strict:
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
        self._strict = False
        with self._apart([group]), self._stance(around):
            made = self._forwards(group, [], around, {})
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
        parameters = list(self.parameters.values())
        try:
            check_unchanged(record, self.root, parameters)
            if strict:
                check_unseen(record, parameters, self.device)
        except ReplayError as error:
            record.give_up(str(error))
            raise

    def _run_pass(
        self,
        group: Pass,
        totals: list[torch.Tensor | None],
        outputs: list[torch.Tensor],
        done: Execution,
        *,
        around: Around,
        zero_start: bool,
    ) -> None:
        new = self._gradients(group, outputs, done, around)
        for index, grad in enumerate(new):
            if grad is None:
                continue
            total = totals[index]
            if total is None and zero_start:
                total = torch.zeros_like(grad)
            totals[index] = grad.detach() if total is None else self._added(index, total, grad, around)

    def _added(self, index: int, total: torch.Tensor, grad: torch.Tensor, around: Around) -> torch.Tensor:
        """Add a later micro-batch's gradient, as an operator of the parameter's module where operators are looked at."""
        if around is nullcontext:
            return total.add_(grad)
        with around(), own_work(list(self.parameters)[index].rpartition(".")[0] or ROOT, "grad"):
            return total.add_(grad)

    def _gradients(
        self, group: Pass, outputs: list[torch.Tensor], done: Execution, around: Around
    ) -> Sequence[torch.Tensor | None]:
        """Run one group forward and backward; return the parameters' gradients, in order."""
        missed = self._had_gradients
        hashes: list[torch.Tensor] = []
        if not self._through_leaves:
            new, found = self._by_asking(group, hashes, around)
            missed = [grad is None and there for grad, there in zip(new or (), self._had_gradients, strict=False)]
            if new is not None and (not any(missed) or self._through_leaves is False):
                outputs += hashes
                done.note(found)
                return new
        hashes = []
        new, found = self._by_accumulating(group, hashes, around)
        if self._through_leaves is None:
            # A reentrant checkpoint hides the parameters used inside it from torch.autograd.grad; a parameter that was
            # simply not used has no gradient either way.
            self._through_leaves = any(grad is not None and gap for grad, gap in zip(new, missed, strict=True))
        outputs += hashes
        done.note(found)
        return new

    def _by_asking(
        self, group: Pass, hashes: list[torch.Tensor], around: Around
    ) -> tuple[Sequence[torch.Tensor | None] | None, Starts]:
        """Ask autograd for the gradients; None where a reentrant checkpoint refuses that."""
        found = self._starts(group, hashes, around, {})
        parameters = list(self.parameters.values())
        try:
            with around(), scripts_modes_back(backward=True):
                return torch.autograd.grad(found.roots, parameters, found.grads, allow_unused=True), found
        except RuntimeError as error:
            if "use_reentrant" not in str(error):
                raise
        self._through_leaves = True
        return None, found

    def _by_accumulating(
        self, group: Pass, hashes: list[torch.Tensor], around: Around
    ) -> tuple[Sequence[torch.Tensor | None], Starts]:
        leaves = {name: parameter.detach().requires_grad_() for name, parameter in self.parameters.items()}
        for leaf, hooks in zip(leaves.values(), parameter_hooks(list(self.parameters.values())), strict=True):
            for hook in hooks:
                leaf.register_hook(hook)
        with reparametrized(self.root, leaves, tie_weights=True):
            found = self._starts(group, hashes, around, {id(p): leaves[name] for name, p in self.parameters.items()})
            with around(), scripts_modes_back(backward=True):
                torch.autograd.backward(found.roots, found.grads)
        return [leaf.grad for leaf in leaves.values()], found

    def _starts(
        self, group: Pass, hashes: list[torch.Tensor], around: Around, leaves: dict[int, torch.Tensor]
    ) -> Starts:
        """Run a group's forwards, and its loss code; return what to go back from."""
        made = self._forwards(group, hashes, around, leaves)
        with around():
            return starts_of(group, made, strict=self._strict)

    def starts_through(self, wrapper: nn.Module, group: Pass) -> Starts:
        """Run a pass's forwards through DistributedDataParallel, and its loss code; return what to go back from."""
        self._strict = True
        made = self._forwards(group, [], nullcontext, {}, call=wrapper)
        return starts_of(group, made)

    def _forwards(
        self, group: Pass, hashes: list[torch.Tensor], around: Around, leaves: dict[int, torch.Tensor], call: Any = None
    ) -> Replayed:
        standing = leaves.values() if leaves else self.parameters.values()
        made = Replayed(leaves=leaves, positions={id(leaf): i for i, leaf in enumerate(standing)})
        made.begin(group.graph, copies=self._strict)
        for record in group.forwards:
            given = [fresh(tensor) for tensor in tensors_of((record.args, record.kwargs))]
            with around():
                given = made.chained(group.graph, record.number, given)
            begin = sequence_number()
            values = self._forward(record, given, hashes, around, call)
            span = ForwardSpan(record.number, begin, sequence_number())
            span.enter(given)
            for index, position in enumerate(differentiable(values)):
                span.add(values[position], index)
                made.outputs[Output(record.number, index)] = values[position]
            made.outputs |= {Output(record.number, -1 - position): value for position, value in enumerate(values)}
            made.spans.append(span)
            made.take_held(group.graph, record.number, lambda source: self._held.value(source.path))
        return made

    def _forward(
        self,
        record: ForwardRecord,
        given: list[torch.Tensor],
        hashes: list[torch.Tensor],
        around: Around,
        call: Any = None,
    ) -> list[torch.Tensor]:
        if self._latest != record.number - 1 or record.untouched is None or not bool(record.untouched):
            self.keeper.put(record.buffers)  # else they are what the replay of the forward before made of them
        self._latest = record.number
        if record.state is not None:
            record.state.restore()
        record.random.restore(self.device)
        inputs = iter(given)
        args = map_tensors(record.args, lambda _: next(inputs))
        kwargs = map_tensors(record.kwargs, lambda _: next(inputs))
        ambient = nullcontext() if record.ambient is None else record.ambient.restored()
        call = call if record.module is None else record.module
        if call is None:  # a module may have a length, and that may be 0
            call = self._entry.call if around is nullcontext else self.root
        with ambient, record.autocast.context(), around(), redirected(self.root, record.redirect):
            if around is nullcontext:
                self._compare_surroundings(record)
            with quiet(self.root, since=record.began), scripts_modes_back():
                result = call(*args, **kwargs)
        if (
            around is nullcontext
            and record.drawn is not None
            and not record.drawn.equals(RandomState.read(self.device))
        ):
            self._untouched.problem = (
                "a re-execution draws other random numbers than the forward did (a cache, perhaps)"
            )
        values = tensors_within(result)
        if self._results is not None:
            self._results += still_used(record.results, values)
        made, wanted = differentiable(values), len(record.output_grads)
        if len(made) != wanted:
            raise ReplayError(f"the replayed forward returned {len(made)} differentiable outputs, the step {wanted}")
        with own_work(), torch.no_grad():
            hashes += [bit_hash(values[position].detach()) for position in made]
        return values

    def _compare_surroundings(self, record: ForwardRecord) -> None:
        """See whether a forward that is about to be repeated finds what the training's found."""
        with own_work(), torch.no_grad():
            moved = None if record.surroundings is None else self._held.moved(record.surroundings)
        if moved is not None:
            self._untouched.problem = f"the forward found {moved} otherwise than a re-execution does"
        if record.ambient is not None and (mode := record.ambient.dispatching()) is not None:
            self._untouched.problem = DISPATCHING.format(mode=mode)
        if self._untouched.problem is not None and self._strict and not self.lockstep:
            raise ReplayError(self._untouched.problem)  # before it changes anything for nothing
