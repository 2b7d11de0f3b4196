"""The tensors of what a script is about to write, hashed as they lie in memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from bitwitness.checkpoint.manifest import SealedTensor
from bitwitness.errors import UsageError
from bitwitness.stats import in_hex
from bitwitness.stats.digest import HashBatch
from bitwitness.store.torchfile import tensors_in
from bitwitness.tap.compat import without_dispatch_modes

SMALLEST = 16 << 10
"""Bytes of tensors from which on a file is worth a seal: generators' states and the like are not."""


def size_of(content: Any) -> int:
    """Return about how many bytes of tensors a state holds; of a module those of its parameters and buffers."""
    if isinstance(content, torch.nn.Module):
        content = content.state_dict()
    waiting, size, seen = [content], 0, 0
    while waiting and size < SMALLEST and seen < 1 << 20:
        one = waiting.pop()
        seen += 1
        if isinstance(one, torch.Tensor):
            size += 0 if one.device.type == "meta" else one.numel() * one.element_size()
        elif isinstance(one, torch.nn.Module):
            waiting.append(one.state_dict())
        elif isinstance(one, Mapping):
            waiting += one.values()
        elif isinstance(one, list | tuple):
            waiting += one
    return size


def hashes_of_state(content: Any) -> tuple[SealedTensor, ...]:
    """Hash all tensors and numbers of a state by their dotted names; none of what holds more than containers and values."""
    try:
        entries = tensors_in(content, "a state", None).entries
    except UsageError:
        return ()
    batch = HashBatch()
    with torch.no_grad(), without_dispatch_modes():
        batch.add_all(entry.read() for entry in entries.values())
        hashes = [in_hex(one) for one in batch.finish()]
    return tuple(SealedTensor(name, "", None, hashed) for name, hashed in zip(entries, hashes, strict=True))
