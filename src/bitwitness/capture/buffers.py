"""What a root's forward reads and may change beside trained parameters: buffers, and frozen parameters that it moves.

Copied only where it may have changed since the last copy. Frozen parameters are as large as models are, and few forwards touch
them (a momentum encoder is one that does): whether this one does is found out in its first forwards.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from bitwitness.capture.lossgraph import version_of
from bitwitness.stats import bit_hash
from bitwitness.stats.digest import bit_hashes
from bitwitness.stats.local import local_values
from bitwitness.tap.compat import keeping_versions

_SMALL = 1 << 16  # bytes below which a copy costs less than finding out whether it is needed
LEARNED_FROM = 2  # forwards around which all that they may change is looked at, to learn what does


class BufferKeeper:
    """Copies one root's buffers, and the frozen parameters that its forward changes.

    Running statistics change without a word to the version counter, so they are always copied, and so is what is small; a
    table of positions is copied once.
    """

    def __init__(self, root: nn.Module) -> None:
        self._root = root
        self._copies: list[torch.Tensor] = []
        self._known: list[tuple[int, int]] = []
        self._always: set[int] = set()
        self._moving: list[nn.Parameter] = []
        self._learned = 0
        self._frozen: list[nn.Parameter] = []
        self._before: list[tuple[tuple[int, int], torch.Tensor | None]] = []

    def tensors(self) -> list[torch.Tensor]:
        """Return what is kept, the buffers first, in order."""
        return [*self._root.buffers(), *self._moving]

    def take(self) -> list[torch.Tensor]:
        """Return the values; they belong to the keeper and must not be changed."""
        tensors = self.tensors()
        if len(tensors) != len(self._copies):
            self._begin(tensors)
        for index, tensor in enumerate(tensors):
            strided = tensor.layout is torch.strided and not tensor.is_meta
            key = (tensor.data_ptr() if strided else 0, version_of(tensor))
            if index in self._always or key != self._known[index]:
                self._copies[index], self._known[index] = tensor.detach().clone(), key
        return list(self._copies)

    def versions(self) -> list[int]:
        """Return the versions of what is kept."""
        return [version_of(tensor) for tensor in self.tensors()]

    def digest(self) -> torch.Tensor | None:
        """Return the hashes, int64 [N], of what may change without a word; None where there is nothing of the kind."""
        quiet = [tensor.detach() for index, tensor in enumerate(self.tensors()) if index in self._always]
        if not quiet or any(tensor.layout is not torch.strided or tensor.device != quiet[0].device for tensor in quiet):
            return None
        return bit_hashes(quiet)

    def put(self, values: Sequence[torch.Tensor]) -> None:
        """Set what is kept, in order, in place; fewer values than there are now are those of the first ones.

        Their versions stay: a graph may hold them (batch normalisation's does), and finds them as the training's found them.
        """
        tensors = self.tensors()
        versioned = tuple(tensor for tensor in tensors if not tensor.is_inference())
        with torch.no_grad(), keeping_versions(versioned):
            for tensor, value in zip(tensors, values, strict=False):
                tensor.detach().copy_(value)

    def forward_begins(self) -> None:
        """Look at the frozen parameters: at their bits before one of the first forwards, at their versions before any other."""
        learning = self._learned < LEARNED_FROM
        if learning:
            known = {id(p) for p in self._moving}
            frozen = (p for p in self._root.parameters() if not p.requires_grad and id(p) not in known)
            self._frozen = [p for p in frozen if not p.is_meta]
        self._before = [(_state_of(p), bit_hash(p.detach()) if learning else None) for p in self._frozen]

    def forward_ended(self) -> bool:
        """Keep from now on the frozen parameters that the forward has changed; return whether there are any new ones."""
        self._learned += self._learned < LEARNED_FROM
        moved = [p for p, before in zip(self._frozen, self._before, strict=False) if _has_moved(p, *before)]
        if moved:
            gone = set(map(id, moved))
            self._moving += moved
            self._frozen = [p for p in self._frozen if id(p) not in gone]
        return bool(moved)

    def quiet_change(self, index: int) -> None:
        """Say that a tensor changed although its version did not: it is always copied from now on."""
        self._always.add(index)

    @property
    def always(self) -> frozenset[int]:
        """Positions of what is copied every time."""
        return frozenset(self._always)

    def _begin(self, tensors: list[torch.Tensor]) -> None:
        self._copies, self._known = list(tensors), [(-1, -1)] * len(tensors)
        statistics = {
            id(buffer)
            for module in self._root.modules()
            if hasattr(module, "track_running_stats")
            for buffer in module.buffers(recurse=False)
        } | {id(parameter) for parameter in self._moving}
        small = (b.numel() * b.element_size() <= _SMALL for b in tensors)
        self._always |= {i for i, tiny in enumerate(small) if tiny or id(tensors[i]) in statistics}


def _state_of(parameter: nn.Parameter) -> tuple[int, int]:
    return (local_values(parameter).data_ptr() if parameter.layout is torch.strided else 0), version_of(parameter)


def _has_moved(parameter: nn.Parameter, state: tuple[int, int], digest: torch.Tensor | None) -> bool:
    if digest is None:
        return _state_of(parameter) != state
    return not torch.equal(bit_hash(parameter.detach()), digest)
