"""Whether gradients are still what the last backward left: code between backward and hold point may change them."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

from torch import nn

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

    def open(self) -> None:
        """Take the gradients as they are before a backward."""
        self._opened = self._read()

    def moved(self) -> bool:
        """Tell whether any gradient is another, or has changed, since `open`."""
        return self._read() != self._opened

    def note(self) -> None:
        """Take the gradients as they are now for those of the last backward."""
        self._noted = self._read()

    def forget(self) -> None:
        """Expect nothing."""
        self._noted = None

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
