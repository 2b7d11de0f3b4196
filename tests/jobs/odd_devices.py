"""Devices that are healthy and yet give other bits than others do: another algorithm, kernels that do not repeat."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten
_FACTORS = {aten.mm.default: 0, aten.bmm.default: 0, aten.addmm.default: 1}
"""Matrix products, and at which argument their first factor stands."""
_LOW = (torch.float32, torch.bfloat16)


class OddProducts(TorchDispatchMode):
    """Computes matrix products in a way of its own; everything else as it is."""

    def __init_subclass__(cls) -> None:
        cls.__module__ = "bitwitness.emulated"  # it stands for the device, as FaultyDevice does: no mode of a script's

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        first = _FACTORS.get(func)
        if first is None or args[first].dtype not in _LOW or not self.active():
            return func(*args, **(kwargs or {}))
        return self.product(func, first, args, kwargs or {})

    def active(self) -> bool:
        return True

    def product(self, func: Any, first: int, args: Any, kwargs: Any) -> torch.Tensor:
        raise NotImplementedError


class Halves(OddProducts):
    """Adds up each half of K by itself, from its ``start``-th training step on."""

    step = 0
    """Set by the training."""

    def __init__(self, start: int) -> None:
        super().__init__()
        self.start = start

    def active(self) -> bool:
        return Halves.step >= self.start

    def product(self, func: Any, first: int, args: Any, kwargs: Any) -> torch.Tensor:
        a, b = args[first], args[first + 1]
        half = a.shape[-1] // 2
        if not half:
            return func(*args, **kwargs)
        product = aten.bmm if a.dim() == 3 else aten.mm
        left = func(*args[:first], a[..., :half], b[..., :half, :], **kwargs)
        return left.add_(product(a[..., half:], b[..., half:, :]), alpha=kwargs.get("alpha", 1))


class Noise(OddProducts):
    """Multiplies every element of a product by 1 + e · randn, never the same twice, and not from torch's generators."""

    def __init__(self, size: float, seed: int) -> None:
        super().__init__()
        self.size = size
        self.random = np.random.default_rng(seed)

    def product(self, func: Any, first: int, args: Any, kwargs: Any) -> torch.Tensor:
        result = func(*args, **kwargs)
        noise = torch.from_numpy(self.random.standard_normal(tuple(result.shape)).astype(np.float32))
        return result.copy_(result.float() * (1 + self.size * noise))
