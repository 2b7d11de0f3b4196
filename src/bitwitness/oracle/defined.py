"""Which elements of an operator's results are results at all: padding and work space hold what the memory held before."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from bitwitness.oracle.product import READERS
from bitwitness.tap.operators import OpCall

_DEFINED_RESULTS = {"_ctc_loss": 1, "_embedding_bag": 1, "_embedding_bag_forward_only": 1, "mkldnn_rnn_layer": 3}
"""Operators of whose results only so many are defined everywhere; the others are work space."""


def defined_count(op: str, count: int) -> int:
    """Return how many of an operator's ``count`` results are no work space; they come first."""
    return _DEFINED_RESULTS.get(op, count)


def defined_results(call: OpCall) -> tuple[Tensor, ...]:
    """Return the results of a call that are no work space."""
    return call.outputs[: _DEFINED_RESULTS.get(call.op, len(call.outputs))]


def is_wholly_defined(call: OpCall) -> bool:
    """Whether an operator writes every element of its results, so that one that varies is no padding."""
    return call.op in READERS or call.op.startswith("convolution") or torch.Tag.pointwise in call.func.tags


def with_padding_filled(
    values: Sequence[Tensor], again: Sequence[Tensor], exact: Sequence[Tensor], allowed: float
) -> tuple[Tensor, ...]:
    """Return results with float64's in the place of elements that vary when they are computed again.

    What comes out as float64's the other time is a result all the same, and was wrong this time.

    Parameters
    ----------
    values, again, exact
        The results, those of a second run, and float64's.
    allowed
        Relative difference that is rounding.

    """
    found = []
    for value, other, truth in zip(values, again, exact, strict=False):
        if not value.is_floating_point() or not value.shape == other.shape == truth.shape:
            found.append(value)
            continue
        right = truth.to(value.device, value.dtype)
        same = (value == other) | (value.isnan() & other.isnan()) | _near(value, other, allowed)
        # A zero of float64's is what fresh memory holds, too: it says nothing of whether the element was written.
        found.append(torch.where(same | (_near(other, right, allowed) & (right != 0)), value, right))
    return tuple(found)


def _near(a: Tensor, b: Tensor, allowed: float) -> Tensor:
    """Return which elements differ by no more than a kernel does that rounds otherwise."""
    return (a - b).abs() <= allowed * torch.maximum(a.abs(), b.abs())
