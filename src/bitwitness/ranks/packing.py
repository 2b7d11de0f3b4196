"""Tensors of any shape and dtype as two byte vectors, which is all that is sent from one rank to another."""

from __future__ import annotations

import json
from collections.abc import Sequence

import torch

from bitwitness.stats.local import as_bytes


def pack(tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Lay tensors out as one header (JSON: dtypes and shapes) and one payload, both uint8 vectors."""
    shapes = [(str(t.dtype).removeprefix("torch."), list(t.shape)) for t in tensors]
    header = torch.frombuffer(bytearray(json.dumps(shapes).encode()), dtype=torch.uint8)
    flat = [as_bytes(t.detach().to("cpu").contiguous()) for t in tensors if t.numel()]
    return header, torch.cat(flat) if flat else torch.empty(0, dtype=torch.uint8)


def unpack(header: torch.Tensor, payload: torch.Tensor) -> list[torch.Tensor]:
    """Return the tensors that `pack` laid out."""
    tensors: list[torch.Tensor] = []
    start = 0
    for name, shape in json.loads(bytes(header.numpy()).decode()):
        dtype = getattr(torch, name)
        empty = torch.empty(shape, dtype=dtype)
        size = empty.numel() * empty.element_size()
        if size:
            empty = payload[start : start + size].clone().view(dtype).reshape(shape)
        tensors.append(empty)
        start += size
    return tensors
