"""What lies on a device brought to the host, for which nobody has to wait until it is read."""

from __future__ import annotations

from collections.abc import Callable

import torch


def to_host(tensor: torch.Tensor) -> tuple[torch.Tensor, Callable[[], None]]:
    """Begin to copy a device's tensor into pinned memory; return the copy and what waits until it is complete."""
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    host.copy_(tensor, non_blocking=True)
    event = torch.Event(tensor.device)
    event.record()
    return host, event.synchronize
