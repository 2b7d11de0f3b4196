"""Tensors that the loss code read and no taped call made, known again among what the replayed model computes.

An output without a gradient, or a value that a module keeps as an attribute, reaches the loss without a word to the tape. The
replay computes it again; where an operator's result has its bits, that operator's origins are the tensor's.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from bitwitness.nonfinite.flags import flags_of, measurable
from bitwitness.nonfinite.taint import Taint


class Strays:
    """Those of some tensors that are not finite, until what made them is found."""

    def __init__(self, tensors: Iterable[torch.Tensor] = ()) -> None:
        self._missing = {id(t): t for t in tensors if measurable(t) and flags_of(t)}
        self._known: dict[int, Taint] = {}

    def meet(self, op: str, result: torch.Tensor, value: Taint) -> None:
        """Look whether an operator's bad result is one of them."""
        for key, tensor in list(self._missing.items()):
            if _made_by(tensor, op) and _same(tensor.detach(), result.detach()):
                self._known[tensor.untyped_storage().data_ptr()] = value
                del self._missing[key]

    def get(self, tensor: torch.Tensor) -> Taint | None:
        """Return what is known of a tensor's origins, by where it lies."""
        return self._known.get(tensor.untyped_storage().data_ptr())


def _made_by(tensor: torch.Tensor, op: str) -> bool:
    """Tell whether autograd's node of a tensor, where it has one, is that of an operator: NaN equals any other NaN."""
    node = tensor.grad_fn
    if node is None:
        return True
    name = node.name().rstrip("0123456789").removesuffix("Backward").lower()
    return op.strip("_").replace("_", "").startswith(name)


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.numel() != other.numel() or one.dtype != other.dtype or one.device != other.device:
        return False
    a, b = one.reshape(-1), other.reshape(-1)
    if a.dtype.itemsize == 1:
        a, b = a.float(), b.float()
    return bool(((a == b) | (a.isnan() & b.isnan())).all())
