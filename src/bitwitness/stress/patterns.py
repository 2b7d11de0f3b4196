"""What is written into memory and read back: bits that neighbours, addresses and drivers get wrong.

Walking ones find lines that stick, checkerboards cells that their neighbours sway, addresses that are their own contents find
lines of the address that do. Each is written with its inverse after it, so that every cell holds both values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from bitwitness.stress.workload import Workload, dtype_name
from bitwitness.trial.call import Call

_INTEGER = {torch.float64: torch.int64, torch.float32: torch.int32, torch.bfloat16: torch.int16}
_WORDS: dict[bool, tuple[int, ...]] = {False: (1 << 15, 9973), True: (1 << 24, 99991)}


def memory_workloads(dtype: torch.dtype, *, large: bool) -> Iterator[Workload]:
    """Yield the patterns in words of a dtype's size; none of a dtype that is no word of its own."""
    if dtype not in _INTEGER:
        return
    for name, pattern in _PATTERNS.items():
        for words in _WORDS[large]:
            call = partial(_call, pattern=pattern, words=words, dtype=dtype)
            yield Workload(name, dtype_name(dtype), f"{words}", call, exact=True)


def _call(
    variant: int, _rank: int, *, pattern: Callable[[Tensor, int], Tensor], words: int, dtype: torch.dtype
) -> Call:
    kind = _INTEGER[dtype]
    bits = pattern(torch.arange(variant, variant + words), kind.itemsize * 8).to(kind)
    return Call(written_and_read, (bits.view(dtype), (~bits).view(dtype)), gradients=False)


def written_and_read(pattern: Tensor, inverse: Tensor) -> tuple[Tensor, Tensor]:
    """Write a pattern and then its inverse into the same memory, and return what is read of each."""
    memory = torch.empty_like(pattern)
    memory.copy_(pattern)
    first = memory.clone()
    memory.copy_(inverse)
    return first, memory.clone()


def _walking(addresses: Tensor, bits: int) -> Tensor:
    return torch.ones_like(addresses) << (addresses % bits)


def _checkerboard(addresses: Tensor, bits: int) -> Tensor:
    even = sum(1 << bit for bit in range(0, bits - 1, 2))
    return torch.where(addresses % 2 == 0, even, ~even)


def _addresses(addresses: Tensor, bits: int) -> Tensor:
    return addresses * (0x9E3779B97F4A7C15 >> (65 - min(bits, 62)) | 1)  # spread over all bits, each word another


_PATTERNS: dict[str, Callable[[Tensor, int], Tensor]] = {
    "walking ones": _walking,
    "checkerboard": _checkerboard,
    "addresses": _addresses,
}
