"""The standard: is a result within what its dtype and formula allow, element by element and as a whole.

An element may be off by half a unit in the last place of its dtype (the result's own rounding, which nothing avoids), and by
`ALLOWANCE` times what rounding moved it by in the oracle's noisy runs (`bitwitness.oracle.rounding`). Both are relative to the
data: numbers of size 1e-6 are judged as strictly as numbers of size 1. What a correctly rounding kernel returns always passes.

Three questions follow one another. Is it within what a kernel leaves that computes in float32, or wider, and rounds once
(*pass*)? For half types: within what one leaves that rounds each intermediate result to the dtype (*warn*)? If not: *fail*.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from bitwitness.oracle.eligible import have_truth
from bitwitness.trial.call import Results, is_inexact
from bitwitness.trial.figures import figures, parts, spacing
from bitwitness.trial.oracle import Oracle
from bitwitness.trial.residuals import residual_of
from bitwitness.trial.result import FAIL, PASS, WARN, OutputResult

ALLOWANCE = 8.0
"""Times the spread that an element may be off by: uniform roundings sum to nearly normal errors, of which 8 sigma never happen;
what a kernel's own algorithm adds is of the same size."""
_ROOM, _HALF_ROOM = 2.0**-9, 2.0**-5
"""Of half a unit in the last place: for what the oracle itself rounds, and for half types what float32 leaves on the way."""
_BEYOND, _FEW_NUMBERS = 2.0, 30.0
"""Times what bounded noise reaches that it may reach; and the count of numbers below which what was seen says little."""
_LEANING, _LEANING_NUMBERS = 0.3, 64
"""Units in the last place that results are off by in the mean, over so many numbers, where a store cuts or raises."""
_PRIOR = 4.0
"""Weight, in draws, of the spread of an element's neighbours in size: a few draws may all be small by chance."""
FEW, MANY = 4, 16
"""Noisy runs of which a spread is made: few, and more before anything is called wrong."""
_TIERS = ((False, FEW), (False, MANY))
_HALF_TIERS = ((False, FEW), (True, FEW), (False, MANY), (True, MANY))
_ROUNDED_ON_THE_WAY = (
    "right only if intermediate results are rounded to {dtype}: the kernel does not compute wider than that"
)


def judge_all(results: Results, oracle: Oracle) -> tuple[tuple[OutputResult, ...], str]:
    """Judge every output and gradient of a run; with the reason why none of them can be, if there is one.

    Raises whatever the function raises in float64 on the CPU.
    """
    exact = oracle.exact
    if not have_truth(oracle.mode.operators):
        return (
            (),
            "float64 cannot say what its result should be: it depends on the dtype's own numbers, or on fresh memory",
        )
    if oracle.mode.draws:
        return (), "it draws random numbers: there is no one right result"
    if len(exact.outputs) != len(results.outputs):
        wrong = f"{len(results.outputs)} tensors were returned; the oracle has {len(exact.outputs)}"
        return (OutputResult("out0", FAIL, wrong),), ""
    found = [judge(f"out{i}", t, oracle, i) for i, t in enumerate(results.outputs)]
    for i, gradient in enumerate(results.gradients):
        if gradient is not None:
            found.append(judge(f"grad{i}", gradient, oracle, i, gradient=True))
        elif i < len(exact.gradients) and (due := exact.gradients[i]) is not None and bool((due != 0).any()):
            found.append(OutputResult(f"grad{i}", FAIL, "there is no gradient; the oracle has one that is not zero"))
    if oracle.mode.is_unique or all(one.verdict != FAIL for one in found):
        return tuple(found), ""
    return _of_several(found, results, oracle)


def _of_several(found: list[OutputResult], results: Results, oracle: Oracle) -> tuple[tuple[OutputResult, ...], str]:
    """Judge results of which more than one is right, and which are not the oracle's."""
    names = [f.overloadpacket.__name__ for f in oracle.mode.operators]
    wrong = residual_of(names, oracle.given, results.outputs)
    if wrong:
        return tuple(replace(one, verdict=FAIL, reason=wrong) for one in found if one.slot == "out0"), ""
    if wrong is None or any(one.verdict == FAIL and one.slot.startswith("grad") for one in found):
        return (), "its result is right in more than one form (signs, order), and not the one that float64 gives"
    return tuple(replace(one, verdict=PASS, reason="") for one in found), ""


def judge(slot: str, actual: Tensor, oracle: Oracle, place: int, *, gradient: bool = False) -> OutputResult:
    """Judge one output, or one gradient, of a call.

    Parameters
    ----------
    slot
        Its name.
    actual
        As the device returned it.
    oracle
        The call's truth; noisy runs are made only where the result is not correctly rounded everywhere.
    place
        Which of the call's outputs, or gradients, it is.

    """

    def of(results: Results) -> Tensor | None:
        found = results.gradients if gradient else results.outputs
        return found[place] if place < len(found) else None

    exact = of(oracle.exact)
    head: dict[str, Any] = {
        "slot": slot,
        "dtype": str(actual.dtype).removeprefix("torch."),
        "shape": tuple(actual.shape),
    }
    if exact is None:
        return OutputResult(**head, verdict=FAIL, reason="the oracle has no such result")
    if actual.shape != exact.shape:
        reason = f"its shape is {list(actual.shape)}; the oracle's is {list(exact.shape)}"
        return OutputResult(**head, verdict=FAIL, reason=reason)
    actual = actual.detach().cpu()
    if not is_inexact(actual):
        return _exactly(
            head, actual, exact, [of(r) for r in oracle.noisy(stepwise=False, draws=FEW)] if actual.numel() else []
        )
    value, truth = parts(actual), parts(exact)
    dtype = actual.dtype.to_real() if actual.is_complex() else actual.dtype
    right = _correctly_rounded(value, truth, dtype)
    if bool(right.all()):
        return figures(head, PASS, "", value, truth, spacing(truth, dtype) / 2, dtype)
    verdict, reason, allowed = FAIL, "", spacing(truth, dtype) / 2
    tiers = _HALF_TIERS if dtype in (torch.float16, torch.bfloat16) else _TIERS
    for stepwise, draws in tiers:
        noisy = [parts(t) for r in oracle.noisy(stepwise=stepwise, draws=draws) if (t := of(r)) is not None]
        allowed = allowance(truth, noisy, dtype)
        within = right | ((value - truth).abs() <= allowed) | _may_be_infinite(value, truth, noisy, allowed, dtype)
        if bool(within.all()):
            if leaning := lean(value, truth, dtype):
                verdict, reason = FAIL, leaning
                break
            verdict = WARN if stepwise else PASS
            reason = _ROUNDED_ON_THE_WAY.format(dtype=head["dtype"]) if stepwise else ""
            break
    return figures(head, verdict, reason, value, truth, allowed, dtype, within=within)


def allowance(truth: Tensor, noisy: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """Return by how much each element may be off; float64, all of one shape.

    For half types nearly all of the noise is that of known roundings: a few of them never sum to what is unusual for many, and
    how far they go together is seen in the noise itself.
    """
    finite = truth.isfinite()
    size = truth.masked_fill(~finite, 0.0)
    deviations = [torch.where(finite & n.isfinite(), n - size, 0.0) for n in noisy]
    spread = _spread(deviations, size)
    half = dtype in (torch.float16, torch.bfloat16)
    times = min(ALLOWANCE, _reach(deviations, spread)) if half else ALLOWANCE
    return spacing(size, dtype) / 2 * (1 + (_HALF_ROOM if half else _ROOM)) + times * spread


def _reach(deviations: Sequence[Tensor], spread: Tensor) -> float:
    """Return how many standard deviations the noise goes at the most; more than that where there are few numbers to tell."""
    count = len(deviations) * spread.numel()
    furthest = max(
        (float((d.abs() / spread.clamp_min(1e-300)).max()) for d in deviations if d.numel()), default=ALLOWANCE
    )
    return _BEYOND * furthest * (1 + _FEW_NUMBERS / max(count, 1))


def lean(value: Tensor, truth: Tensor, dtype: torch.dtype) -> str:
    """Return what is to be told where every result is rounded towards zero, or away from it; rounding to nearest does both.

    A store that cuts or raises leaves errors of one sign, up to one unit in the last place, half a unit in the mean. What all
    elements share (a norm that they are divided by) moves them together, and leaves errors of both signs, or larger ones.
    """
    among = value.isfinite() & truth.isfinite() & (truth != 0) & (value != truth)
    error = ((value - truth) * truth.sign() / spacing(truth, dtype))[among]
    if error.numel() < _LEANING_NUMBERS or float(error.abs().max()) >= 1.0:
        return ""
    mean, one_way = float(error.mean()), bool((error > 0).all() or (error < 0).all())
    if not one_way or abs(mean) < _LEANING:
        return ""
    way = "away from" if mean > 0 else "towards"
    return f"every result is rounded {way} zero, by {abs(mean):.2f} units in the last place in the mean, and not to nearest"


def _spread(deviations: Sequence[Tensor], size: Tensor) -> Tensor:
    """Return the standard deviation of each element over the draws, drawn towards that of elements of its size."""
    draws = len(deviations)
    variance = torch.stack([d * d for d in deviations]).mean(0) if draws else torch.zeros_like(size)
    if not size.numel():
        return variance
    exponent = torch.frexp(size.abs())[1].reshape(-1).long()
    exponent = exponent - exponent.min()
    count = torch.bincount(exponent)
    usual = torch.bincount(exponent, weights=variance.reshape(-1)) / count.clamp_min(1)
    return ((draws * variance + _PRIOR * usual[exponent].reshape(size.shape)) / (draws + _PRIOR)).sqrt()


def _correctly_rounded(value: Tensor, truth: Tensor, dtype: torch.dtype) -> Tensor:
    """Return which elements are the number of ``dtype`` that is nearest to the truth; NaN is NaN."""
    nearest = truth.to(dtype).double()
    return (value == nearest) | (value.isnan() & nearest.isnan())


def _may_be_infinite(
    value: Tensor, truth: Tensor, noisy: Sequence[Tensor], allowed: Tensor, dtype: torch.dtype
) -> Tensor:
    """Return which elements are no number where rounding decides whether they are one: next to the largest of the dtype."""
    some = torch.zeros_like(truth, dtype=torch.bool)
    for one in noisy:
        some |= ~one.isfinite() & truth.isfinite()
    near = (truth.abs() + allowed >= torch.finfo(dtype).max) & truth.isfinite()
    infinite = (near & value.isinf() & (value.sign() == truth.sign())) | some
    return infinite | (
        truth.isinf() & (value.abs() >= torch.finfo(dtype).max * (1 - 2.0**-6)) & (value.sign() == truth.sign())
    )


def _exactly(head: Mapping[str, Any], actual: Tensor, exact: Tensor, noisy: Sequence[Tensor | None]) -> OutputResult:
    """Judge integers and bools: they are equal, but where rounding decides which one it is."""
    expected = exact.to(actual.dtype) if not is_inexact(exact) else exact.real.to(actual.dtype)
    wrong = actual != expected
    if not bool(wrong.any()):
        verdict = PASS
        return OutputResult(**head, verdict=verdict)
    undecided = torch.zeros_like(wrong)
    for one in noisy:
        if one is not None and one.shape == exact.shape:
            undecided |= one != exact
    wrong &= ~undecided
    if not bool(wrong.any()):
        return OutputResult(**head, verdict=PASS)
    at = int(wrong.reshape(-1).int().argmax())
    index = tuple(int(i) for i in torch.unravel_index(torch.tensor(at), actual.shape))
    got, due = actual.reshape(-1)[at].item(), expected.reshape(-1)[at].item()
    reason = f"{int(wrong.sum())} of {actual.numel()} elements differ: at {list(index)} it is {got}; expected {due}"
    return OutputResult(
        **head,
        verdict=FAIL,
        reason=reason,
        ratio=math.inf,
        at=index,
        value=float(got),
        expected=float(due),
    )
