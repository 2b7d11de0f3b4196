"""What inputs are drawn from: a seeded generator that knows the dtype."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

Draws = Callable[["Draw"], tuple[Any, ...]]


class Draw:
    """Tensors of one dtype from a generator of its own; floating ones are leaves that take gradients, unless told."""

    def __init__(self, dtype: torch.dtype, seed: int) -> None:
        self.dtype = dtype
        self.generator = torch.Generator().manual_seed(seed)

    def normal(self, *shape: int, scale: float = 1.0, shift: float = 0.0, grad: bool = True) -> torch.Tensor:
        """Draw normal numbers."""
        values = torch.randn(shape, generator=self.generator, dtype=torch.float64) * scale + shift
        return values.to(self.dtype).requires_grad_(grad)

    def uniform(self, *shape: int, low: float = 0.0, high: float = 1.0, grad: bool = True) -> torch.Tensor:
        """Draw uniform numbers."""
        values = torch.rand(shape, generator=self.generator, dtype=torch.float64) * (high - low) + low
        return values.to(self.dtype).requires_grad_(grad)

    def grid(self, *shape: int, step: float, low: int, high: int, grad: bool = True) -> torch.Tensor:
        """Draw multiples of a step, from ``low`` to ``high`` of them: values with ties, and values on boundaries."""
        values = torch.randint(low, high + 1, shape, generator=self.generator).double() * step
        return values.to(self.dtype).requires_grad_(grad)

    def planted(
        self, value: float, *shape: int, every: int = 97, scale: float = 1.0, grad: bool = True
    ) -> torch.Tensor:
        """Draw normal numbers; each ``every``-th is the value (NaN, infinity, zero)."""
        values = torch.randn(shape, generator=self.generator, dtype=torch.float64) * scale
        values.view(-1)[every // 2 :: every] = value
        return values.to(self.dtype).requires_grad_(grad)

    def index(self, *shape: int, high: int) -> torch.Tensor:
        """Draw indices."""
        return torch.randint(0, high, shape, generator=self.generator)

    def mask(self, *shape: int, share: float = 0.3) -> torch.Tensor:
        """Draw which are true, a share of them."""
        return torch.rand(shape, generator=self.generator) < share

    def transposed(self, *shape: int, scale: float = 1.0) -> torch.Tensor:
        """Draw normal numbers whose last two dimensions aren't in the memory's order."""
        values = torch.randn(shape, generator=self.generator, dtype=torch.float64) * scale
        return values.to(self.dtype).transpose(-1, -2).requires_grad_()
