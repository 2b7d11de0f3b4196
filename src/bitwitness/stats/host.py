"""What lies on a device brought to the host, waited for when it is read; and numbers the other way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch


def to_host(tensor: torch.Tensor) -> tuple[torch.Tensor, Callable[[], None]]:
    """Begin to copy a device's tensor into pinned memory; return the copy and what waits until it is complete."""
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    host.copy_(tensor, non_blocking=True)
    event = torch.Event(tensor.device)
    event.record()
    return host, event.synchronize


def numbers_of(tensors: Sequence[torch.Tensor]) -> list[Any]:
    """Return 0-d tensors of one dtype as Python's numbers, in their order: one transfer a device, each waited for."""
    places: dict[torch.device, list[int]] = {}
    for index, tensor in enumerate(tensors):
        places.setdefault(tensor.device, []).append(index)
    numbers: list[Any] = [None] * len(tensors)
    for mine in places.values():
        for index, number in zip(mine, torch.stack([tensors[index] for index in mine]).tolist(), strict=True):
            numbers[index] = number
    return numbers


def to_device(numbers: Sequence[int] | torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return whole numbers on a device, int64, without waiting for it."""
    here = torch.as_tensor(numbers, dtype=torch.int64)
    return here if device.type == "cpu" else here.pin_memory().to(device, non_blocking=True)
