"""Running a captured step again where parameters are sharded (FSDP2): all ranks together, through the module itself.

Each rank may run its own batch or another rank's; what is compared are local gradients, as they enter the reduce-scatter.
What the reduce-scatter returns, where all ranks ran their own, is what heals.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

import torch

from bitwitness.replay.loss import ThroughLoss
from bitwitness.replay.run import Around, Execution, Replayer
from bitwitness.stats import Features
from bitwitness.tap.capture import ForwardRecord, StepRecord
from bitwitness.tap.modules import own_work
from bitwitness.tap.randomness import randomness_kept
from bitwitness.tap.sharded import ReduceTap


class LockstepReplayer(Replayer):
    """A `Replayer` that all ranks must call at the same time, the same number of times."""

    lockstep = True

    def use(self, tap: ReduceTap, joined: Callable[[list[Features | None]], Features]) -> None:
        """Say where the gradients are seen, and how parameters' descriptions are put together."""
        self._tap = tap
        self._joined = joined

    def run(
        self,
        record: StepRecord,
        passes: list[list[ForwardRecord]] | None = None,
        *,
        keep: bool = False,
        around: Around = nullcontext,
        through_loss: bool = False,
    ) -> Execution:
        """Execute the step again, with all ranks; see `Replayer.run`. ``grads`` are the reduced ones."""
        passes = record.passes() if passes is None else passes
        self.check(record, passes)
        self._loss = ThroughLoss(record.graphs if through_loss else {})
        outputs: list[torch.Tensor] = []
        with (
            self._gradients_apart(zero_start=record.zero_start),
            self._buffers_kept(),
            self._tap.aside() as parts,
            randomness_kept(self.device),
            torch.enable_grad(),
        ):
            try:
                for group in passes:
                    self._backpropagate(group, outputs, around)
                after = [buffer.detach().clone() for buffer in self.root.buffers()] if keep else None
                reduced = [p.grad for p in self.parameters.values()] if keep else None
            finally:
                self._sync(reduce=True)
        with torch.no_grad(), own_work():
            digests = torch.stack(outputs) if outputs else torch.zeros(0, dtype=torch.int64, device=self.device)
            features = self._joined([parts.get(index) for index in range(len(self.parameters))])
            loss = self._loss
            return Execution(features, digests, reduced, after, loss.losses, loss.problem, loss.outputs)

    def _backpropagate(self, group: list[ForwardRecord], outputs: list[torch.Tensor], around: Around) -> None:
        self._sync(reduce=group[-1].sync)
        results, grads, hashes = self._forwards(group, around)
        with around():
            torch.autograd.backward(results, grads)
        outputs += hashes

    def _sync(self, *, reduce: bool) -> None:
        setter = getattr(self.root, "set_requires_gradient_sync", None)
        if setter is not None:
            setter(reduce)

    @contextmanager
    def _gradients_apart(self, *, zero_start: bool) -> Iterator[None]:
        """Let the replay reduce into gradients of its own."""
        parameters = list(self.parameters.values())
        held = [p.grad for p in parameters]
        for parameter, grad in zip(parameters, held, strict=True):
            parameter.grad = torch.zeros_like(grad) if zero_start and grad is not None else None
        try:
            yield
        finally:
            for parameter, grad in zip(parameters, held, strict=True):
                parameter.grad = grad
