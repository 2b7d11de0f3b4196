"""Which operators have a checksum of their own, beside matrix products and attention, and who computes it."""

from __future__ import annotations

from functools import cache

from bitwitness.oracle.kernels import named_arguments
from bitwitness.sense import (
    checksum_again,
    checksum_convolution,
    checksum_draws,
    checksum_moves,
    checksum_norms,
    checksum_recurrent,
    checksum_rownorms,
    checksum_rows,
    checksum_sums,
    checksum_wider,
)
from bitwitness.sense.invariant import Check, Invariant, Signs
from bitwitness.sense.rowreading import is_readable
from bitwitness.stats.local import is_plain
from bitwitness.tap.compat import OpOverload
from bitwitness.tap.operators import OpCall, tensors_in

_LEAST = 64
"""Elements of a result by rows below which a check would cost more than it is worth."""
_BY_ROW = {**checksum_rows.CHECKS, **checksum_rownorms.CHECKS}
_ROWS = {**_BY_ROW, **checksum_sums.CHECKS, **checksum_moves.CHECKS}
"""Checks that see what rounding does not explain, which take as long as their operators."""
_ELEMENTS = {**checksum_wider.CHECKS, **checksum_again.CHECKS, **checksum_draws.CHECKS}
_BETWEEN: dict[str, Check] = {**_ROWS, **checksum_norms.CHECKS, **_ELEMENTS}
"""Those of operators that carry no work that counts."""
_OVERWRITE = ("copy_", "bernoulli_")
"""Those of them that read nothing of what they write over."""
_LAYERS: dict[str, Check] = {**checksum_convolution.CHECKS, **checksum_recurrent.CHECKS}
"""Those of operators that do."""


@cache
def is_between(func: OpOverload) -> bool:
    """Tell whether an operator is one of those that run between products, and leaves its inputs as they are."""
    known = func.namespace == "aten" and func.overloadpacket.__name__ in _BETWEEN
    return known and (func.overloadpacket.__name__ in _OVERWRITE or not func._schema.is_mutable)


def turns_of(op: str, rows_one_in: int) -> int:
    """Return of how many large operators of a kind one is checked on a step, where one in so many is whose rows are read."""
    copies = op == "_to_copy" or op in checksum_moves.CHECKS  # autocast makes one for each input of each product
    if copies or op in checksum_again.CHECKS or op in checksum_draws.CHECKS:
        return 4 * rows_one_in  # they take longer to compare than to make
    by_rows = op in _ROWS or op in checksum_norms.CHECKS or op in checksum_recurrent.CHECKS
    return rows_one_in if by_rows else 1


def sees_last_bits(op: str) -> bool:
    """Tell whether a check leaves nothing to those who compute an operator again and compare the bits."""
    return op in _ROWS or not (op in _BETWEEN or op in _LAYERS)


def check_between(call: OpCall, signs: Signs) -> list[Invariant] | None:
    """Check one call, after it ran; None where it is too small, or in strides that are not read."""
    out = call.outputs[0] if call.outputs else None
    if out is None or not _are_plain(call) or not out.numel():
        return None
    if call.op in _BY_ROW and (not is_readable(out) or out.numel() < _LEAST):
        return None
    return _BETWEEN[call.op](call, named_arguments(call.func, call.args, call.kwargs), signs)


def check_layer(call: OpCall, signs: Signs) -> list[Invariant] | None:
    """Check a convolution or a recurrent layer, forward or backward; None for what is neither, or has no checksum."""
    check = _LAYERS.get(call.op) if call.func.namespace == "aten" else None
    if check is None or not _are_plain(call):
        return None
    return check(call, named_arguments(call.func, call.args, call.kwargs), signs)


def _are_plain(call: OpCall) -> bool:
    """Tell whether a call's tensors are torch's own, strided, and hold numbers: neither sparse, nested nor quantized ones."""
    return all(map(is_plain, (*call.outputs, *tensors_in((*call.args, *call.kwargs.values())))))
