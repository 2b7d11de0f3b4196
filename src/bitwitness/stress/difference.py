"""Where two results differ: elements, and their bits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from bitwitness.finding import to_jsonable
from bitwitness.stats.digest import flat_bits

_TOLD = 4  # elements
_CONFINED = 0.5


@dataclass(frozen=True, slots=True)
class Difference:
    """How one result differs from the one that is right.

    Attributes
    ----------
    slot
        Which result: ``out0``, ``grad1``.
    elements, of
        How many differ, of how many.
    at
        The indices of the first of them.
    expected, seen
        The bits of these, in hexadecimal.
    expected_value, seen_value
        The same as numbers.
    confined
        Whether they lie in few rows or in few columns, as what one part of a chip computes does; another algorithm
        rounds otherwise everywhere.

    """

    slot: str
    elements: int
    of: int
    at: list[list[int]]
    expected: list[str]
    seen: list[str]
    expected_value: list[float]
    seen_value: list[float]
    confined: bool

    def as_dict(self) -> dict[str, Any]:
        """Return the fields by name, as JSON takes them."""
        found: dict[str, Any] = to_jsonable(asdict(self))
        return found

    def __str__(self) -> str:
        at = f"{self.slot}[{', '.join(map(str, self.at[0]))}]"
        what = f"{at}: 0x{self.seen[0]} ({self.seen_value[0]:g}), expected 0x{self.expected[0]} ({self.expected_value[0]:g})"
        return what + (f", and {self.elements - 1} more of {self.of}" if self.elements > 1 else "")


def difference(expected: dict[str, Tensor], seen: dict[str, Tensor]) -> Difference | None:
    """Return the first result that has other bits, on the CPU; None where all have equal ones."""
    for slot, right in expected.items():
        other = seen.get(slot)
        if (
            other is None
            or other.shape != right.shape
            or other.dtype != right.dtype
            or not right.numel()
            or right.is_complex()
        ):
            continue
        a, b = flat_bits(right.detach()), flat_bits(other.detach())
        places = (a != b).nonzero().reshape(-1)
        if len(places):
            return _told(slot, right, other, places)
    return None


def _told(slot: str, right: Tensor, other: Tensor, places: Tensor) -> Difference:
    first = places[:_TOLD]
    at = torch.stack(torch.unravel_index(first, right.shape), 1).tolist() if right.ndim else [[]]
    return Difference(
        slot=slot,
        elements=len(places),
        of=right.numel(),
        at=at,
        expected=_hex(right, first),
        seen=_hex(other, first),
        expected_value=[float(v) for v in right.reshape(-1)[first].tolist()],
        seen_value=[float(v) for v in other.reshape(-1)[first].tolist()],
        confined=_confined(right.shape, places),
    )


def _hex(tensor: Tensor, places: Tensor) -> list[str]:
    width = tensor.dtype.itemsize
    bits = flat_bits(tensor.reshape(-1)[places].contiguous()).tolist()
    return [f"{word & (1 << 8 * width) - 1:0{2 * width}x}" for word in bits]


def _confined(shape: Sequence[int], places: Tensor) -> bool:
    columns = shape[-1] if shape else 1
    rows = math.prod(shape) // max(columns, 1)
    share = min(len((places // columns).unique()) / rows, len((places % columns).unique()) / columns)
    return share <= _CONFINED
