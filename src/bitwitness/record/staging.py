"""Small tensors, copied side by side until there are enough of one length to be measured at once.

A small tensor's statistics cost what calling torch costs, ten times over. Copied, it costs one call, and a row of a matrix
afterwards, which torch reduces with the same operations whatever its place, so that a recording's numbers do not depend on
what was recorded before.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

_LONGEST = {"cpu": 512}
"""Elements up to which a tensor counts as small. On a CPU 32 elements take 5 us so and 9 us alone, 1,024 take 8 and 10."""
_LONGEST_DEVICE = 1 << 15
_MEMORY = {"cpu": 1 << 15}
"""Elements of a buffer: on a CPU 128 KiB of float32, which stay in a core's cache."""
_MEMORY_DEVICE = 1 << 20
_ROWS = 256  # at the most: what waits to be measured is not in a run that stops meanwhile
_BUFFERS = 48
"""Buffers from which on one that is empty makes room for another; a model's tensors have few lengths."""
_DTYPES = {
    torch.float32: torch.float32,
    torch.bfloat16: torch.float32,
    torch.float16: torch.float32,
    torch.float64: torch.float64,
}


class Rows(NamedTuple):
    """Tensors of one length: ``numbers`` by which they are known, and their values, ``[len(numbers), length]``."""

    numbers: list[int]
    values: torch.Tensor


@dataclass(slots=True)
class _Buffer:
    memory: torch.Tensor
    numbers: list[int]

    def take(self) -> Rows:
        numbers, self.numbers = self.numbers, []
        return Rows(numbers, self.memory[: len(numbers)])


class Staging:
    """Collects small tensors; half types are widened to float32."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[int, torch.dtype, torch.device, Any], _Buffer] = {}

    def takes(self, values: torch.Tensor) -> bool:
        """Tell whether a plain tensor is one that `add` takes."""
        return values.dtype in _DTYPES and 0 < values.numel() <= _LONGEST.get(values.device.type, _LONGEST_DEVICE)

    def add(self, number: int, values: torch.Tensor) -> Rows | None:
        """Copy a tensor; return a buffer's rows, to be measured before the next call, if it is full now."""
        stream = None if values.device.type == "cpu" else torch.accelerator.current_stream(values.device)
        key = values.numel(), _DTYPES[values.dtype], values.device, stream
        buffer = self._buffers.get(key)
        if buffer is None:
            if len(self._buffers) >= _BUFFERS:
                self._forget_one()
            buffer = self._buffers[key] = _Buffer(_memory(*key[:3]), [])
        buffer.memory[len(buffer.numbers)].copy_(values.reshape(-1))
        buffer.numbers.append(number)
        return buffer.take() if len(buffer.numbers) == len(buffer.memory) else None

    def flush(self) -> list[Rows]:
        """Return all that waits, to be measured on the current streams before the next `add`."""
        found = []
        for key, buffer in list(self._buffers.items()):
            if not buffer.numbers:
                continue
            stream, current = key[3], None if key[3] is None else torch.accelerator.current_stream(key[2])
            if stream is not None and current is not None and stream != current:
                current.wait_stream(stream)
                buffer.memory.record_stream(current)
                del self._buffers[key]  # it would be written again without waiting for who reads it now
            found.append(buffer.take())
        return found

    def _forget_one(self) -> None:
        empty = next((key for key, buffer in self._buffers.items() if not buffer.numbers), None)
        if empty is not None:
            del self._buffers[empty]


def _memory(length: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    rows = min(_ROWS, max(1, _MEMORY.get(device.type, _MEMORY_DEVICE) // length))
    with torch.inference_mode(mode=False):  # what is made in an evaluation may not be written to after it
        return torch.empty(rows, length, dtype=dtype, device=device)
