"""Other people's standards of what a right result is, to be chosen by name in the place of the project's own."""

from __future__ import annotations

import difflib

import torch
from torch import Tensor

from bitwitness.errors import UsageError
from bitwitness.files.shown import quoted
from bitwitness.trial import standards_msprobe  # noqa: F401 - enters msprobe's
from bitwitness.trial.standard import STANDARDS, Given, Judged, bitwise, by_allowance, standard

__all__ = ["STANDARDS", "Judged", "judge_by"]


@torch.no_grad()
def judge_by(name: str, actual: Tensor, golden: Tensor, benchmark: Tensor | None = None, operator: str = "") -> Judged:
    """Judge a result by the standard of a name.

    Parameters
    ----------
    actual
        The device's result, in its dtype, on any device.
    golden
        The float64 oracle's, of the same shape.
    benchmark
        A reference device's or implementation's result of that shape; only ``benchmark`` reads it.
    operator
        E.g. ``nn.functional.layer_norm``; only ``benchmark`` reads it.

    Raises
    ------
    UsageError
        For a name that is not known, naming the nearest; for a benchmark that is missing or of another shape.

    """
    if name not in STANDARDS:
        near = difflib.get_close_matches(name, STANDARDS, n=1, cutoff=0.4)
        hint = f"did you mean {near[0]}?" if near else "take one of these:"
        raise UsageError(f"there is no standard {quoted(name)}; {hint} (known: {', '.join(sorted(STANDARDS))})")
    return STANDARDS[name](actual, golden, benchmark, operator)


standard("binary")(bitwise)

_ALLCLOSE = {  # rtol, atol: torch.testing.assert_close's own, of its documentation; it is exact for all other dtypes
    torch.float16: (1e-3, 1e-5),
    torch.bfloat16: (1.6e-2, 1e-5),
    torch.float32: (1.3e-6, 1e-5),
    torch.float64: (1e-7, 1e-7),
}


@standard("allclose")
def _allclose(given: Given) -> Judged:
    """Judge as ``torch.testing.assert_close(actual, golden in its dtype, equal_nan=True)`` does by default."""
    rtol, atol = _ALLCLOSE.get(given.dtype, (0.0, 0.0))
    expected = given.rounded
    error = (given.wide - expected).abs()
    return by_allowance(
        given, error, atol + rtol * expected.abs(), f"off by more than {atol:.3g} + {rtol:.3g} of their size"
    )


@standard("backendbench", exact_integers=False)
def _backendbench(given: Given) -> Judged:
    """Judge as BackendBench does: ``assert_close`` with rtol = atol = 1e-2 for every dtype, integers included.

    Source: github.com/meta-pytorch/BackendBench, BackendBench/eval.py (``_allclose``, commit 015f5cb). The relative part is
    relative to the result under test, which it hands over as the expected one.
    """
    error = (given.wide - given.rounded).abs()
    return by_allowance(given, error, 1e-2 + 1e-2 * given.wide.abs(), "off by more than 0.01 + 0.01 of their size")
