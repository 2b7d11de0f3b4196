"""Backwards that begin: what a replay would do otherwise, and reading local gradients before they are reduced."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from bitwitness.capture import reasons
from bitwitness.tap.compat import queue_after_backward
from bitwitness.tap.moments import BackwardCall


def unrepeatable(call: BackwardCall, parameters: Sequence[torch.Tensor], device: torch.device) -> str | None:
    """Say what a re-execution would do otherwise than a backward that begins now; None if nothing is known."""
    if call.inputs and {id(p) for p in parameters} - {id(leaf) for leaf in call.inputs}:
        return reasons.SOME_PARAMETERS
    if not all(p.requires_grad for p in parameters):
        return reasons.FROZEN
    return reasons.AUTOCAST_BACKWARD if torch.is_autocast_enabled(device.type) else None


class LocalGradientsFirst:
    """Has the local gradients read at the end of a backward, before DistributedDataParallel reduces them.

    Parameters
    ----------
    read
        Reads them.

    """

    def __init__(self, read: Callable[[], None]) -> None:
        self._read = read
        self._hook: Any = None

    def queue(self, roots: Sequence[Any]) -> None:
        """Have them read in the backward that begins at ``roots``."""
        root = next((root for root in roots if isinstance(root, torch.Tensor) and root.requires_grad), None)
        if root is not None:
            # A hook on the root runs first of all, so that this callback is queued before the reducer's own.
            self._hook = root.register_hook(lambda _: queue_after_backward(self._read))

    def done(self) -> None:
        """Take the hook away: the backward has ended."""
        if self._hook is not None:
            self._hook.remove()
            self._hook = None
