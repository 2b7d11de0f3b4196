"""In which dtype the device keeps what is computed here in float64: a mark on each tensor."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from bitwitness.numerics import is_inexact, unit_roundoff

_TAG = "_bitwitness_kept_as"
"""The attribute of a float64 tensor that says which dtype the device keeps it in."""


def kept_as(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Mark a float64 tensor as one that the device keeps in ``dtype``."""
    setattr(tensor, _TAG, dtype)
    return tensor


def is_marked(tensor: Tensor) -> bool:
    """Whether a tensor says in which dtype the device keeps it."""
    return hasattr(tensor, _TAG)


def roundoff(dtype: torch.dtype) -> float:
    """Return the unit roundoff of a dtype; float32's for integers, which are computed with in it."""
    return unit_roundoff(dtype if dtype.is_floating_point or dtype.is_complex else torch.float32)


class KeptDtypes:
    """Tells in which dtype the device keeps tensors.

    ``default``: where that is not known otherwise; ``only``: whatever is known.
    """

    def __init__(self, default: torch.dtype, only: torch.dtype | None = None) -> None:
        self._default = default
        self.only = only

    def of(self, tensor: Tensor) -> torch.dtype:
        """Return the real dtype of a floating or complex tensor's numbers."""
        if self.only is not None:
            return self.only
        # what a function brings along, its weights, say, was not made wide, and is what it is
        own = tensor.dtype not in (torch.float64, torch.complex128)
        found: torch.dtype = getattr(tensor, _TAG, tensor.dtype if own else self._default)
        return found.to_real() if found.is_complex else found

    def shown(self, tensor: Tensor) -> torch.dtype:
        """Return what the device would say that a tensor's dtype is."""
        if not is_inexact(tensor):
            return tensor.dtype
        kept = self.of(tensor)
        return kept.to_complex() if tensor.is_complex() and not kept.is_complex else kept

    def coarsest(self, tensors: Sequence[Tensor]) -> torch.dtype:
        """Return in which dtype a result of these is kept: the coarsest of theirs.

        Torch would take the widest where they differ. But where a function casts to ``x.dtype`` nothing is cast in float64,
        and what is wider here was cast there.
        """
        inexact = [t for t in tensors if is_inexact(t)]
        if not inexact:  # made of integers, as torch's default; or from nothing, most often as the tensors around it
            return torch.float32 if tensors else self._default
        shaped = [t for t in inexact if t.dim()] or inexact  # numbers take no part in it
        return max(map(self.of, shaped), key=roundoff)
