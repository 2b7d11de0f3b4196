"""A re-execution leaves no trace: what it may have changed is looked at afterwards, put back, and told.

Buffers, held state (`capture.heldstate`), gradients and the training's own outputs: the last two lie, where CUDA graphs or
static buffers are used, in memory that the next run of the same code writes to.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from bitwitness.capture.buffers import BufferKeeper
from bitwitness.capture.contents import Snapshot
from bitwitness.capture.equality import equal_values
from bitwitness.capture.gradients import features_with_absent
from bitwitness.capture.heldstate import HeldState
from bitwitness.capture.leaves import LARGEST
from bitwitness.capture.step import Pass
from bitwitness.capture.structure import objects_in
from bitwitness.capture.surroundings import Reading
from bitwitness.stats import Features
from bitwitness.stats.local import local_values
from bitwitness.tap.compat import keeping_versions
from bitwitness.tap.ownwork import own_work

STATIC = (
    "{what} lie in memory that a re-execution overwrites (CUDA graphs, static buffers); what was overwritten is put back, "
    "and no step is run again"
)


class Untouched:
    """Guards one root while its steps are run again.

    Parameters
    ----------
    root, parameters
        The module, and the parameters whose gradients the training is about to use.
    held, keeper
        What knows the root's other state, and its buffers.

    """

    def __init__(
        self, root: nn.Module, parameters: Sequence[nn.Parameter], held: HeldState, keeper: BufferKeeper
    ) -> None:
        self._root = root
        self._parameters = parameters
        self._held = held
        self._keeper = keeper
        self.problem: str | None = None
        """What the last re-execution did that makes its result no evidence; None if nothing."""

    @property
    def refused(self) -> str | None:
        """Why no step may be run again any more."""
        return self._held.refused

    @contextmanager
    def watched(self, passes: Sequence[Pass]) -> Iterator[None]:
        """Run what is inside; put everything back afterwards. `problem` tells what was found."""
        self.problem = None
        given = [one for group in passes for f in group.forwards for one in objects_in((f.args, f.kwargs))]
        everything, around = self._held.everything(given), self._held.surroundings()
        outputs = _living_outputs(passes)
        grads = [None if p.grad is None else (p.grad, local_values(p.grad).detach().clone()) for p in self._parameters]
        with self._buffers_kept():
            try:
                yield
            finally:
                with own_work(), torch.no_grad():
                    self._gradients_back(grads)  # first of all: what is put back next may lie in the same memory
                    self._mind_static(outputs, "outputs")
                    self._put_back(everything, around)

    def mind_static_gradients(self, grads: list[torch.Tensor | None], features: Features, device: torch.device) -> None:
        """See whether gradients lie in memory that putting everything back has written to: they are not what they were."""
        with own_work(), torch.no_grad():
            now = features_with_absent(grads, device)
        if not torch.equal(now.digest, features.digest):
            self._held.refused = self._held.refused or STATIC.format(what="gradients")

    def _put_back(self, everything: Snapshot, around: Reading) -> None:
        new = self._held.learn(everything)
        lost = everything.restore() or list(around.changed().values())
        if lost:
            self._held.disturbed(
                f"a re-execution changed {lost[0]}, which cannot be put back: the training's own numbers may be others since"
            )
        if new:
            self.problem = (
                f"a re-execution changes {', '.join(sorted(new)[:3])}, which had not been seen to change before"
            )

    def _gradients_back(self, grads: list[tuple[torch.Tensor, torch.Tensor] | None]) -> None:
        for parameter, kept in zip(self._parameters, grads, strict=True):
            held = None if kept is None else kept[0]
            if parameter.grad is not held:
                parameter.grad = held
        self._mind_static([kept for kept in grads if kept is not None], "gradients")

    def _mind_static(self, kept: list[tuple[torch.Tensor, torch.Tensor]], what: str) -> None:
        for tensor, content in kept:
            values = local_values(tensor).detach()
            if values.shape != content.shape or not _equal(values, content):
                with keeping_versions((tensor,)):
                    values.copy_(content)
                self._held.refused = self._held.refused or STATIC.format(what=what)

    @contextmanager
    def _buffers_kept(self) -> Iterator[None]:
        """Put the buffers back, versions included: a graph of the script's may hold them, and they are what they were."""
        buffers = self._keeper.tensors()
        held = [buffer.detach().clone() for buffer in buffers]
        versioned = tuple(buffer for buffer in buffers if not buffer.is_inference())
        before = [buffer._version if not buffer.is_inference() else 0 for buffer in buffers]
        with keeping_versions(versioned):
            try:
                yield
            finally:
                self._mind_quiet_changes(buffers, held, before)
                self._keeper.put(held)

    def _mind_quiet_changes(self, buffers: list[torch.Tensor], held: list[torch.Tensor], versions: list[int]) -> None:
        """Find buffers that the forward changes without a word to the version counter: their copies may be out of date."""
        for index, (buffer, value) in enumerate(zip(buffers, held, strict=True)):
            quiet = (
                index not in self._keeper.always and not buffer.is_inference() and buffer._version == versions[index]
            )
            if quiet and not _equal(buffer.detach(), value):
                self._keeper.quiet_change(index)
                self.problem = (
                    "a re-execution changes a buffer behind the version counter, which had not been seen before"
                )


def _living_outputs(passes: Sequence[Pass]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return the training's own outputs that the script still holds, with copies, as far as that is cheap."""
    memories = [memory for p in passes for forward in p.forwards for memory in forward.results if memory is not None]
    kept, size = [], 0
    for tensor in [tensor for memory in memories if (tensor := memory.tensor()) is not None]:
        size += tensor.numel() * tensor.element_size()
        if size <= LARGEST:
            kept.append((tensor, tensor.clone()))
    return kept


def _equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    # Sparse gradients are made anew in each backward.
    return a.layout is not torch.strided or a.is_meta or equal_values(a, b)
