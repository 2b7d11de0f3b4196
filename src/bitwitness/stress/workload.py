"""One piece of work that every device does alike: told in few words, so that each process makes it by itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from bitwitness.trial.call import Call

VARIANTS = 4
"""So many inputs does a workload have; passes take them in turns. What a fault does depends on the data."""


@dataclass(frozen=True, slots=True)
class Workload:
    """Work with inputs that are drawn on the host, the same in every process.

    Attributes
    ----------
    name
        ``matmul``, ``walking ones``, ``all_reduce``, or a recorded call's site.
    dtype, shape
        As they are told: ``bfloat16``, ``4096x4096 4096x4096``.
    call
        Makes the work for a variant and a rank, its tensors on the CPU; run on the CPU it is the truth of what is exact.
    exact
        Whether there is one right answer to the bit: integers, copies.
    collective
        Whether all devices do it together; then what each is due is `expected`'s.
    expected
        Of a collective: what a rank receives, by variant, rank and number of ranks.

    """

    name: str
    dtype: str
    shape: str
    call: Callable[[int, int], Call]
    exact: bool = False
    collective: bool = False
    expected: Callable[[int, int, int], list[Tensor]] | None = None

    @property
    def key(self) -> str:
        """What it is known by in every process, and in files."""
        return f"{self.name} {self.dtype} {self.shape}"


def drawn(shape: tuple[int, ...], dtype: torch.dtype, seed: int, *, grad: bool = False) -> Tensor:
    """Return normal numbers on the CPU; small whole ones of an integer dtype."""
    generator = torch.Generator().manual_seed(seed)
    if not dtype.is_floating_point:
        return torch.randint(-9, 10, shape, generator=generator).to(dtype)
    return torch.randn(shape, generator=generator).to(dtype).requires_grad_(grad)


def dtype_name(dtype: torch.dtype) -> str:
    """Return ``bfloat16`` for ``torch.bfloat16``."""
    return str(dtype).removeprefix("torch.")


def shape_text(*shapes: tuple[int, ...]) -> str:
    """Return ``64x32 32x16``."""
    return " ".join("x".join(map(str, shape)) for shape in shapes)
