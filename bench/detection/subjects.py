"""The trainings on which sensors are tried: small, ordinary, each with its optimizer and precision."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from bitwitness.demo.model import ByteGPT, batch, standard_library

Batch = tuple[torch.Tensor, torch.Tensor]
CONTEXT = 64


class LlamaBlock(nn.Module):
    """RMSNorm, attention without biases, SwiGLU; no dropout, as such models are trained."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.gate, self.up = nn.Linear(width, 2 * width, bias=False), nn.Linear(width, 2 * width, bias=False)
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [batch, time, width] to the same shape."""
        size, time, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(size, time, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(size, time, width)
        x = x + self.out(mixed)
        y = self.norm2(x)
        result: torch.Tensor = x + self.down(F.silu(self.gate(y)) * self.up(y))
        return result


class Llama(nn.Module):
    """A byte-level decoder with tied embeddings and dropout on its input; returns the loss."""

    def __init__(self, width: int = 96, layers: int = 3) -> None:
        super().__init__()
        self.tokens = nn.Embedding(256, width)
        self.positions = nn.Embedding(CONTEXT, width)
        self.drop = nn.Dropout(0.1)
        self.layers = nn.ModuleList(LlamaBlock(width, 4) for _ in range(layers))
        self.norm = nn.RMSNorm(width)
        nn.init.normal_(self.tokens.weight, std=0.05)

    def forward(self, text: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
        """Return the mean cross-entropy."""
        x = self.drop(self.tokens(text) + self.positions.weight[: text.shape[1]])
        for layer in self.layers:
            x = layer(x)
        logits = F.linear(self.norm(x), self.tokens.weight)
        return F.cross_entropy(logits.float().flatten(0, 1), following.flatten())


class ConvNet(nn.Module):
    """A small image classifier with BatchNorm that returns its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *(nn.Conv2d(1, 12, 3, padding=1), nn.BatchNorm2d(12), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(12, 24, 3, padding=1), nn.BatchNorm2d(24), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten()),
        )
        self.head = nn.Linear(96, 256)

    def forward(self, text: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
        """Read bytes as an image; predict the last of those that follow."""
        image = text.float().view(len(text), 1, 8, -1) / 64 - 2
        return F.cross_entropy(self.head(self.body(image)), following[:, -1])


class UNet(nn.Module):
    """A small image model with group norms, in-place activations and sums, dropout, padding and resizing."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.down = nn.Sequential(nn.Conv2d(1, width, 3), nn.GroupNorm(4, width), nn.SiLU(inplace=True))
        self.inner = nn.Sequential(
            *(nn.MaxPool2d(2), nn.ReflectionPad2d(1), nn.Conv2d(width, width, 3), nn.GroupNorm(4, width)),
            *(nn.ReLU(inplace=True), nn.Dropout(0.1)),
        )
        self.out = nn.Conv2d(2 * width, width, 1)
        self.head = nn.Linear(width, 256)

    def forward(self, text: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
        """Read bytes as an image; predict the last of those that follow."""
        image = F.pad(text.float().view(len(text), 1, 8, -1) / 64 - 2, (1, 1, 1, 1))
        x = self.down(image)
        inner = F.interpolate(self.inner(x), size=x.shape[-2:], mode="bilinear", align_corners=False)
        inner += x
        joined = self.out(torch.cat([x, inner.clamp(-8.0, 8.0)], 1)).masked_fill(image[:, :, 1:-1, 1:-1] > 1.5, 0.0)
        return F.cross_entropy(self.head(joined.mean((2, 3))), following[:, -1])


class Recurrent(nn.Module):
    """A byte-level LSTM that returns its loss."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.tokens = nn.Embedding(256, width)
        self.lstm = nn.LSTM(width, width, num_layers=2, batch_first=True)
        self.head = nn.Linear(width, 256)

    def forward(self, text: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
        """Return the mean cross-entropy."""
        logits = self.head(self.lstm(self.tokens(text))[0])
        return F.cross_entropy(logits.flatten(0, 1), following.flatten())


class Experts(nn.Module):
    """A mixture of experts, top 1 of 12, so that some get no token, and no gradient, in a step."""

    def __init__(self, width: int, experts: int = 12) -> None:
        super().__init__()
        self.router = nn.Linear(width, experts)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)) for _ in range(experts)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Send each token of [batch, time, width] to its expert."""
        flat = x.reshape(-1, x.shape[-1])
        weight, chosen = self.router(flat).softmax(-1).max(-1)
        result = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            where = (chosen == number).nonzero().squeeze(-1)
            if where.numel():
                result = result.index_add(0, where, expert(flat[where]) * weight[where, None])
        return result.view_as(x)


class MixtureOfExperts(nn.Module):
    """Attention blocks whose MLPs are mixtures of experts; returns the loss."""

    def __init__(self, width: int = 48) -> None:
        super().__init__()
        self.tokens = nn.Embedding(256, width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0, batch_first=True, norm_first=True)
            for _ in range(2)
        )
        self.experts = nn.ModuleList(Experts(width) for _ in range(2))
        self.head = nn.Linear(width, 256)

    def forward(self, text: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
        """Return the mean cross-entropy (the encoder sees what follows; that is no matter here)."""
        x = self.tokens(text)
        for layer, experts in zip(self.layers, self.experts, strict=True):
            x = layer(x)
            x = x + experts(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), following.flatten())


@dataclass(frozen=True)
class Subject:
    """One training: ``size`` sequences a rank and step."""

    name: str
    model: Callable[[], nn.Module]
    optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer]
    autocast: torch.dtype | None = None
    size: int = 4
    clip: float = 1.0

    @contextmanager
    def precision(self) -> Iterator[None]:
        """Compute in this subject's precision."""
        with torch.autocast("cpu", dtype=self.autocast or torch.bfloat16, enabled=self.autocast is not None):
            yield

    def batches(self, ranks: int, generator: torch.Generator, text: torch.Tensor) -> list[Batch]:
        """Draw one batch for each rank."""
        return [batch(text, generator, self.size, CONTEXT) for _ in range(ranks)]


SUBJECTS = (
    Subject(
        "GPT, bf16 autocast, AdamW",
        lambda: ByteGPT(width=96, layers=4, heads=4, context=CONTEXT),
        lambda p: torch.optim.AdamW(p, lr=1e-3),
        torch.bfloat16,
    ),
    Subject("Llama-style, fp32, AdamW", Llama, lambda p: torch.optim.AdamW(p, lr=1e-3)),
    Subject("convnet, fp32, SGD", ConvNet, lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9), size=16),
    Subject("LSTM, fp32, Adam", Recurrent, lambda p: torch.optim.Adam(p, lr=2e-3)),
)
TEXT = standard_library
