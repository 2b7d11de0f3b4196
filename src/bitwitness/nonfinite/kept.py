"""What the first origins read, wrote and saved, kept so that each of these operators can be tried alone."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import torch

from bitwitness.tap.compat import without_dispatch_modes

_KEPT = 4  # origins whose inputs and outputs are kept
_LARGEST = 64 << 20  # bytes, of all of them together

Named = list[tuple[str, torch.Tensor]]


class KeptTensors:
    """Copies of tensors by ``origin{number}.{slot}``, up to a limit."""

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self._bytes = 0

    def keep(self, number: int, tensors: Named) -> None:
        """Keep what belongs to an origin, unless enough is kept."""
        if len({name.partition(".")[0] for name in self.tensors}) < _KEPT:
            self._store(number, tensors)

    def add(self, number: int, tensors: Named) -> None:
        """Keep more of an origin of which something is kept."""
        if any(name.startswith(f"origin{number}.") for name in self.tensors):
            self._store(number, tensors)

    def _store(self, number: int, tensors: Named) -> None:
        size = sum(t.numel() * t.element_size() for _, t in tensors)
        if self._bytes + size > _LARGEST:
            return
        self._bytes += size
        # a number that autograd saved as a tensor reaches other dispatch modes as the bare number, which has no copy
        with without_dispatch_modes():
            for slot, tensor in tensors:
                self.tensors[f"origin{number}.{slot}"] = tensor.detach().clone().contiguous()


def saved_by(node: Any) -> Named:
    """Return what the forward saved for a backward node, by its names in torch."""
    found: Named = []
    for name in dir(node) if node is not None else ():
        if name.startswith("_saved_") or name == "saved_tensors":
            with suppress(Exception):  # a node may have let go of it already
                value = getattr(node, name)
                many = value if isinstance(value, tuple | list) else [value]
                found += [
                    (f"{name.removeprefix('_')}{i or ''}", t) for i, t in enumerate(many) if isinstance(t, torch.Tensor)
                ]
    return found
