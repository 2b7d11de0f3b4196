"""One tensor of two checkpoints: the same bits, the same values, or how far apart and where."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bitwitness.comparison.measuring.tensors import same_bits, tensor_metrics
from bitwitness.errors import UsageError
from bitwitness.numerics import ErrorMetrics
from bitwitness.store.checkpoints import Checkpoint

_BLOCK = 1 << 20  # elements that are compared at a time, which bounds the memory that takes
_METRICS = (
    "cosine",
    "max_abs",
    "max_rel",
    "mean_rel",
    "rmse",
    "l2_relative",
    "ulp_max",
    "nan_mismatch",
    "inf_mismatch",
)

EQUAL, SAME_VALUES, DIFFERS, SHAPES, UNREADABLE = "equal", "same values", "differs", "shapes differ", "unreadable"

Shape = tuple[int, ...]


@dataclass(slots=True)
class Parameter:
    """What was found about one name.

    Attributes
    ----------
    name, name_a, name_b
        What both sides call it, and what each calls it before prefixes were stripped.
    result
        ``equal`` (bits), ``same values`` (another dtype, signs of zeros, kinds of NaN), ``differs``, ``shapes differ``,
        ``unreadable``.
    metrics, where
        Of what differs: how far A is from B, and the index of the largest error. A NaN or an Inf on one side is larger than
        any number.
    why
        What could not be measured, and why.

    """

    name: str
    name_a: str
    name_b: str
    result: str
    dtype_a: torch.dtype
    dtype_b: torch.dtype
    shape_a: Shape
    shape_b: Shape
    nan_a: int = 0
    nan_b: int = 0
    inf_a: int = 0
    inf_b: int = 0
    metrics: ErrorMetrics | None = None
    where: Shape | None = None
    why: str | None = None

    @property
    def weight(self) -> tuple[int, float, float]:
        """By what it is ranked: values that are not finite on one side only, relative L2 error, largest error."""
        if self.metrics is None:
            return (0, math.inf, math.inf) if self.result == DIFFERS else (-1, 0.0, 0.0)
        relative = self.metrics.l2_relative
        mismatched = self.metrics.nan_mismatch + self.metrics.inf_mismatch
        return mismatched, math.inf if math.isnan(relative) else relative, self.metrics.max_abs

    def to_dict(self) -> dict[str, Any]:
        """Return it as a row of a table."""
        row: dict[str, Any] = {
            "name": self.name,
            "name_a": self.name_a,
            "name_b": self.name_b,
            "result": self.result,
            "dtype_a": str(self.dtype_a).removeprefix("torch."),
            "dtype_b": str(self.dtype_b).removeprefix("torch."),
            "shape_a": list(self.shape_a),
            "shape_b": list(self.shape_b),
            **{name: getattr(self, name) for name in ("nan_a", "nan_b", "inf_a", "inf_b")},
        }
        if self.metrics is not None:
            row |= {name: getattr(self.metrics, name) for name in _METRICS}
        if self.where is not None:
            row["largest_error_at"] = list(self.where)
        return row | ({"why": self.why} if self.why else {})


@torch.no_grad()
def compare_pair(a: Checkpoint, b: Checkpoint, name: str, name_a: str, name_b: str) -> Parameter:
    """Load a tensor of both sides and compare; what cannot be read is a result, too."""
    (dtype_a, shape_a), (dtype_b, shape_b) = a.describe(name_a), b.describe(name_b)
    found = Parameter(name, name_a, name_b, EQUAL, dtype_a, dtype_b, shape_a, shape_b)
    if shape_a != shape_b:
        found.result = SHAPES
        return found
    try:
        x, y = a.tensor(name_a), b.tensor(name_b)
    except UsageError as error:
        found.result, found.why = UNREADABLE, str(error)
        return found
    try:
        _measure(found, x, y)
    except RuntimeError as error:  # torch computes nothing with some dtypes, such as packed 4-bit numbers
        found.result = EQUAL if same_bits(x, y) else DIFFERS
        found.why = f"only its bits were compared: {(str(error).splitlines() or ['RuntimeError'])[0][:200]}"
    return found


def _measure(found: Parameter, x: Tensor, y: Tensor) -> None:
    found.nan_a, found.inf_a = _not_finite(x)
    if same_bits(x, y):
        found.nan_b, found.inf_b = found.nan_a, found.inf_a
        return
    found.nan_b, found.inf_b = _not_finite(y)
    found.result = DIFFERS
    found.metrics = tensor_metrics(x, y)
    if _same_values(found):
        found.result = SAME_VALUES
        return
    if found.metrics.max_abs == 0 and not found.dtype_a.is_floating_point and not found.dtype_a.is_complex:
        found.why = "these whole numbers differ by less than float64 can tell"
    found.where = _worst(x, y)


def _same_values(found: Parameter) -> bool:
    """Return whether no value differs; whole numbers of one dtype and other bits do, however large they are."""
    metrics = found.metrics
    if metrics is None or metrics.max_abs > 0 or metrics.nan_mismatch or metrics.inf_mismatch:
        return False
    return found.dtype_a != found.dtype_b or found.dtype_a.is_floating_point or found.dtype_a.is_complex


def _not_finite(x: Tensor) -> tuple[int, int]:
    """Count NaNs and infinities; of a complex number, either part."""
    if not x.dtype.is_floating_point and not x.dtype.is_complex:
        return 0, 0
    nan = inf = 0
    for block in x.flatten().split(_BLOCK):
        numbers = block.to(torch.float32) if block.dtype.itemsize == 1 else block
        nan += int(numbers.isnan().sum())
        inf += int(numbers.isinf().sum())
    return nan, inf


def _worst(x: Tensor, y: Tensor) -> Shape:
    """Return the index of the largest error; a NaN or Inf on one side alone is the largest."""
    top, at, begin = -1.0, 0, 0
    for a, b in zip(x.flatten().split(_BLOCK), y.flatten().split(_BLOCK), strict=True):
        error = _error(a, b)
        largest = int(error.argmax())
        if float(error[largest]) > top:
            top, at = float(error[largest]), begin + largest
        begin += len(a)
    return tuple(int(i) for i in torch.unravel_index(torch.tensor(at), x.shape))


def _error(a: Tensor, b: Tensor) -> Tensor:
    if not a.dtype.is_floating_point and a.dtype == b.dtype and not a.dtype.is_complex:
        differs = (a != b).to(torch.float64)  # float64 may round both to the same number
        return differs + (a.to(torch.float64) - b.to(torch.float64)).abs()
    wide = torch.complex128 if a.dtype.is_complex or b.dtype.is_complex else torch.float64
    a, b = a.to(wide), b.to(wide)
    error = (a - b).abs()
    same = (a == b) | (a.isnan() & b.isnan())
    return torch.where(same, 0.0, error.nan_to_num(nan=math.inf, posinf=math.inf))
