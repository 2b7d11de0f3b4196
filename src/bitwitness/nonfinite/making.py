"""How an operator made NaN or infinities out of what it read: from its arguments' extents, and from its result in float64.

Only what is seen is claimed: a division is by zero where the divisor holds zeros, an overflow where float64 gives a finite
result or where an operator without a pole gave an infinity.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from enum import StrEnum
from functools import partial

from bitwitness.nonfinite.dtypes import largest, shows_no_infinity
from bitwitness.nonfinite.exact import overflows
from bitwitness.nonfinite.kinds import ATTENTION, CASTS, SOFTMAX
from bitwitness.nonfinite.origin import Extent, Origin


class Making(StrEnum):
    """What happened."""

    OVERFLOW = "overflow"
    OVERFLOW_INSIDE = "overflow_inside"
    BY_ZERO = "division_by_zero"
    ZERO_BY_ZERO = "zero_by_zero"
    INF_BY_INF = "inf_by_inf"
    ZERO_TIMES_INF = "zero_times_inf"
    INF_IN_PRODUCT = "infinity_in_product"
    INF_MINUS_INF = "inf_minus_inf"
    LOG_OF_ZERO = "log_of_zero"
    LOG_OF_NEGATIVE = "log_of_negative"
    ROOT_OF_NEGATIVE = "root_of_negative"
    ZERO_TO_NEGATIVE_POWER = "zero_to_negative_power"
    NEGATIVE_TO_FRACTION = "negative_to_fraction"
    OUTSIDE_DOMAIN = "outside_domain"
    ALL_MASKED = "all_masked"
    NOTHING_TO_AVERAGE = "nothing_to_average"
    SINGLE_VALUE = "single_value"
    NO_ALIGNMENT = "no_alignment"
    NUMBER = "number"
    SLOPE = "slope"
    UNKNOWN = "unknown"


SLOPES = {
    "sqrt": "at zero", "var": "of a single value",
    "var_mean": "of a single value", "pow": "at zero for an exponent below one",
    "float_power": "at zero for an exponent below one",
    "log": "at zero", "log2": "at zero", "log10": "at zero", "log1p": "at minus one", "xlogy": "at zero",
    "div": "where it divides by zero", "reciprocal": "at zero", "rsqrt": "at zero",
    "acos": "at one and minus one", "asin": "at one and minus one", "acosh": "at one", "atanh": "at one and minus one",
    "erfinv": "at one and minus one", "logit": "at zero and one",
    "linalg_inv_ex": "of a singular matrix", "_linalg_svd": "where singular values are equal or zero",
    "_linalg_eigh": "where eigenvalues are equal", "_linalg_det": "of a singular matrix",
}  # fmt: skip
"""Where the derivative of a forward operator is infinite or undefined."""

_DIVISIONS = ("div", "true_divide", "floor_divide", "remainder", "fmod", "addcdiv")
_LOGS = {"log": 0.0, "log2": 0.0, "log10": 0.0, "log1p": -1.0}
_DOMAINS = {
    "acos": (-1.0, 1.0), "asin": (-1.0, 1.0), "atanh": (-1.0, 1.0), "erfinv": (-1.0, 1.0), "acosh": (1.0, math.inf),
    "logit": (0.0, 1.0), "lgamma": (0.0, math.inf), "digamma": (0.0, math.inf), "special_ndtri": (0.0, 1.0),
}  # fmt: skip
_SUMS = ("add", "sub", "rsub", "sum", "mean", "cumsum", "lerp", "index_add", "scatter_add")
_PRODUCTS = ("mul", "mm", "bmm", "mv", "dot", "addmm", "baddbmm", "prod", "cumprod", "convolution", "linear", "addcmul")
_VARIANCES = ("var", "std", "var_mean", "std_mean", "native_batch_norm", "cudnn_batch_norm", "_batch_norm_with_update")
_AVERAGES = ("mean", "nll_loss_forward", "nll_loss2d_forward", "nll_loss_backward", "nll_loss2d_backward")

_WITHOUT_POLES = frozenset({
    *_SUMS, *_PRODUCTS, "div", "pow", "exp", "expm1", "exp2", "cosh", "sinh", "square", "linalg_vector_norm", "norm", "hypot",
    "cumprod", "mse_loss", "smooth_l1_loss", "huber_loss", "gelu", "silu", "softplus", "elu", *CASTS,
})  # fmt: skip
_ORDERS = (
    "linalg_vector_norm",
    "norm",
    "_cdist_forward",
    "cdist",
    "clamp",
    "clamp_min",
    "clamp_max",
    "nan_to_num",
    "hardtanh",
)
"""They take infinity as an order or as a bound."""


def making_of(origin: Origin) -> Making:
    """Tell how an origin of kind ``operator`` came about."""
    op = plain(origin.site.op)
    if op not in _ORDERS and any(isinstance(n, float) and not math.isfinite(n) for n in origin.arguments):
        return Making.NUMBER
    too_large = overflows(origin.exact)
    if too_large and origin.exact is not None and origin.exact.size:
        return Making.OVERFLOW if _beyond(origin) else Making.OVERFLOW_INSIDE
    known = _RULES[op](origin) if op in _RULES else None
    if origin.site.phase == "backward" and plain(origin.forward_op) in SLOPES and not _given_infinity(origin):
        return Making.SLOPE if too_large is not None or known is not None else Making.UNKNOWN
    if known is not None:
        return known
    finite = not _given_infinity(origin)
    if finite and origin.flags.inf and not origin.flags.nan and (too_large is None or op in _WITHOUT_POLES):
        return Making.OVERFLOW  # of float64, too, or it could not be tried
    if finite and op in CASTS and any(shows_no_infinity(out.dtype) for out in origin.outputs):
        return Making.OVERFLOW
    return Making.UNKNOWN


def plain(op: str) -> str:
    """Return an operator's name without the marks of its in-place and many-tensor forms."""
    return op.removeprefix("_foreach_").rstrip("_")


def _beyond(origin: Origin) -> bool:
    """Tell whether the result itself is beyond its dtype, rather than something on the way to it."""
    dtypes = [out.dtype for out in origin.outputs if out.bad]
    return origin.exact is None or not dtypes or any(origin.exact.size > largest(dtype) for dtype in dtypes)


# -- what a call was given -------------------------------------------------------------------------------------------


def _argument(origin: Origin, position: int) -> Extent | float | None:
    return origin.arguments[position] if position < len(origin.arguments) else None


def _holds_zero(value: Extent | float | None) -> bool:
    return value.stats.zeros > 0 if isinstance(value, Extent) else value == 0


def _ends(value: Extent | float | None) -> tuple[float, float]:
    """Return the smallest and the largest finite value, NaN where there is none."""
    if isinstance(value, Extent):
        return value.stats.min, value.stats.max
    return (math.nan, math.nan) if value is None else (value, value)


def _given_infinity(origin: Origin) -> bool:
    return any(extent.stats.pos_inf + extent.stats.neg_inf for extent in origin.inputs)


# -- the operators' own rules ----------------------------------------------------------------------------------------


def _of_division(origin: Origin, *, divisor: int) -> Making | None:
    if _holds_zero(_argument(origin, divisor)):
        return Making.BY_ZERO if origin.flags.inf else Making.ZERO_BY_ZERO
    return Making.INF_BY_INF if origin.flags.nan and _given_infinity(origin) else None


def _of_rsqrt(origin: Origin) -> Making | None:
    return Making.ROOT_OF_NEGATIVE if origin.flags.nan else _of_division(origin, divisor=0)


def _of_logarithm(origin: Origin, *, position: int, pole: float) -> Making | None:
    low, high = _ends(_argument(origin, position))
    if origin.flags.nan and low < pole:
        return Making.LOG_OF_NEGATIVE
    return Making.LOG_OF_ZERO if origin.flags.neg and low <= pole <= high else None


def _of_root(origin: Origin) -> Making | None:
    return Making.ROOT_OF_NEGATIVE if origin.flags.nan and _ends(_argument(origin, 0))[0] < 0 else None


def _of_power(origin: Origin) -> Making | None:
    base, exponent = _argument(origin, 0), _argument(origin, 1)
    if origin.flags.nan and _ends(base)[0] < 0:
        return Making.NEGATIVE_TO_FRACTION
    return Making.ZERO_TO_NEGATIVE_POWER if _holds_zero(base) and _ends(exponent)[0] < 0 else None


def _of_domain(origin: Origin, *, low: float, high: float) -> Making | None:
    least, most = _ends(_argument(origin, 0))
    touched = least <= low if origin.flags.inf else least < low
    touched |= most >= high if origin.flags.inf else most > high
    return Making.OUTSIDE_DOMAIN if touched else None


def _of_choice(origin: Origin) -> Making | None:
    """Tell of a softmax, or of attention, which a mask of -inf left nothing to choose from."""
    masked = any(extent.stats.neg_inf for extent in origin.inputs)
    if any(extent.stats.pos_inf for extent in origin.inputs):
        return Making.INF_MINUS_INF
    return Making.ALL_MASKED if masked else None


def _of_sum(origin: Origin) -> Making | None:
    return Making.INF_MINUS_INF if origin.flags.nan and _given_infinity(origin) else None


def _of_product(origin: Origin) -> Making | None:
    if not origin.flags.nan or not _given_infinity(origin):
        return None
    return Making.ZERO_TIMES_INF if plain(origin.site.op) == "mul" else Making.INF_IN_PRODUCT


def _of_alignment(origin: Origin) -> Making | None:
    return Making.NO_ALIGNMENT if origin.flags.inf and not _given_infinity(origin) else None


def _of_variance(origin: Origin) -> Making | None:
    return Making.SINGLE_VALUE if origin.flags.nan and not _given_infinity(origin) else None


def _of_average(origin: Origin) -> Making | None:
    # The mean of many numbers may also be NaN because their partial sums overflow with both signs.
    labels = origin.site.op.startswith("nll_loss")
    if origin.flags.nan and not _given_infinity(origin) and (labels or not origin.inputs):
        return Making.NOTHING_TO_AVERAGE
    return _of_sum(origin)


_RULES: dict[str, Callable[[Origin], Making | None]] = {
    **dict.fromkeys(_PRODUCTS, _of_product),
    **dict.fromkeys(_SUMS, _of_sum),
    **dict.fromkeys(_DIVISIONS, partial(_of_division, divisor=1)),
    **{op: partial(_of_logarithm, position=0, pole=pole) for op, pole in _LOGS.items()},
    **{op: partial(_of_domain, low=low, high=high) for op, (low, high) in _DOMAINS.items()},
    **dict.fromkeys(SOFTMAX, _of_choice),
    **dict.fromkeys(ATTENTION, _of_choice),
    **dict.fromkeys(_VARIANCES, _of_variance),
    **dict.fromkeys(_AVERAGES, _of_average),
    "_ctc_loss": _of_alignment,
    "_cudnn_ctc_loss": _of_alignment,
    "_weight_norm_interface": partial(_of_division, divisor=0),
    "reciprocal": partial(_of_division, divisor=0),
    "rsqrt": _of_rsqrt,
    "addcdiv": partial(_of_division, divisor=2),
    "xlogy": partial(_of_logarithm, position=1, pole=0.0),
    "special_xlog1py": partial(_of_logarithm, position=1, pole=-1.0),
    "sqrt": _of_root,
    "pow": _of_power,
    "float_power": _of_power,
}
