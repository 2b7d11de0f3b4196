"""What results were before they were rounded themselves: what their operators made of what they read."""

from __future__ import annotations

from torch import Tensor


class Unrounded:
    """Remembers it as long as nothing is written into a result, through whatever view."""

    def __init__(self) -> None:
        self._found: dict[int, tuple[Tensor, Tensor, int]] = {}

    def remember(self, result: Tensor, clean: Tensor, *, written: bool = False) -> Tensor:
        """Take in what a result was, and return the result; ``written``: it is an argument that is being written into."""
        self._found[id(result)] = result, clean, result._version + written  # which counts when the operator ends
        return result

    def of(self, result: Tensor) -> Tensor | None:
        """Return what a result was; None where that is not known, or was written over."""
        found = self._found.get(id(result))
        return None if found is None or found[2] != result._version else found[1]

    def clear(self) -> None:
        """Let go of all tensors."""
        self._found.clear()
