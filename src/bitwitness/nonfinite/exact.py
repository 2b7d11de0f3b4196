"""What an operator's bad result is in float64: one that is too large for its dtype is told from one that is undefined."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from bitwitness.nonfinite.flags import measurable
from bitwitness.stats.local import local_values
from bitwitness.tap.operators import OpCall, tensors_in

_LARGEST = 1 << 24  # elements of all inputs together: their copies in float64 take 128 MiB
_BARE_FLAGS = {
    "_softmax": 2,
    "_log_softmax": 2,
}  # where an argument says that the input is a half: in float64 it is none


@dataclass(frozen=True, slots=True)
class Exact:
    """The values in float64 where the operator's own are NaN or infinite.

    ``size``: the largest finite magnitude among them (0 if none is finite); ``undefined``: how many are not finite in
    float64 either.
    """

    size: float
    undefined: int


def in_float64(
    call: OpCall, before: dict[int, torch.Tensor], found: Sequence[torch.Tensor], *, nan_alone: bool
) -> Exact | None:
    """Run an operator again in float64 and look where its own result is bad; None where that cannot be done.

    Parameters
    ----------
    call
        The operator; it ran already.
    before
        What the tensors held that it changed in place, by their ``id``.
    found
        Its bad outputs, or the tensors that it changed.
    nan_alone
        Look at NaN only: the infinities may be some that it was given.

    """
    given = tensors_in([*call.args, *call.kwargs.values()])
    if call.func.namespace != "aten":
        return None  # somebody's own operator may do more than compute
    if torch.Tag.nondeterministic_seeded in call.func.tags or sum(t.numel() for t in given) > _LARGEST:
        return None  # a random operator would draw again, and the rest of the replay would get other numbers
    wide: dict[int, torch.Tensor] = {}
    position = {id(tensor): number for number, tensor in enumerate(call.outputs)}
    try:
        made = tensors_in(call.func(*_widened(call, wide, before), **_keywords(call, wide, before)))
        size, undefined = 0.0, 0
        for tensor in found:
            exact = wide[id(tensor)] if id(tensor) in wide else made[position[id(tensor)]]
            more = _where_bad(tensor, exact, nan_alone=nan_alone)
            size, undefined = max(size, more.size), undefined + more.undefined
    except Exception:  # not every operator, and not every device, computes in float64
        return None
    return Exact(size, undefined)


def _where_bad(tensor: torch.Tensor, exact: torch.Tensor, *, nan_alone: bool) -> Exact:
    own = local_values(tensor.detach())
    own = own.float() if own.dtype.itemsize == 1 else own
    bad = own.isnan() if nan_alone else ~own.isfinite()
    values = local_values(exact.detach())[bad].abs()
    fine = values[values.isfinite()]
    return Exact(float(fine.max()) if fine.numel() else 0.0, int(values.numel() - fine.numel()))


def _widened(call: OpCall, wide: dict[int, torch.Tensor], before: dict[int, torch.Tensor]) -> list[Any]:
    args = [_wide(value, wide, before) for value in call.args]
    flag = _BARE_FLAGS.get(call.op)
    if flag is not None and len(args) > flag:
        args[flag] = False
    return args


def _keywords(call: OpCall, wide: dict[int, torch.Tensor], before: dict[int, torch.Tensor]) -> dict[str, Any]:
    return {name: _wide(value, wide, before) for name, value in call.kwargs.items()}


def _wide(value: Any, wide: dict[int, torch.Tensor], before: dict[int, torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        if id(value) not in wide:
            wide[id(value)] = _copy(before.get(id(value), value))
        return wide[id(value)]
    if isinstance(value, torch.dtype):
        return _double(value)
    if isinstance(value, list | tuple):
        return [_wide(item, wide, before) for item in value]
    return value


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy, so that what is written in place is nobody's; of numbers that can be measured in double precision."""
    values = tensor.detach()
    return values.to(_double(values.dtype), copy=True) if measurable(values) else values.clone()


def _double(dtype: torch.dtype) -> torch.dtype:
    if dtype.is_complex:
        return torch.complex128
    return torch.float64 if dtype.is_floating_point else dtype


def overflows(exact: Exact | None) -> bool | None:
    """Tell whether a result is defined, and only too large for its dtype; None where it is not known."""
    return None if exact is None else not exact.undefined and math.isfinite(exact.size)
