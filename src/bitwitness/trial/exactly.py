"""The standard for integers and bools: they are equal, but where rounding decides which one it is."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from bitwitness.numerics import is_inexact
from bitwitness.trial.asked import MANY
from bitwitness.trial.call import Results
from bitwitness.trial.oracle import Oracle
from bitwitness.trial.result import FAIL, PASS, OutputResult


def judged_exactly(
    head: Mapping[str, Any], actual: Tensor, exact: Tensor, oracle: Oracle, of: Callable[[Results], Tensor | None]
) -> OutputResult:
    """Judge integers and bools: they are equal, but where rounding decides which one it is."""
    expected = exact.to(actual.dtype) if not is_inexact(exact) else exact.real.to(actual.dtype)
    wrong = actual != expected
    if not bool(wrong.any()):
        return OutputResult(**head, verdict=PASS)
    noisy = [of(r) for r in oracle.noisy(stepwise=False, draws=MANY)]
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
