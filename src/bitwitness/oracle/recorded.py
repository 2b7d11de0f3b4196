"""A recorded operator again, in float64 from its recorded inputs: what of its error was made here, and in which run."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from bitwitness.numerics import HALF, unit_roundoff
from bitwitness.oracle.eligible import functional_operator
from bitwitness.oracle.float64 import run_in_float64
from bitwitness.oracle.limits import accumulation_roundoff, sum_bound, underflow
from bitwitness.oracle.names import PRODUCTS, canonical
from bitwitness.oracle.terms import term_sizes
from bitwitness.oracle.worst import WorstElement, worst_element
from bitwitness.tap.compat import OpOverload

_LARGEST = 1 << 28  # elements of an input: 2 GiB in float64
_ROUNDING = 2.0
"""Units of u that the result's own rounding may take: one, and one for a kernel that rounds once more on its way."""
_ACCUMULATION = 8.0
"""Units of u_sum sqrt(n) that the order of summation may take: twice the live check's, for the kernel is not known."""
_GENERAL = 64.0
"""The same for an operator of no known formula, beside its largest magnitude.

Wide on purpose: narrower, it would blame a run for what a healthy kernel does; wider, it would miss smaller errors.
"""
_WITH_BIAS = 3
"""Tensors that a convolution with a bias reads."""
_REDUCES = 1.5
"""Elements of the first input for each of the result, from which an operator is taken to sum them."""


@lru_cache(maxsize=4096)
def arguments(text: str) -> dict[str, Any]:
    """Return a recording's args column as an object; empty if it holds none, or a damaged one.

    ``f`` is the operator's full name, ``a`` and ``k`` are its arguments, tensors in them ``{"$": position}``.
    """
    try:
        found = json.loads(text) if text else {}
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def operator_of(text: str) -> OpOverload | None:
    """Return the operator that an args column names, if it may be run (`eligible.functional_operator`)."""
    return functional_operator(str(arguments(text).get("f", "")))


@torch.no_grad()
def compare_recorded_with_float64(text: str, inputs: Sequence[Tensor], result: Tensor, out: int) -> WorstElement | None:
    """Compare a recorded result with float64's.

    Parameters
    ----------
    text
        The args column.
    inputs
        The recorded inputs in the order of their slots, on the CPU, in the dtypes that the operator read.
    result
        The recorded result number ``out``, in the dtype that it was returned in.

    Returns
    -------
    WorstElement or None
        The element that exceeds its bound (`oracle.limits`) by most; None where the operator cannot, or may not, be run again.

    """
    func = operator_of(text)
    if func is None or not inputs or any(t.numel() > _LARGEST for t in inputs) or not result.dtype.is_floating_point:
        return None
    try:
        called = _called(arguments(text), inputs)
        results = run_in_float64(func, *called)
        exact = results[out]
        if exact.shape != result.shape:
            return None
        name = canonical(func.overloadpacket.__name__)
        if name in PRODUCTS:
            bound = _contraction_bound(func, arguments(text), inputs, exact, result.dtype, out)
            bound += _of_bias(name, inputs, exact, result.dtype)
            # Parts of a sum may be kept in a half dtype, and numbers that small are rounded by the same amount each.
            parts = math.sqrt(max(max((t.shape[-1] for t in inputs if t.dim()), default=1), 1))
            return worst_element(result.double(), exact, bound + parts * underflow(result.dtype))
        bound = _general_bound(func, inputs, exact, result.dtype) + underflow(result.dtype)
        found = worst_element(result.double(), exact, bound)
        if not found.wrong:
            return found
        terms = term_sizes(func, *called, results)[out]
        return worst_element(result.double(), exact, bound + _of_terms(terms, result))
    except Exception:  # whatever torch raises for arguments that do not fit: a recording may be damaged
        return None


def _called(call: Mapping[str, Any], inputs: Sequence[Tensor]) -> tuple[list[Any], dict[str, Any]]:
    """Return the arguments of a call, by position and by name."""
    args = [argument(value, inputs) for value in call.get("a", [])]
    return args, {name: argument(value, inputs) for name, value in call.get("k", {}).items()}


def argument(value: Any, inputs: Sequence[Tensor], device: torch.device | None = None) -> Any:
    """Return an argument as the operator got it, on a device (the CPU); raises ValueError for one not written whole."""
    if isinstance(value, list):
        return [argument(item, inputs, device) for item in value]
    if not isinstance(value, dict):
        return value
    if "$" in value:
        return inputs[int(value["$"])]
    if "dtype" in value:
        return getattr(torch, str(value["dtype"]))
    if "float" in value:
        return float(value["float"])
    if "device" in value:
        return device or torch.device("cpu")  # as every tensor that is given
    if str(value.get("other", "")).startswith("torch."):  # a memory format, a layout
        found = getattr(torch, value["other"].removeprefix("torch."), None)
        if isinstance(found, torch.memory_format | torch.layout):
            return found
    raise ValueError(f"an argument that cannot be given again: {value}")


def _contraction_bound(
    func: OpOverload,
    call: Mapping[str, Any],
    inputs: Sequence[Tensor],
    exact: Tensor,
    dtype: torch.dtype,
    out: int,
) -> Tensor:
    """Return the bound of a sum of products, whose terms' sizes the same product of magnitudes gives."""
    sizes = [t.double().abs() if t.dtype.is_floating_point else t for t in inputs]
    magnitudes = run_in_float64(func, *_called(call, sizes))[out].abs()
    # A matrix sums over its last dimension, a convolution over all of a filter.
    terms = max(max(t.shape[-1] if t.dim() else 1, t[0].numel() if t.dim() > 2 else 1) for t in inputs)
    return sum_bound(exact, magnitudes, dtype, terms, rounding=_ROUNDING, accumulation=_ACCUMULATION)


def _general_bound(func: OpOverload, inputs: Sequence[Tensor], exact: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the bound of an operator of no known formula: a share of the largest magnitude, of what it sums as well."""
    own, accumulated = unit_roundoff(dtype), accumulation_roundoff(dtype)
    size = exact.abs()
    top = float(size.max()) if size.numel() else 0.0
    terms = max((t.shape[-1] for t in inputs if t.dim()), default=1)
    # How many elements of the first input go into one of the result, if it is a sum at all.
    sums = max(inputs[0].numel() / max(exact.numel(), 1), 1.0)
    largest = _largest(inputs[0]) if inputs[0].dtype.is_floating_point else 0.0
    if "backward" in func.overloadpacket.__name__ and sums > _REDUCES:
        accumulated = own  # torch's layer norm on a CPU adds up its weight's gradient in the dtype itself
        largest *= max((_largest(t) for t in inputs[1:2] if t.numel()), default=1.0)
    reduced = accumulated * sums * largest if sums > _REDUCES else 0.0
    return _ROUNDING * own * size + _GENERAL * accumulated * math.sqrt(max(terms, sums)) * top + _ACCUMULATION * reduced


def _of_bias(name: str, inputs: Sequence[Tensor], exact: Tensor, dtype: torch.dtype) -> Tensor:
    """Return what rounding to a half dtype takes before a convolution's bias is added, as some kernels do."""
    if name != "conv" or dtype not in HALF or len(inputs) < _WITH_BIAS:
        return torch.zeros((), dtype=torch.float64)
    weight, bias = inputs[1:_WITH_BIAS]
    channels = exact.dim() - weight.dim() + 1  # without a batch the first
    return _ROUNDING * unit_roundoff(dtype) * bias.double().abs().view(-1, *[1] * (exact.dim() - channels - 1))


def _of_terms(size: float, result: Tensor) -> float:
    """Return what rounding leaves of an element's terms, where they cancel in it: its own size says nothing of that then.

    ``size``: the L2 size of the terms of all elements (`terms.term_sizes`).
    """
    # Some kernels keep their terms in a half dtype.
    inside = _ROUNDING * unit_roundoff(result.dtype) if result.dtype in HALF else 0.0
    each = size / math.sqrt(max(result.numel(), 1))
    return max(_GENERAL * accumulation_roundoff(result.dtype), inside) * each


def _largest(tensor: Tensor) -> float:
    return float(tensor.double().abs().max()) if tensor.numel() else 0.0
