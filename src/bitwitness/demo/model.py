"""A byte-level GPT of a few million parameters, and its text: the Python standard library's own source."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

BYTES = 256  # the alphabet: any byte


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [batch, time, width] to the same shape."""
        batch, time, width = x.shape
        q, k, v = self.qkv(x).view(batch, time, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        result: torch.Tensor = self.out(mixed.transpose(1, 2).reshape(batch, time, width))
        return result


class Mlp(nn.Module):
    """Two linear layers around a GELU."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [batch, time, width] to the same shape."""
        result: torch.Tensor = self.down(functional.gelu(self.up(x)))
        return result


class Block(nn.Module):
    """One pre-norm transformer block."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = Mlp(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [batch, time, width] to the same shape."""
        x = x + self.attention(self.norm1(x))
        result: torch.Tensor = x + self.mlp(self.norm2(x))
        return result


class ByteGPT(nn.Module):
    """A GPT over bytes that computes its loss inside."""

    def __init__(self, width: int = 256, layers: int = 4, heads: int = 4, context: int = 128) -> None:
        super().__init__()
        self.tokens = nn.Embedding(BYTES, width)
        self.positions = nn.Embedding(context, width)
        self.layers = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, BYTES, bias=False)

    def forward(self, text: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
        """Return the mean cross-entropy of predicting ``following`` from ``text``, both int64 [batch, time]."""
        x = self.tokens(text) + self.positions.weight[: text.shape[1]]
        for layer in self.layers:
            x = layer(x)
        logits = self.head(self.norm(x))
        loss: torch.Tensor = functional.cross_entropy(logits.float().view(-1, BYTES), following.reshape(-1))
        return loss


def standard_library(limit: int = 4 << 20) -> torch.Tensor:
    """Return up to ``limit`` bytes of the standard library's source, a uint8 vector, the same on every rank."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    text = bytearray()
    for path in sorted(folder.glob("*.py")):
        text += path.read_bytes()
        if len(text) >= limit:
            break
    return torch.frombuffer(text[:limit], dtype=torch.uint8)


def batch(text: torch.Tensor, generator: torch.Generator, size: int, context: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw ``size`` windows of ``context`` bytes and the bytes that follow each, both int64 [size, context]."""
    starts = torch.randint(0, text.numel() - context - 1, (size,), generator=generator)
    windows = torch.stack([text[start : start + context + 1] for start in starts.tolist()]).long()
    return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()
