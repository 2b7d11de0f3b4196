"""One recorded operator again, in float64 from its recorded inputs: what of its error was made here, and in which run.

The recording's word is not taken for what is run: only functional operators of torch's own that compute from the recorded
tensors, never one that reads files, draws random numbers or changes its arguments.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bitwitness.comparison.allowance import arguments
from bitwitness.comparison.names import CONTRACTIONS, canonical
from bitwitness.numerics import unit_roundoff

_BARRED = ("from_file", "empty", "rand", "normal", "bernoulli", "_to_copy", "copy", "resize", "set_", "repeat", "full")
_LARGEST = 1 << 28  # elements of an input
_TERMS = 8.0
_GENERIC = 64.0


@dataclass(frozen=True, slots=True)
class Error:
    """How far a recorded result is from float64's: at its worst element, against what rounding allows there.

    ``ratio``: error over allowed; ``value``, ``expected``: the recorded number and float64's; ``at``: its flat index.
    """

    ratio: float
    value: float
    expected: float
    at: int


def operator_of(text: str) -> Any | None:
    """Return the operator that an args column names, if it may be run."""
    name = str(arguments(text).get("f", ""))
    parts = name.split(".")
    if len(parts) != 3 or parts[0] != "aten" or not all(part.isidentifier() for part in parts):
        return None
    if any(parts[1].lstrip("_").startswith(barred.lstrip("_")) for barred in _BARRED):
        return None
    try:
        func = getattr(getattr(torch.ops.aten, parts[1]), parts[2])
        schema = func._schema
    except (AttributeError, RuntimeError):
        return None
    if schema.is_mutable or torch.Tag.nondeterministic_seeded in func.tags:
        return None
    if any(
        str(argument.type) in ("str", "Optional[str]") and argument.name == "filename" for argument in schema.arguments
    ):
        return None
    return func


@torch.no_grad()
def recompute(text: str, inputs: Sequence[Tensor], result: Tensor, out: int) -> Error | None:
    """Compare a recorded result with float64's.

    Parameters
    ----------
    text
        The args column.
    inputs
        The recorded inputs in the order of their slots.
    result
        The recorded result number ``out``.

    Returns
    -------
    Error or None
        None where the operator cannot be run again.

    """
    func = operator_of(text)
    if func is None or not inputs or any(t.numel() > _LARGEST for t in inputs) or not result.dtype.is_floating_point:
        return None
    try:
        exact = _run(func, text, [_double(t) for t in inputs], out)
        bound = _bound(func, text, inputs, exact, result, out)
    except Exception:  # whatever torch raises for arguments that do not fit: a recording may be damaged
        return None
    if exact is None or exact.shape != result.shape:
        return None
    return _worst(result.double(), exact, bound)


def _double(t: Tensor) -> Tensor:
    return t.double() if t.dtype.is_floating_point else t


def _run(func: Any, text: str, inputs: list[Tensor], out: int) -> Tensor:
    call = arguments(text)
    args = [_filled(value, inputs) for value in call.get("a", [])]
    kwargs = {name: _filled(value, inputs) for name, value in call.get("k", {}).items()}
    found = func(*args, **kwargs)
    results = [found] if isinstance(found, Tensor) else [t for t in found if isinstance(t, Tensor)]
    return results[out]


def _filled(value: Any, inputs: list[Tensor]) -> Any:
    if isinstance(value, list):
        return [_filled(item, inputs) for item in value]
    if not isinstance(value, dict):
        return value
    if "$" in value:
        return inputs[int(value["$"])]
    if "dtype" in value:
        dtype = getattr(torch, str(value["dtype"]))
        return torch.float64 if dtype.is_floating_point else dtype
    if "float" in value:
        return float(value["float"])
    if "device" in value:
        return torch.device("cpu")
    raise ValueError(f"an argument that cannot be given again: {value}")


def _bound(func: Any, text: str, inputs: Sequence[Tensor], exact: Tensor, result: Tensor, out: int) -> Tensor:
    """Return what rounding allows for each element of the result.

    For a contraction the same product of magnitudes (Higham, "Accuracy and Stability of Numerical Algorithms", 3.5), with
    the square root of the number of terms; else a share of the largest magnitude.
    """
    own = unit_roundoff(result.dtype)
    accumulated = min(own, 2.0**-24) if result.dtype != torch.float64 else own
    size = exact.abs()
    top = float(size.max()) if size.numel() else 0.0
    if canonical(func.overloadpacket.__name__) in (*CONTRACTIONS, "conv"):
        magnitudes = _run(func, text, [_double(t).abs() if t.dtype.is_floating_point else t for t in inputs], out).abs()
        terms = max(max(t.shape[-1] if t.dim() else 1, t[0].numel() if t.dim() > 2 else 1) for t in inputs)
        return 2 * own * size + _TERMS * accumulated * math.sqrt(terms) * magnitudes
    terms = max((t.shape[-1] for t in inputs if t.dim()), default=1)
    sums = max(inputs[0].numel() / max(result.numel(), 1), 1.0)
    largest = max(
        (float(t.double().abs().max()) for t in inputs[:1] if t.numel() and t.dtype.is_floating_point), default=0.0
    )
    if "backward" in func.overloadpacket.__name__ and sums > 1.5:
        accumulated = own  # torch's layer norm on a CPU adds up its weight's gradient in the dtype itself
        largest *= max((float(t.double().abs().max()) for t in inputs[1:2] if t.numel()), default=1.0)
    reduced = accumulated * sums * largest if sums > 1.5 else 0.0
    return 2 * own * size + _GENERIC * accumulated * math.sqrt(max(terms, sums)) * top + _TERMS * reduced


def _worst(value: Tensor, exact: Tensor, bound: Tensor) -> Error:
    error = (value - exact).abs()
    same = (value == exact) | (value.isnan() & exact.isnan())  # infinities, too
    ratio = (error / bound.clamp_min(torch.finfo(torch.float64).tiny)).nan_to_num_(nan=math.inf, posinf=math.inf)
    ratio[same] = 0.0
    if not ratio.numel():
        return Error(0.0, 0.0, 0.0, 0)
    at = int(ratio.argmax())
    return Error(float(ratio.flatten()[at]), float(value.flatten()[at]), float(exact.flatten()[at]), at)
