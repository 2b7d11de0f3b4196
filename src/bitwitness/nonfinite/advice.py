"""What an operator did, and what to do about it, in words: by how it made its bad values, its name and its dtype."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from bitwitness.nonfinite.dtypes import dtype_name, smallest, wider
from bitwitness.nonfinite.kinds import ATTENTION, CASTS
from bitwitness.nonfinite.making import SLOPES, Making, making_of, plain
from bitwitness.nonfinite.origin import Origin

_EXPONENTIALS = ("exp", "expm1", "exp2", "cosh", "sinh")

_CLAIMS = {
    Making.BY_ZERO: "it divides by zero",
    Making.ZERO_BY_ZERO: "it divides zero by zero",
    Making.INF_BY_INF: "it divides infinity by infinity",
    Making.ZERO_TIMES_INF: "zero times infinity",
    Making.INF_IN_PRODUCT: "it multiplies or adds up infinities that it was given",
    Making.INF_MINUS_INF: "infinity minus infinity",
    Making.LOG_OF_ZERO: "the logarithm of zero",
    Making.LOG_OF_NEGATIVE: "the logarithm of a negative number",
    Making.ROOT_OF_NEGATIVE: "the root of a negative number",
    Making.ZERO_TO_NEGATIVE_POWER: "zero to a negative power",
    Making.NEGATIVE_TO_FRACTION: "a negative number to a power that is no integer",
    Making.OUTSIDE_DOMAIN: "some inputs are at the ends of its domain or beyond",
    Making.ALL_MASKED: "a mask leaves some row nothing to choose from",
    Making.NO_ALIGNMENT: "a target is too long for its input, so that nothing aligns them",
    Making.SINGLE_VALUE: "a single value has no unbiased variance",
}


def claim(origin: Origin) -> str:
    """Return what happened, in a few words; empty where that is not known."""
    making = making_of(origin)
    exact = origin.exact
    match making:
        case Making.OVERFLOW:
            known = exact is not None and not exact.undefined
            return f"it overflows: in float64 it comes to {exact.size:.4g}" if exact and known else "it overflows"
        case Making.OVERFLOW_INSIDE:
            size = 0.0 if exact is None else exact.size
            return f"it overflows on the way to a result that is {size:.4g} in float64"
        case Making.NOTHING_TO_AVERAGE:
            labels = "every label is ignored or has no weight, so " if origin.site.op.startswith("nll_loss") else ""
            return f"{labels}it averages over nothing"
        case Making.NUMBER:
            given = [n for n in origin.arguments if isinstance(n, float) and not math.isfinite(n)]
            return f"the code gives it the number {given[0]}"
        case Making.SLOPE:
            return f"the slope of {origin.forward_op} is infinite or undefined {SLOPES[plain(origin.forward_op)]}"
        case _:
            return _CLAIMS.get(making, "")


def advice_for(origin: Origin) -> str:
    """Return what to do about an operator that is an origin."""
    making = making_of(origin)
    text = _ADVICE[making](origin)
    return text + _underflow(origin) if making in _POLES else text


# -- too large -------------------------------------------------------------------------------------------------------


def _narrower(origin: Origin) -> torch.dtype:
    """Return the dtype of what came out bad."""
    bad = [out.dtype for out in origin.outputs if out.bad]
    return (bad or [out.dtype for out in origin.outputs] or [torch.float32])[0]


def _for_overflow(origin: Origin) -> str:
    dtype = _narrower(origin)
    beyond_all = origin.exact is not None and origin.exact.undefined > 0
    size = 0.0 if origin.exact is None or making_of(origin) is Making.OVERFLOW_INSIDE else origin.exact.size
    names = [] if beyond_all else wider(dtype, size)
    name, smaller = dtype_name(dtype), "make its inputs smaller (scale or clamp them)"
    if plain(origin.site.op) in _EXPONENTIALS:
        smaller = "subtract the largest exponent first, or clamp its input from above"
    if names and origin.site.op in CASTS:
        return f"keep this tensor in a wider dtype than {name} ({_or(names)}), or scale or clamp it before the cast"
    if not names:
        return f"{smaller}, or work with logarithms: no wider dtype holds the result"
    if names[-1] in ("float64", "complex128"):
        same = "; float32 has no wider range than bfloat16" if dtype is torch.bfloat16 else ""
        return f"{smaller}; of all dtypes only {names[-1]} would hold it{same}"
    return f"run this operator in a wider dtype than {name} ({_or(names)}), or {_lower_first(smaller)}"


def _lower_first(text: str) -> str:
    return "make its inputs smaller" if text.startswith("make") else text


def _or(names: list[str]) -> str:
    return f"{', '.join(names[:-1])} or {names[-1]}" if len(names) > 1 else names[0]


# -- not defined -----------------------------------------------------------------------------------------------------


def _underflow(origin: Origin) -> str:
    """Say from where on a narrow dtype holds zero: an eps below that is none."""
    found = [smallest(extent.dtype) for extent in origin.inputs if extent.stats.zeros]
    size = max((s for s in found if s is not None), default=None)
    if size is None:
        return ""
    dtype = next(e.dtype for e in origin.inputs if e.stats.zeros and smallest(e.dtype) == size)
    return f" ({dtype_name(dtype)} holds nothing between 0 and {size:.2g}: what is smaller, an eps too, becomes zero)"


def _for_slope(origin: Origin) -> str:
    op = plain(origin.forward_op)
    if op in ("log", "log2", "log10", "log1p", "xlogy", "logit"):
        return "clamp the input of the logarithm from below (torch.where behind it does not stop this gradient)"
    if op in ("acos", "asin", "atanh", "acosh", "erfinv"):
        return f"clamp the input of {op} away from the ends of its domain"
    if op in ("div", "reciprocal", "rsqrt"):
        return "add an eps to what it divides by, or clamp it (torch.where behind it does not stop this gradient)"
    if op in ("var", "var_mean"):
        return _single(origin)
    if op in ("sqrt", "pow", "float_power"):
        return "add an eps under the root, or clamp what it reads (torch.where behind it does not stop this gradient)"
    return "keep the input of the forward operator away from where it has no derivative"


def _single(_origin: Origin) -> str:
    return "use correction=0 (unbiased=False), or more values: a batch of one has no variance"


def _mask(origin: Origin) -> str:
    if origin.site.op in ATTENTION:
        return "make sure that each query keeps one key unmasked, or leave such queries out"
    return "make sure that each row keeps one entry unmasked, or leave such rows out"


def _unknown(origin: Origin) -> str:
    if origin.site.phase == "backward":
        return "look at the derivative at these inputs: clamp the forward's input away from where it has none"
    if origin.inputs and any(extent.stats.pos_inf + extent.stats.neg_inf for extent in origin.inputs):
        return (
            "look at the infinities among its inputs: a mask that reaches this operator must be masked away before it"
        )
    return "look at these inputs: the result is not defined for them; guard the expression with a clamp or a where on its input"


def _number(origin: Origin) -> str:
    given = next(n for n in origin.arguments if isinstance(n, float) and not math.isfinite(n))
    return f"look at where the number {given} comes from: .item() of a bad tensor, a division in Python, a schedule"


def _always(text: str) -> Callable[[Origin], str]:
    return lambda _origin: text


_ADVICE: dict[Making, Callable[[Origin], str]] = {
    Making.OVERFLOW: _for_overflow,
    Making.OVERFLOW_INSIDE: _for_overflow,
    Making.BY_ZERO: _always("add an eps to what it divides by, or clamp it away from zero"),
    Making.ZERO_BY_ZERO: _always("add an eps to what it divides by, or clamp it; a count or a norm may be zero"),
    Making.INF_BY_INF: _always("look at the infinities among its inputs: they must be masked away before it"),
    Making.ZERO_TIMES_INF: _always("replace a mask that multiplies by torch.where or masked_fill"),
    Making.INF_IN_PRODUCT: _always("infinities of a mask must not enter a product: mask after it, or fill in zeros"),
    Making.INF_MINUS_INF: _always("infinities must not meet here: use a large finite number in their place"),
    Making.LOG_OF_ZERO: _always("clamp its input from below (or use log_softmax, logsigmoid)"),
    Making.LOG_OF_NEGATIVE: _always("make sure that its input is positive: clamp it from below"),
    Making.ROOT_OF_NEGATIVE: _always("clamp its input at zero: a difference may fall below it by rounding"),
    Making.ZERO_TO_NEGATIVE_POWER: _always("add an eps to the base, or clamp it away from zero"),
    Making.NEGATIVE_TO_FRACTION: _always("clamp the base at zero, or take the power of its magnitude"),
    Making.OUTSIDE_DOMAIN: _always("clamp its input inside its domain: rounding may carry it beyond"),
    Making.ALL_MASKED: _mask,
    Making.NOTHING_TO_AVERAGE: _always("skip a batch without anything to average, or divide a sum by a clamped count"),
    Making.NO_ALIGNMENT: _always("use zero_infinity=True, or leave out targets that are longer than their input"),
    Making.SINGLE_VALUE: _single,
    Making.NUMBER: _number,
    Making.SLOPE: _for_slope,
    Making.UNKNOWN: _unknown,
}
_POLES = (Making.BY_ZERO, Making.ZERO_BY_ZERO, Making.LOG_OF_ZERO, Making.ZERO_TO_NEGATIVE_POWER, Making.SLOPE)
