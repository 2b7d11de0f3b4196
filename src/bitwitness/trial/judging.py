"""The standard: is a result within what its dtype and formula allow, element by element and as a whole.

An element may be off by half a unit in the last place of its dtype (the result's own rounding, which nothing avoids), and by
`allowance.ALLOWANCE` times what rounding moved it by in the oracle's noisy runs (`bitwitness.oracle.rounding`). Both are
relative to the data: numbers of size 1e-6 are judged as strictly as numbers of size 1. What a correctly rounding kernel returns
always passes.

Questions follow one another. Is it within what a kernel leaves that computes in float32, or wider, and rounds once (*pass*)?
For half types: within what one leaves that rounds each intermediate result to the dtype (*warn*)? Where a reference is another
formula: within what rounding leaves of the function's own (`trial.ownformula`, *warn*)? If not: *fail*. And so where all of it
leans, or is off by a factor (`trial.sway`), though each number is within.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import torch
from torch import Tensor

from bitwitness.numerics import HALF, is_inexact, unit_roundoff
from bitwitness.oracle.eligible import have_truth
from bitwitness.oracle.float64 import widened
from bitwitness.oracle.opclass import is_elementwise, only_rounds_correctly
from bitwitness.trial.allowance import allowance, lean, least_allowance
from bitwitness.trial.asked import COUNTS, MANY, Answer, Asked
from bitwitness.trial.call import Results
from bitwitness.trial.exactly import judged_exactly
from bitwitness.trial.figures import figures, parts, spacing
from bitwitness.trial.oracle import Oracle
from bitwitness.trial.otherformula import other_formula
from bitwitness.trial.ownformula import by_its_own_formula
from bitwitness.trial.residuals import residual_of
from bitwitness.trial.result import FAIL, PASS, WARN, OutputResult
from bitwitness.trial.sway import swayed

_NO_GRADIENT = "there is no gradient; the oracle has one that is not zero (judge without gradients where none is due)"
_ROUNDED_ON_THE_WAY = (
    "right only if intermediate results are rounded to {dtype}: the kernel does not compute wider than that"
)


def undecidable(oracle: Oracle) -> str:
    """Return why no result of a call can be judged, whatever it is; empty where it can. Raises what its float64 run raises."""
    if not have_truth(oracle.mode.operators):
        return "float64 cannot say what its result should be: it depends on the dtype's own numbers, or on fresh memory"
    return "it draws random numbers: there is no one right result" if oracle.mode.draws else ""


def judge_all(results: Results, oracle: Oracle) -> tuple[tuple[OutputResult, ...], str]:
    """Judge every output and gradient of a run; with the reason why none of them can be, if there is one.

    Raises whatever the function raises in float64 on the CPU.
    """
    exact = oracle.exact
    if reason := undecidable(oracle):
        return (), reason
    if not oracle.has_reference and (shapes := _other_shapes(results, exact)):
        return (), shapes
    if len(exact.outputs) != len(results.outputs):
        wrong = f"{len(results.outputs)} tensors were returned; the oracle has {len(exact.outputs)}"
        return (OutputResult("out0", FAIL, wrong),), ""
    due = exact.slots()
    found = [_typed(judge(f"out{i}", t, oracle), t, oracle) for i, t in enumerate(results.outputs)]
    if any(slot.startswith("grad") for slot in due) or not oracle.has_reference:
        _judge_gradients(found, results, due, oracle)
    elif any(t is not None for t in results.gradients) and all(one.verdict == PASS for one in found):
        found[0] = replace(found[0], verdict=WARN, reason="the reference gives no gradients: they were not judged")
    if oracle.has_reference:
        found = [_tracked(one, exact.tracked - results.tracked) for one in found]
    for i in sorted({*results.changed, *exact.changed}):
        given = oracle.given[i]
        one = judge(f"in{i}", results.changed.get(i, given), oracle, unless=widened(given.detach()))
        if one.verdict == FAIL and i not in exact.changed:
            one = replace(one, reason=f"an argument was written into that {_whose(oracle)} leaves: {one.reason}")
        found.append(one)
    if oracle.mode.is_unique or all(one.verdict != FAIL for one in found):
        return tuple(found), ""
    return _of_several(found, results, oracle)


def _other_shapes(results: Results, exact: Results) -> str:
    """Return why nothing can be judged where a function gives results of other shapes in float64; empty where it does not."""
    for i, (one, other) in enumerate(zip(results.outputs, exact.outputs, strict=False)):
        if one.shape != other.shape:
            shapes = f"{list(other.shape)}, and {list(one.shape)} in its dtype"
            return f"in float64 its out{i} is of shape {shapes}: it reads bits; give it a reference"
    return ""


def _judge_gradients(found: list[OutputResult], results: Results, due: Mapping[str, Tensor], oracle: Oracle) -> None:
    """Add what is said of each gradient of a run; ``due``: the oracle's results by their names."""
    for slot, gradient in ((f"grad{i}", t) for i, t in enumerate(results.gradients)):
        if gradient is not None and (slot in due or all(one.verdict != FAIL for one in found)):
            found.append(judge(slot, gradient, oracle))
        elif gradient is None and slot in due and bool((due[slot] != 0).any()):
            found.append(OutputResult(slot, FAIL, _NO_GRADIENT))


def _tracked(one: OutputResult, lost: frozenset[str]) -> OutputResult:
    if one.verdict != PASS or one.slot not in lost:
        return one
    return replace(one, verdict=WARN, reason="no gradient flows through it, as it does in the reference")


def _whose(oracle: Oracle) -> str:
    return "the reference" if oracle.has_reference else "its float64 run"


def _of_several(found: list[OutputResult], results: Results, oracle: Oracle) -> tuple[tuple[OutputResult, ...], str]:
    """Judge results of which more than one is right, and which are not the oracle's."""
    names = [f.overloadpacket.__name__ for f in oracle.mode.operators]
    wrong = residual_of(names, oracle.given, results.outputs)
    if wrong:
        return tuple(replace(one, verdict=FAIL, reason=wrong) for one in found if one.slot == "out0"), ""
    if wrong is None or any(one.verdict == FAIL and one.slot.startswith("grad") for one in found):
        return (), "its result is right in more than one form (signs, order), and not the one that float64 gives"
    return tuple(replace(one, verdict=PASS, reason="") for one in found), ""


def judge(slot: str, actual: Tensor, oracle: Oracle, *, unless: Tensor | None = None) -> OutputResult:
    """Judge one output, one gradient, or one argument that was written into, of a call.

    Parameters
    ----------
    slot
        Its name.
    actual
        As the device returned it.
    oracle
        The call's truth; noisy runs are made only where the result is not correctly rounded everywhere.
    unless
        What the oracle's result is where a run of it has none of that name: an argument that was not written into.

    """

    def of(results: Results) -> Tensor | None:
        return results.slots().get(slot, unless)

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
    judged = _inexactly if is_inexact(actual) else judged_exactly
    return judged(head, actual.detach().cpu(), exact, oracle, of)


def _inexactly(
    head: Mapping[str, Any], actual: Tensor, exact: Tensor, oracle: Oracle, of: Callable[[Results], Tensor | None]
) -> OutputResult:
    """Judge floating and complex numbers: by the first of the questions above that they answer."""
    value, truth = parts(actual), parts(exact)
    dtype = _due_dtype(head["slot"], actual, oracle)
    right = _correctly_rounded(value, truth, dtype)
    if bool(right.all()):
        return figures(head, PASS, "", value, truth, spacing(truth, dtype) / 2, dtype)
    least = least_allowance(truth, dtype, rounds_once=only_rounds_correctly(oracle.mode.operators))
    if bool((right | ((value - truth).abs() <= least)).all()) and not lean(value, truth, [], dtype):
        return figures(head, PASS, "", value, truth, least, dtype)  # whatever the noise would say
    asked = Asked(head["slot"], value, truth, dtype, actual.dtype, right, oracle, of)
    verdict, reason, within, allowed = _by_the_reference(asked, head["dtype"])
    if verdict == FAIL and not reason and oracle.has_reference:
        verdict, reason, within, allowed = by_its_own_formula(asked, within, allowed)
    if verdict != FAIL and (another := other_formula(asked)) and another[0] != verdict:
        verdict, reason = another
    if verdict == FAIL and _only_flushed(value, truth, within, dtype) and not is_elementwise(oracle.mode.operators):
        verdict, reason = WARN, f"subnormal numbers of {head['dtype']} are flushed to zero on the way"
    return figures(head, verdict, reason, value, truth, allowed, dtype, within=within)


def _by_the_reference(asked: Asked, said: str) -> Answer:
    """Ask whether results are within what rounding leaves; in half types also whether all of them are pulled one way."""
    value, truth, dtype = asked.value, asked.truth, asked.dtype
    within, allowed = asked.right, spacing(truth, dtype) / 2
    steps = (False, True) if dtype in HALF and not asked.is_wider else (False,)
    for draws, stepwise in product(asked.draws, steps):
        noisy = asked.noisy(stepwise=stepwise, draws=draws)
        allowed = allowance(
            truth, noisy, dtype, leaps=bool(asked.oracle.mode.quantised), bounded=asked.is_of_one_function
        )
        near = (value - truth).abs() <= allowed
        within = asked.right | near | _may_be_infinite(value, truth, noisy, allowed, dtype)
        if not bool(within.all()):
            continue
        if leaning := lean(value, truth, asked.noisy(stepwise=False, draws=asked.draws[0]), dtype):
            return FAIL, leaning, within, allowed
        if swayed(asked, noisy) and (how := swayed(asked, asked.noisy(stepwise=not asked.is_wider, draws=MANY))):
            return FAIL, how, within, allowed
        if left := _leaves_the_range(asked, noisy, said):
            return left[0], left[1], within, allowed
        return (
            (WARN, _ROUNDED_ON_THE_WAY.format(dtype=said), within, allowed) if stepwise else (PASS, "", within, allowed)
        )
    return FAIL, "", within, allowed


def _leaves_the_range(asked: Asked, noisy: Sequence[Tensor], said: str) -> tuple[str, str] | None:
    """Return what is to be told where a result is infinite, NaN or zero, as those with noise are, though the true one is none.

    Squares overflow, or vanish, of numbers whose root does not: wrong, where the reference's do not in the same dtype.
    """
    value, truth, info = asked.value, asked.truth, torch.finfo(asked.dtype)
    size = truth.abs().nan_to_num(0.0, 0.0, 0.0)
    ordinary = (size < info.max / 4) & (size > max(4 * info.smallest_normal, COUNTS * float(size.max()))) & ~asked.right
    vanished = value == 0 if asked.slot.startswith("out") else torch.zeros_like(ordinary)  # gradients cancel, too
    lost = ordinary & (~value.isfinite() | vanished)
    for one in noisy:
        lost &= ~one.isfinite() | (one == 0)
    if not bool(lost.any()):
        return None
    at = int(lost.reshape(-1).int().argmax())
    got, due = float(value.reshape(-1)[at]), float(truth.reshape(-1)[at])
    reason = f"its formula leaves the range of {said} on its way: {got:g} where {due:.6g} is due"
    plain = asked.these([asked.oracle.as_it_is]) if asked.oracle.as_it_is else []
    kept = bool(plain) and plain[0].shape == lost.shape and bool((plain[0].isfinite() & (plain[0] != 0))[lost].all())
    return (FAIL, f"{reason}; the reference's does not") if kept else (WARN, reason)


def _typed(one: OutputResult, actual: Tensor, oracle: Oracle) -> OutputResult:
    """Return a passed result with a warning where its dtype is wider than a reference gives; losses should be."""
    due = oracle.exact.kept.get(one.slot)
    if one.verdict != PASS or not oracle.has_reference or due not in HALF or not actual.dim():
        return one
    if not actual.is_floating_point() or unit_roundoff(actual.dtype) >= unit_roundoff(due):
        return one
    return replace(one, verdict=WARN, reason=f"{one.dtype} was returned where the reference gives {str(due)[6:]}")


def _due_dtype(slot: str, actual: Tensor, oracle: Oracle) -> torch.dtype:
    """Return by whose units a result is judged: its own dtype's, or those of a finer one in which the reference keeps it.

    What returns bfloat16 for float32 inputs has lost what the reference keeps, unless the reference casts as well.
    """
    own = actual.dtype.to_real() if actual.is_complex() else actual.dtype
    due = oracle.exact.kept.get(slot, own)
    due = due.to_real() if due.is_complex else due
    if not due.is_floating_point or unit_roundoff(due) == unit_roundoff(own):
        return own
    if unit_roundoff(due) > unit_roundoff(own):  # a reference's result is rounded to it
        return due if oracle.has_reference else own
    return max(due, oracle.dtype, key=unit_roundoff) if unit_roundoff(oracle.dtype) < unit_roundoff(own) else own


def _correctly_rounded(value: Tensor, truth: Tensor, dtype: torch.dtype) -> Tensor:
    """Return which elements are the number of ``dtype`` that is nearest to the truth; NaN is NaN.

    Beyond the largest number of an eight-bit type without infinities a kernel may keep that or give NaN (OCP's specification
    of these types knows both), and on processors that have them in hardware torch's do the latter.
    """
    nearest = truth.to(dtype).double()
    right = (value == nearest) | (value.isnan() & nearest.isnan())
    if dtype.itemsize == 1 and not torch.tensor(torch.inf).to(dtype).double().isinf():
        right |= value.isnan() & (truth.abs() > torch.finfo(dtype).max)
    return right


def _only_flushed(value: Tensor, truth: Tensor, within: Tensor, dtype: torch.dtype) -> bool:
    """Whether all that is outside is zero where the truth is subnormal.

    Processors flush float32, and with it bfloat16; none flushes float16.
    """
    outside = ~within
    if dtype is torch.float16 or not bool(outside.any()):
        return False
    return bool(((value == 0) & (truth.abs() < torch.finfo(dtype).smallest_normal))[outside].all())


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
