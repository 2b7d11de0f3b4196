"""The figures of a result beside the oracle's: its worst element, its distance in units in the last place, and by L2."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from bitwitness.trial.result import FAIL, OutputResult


def parts(tensor: Tensor) -> Tensor:
    """Return a detached floating tensor in float64; a complex one as its real and imaginary parts, ``[..., 2]``."""
    tensor = tensor.detach()
    if tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    return (torch.view_as_real(tensor.resolve_conj().contiguous()) if tensor.is_complex() else tensor).double()


def spacing(value: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the distance between numbers of ``dtype`` next to each element: its unit in the last place; float64.

    Below the smallest normal number they are as far apart as there.
    """
    info = torch.finfo(dtype)
    lowest = round(math.log2(info.smallest_normal))
    finite = value.abs().nan_to_num(nan=0.0, posinf=info.max).clamp_max(info.max)
    exponent = (torch.frexp(finite)[1] - 1).masked_fill(finite == 0, lowest).clamp_min(lowest)  # of 0 it says 0
    return torch.full_like(finite, info.eps, dtype=torch.float64).ldexp(exponent)


def figures(
    head: Mapping[str, Any],
    verdict: str,
    reason: str,
    value: Tensor,
    truth: Tensor,
    allowed: Tensor,
    dtype: torch.dtype,
    *,
    within: Tensor | None = None,
) -> OutputResult:
    """Return an output's result; ``value``, ``truth``, ``allowed``: float64 of one shape; ``within``: what is no error."""
    if not value.numel():
        return OutputResult(**head, verdict=verdict, reason=reason)
    nearest = truth.to(dtype).double()
    same = (value == nearest) | (value.isnan() & nearest.isnan()) | (value == truth)
    error = (value - truth).abs().masked_fill(same & ~truth.isfinite(), 0.0).nan_to_num(nan=math.inf, posinf=math.inf)
    ratio = (error / allowed.clamp_min(torch.finfo(torch.float64).tiny)).masked_fill(same, 0.0)
    if within is not None:
        ratio = torch.where(within, ratio.clamp_max(1.0), ratio.clamp_min(1.0 + 2.0**-20))
    at = int(ratio.reshape(-1).argmax())
    index = tuple(int(i) for i in torch.unravel_index(torch.tensor(at), value.shape)) if value.dim() else ()
    steps = (
        ((value - nearest).abs() / spacing(nearest, dtype))
        .masked_fill(same, 0.0)
        .nan_to_num(nan=math.inf, posinf=math.inf)
    )
    finite = value.isfinite() & truth.isfinite()
    distance = float((value - truth)[finite].norm())
    size = float(truth[finite].norm())
    got, due, may = (float(t.reshape(-1)[at]) for t in (value, truth, allowed))
    if verdict == FAIL and not reason:
        reason = _said(value, ratio, index, got, due, may)
    return OutputResult(
        **head,
        verdict=verdict,
        reason=reason,
        ratio=float(ratio.reshape(-1)[at]),
        at=index,
        value=got,
        expected=due,
        allowed=may,
        ulp_max=float(steps.max()),
        ulp_histogram=histogram(steps),
        euclidean=distance,
        relative=distance / size if size else (math.inf if distance else 0.0),
    )


def _said(value: Tensor, ratio: Tensor, index: tuple[int, ...], got: float, due: float, may: float) -> str:
    wrong = int((ratio > 1).sum())
    where = f"at {list(index)} it is {got:.9g}; expected {due:.9g}"
    room = f" ± {may:.2g}" if math.isfinite(due) else ""
    return f"{wrong} of {value.numel()} elements are outside: {where}{room}"


def histogram(steps: Tensor) -> dict[str, int]:
    """Return how many elements are 0, up to 1, 2, 4, … units in the last place away, by the upper end of each bucket."""
    flat = steps.reshape(-1)
    found = {"0": int((flat == 0).sum())}
    infinite = int(flat.isinf().sum())
    some = flat[(flat > 0) & flat.isfinite()]
    if some.numel():
        bucket = some.log2().ceil().clamp_min(0).long()
        for power, count in enumerate(torch.bincount(bucket).tolist()):
            if count:
                found[str(2**power)] = count
    if infinite:
        found["inf"] = infinite
    return {name: count for name, count in found.items() if count}
