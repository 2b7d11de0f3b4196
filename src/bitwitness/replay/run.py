"""Running a captured step again, locally: no gradient is accumulated, no communication, nothing left changed.

The replay calls ``torch.autograd.grad`` on the root's parameters (or, where a reentrant checkpoint refuses that, puts
leaves that share the parameters' memory in their place), so that neither ``p.grad`` nor any hook behind the accumulation
(DistributedDataParallel's reducer, an optimizer inside backward) takes part. Gradients of several micro-batches are added
in the order in which autograd added them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.nn.utils.stateless import _reparametrize_module

from bitwitness.replay.loss import ThroughLoss
from bitwitness.stats import Features, bit_hash
from bitwitness.tap.capture import ForwardRecord, StepRecord
from bitwitness.tap.compiled import CompiledRegions, Entry, RecompileError
from bitwitness.tap.gradients import features_with_absent
from bitwitness.tap.lossgraph import LossGraph, Output
from bitwitness.tap.modules import ROOT, own_work
from bitwitness.tap.randomness import randomness_kept
from bitwitness.tap.structure import fresh, map_tensors, tensors_of


class ReplayError(Exception):
    """The step cannot be run again; the text says why."""


@dataclass(slots=True)
class Execution:
    """What one execution of a step's local work produced.

    ``features`` describe the local gradients (before reduction) of the parameters in order, those without a gradient
    as zeros; ``outputs`` is the int64 vector of the outputs' bit hashes, all forwards in order. ``grads`` are the
    gradients themselves where they were asked for. ``losses`` are what a replay through the script's loss code started
    back from, with the reason in ``no_loss`` where that code could not be run again; ``starts`` are the root's outputs, where
    it started from their captured gradients.
    """

    features: Features
    outputs: torch.Tensor
    grads: list[torch.Tensor | None] | None = None
    buffers: list[torch.Tensor] | None = None
    losses: list[torch.Tensor] = field(default_factory=list)
    no_loss: str | None = None
    starts: list[torch.Tensor] = field(default_factory=list)


_Pass = tuple[Sequence[torch.Tensor | None], list[torch.Tensor]]
Around = Callable[[], AbstractContextManager[object]]


class Replayer:
    """Runs captured steps of one root again.

    ``lockstep`` tells that all ranks must run at the same time.

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

    """

    lockstep = False

    def __init__(
        self,
        root: nn.Module,
        parameters: dict[str, nn.Parameter],
        device: torch.device,
        *,
        entry: Entry | None = None,
        regions: CompiledRegions | None = None,
    ) -> None:
        self.root = root
        self.parameters = parameters
        self.device = device
        self._entry = Entry(root, root) if entry is None else entry
        self._regions = CompiledRegions(root) if regions is None else regions
        self._through_leaves: bool | None = None
        self._had_gradients: list[bool] = []
        self._loss = ThroughLoss()

    @property
    def compiled(self) -> bool:
        """Whether the training's own kernels are compiled ones, which no operator tap can see."""
        return self._regions.present()

    def run(
        self,
        record: StepRecord,
        passes: list[list[ForwardRecord]] | None = None,
        *,
        keep: bool = False,
        around: Around = nullcontext,
        through_loss: bool = False,
    ) -> Execution:
        """Execute the step again and describe its local gradients.

        Parameters
        ----------
        record
            The step.
        passes
            Its forwards grouped by backward; another rank's, to run its batch on this device.
        keep
            Keep the gradients and the buffers as the replay left them.
        around
            Context for each forward and each backward (an operator tap). Compiled code then runs eagerly, with kernels
            (and, in a compiled dropout, with random numbers) other than the training's.
        through_loss
            Run the script's loss code again, too, where it was taped, rather than start back from the captured gradients
            of the root's outputs.

        Raises
        ------
        ReplayError
            If the step cannot be run again.

        """
        passes = record.passes() if passes is None else passes
        self.check(record, passes)
        self._loss = ThroughLoss(record.graphs if through_loss else {})
        totals: list[torch.Tensor | None] = [None] * len(self.parameters)
        outputs: list[torch.Tensor] = []
        self._had_gradients = [p.grad is not None for p in self.parameters.values()]
        kept = self._gradients_kept(), self._buffers_kept(), randomness_kept(self.device)
        with kept[0], kept[1], kept[2], torch.enable_grad(), self._stance(around):
            for group in passes:
                self._run_pass(group, totals, outputs, around=around, zero_start=record.zero_start)
            after = [buffer.detach().clone() for buffer in self.root.buffers()] if keep else None
        with torch.no_grad(), own_work():
            digests = torch.stack(outputs) if outputs else torch.zeros(0, dtype=torch.int64, device=self.device)
            features = features_with_absent(totals, self.device)
            loss = self._loss
            return Execution(
                features, digests, totals if keep else None, after, loss.losses, loss.problem, loss.outputs
            )

    def run_forward(self, record: StepRecord, graph: LossGraph, around: Around) -> list[torch.Tensor]:
        """Execute the forwards of a step that had no backward, and its loss code; return what that computed.

        Raises
        ------
        ReplayError
            If they cannot be run again.

        """
        group = [forward for forward in record.forwards if forward.backward is None]
        self.check(record, [group] if group else [])
        self._loss = ThroughLoss({0: graph})
        kept = self._gradients_kept(), self._buffers_kept(), randomness_kept(self.device)
        with kept[0], kept[1], kept[2], torch.enable_grad(), self._stance(around):
            outputs = {
                Output(forward.number, index): value
                for forward in group
                for index, value in enumerate(self._forward(forward, [], around))
            }
            with around():
                self._loss.run(group, outputs, {})
        if self._loss.problem is not None:
            raise ReplayError(self._loss.problem)
        return self._loss.losses

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

    def check(self, record: StepRecord, passes: list[list[ForwardRecord]]) -> None:
        """Raise `ReplayError` if the step cannot be run again."""
        if record.unreplayable is not None:
            raise ReplayError(record.unreplayable)
        if not passes:
            raise ReplayError("no forward of the guarded module took part in the backward")
        if record.versions != [p._version for p in self.parameters.values()]:
            raise ReplayError("parameters were changed between the forward and the optimizer step")
        if any(module.training is not mode for module, mode in zip(self.root.modules(), record.training, strict=True)):
            raise ReplayError("training flags were changed between the forward and the optimizer step")
        if record.start_norm is not None and float(record.start_norm) != 0:
            raise ReplayError("gradients were not zero when the step began")

    def _run_pass(
        self,
        group: list[ForwardRecord],
        totals: list[torch.Tensor | None],
        outputs: list[torch.Tensor],
        *,
        around: Around,
        zero_start: bool,
    ) -> None:
        new = self._gradients(group, outputs, around)
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
        self, group: list[ForwardRecord], outputs: list[torch.Tensor], around: Around
    ) -> Sequence[torch.Tensor | None]:
        """Run one group forward and backward; return the parameters' gradients, in order."""
        missed = self._had_gradients
        if not self._through_leaves and (asked := self._by_asking(group, around)) is not None:
            new, hashes = asked
            missed = [grad is None and there for grad, there in zip(new, self._had_gradients, strict=True)]
            if not any(missed) or self._through_leaves is False:
                outputs += hashes
                return new
        new, hashes = self._by_accumulating(group, around)
        if self._through_leaves is None:
            # A reentrant checkpoint hides the parameters used inside it from torch.autograd.grad; a parameter that was
            # simply not used has no gradient either way.
            self._through_leaves = any(grad is not None and gap for grad, gap in zip(new, missed, strict=True))
        outputs += hashes
        return new

    def _by_asking(self, group: list[ForwardRecord], around: Around) -> _Pass | None:
        """Ask autograd for the gradients; None where a reentrant checkpoint refuses that."""
        results, grads, hashes = self._forwards(group, around)
        try:
            with around():
                return torch.autograd.grad(results, list(self.parameters.values()), grads, allow_unused=True), hashes
        except RuntimeError as error:
            if "use_reentrant" not in str(error):
                raise
        self._through_leaves = True
        return None

    def _by_accumulating(self, group: list[ForwardRecord], around: Around) -> _Pass:
        leaves = {name: parameter.detach().requires_grad_() for name, parameter in self.parameters.items()}
        with _reparametrize_module(self.root, leaves, tie_weights=True):
            results, grads, hashes = self._forwards(
                group, around, {id(p): leaves[name] for name, p in self.parameters.items()}
            )
            with around():
                torch.autograd.backward(results, grads)
        return [leaf.grad for leaf in leaves.values()], hashes

    def _forwards(
        self, group: list[ForwardRecord], around: Around, leaves: dict[int, torch.Tensor] | None = None
    ) -> tuple[list[torch.Tensor], list[torch.Tensor | None], list[torch.Tensor]]:
        """Run a group's forwards, and its loss code if asked; return what to go back from, with gradients, and hashes."""
        results: list[torch.Tensor] = []
        grads: list[torch.Tensor | None] = []
        hashes: list[torch.Tensor] = []
        outputs: dict[Output, torch.Tensor] = {}
        for record in group:
            values = self._forward(record, hashes, around)
            outputs |= {Output(record.number, index): value for index, value in enumerate(values)}
            for value, grad in zip(values, record.output_grads, strict=True):
                if grad is not None:
                    results.append(value)
                    grads.append(grad)
        with around():
            roots = self._loss.run(group, outputs, leaves or {})
        if roots is not None:
            return [root for root, _ in roots], [grad for _, grad in roots], hashes
        self._loss.outputs += [result.detach() for result in results]
        return results, grads, hashes

    def _forward(self, record: ForwardRecord, outputs: list[torch.Tensor], around: Around) -> list[torch.Tensor]:
        with torch.no_grad():
            self._set_buffers(record.buffers)
        record.random.restore(self.device)
        args, kwargs = map_tensors(record.args, fresh), map_tensors(record.kwargs, fresh)
        with record.autocast.context(), around():
            result = (self._entry.call if around is nullcontext else self.root)(*args, **kwargs)
        values = [tensor for tensor in tensors_of(result) if tensor.requires_grad]
        if len(values) != len(record.output_grads):
            raise ReplayError(
                f"the replayed forward returned {len(values)} differentiable outputs, the step {len(record.output_grads)}"
            )
        with torch.no_grad(), own_work():
            outputs += [bit_hash(tensor.detach()) for tensor in values]
        return values

    def _set_buffers(self, values: list[torch.Tensor]) -> None:
        with torch.no_grad():
            for buffer, value in zip(self.root.buffers(), values, strict=True):
                buffer.copy_(value)

    @contextmanager
    def _buffers_kept(self) -> Iterator[None]:
        """Put the buffers back, versions included: a graph of the script's may hold them, and they are what they were."""
        buffers = list(self.root.buffers())
        held = [buffer.detach().clone() for buffer in buffers]
        versioned = tuple(buffer for buffer in buffers if not buffer.is_inference())
        with _unsafe_preserve_version_counter(versioned):
            try:
                yield
            finally:
                self._set_buffers(held)

    @contextmanager
    def _gradients_kept(self) -> Iterator[None]:
        """Put ``p.grad`` back should the model's own code write it in a replay."""
        parameters = list(self.parameters.values())
        held = [p.grad for p in parameters]
        try:
            yield
        finally:
            for parameter, grad in zip(parameters, held, strict=True):
                if parameter.grad is not grad:
                    parameter.grad = grad
