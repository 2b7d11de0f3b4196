"""What a standard of right results is: a function from a result and the golden one to a verdict, entered under a name.

Three things hold for all standards: a NaN where the golden result has a number (or the reverse) is a fail, an empty tensor is
not judged, and complex numbers are judged by their parts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from bitwitness.errors import UsageError
from bitwitness.trial.result import FAIL, NOT_JUDGED, PASS


@dataclass(frozen=True, slots=True)
class Judged:
    """What a standard says of one tensor; ``figures`` are those that it looked at, by name."""

    verdict: str
    reason: str = ""
    figures: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Given:
    """What a standard judges by: flat tensors on the CPU.

    Attributes
    ----------
    actual, golden
        The device's result in its dtype, and the oracle's: float64 for a floating dtype, else of any other.
    benchmark
        As ``actual``, of a reference device or implementation.
    operator
        Its name, for standards that are not the same for all.

    """

    actual: Tensor
    golden: Tensor
    benchmark: Tensor | None
    operator: str

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the device's result."""
        return self.actual.dtype

    @property
    def wide(self) -> Tensor:
        """The device's result as float64."""
        return self.actual.to(torch.float64)

    @property
    def rounded(self) -> Tensor:
        """The golden result rounded to the device's dtype, as float64."""
        return self.golden.to(self.dtype).to(torch.float64)


Standard = Callable[[Tensor, Tensor, Tensor | None, str], Judged]
"""Takes ``(actual, golden, benchmark, operator)``; raises `UsageError` where it lacks what it needs."""
STANDARDS: dict[str, Standard] = {}
"""By the name that a user gives."""


def standard(
    name: str, *, exact_integers: bool = True
) -> Callable[[Callable[[Given], Judged]], Callable[[Given], Judged]]:
    """Enter a function into `STANDARDS`, behind the checks that all of them share; raises ValueError for a name that is taken.

    Parameters
    ----------
    exact_integers
        Judge integers and bool by equality alone, and leave the function out of it.

    """

    def entered(rule: Callable[[Given], Judged]) -> Callable[[Given], Judged]:
        if name in STANDARDS:
            raise ValueError(f"there already is a standard {name!r}; give this one another name")

        def judge(actual: Tensor, golden: Tensor, benchmark: Tensor | None = None, operator: str = "") -> Judged:
            if actual.shape != golden.shape or actual.is_complex() != golden.is_complex():
                return Judged(
                    FAIL, f"{_kind(actual)} was returned where the golden result is {_kind(golden)}, of another form"
                )
            if actual.numel() == 0:
                return Judged(NOT_JUDGED, "the tensor is empty")
            given = Given(_flat(actual), _flat(golden), None if benchmark is None else _flat(benchmark), operator)
            if benchmark is not None and benchmark.shape != actual.shape:
                raise UsageError(
                    f"the benchmark is {_kind(benchmark)}, the result {_kind(actual)}; they have to be of one shape"
                )
            if not given.dtype.is_floating_point:
                return bitwise(given) if exact_integers else rule(given)
            mismatched = int(_nan_on_one_side(given).sum())
            if mismatched:
                said = f"{mismatched} of {actual.numel()} elements are NaN on one side only"
                return Judged(FAIL, said, {"nan_mismatch": float(mismatched)})
            return rule(given)

        STANDARDS[name] = judge
        return rule

    return entered


def _flat(tensor: Tensor) -> Tensor:
    tensor = tensor.detach().cpu()
    return (torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor).flatten()


def _kind(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def _nan_on_one_side(given: Given) -> Tensor:
    """Tell where; a golden number that has no place in the dtype, which then writes NaN for it, may be either."""
    actual = given.wide.isnan()
    return (actual & ~given.rounded.isnan()) | (~actual & given.golden.isnan())


def by_allowance(given: Given, error: Tensor, allowed: Tensor, said: str) -> Judged:
    """Judge each element by what it may be off; equal numbers, infinities and NaNs are not off at all.

    An element passes only where its error is known to be no larger: an error of NaN (Inf against Inf of the other sign) fails.
    """
    equal = (given.wide == given.rounded) | (given.wide.isnan() & given.rounded.isnan())
    finite = given.wide.isfinite() & given.rounded.isfinite()
    bad = ~(equal | (finite & (error <= allowed)))
    ratio = (
        torch.where(finite, error / allowed, torch.inf).masked_fill(equal, 0.0).nan_to_num(nan=0.0, posinf=torch.inf)
    )
    count, total = int(bad.sum()), bad.numel()
    figures = {"ratio": float(ratio.max()), "bad": float(count), "bad_share": count / total}
    return Judged(FAIL, f"{count} of {total} elements are {said}", figures) if count else Judged(PASS, "", figures)


def bitwise(given: Given) -> Judged:
    """Each element is the golden one rounded to the dtype, bit by bit; a NaN is as good as another, and -0 is not 0."""
    expected = given.golden.to(given.dtype)
    if given.dtype.is_floating_point:
        actual, wide = given.wide, expected.to(torch.float64)
        equal = (actual == wide) & (actual.signbit() == wide.signbit()) | (actual.isnan() & wide.isnan())
    else:
        equal = given.actual == expected
    count, total = int((~equal).sum()), equal.numel()
    figures = {"mismatches": float(count), "bad_share": count / total}
    if count:
        return Judged(FAIL, f"{count} of {total} elements are not the golden ones in every bit", figures)
    return Judged(PASS, "", figures)
