"""Running a captured step again where parameters are sharded (FSDP2): all ranks together, through the module itself.

Each rank may run its own batch or another rank's; what is compared are local gradients, as they enter the reduce-scatter.
What the reduce-scatter returns, where all ranks ran their own, is what heals.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

import torch

from bitwitness.capture.step import Pass, StepRecord
from bitwitness.replay.quiet import run_backward
from bitwitness.replay.run import Around, Execution, Replayer
from bitwitness.stats import Features
from bitwitness.tap.ownwork import own_work
from bitwitness.tap.sharded import ReduceTap


class LockstepReplayer(Replayer):
    """A `Replayer` that all ranks must call at the same time, the same number of times."""

    sharded = True

    def use(self, tap: ReduceTap, joined: Callable[[list[Features | None]], Features]) -> None:
        """Say where the gradients are seen, and how parameters' descriptions are put together."""
        self._tap = tap
        self._joined = joined

    def run(
        self,
        record: StepRecord,
        passes: list[Pass] | None = None,
        *,
        keep: bool = False,
        around: Around = nullcontext,
        strict: bool = True,
    ) -> Execution:
        """Execute the step again, with all ranks; see `Replayer.run`. ``grads`` are the reduced ones."""
        passes = record.passes() if passes is None else passes
        self.check(record, passes, strict=strict)
        self._demand(strict=strict)
        outputs: list[torch.Tensor] = []
        done = Execution(self._joined([None] * len(self.parameters)), torch.zeros(0))
        with self._tap.aside() as parts, self._apart(passes), self._gradients_apart(zero_start=record.zero_start):
            try:
                for group in passes:
                    self._backpropagate(group, outputs, done, around)
                done.buffers = [buffer.detach().clone() for buffer in self.keeper.tensors()] if keep else None
                done.grads = [p.grad for p in self.parameters.values()] if keep else None
            finally:
                self._sync(reduce=True)
        self._believe(done)
        with own_work(), torch.no_grad():
            done.outputs = torch.stack(outputs) if outputs else torch.zeros(0, dtype=torch.int64, device=self.device)
            done.features = self._joined([parts.get(index) for index in range(len(self.parameters))])
        return done

    def _backpropagate(self, group: Pass, outputs: list[torch.Tensor], done: Execution, around: Around) -> None:
        self._sync(reduce=group.sync)
        found = self._passes.starts(group, outputs, around, {})
        done.note(found)
        with around():
            run_backward(self.root, group.began, torch.autograd.backward, found.roots, found.grads)

    def _sync(self, *, reduce: bool) -> None:
        setter = getattr(self.root, "set_requires_gradient_sync", None)
        if setter is not None:
            setter(reduce)

    @contextmanager
    def _gradients_apart(self, *, zero_start: bool) -> Iterator[None]:
        """Let the replay reduce into gradients of its own."""
        parameters = list({id(p): p for p in (*self.parameters.values(), *self.root.parameters())}.values())
        held = [p.grad for p in parameters]
        for parameter, grad in zip(parameters, held, strict=True):
            parameter.grad = torch.zeros_like(grad) if zero_start and grad is not None else None
        try:
            yield
        finally:
            for parameter, grad in zip(parameters, held, strict=True):
                parameter.grad = grad
