"""What moves numbers and computes none: every bit has to be where it was sent. Copies, rows put together, and constants."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from bitwitness.numerics import INTEGER_OF_SIZE
from bitwitness.sense.checksum_rows import cast
from bitwitness.sense.invariant import Check, Invariant, Named, Signs, counted
from bitwitness.sense.rowreading import is_readable
from bitwitness.tap.operators import OpCall


def _clone(call: OpCall, named: Named, _signs: Signs) -> list[Invariant] | None:
    return _same([(call.outputs[0], named["self"])])


def _copy(call: OpCall, named: Named, signs: Signs) -> list[Invariant] | None:
    """Check a copy into a tensor that is there: bit by bit, or as a cast."""
    out, src = call.outputs[0], named["src"]
    if src.dtype is not out.dtype:
        return cast(call, named, signs) if is_readable(out) else None
    return _same([(out, src.expand_as(out))])


def _cat(call: OpCall, named: Named, _signs: Signs) -> list[Invariant] | None:
    out, dim = call.outputs[0], int(named["dim"])
    parts = [part for part in named["tensors"] if part.dim() == out.dim() and part.shape[dim]]
    if sum(part.shape[dim] for part in parts) != out.shape[dim]:
        return None
    return _same(list(zip(out.split([part.shape[dim] for part in parts], dim), parts, strict=True)))


def _stack(call: OpCall, named: Named, _signs: Signs) -> list[Invariant] | None:
    return _same(list(zip(call.outputs[0].unbind(int(named["dim"])), named["tensors"], strict=True)))


def _constant(call: OpCall, named: Named, _signs: Signs, *, value: float | None = None) -> list[Invariant] | None:
    out = call.outputs[0]
    given = named.get("fill_value", named.get("value")) if value is None else value
    if not isinstance(given, int | float | complex) or out.dtype.itemsize not in INTEGER_OF_SIZE:
        return None
    # as the dtype rounds it
    return _same([(out, torch.full((), given, dtype=out.dtype, device=out.device).expand_as(out))])


def _same(pairs: Sequence[tuple[Tensor, Tensor]]) -> list[Invariant] | None:
    """Count by row where bits differ; None for numbers that have no integer of their size."""
    for one, other in pairs:
        if one.dtype is not other.dtype or one.shape != other.shape or one.device != other.device:
            return None
        if not all(t.dtype.itemsize in INTEGER_OF_SIZE and not (t.is_conj() or t.is_neg()) for t in (one, other)):
            return None
    counts = torch.cat([_differing(one, other) for one, other in pairs])
    return [counted("every bit is where it was sent", counts)]


def _differing(one: Tensor, other: Tensor) -> Tensor:
    """Return how many numbers of each row differ in their bits, float32, flat."""
    if one.is_cpu and torch.equal(
        *(_wide(t) if _is_aligned(one) and _is_aligned(other) else _bits(t) for t in (one, other))
    ):
        return torch.zeros(1)
    a, b = _bits(one), _bits(other)
    return (a != b).sum(-1, dtype=torch.float32).reshape(-1)


def _bits(x: Tensor) -> Tensor:
    return x.view(INTEGER_OF_SIZE[x.dtype.itemsize])


def _wide(x: Tensor) -> Tensor:
    return x.view(torch.int64)


def _is_aligned(x: Tensor) -> bool:
    """Tell whether rows can be compared eight bytes at a time, which is several times as fast."""
    if not x.dim() or x.stride(-1) != 1:
        return False
    counts = (x.shape[-1], x.storage_offset(), *x.stride()[:-1])
    return all(count * x.dtype.itemsize % 8 == 0 for count in counts)


CHECKS: dict[str, Check] = {
    "clone": _clone,
    "copy_": _copy,
    "cat": _cat,
    "stack": _stack,
    **dict.fromkeys(["zeros", "zeros_like", "new_zeros", "zero"], partial(_constant, value=0)),
    **dict.fromkeys(["ones", "ones_like", "new_ones"], partial(_constant, value=1)),
    **dict.fromkeys(["full", "full_like", "new_full", "fill"], _constant),
}
"""Whose bits are compared, by operator."""
