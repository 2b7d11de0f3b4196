"""Whether gradients are still what the last backward left: code between backward and hold point may change them."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

import torch
from torch import nn
from torch.utils.weak import TensorWeakRef

Entry = tuple[int, int] | None


class Change(Enum):
    """What happened to the gradients since they were noted."""

    NONE = "untouched"
    CLEARED = "cleared"
    EDITED = "edited"


class GradientLedger:
    """Notes each gradient's identity and version; both are plain attributes, so that nothing waits for a device.

    Changes that bypass torch's version counter (``p.grad.data.mul_``) are not noticed here: where it matters, the
    gradients' sizes are compared (`capture.gradients`).
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = parameters
        self._noted: list[Entry] | None = None
        self._opened: list[Entry] = []
        self._begun: list[tuple[TensorWeakRef, int] | None] | None = None
        self.left: frozenset[int] = frozenset()
        """Positions of gradients that an earlier step left behind, and no backward of this one has added to, when last seen."""

    def begin(self) -> None:
        """Take the gradients as they are before the first backward since `forget`."""
        if self._begun is None:
            grads = [p.grad for p in self._parameters]
            # References, not identities: a new tensor may lie where one was that is gone.
            self._begun = [None if grad is None else (TensorWeakRef(grad), grad._version) for grad in grads]

    def see(self) -> None:
        """Find out which gradients were there before the first backward, and are as they were: `left`."""
        if self._begun is not None and any(self._begun):
            pairs = enumerate(zip(self._begun, self._parameters, strict=True))
            self.left = frozenset(i for i, (begun, p) in pairs if begun is not None and _is_still(begun, p.grad))

    def open(self) -> None:
        """Take the gradients as they are before a backward."""
        self._opened = self._read()

    def moved(self) -> bool:
        """Tell whether any gradient is another, or has changed, since `open`."""
        return self._read() != self._opened

    def note(self) -> None:
        """Take the gradients as they are now for those of the last backward."""
        self._noted = self._read()
        self.see()

    def forget(self) -> None:
        """Expect nothing: what comes belongs to another step, or begins anew."""
        self._noted, self._begun, self.left = None, None, frozenset()

    def change(self) -> Change:
        """Compare the gradients with what was noted; nothing noted is no change."""
        if self._noted is None:
            return Change.NONE
        now = self._read()
        if now == self._noted:
            return Change.NONE
        return Change.EDITED if any(now) else Change.CLEARED

    def _read(self) -> list[Entry]:
        return [None if (grad := p.grad) is None else (id(grad), grad._version) for p in self._parameters]


def _is_still(begun: tuple[TensorWeakRef, int], grad: torch.Tensor | None) -> bool:
    before, version = begun
    return grad is not None and before() is grad and grad._version == version
