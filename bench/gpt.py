"""A plain GPT for measurements: 11.2 million parameters at its defaults, 300 million and 1,987 modules as ``DEEP``."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

DEEP = {"d": 296, "layers": 283, "heads": 4, "T": 2048}
"""What makes the GPT below one of 300 million parameters in 1,987 modules, nearly all of them small."""


class Block(nn.Module):
    """One pre-norm transformer block."""

    def __init__(self, d: int, heads: int, eager: bool = False) -> None:
        super().__init__()
        self.heads = heads
        self.eager = eager
        self.ln1 = nn.LayerNorm(d)
        self.qkv = nn.Linear(d, 3 * d)
        self.proj = nn.Linear(d, d)
        self.ln2 = nn.LayerNorm(d)
        self.fc1 = nn.Linear(d, 4 * d)
        self.fc2 = nn.Linear(4 * d, d)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [batch, T, d] to the same shape."""
        batch, time, d = x.shape
        q, k, v = (
            part.view(batch, time, self.heads, d // self.heads).transpose(1, 2)
            for part in self.qkv(self.ln1(x)).chunk(3, -1)
        )
        y = by_hand(q, k, v) if self.eager else F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(batch, time, d))
        return x + self.fc2(F.gelu(self.fc1(self.ln2(x))))


def by_hand(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Return causal attention of [batch, heads, T, d] as a GPT of 2020 has it, operator by operator."""
    scores = q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5
    future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
    return scores.masked_fill(future, float("-inf")).softmax(-1) @ v


class GPT(nn.Module):
    """A decoder with learned positions; its head shares the embedding's weight.

    Called with tokens (int64 [batch, time]) it returns logits [batch, time, vocab]; with targets, too, the mean
    cross-entropy.
    """

    def __init__(
        self, vocab: int = 4096, d: int = 320, layers: int = 8, heads: int = 5, T: int = 128, eager: bool = False
    ) -> None:
        super().__init__()
        self.tok = nn.Embedding(vocab, d)
        self.pos = nn.Embedding(T, d)
        self.blocks = nn.ModuleList(Block(d, heads, eager) for _ in range(layers))
        self.ln = nn.LayerNorm(d)
        self.head = nn.Linear(d, vocab, bias=False)
        self.head.weight = self.tok.weight
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor | None = None) -> torch.Tensor:
        """Return logits, or the loss where targets are given."""
        x = self.tok(tokens) + self.pos.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits: torch.Tensor = self.head(self.ln(x))
        return logits if targets is None else F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
