"""What lies on a device brought to the host, for which nobody has to wait until it is read; and numbers the other way."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch


def to_host(tensor: torch.Tensor) -> tuple[torch.Tensor, Callable[[], None]]:
    """Begin to copy a device's tensor into pinned memory; return the copy and what waits until it is complete."""
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    host.copy_(tensor, non_blocking=True)
    event = torch.Event(tensor.device)
    event.record()
    return host, event.synchronize


def to_device(numbers: Sequence[int], device: torch.device) -> torch.Tensor:
    """Return whole numbers on a device, int64, without waiting for it."""
    here = torch.tensor(numbers, dtype=torch.int64)
    return here if device.type == "cpu" else here.pin_memory().to(device, non_blocking=True)
