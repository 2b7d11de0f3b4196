"""Small models that are written in two ways each, with the same mathematics: what `compare` is to take for one."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

D = 16


class Model(nn.Module):
    """A linear layer, something that is written in one way or the other, and a head."""

    def __init__(self, *, other: bool) -> None:
        super().__init__()
        self.other = other
        self.a, self.h = nn.Linear(D, D), nn.Linear(D, 4)

    @staticmethod
    def batch(generator: torch.Generator) -> tuple[torch.Tensor, ...]:
        return (torch.randn(8, D, generator=generator),)

    def loss(self, *batch: torch.Tensor) -> torch.Tensor:
        y = self(*batch)
        return y if y.dim() == 0 else y.float().square().mean()


class Ode(Model):
    """Runge and Kutta's fourth order, its weights factored out or not."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = 0.2
        for _ in range(3):
            k1 = torch.tanh(self.a(x))
            k2 = torch.tanh(self.a(x + h / 2 * k1))
            k3 = torch.tanh(self.a(x + h / 2 * k2))
            k4 = torch.tanh(self.a(x + h * k3))
            whole = h / 6 * (k1 + 2 * k2 + 2 * k3 + k4)
            x = x + (h / 6 * k1 + h / 3 * k2 + h / 3 * k3 + h / 6 * k4 if self.other else whole)
        return self.h(x)


class Likelihood(Model):
    """A normal distribution's, by hand or by torch's."""

    @staticmethod
    def batch(generator: torch.Generator) -> tuple[torch.Tensor, ...]:
        return torch.randn(8, D, generator=generator), torch.randn(8, 2, generator=generator)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        mean, log = self.h(torch.tanh(self.a(x))).chunk(2, -1)
        if self.other:
            return -(-0.5 * ((y - mean) / log.exp()) ** 2 - log - 0.5 * math.log(2 * math.pi)).mean()
        return -torch.distributions.Normal(mean, log.exp()).log_prob(y).mean()


class Norm(Model):
    """RMS norm, by parts or by torch's function."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.a(x)
        parts = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.h(F.rms_norm(y, (D,), None, 1e-6) if self.other else parts)


class Added(Model):
    """A bias that is added behind the product, or in it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.linear(x, self.a.weight) + self.a.bias if self.other else F.linear(x, self.a.weight, self.a.bias)
        return self.h(F.gelu(F.layer_norm(y, (D,))))


class Scan(Model):
    """A recurrence of one factor and one term a step, step by step or as one weighted sum."""

    @staticmethod
    def batch(generator: torch.Generator) -> tuple[torch.Tensor, ...]:
        return (torch.randn(4, 6, D, generator=generator),)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        u = F.silu(self.a(x))
        decay = torch.exp(-F.softplus(u))
        if self.other:
            states = [u[:, 0]]
            for t in range(1, x.shape[1]):
                states.append(decay[:, t] * states[-1] + u[:, t])
            return self.h(torch.stack(states, 1))
        log = torch.cumsum(torch.log(decay), 1)
        weights = torch.exp(log.unsqueeze(2) - log.unsqueeze(1)) * torch.ones(6, 6).tril()[None, :, :, None]
        return self.h(torch.einsum("btsd,bsd->btd", weights, u))


class Logits(Model):
    """Binary cross entropy, by parts or by torch's function."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        z, y = self.h(torch.relu(self.a(x))), (x[:, :4] > 0).float()
        return (F.softplus(z) - y * z).mean() if self.other else F.binary_cross_entropy_with_logits(z, y)


MODELS: dict[str, Any] = {kind.__name__: kind for kind in (Ode, Likelihood, Norm, Added, Scan, Logits)}
