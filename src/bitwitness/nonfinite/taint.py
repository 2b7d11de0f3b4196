"""Where each tensor's NaN and infinities came from: provenance by value, kept while a step is replayed.

A tensor is known by where it lies and by its version, so that what an operator put there is not looked at again when
the next one reads it; what is not known (a view, a parameter) is looked at.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from bitwitness.nonfinite.flags import FINITE, Flags

Key = tuple[int, int, tuple[int, ...], tuple[int, ...], torch.dtype, int]
Origins = frozenset[int]
NONE: Origins = frozenset()


@dataclass(frozen=True, slots=True)
class Taint:
    """What one tensor holds, and from which origins (by number) its NaN and its infinities come."""

    flags: Flags = FINITE
    nan_from: Origins = NONE
    inf_from: Origins = NONE

    @property
    def origins(self) -> Origins:
        """All of them."""
        return self.nan_from | self.inf_from


CLEAN = Taint()


def key_of(tensor: torch.Tensor) -> Key:
    """Return what a tensor's present content is known by."""
    version = -1 if tensor.is_inference() else tensor._version
    pointer = tensor.untyped_storage().data_ptr()
    return pointer, int(tensor.storage_offset()), tuple(tensor.shape), tensor.stride(), tensor.dtype, version


@dataclass(slots=True)
class Provenance:
    """The values seen so far, by tensor; and what was ever written into each storage, for views of it."""

    _values: dict[int, dict[Key, Taint]] = field(default_factory=dict)
    _storages: dict[int, Taint] = field(default_factory=dict)

    def begin(self, tensor: torch.Tensor) -> None:
        """Forget what lay where a new tensor lies now."""
        pointer = tensor.untyped_storage().data_ptr()
        self._values[pointer] = {}
        self._storages.pop(pointer, None)

    def put(self, tensor: torch.Tensor, value: Taint) -> None:
        """Remember what a tensor holds."""
        key = key_of(tensor)
        self._values.setdefault(key[0], {})[key] = value
        if value.flags:
            before = self._storages.get(key[0], CLEAN)
            self._storages[key[0]] = Taint(FINITE, before.nan_from | value.nan_from, before.inf_from | value.inf_from)

    def get(self, tensor: torch.Tensor) -> Taint | None:
        """Return what a tensor is known to hold, or None."""
        key = key_of(tensor)
        return self._values.get(key[0], {}).get(key)

    def written(self, tensor: torch.Tensor) -> Taint:
        """Return where non-finite values in a tensor's storage came from, as far as is known."""
        return self._storages.get(tensor.untyped_storage().data_ptr(), CLEAN)


def joined(values: list[Taint], flags: Flags, constants: Origins) -> Taint | None:
    """Return where an operator's non-finite output came from, given its inputs; None if it is the operator's own doing.

    NaN comes from the inputs' NaN; without any, from infinities that are not just a mask's (``constants``): softmax of an
    overflowed value gives NaN, and is not to blame, but softmax of a row that is masked whole is. Infinities come from the
    inputs' infinities, or from NaN.
    """
    nan_from = frozenset().union(*(value.nan_from for value in values if value.flags.nan))
    inf_from = frozenset().union(*(value.inf_from for value in values if value.flags.inf))
    if flags.nan and not nan_from:
        nan_from = inf_from - constants
        if not nan_from:
            return None
    if flags.inf and not inf_from:
        inf_from = nan_from
        if not inf_from:
            return None
    return Taint(flags, nan_from if flags.nan else NONE, inf_from if flags.inf else NONE)
