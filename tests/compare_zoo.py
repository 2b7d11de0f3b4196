"""Five small architectures, and differences that can be planted in one of two runs of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import bitwitness as bw

VOCAB, D, T = 96, 32, 16


class Attention(nn.Module):
    """Attention written out: scores, mask, softmax, dropout, values."""

    def __init__(self, heads: int = 4, dropout: float = 0.0, *, bias: bool = True) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.o = (nn.Linear(D, D, bias=bias) for _ in range(4))
        self.drop = nn.Dropout(dropout)
        self.scale = (D // heads) ** -0.5
        self.transposed = False

    def forward(
        self, x: torch.Tensor, memory: torch.Tensor | None = None, mask: torch.Tensor | None = None, rope: Any = None
    ) -> torch.Tensor:
        """Map [B, T, D] to [B, T, D]; attend to ``memory`` where it is given."""
        source = x if memory is None else memory
        q, k, v = (self._split(f(z)) for f, z in ((self.q, x), (self.k, source), (self.v, source)))
        if rope is not None:
            q, k = rope(q), rope(k)
        scores = q @ k.transpose(-2, -1) * self.scale
        if mask is not None:
            scores = scores.masked_fill((mask.T if self.transposed else mask) == 0, float("-inf"))
        y = self.drop(scores.softmax(-1)) @ v
        return self.o(y.transpose(1, 2).flatten(2))

    def _split(self, x: torch.Tensor) -> torch.Tensor:
        return x.view(x.shape[0], x.shape[1], self.heads, -1).transpose(1, 2)


class Block(nn.Module):
    """A pre-norm block; ``residual`` may be left out, GELU approximated."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(D), nn.LayerNorm(D)
        self.attn = Attention(dropout=dropout)
        self.fc1, self.fc2 = nn.Linear(D, 2 * D), nn.Linear(2 * D, D)
        self.act = nn.GELU()
        self.residual = True

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        """Map [B, T, D] to the same."""
        y = self.attn(self.ln1(x), mask=mask)
        x = x + y if self.residual else y
        return x + self.fc2(self.act(self.fc1(self.ln2(x))))


class GPT(nn.Module):
    """A decoder with its loss inside."""

    def __init__(self, layers: int = 4, dropout: float = 0.0) -> None:
        super().__init__()
        self.tok, self.pos = nn.Embedding(VOCAB, D), nn.Embedding(T, D)
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(layers))
        self.ln, self.head = nn.LayerNorm(D), nn.Linear(D, VOCAB, bias=False)
        self.register_buffer("mask", torch.ones(T, T).tril(), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the loss of predicting the next token."""
        x = self.tok(tokens) + self.pos.weight
        for block in self.blocks:
            x = block(x, self.mask)
        return F.cross_entropy(self.head(self.ln(x))[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


class RMSNorm(nn.Module):
    """Root mean square normalisation, written out."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(D))
        self.eps = 1e-6

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise the last dimension."""
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


class Rotary(nn.Module):
    """Rotates queries and keys by tables that are kept as buffers."""

    def __init__(self) -> None:
        super().__init__()
        angles = torch.outer(torch.arange(T), 100.0 ** (-torch.arange(0, D // 4, 2) / (D // 4)))
        self.register_buffer("cos", angles.cos().repeat(1, 2))
        self.register_buffer("sin", angles.sin().repeat(1, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Rotate [B, H, T, D/H]."""
        a, b = x.chunk(2, -1)
        return x * self.cos + torch.cat([-b, a], -1) * self.sin


class LlamaBlock(nn.Module):
    """RMSNorm, rotary attention, SwiGLU."""

    def __init__(self) -> None:
        super().__init__()
        self.ln1, self.ln2 = RMSNorm(), RMSNorm()
        self.attn = Attention(bias=False)
        self.gate, self.up = nn.Linear(D, 2 * D, bias=False), nn.Linear(D, 2 * D, bias=False)
        self.fc2 = nn.Linear(2 * D, D, bias=False)
        self.residual = True

    def forward(self, x: torch.Tensor, mask: torch.Tensor, rope: nn.Module) -> torch.Tensor:
        """Map [B, T, D] to the same."""
        y = self.attn(self.ln1(x), mask=mask, rope=rope)
        x = x + y if self.residual else y
        h = self.ln2(x)
        return x + self.fc2(F.silu(self.gate(h)) * self.up(h))


class Llama(nn.Module):
    """The same as a Llama-style decoder."""

    def __init__(self) -> None:
        super().__init__()
        self.tok = nn.Embedding(VOCAB, D)
        self.rope = Rotary()
        self.blocks = nn.ModuleList(LlamaBlock() for _ in range(3))
        self.ln, self.head = RMSNorm(), nn.Linear(D, VOCAB, bias=False)
        self.register_buffer("mask", torch.ones(T, T).tril(), persistent=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the loss of predicting the next token."""
        x = self.tok(tokens)
        for block in self.blocks:
            x = block(x, self.mask, self.rope)
        return F.cross_entropy(self.head(self.ln(x))[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


class ViT(nn.Module):
    """Patches by a convolution, a class token, blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, D, 4, 4)
        self.cls = nn.Parameter(torch.randn(1, 1, D) * 0.02)
        self.pos = nn.Parameter(torch.randn(1, 17, D) * 0.02)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.ln, self.head = nn.LayerNorm(D), nn.Linear(D, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return logits [B, 10]."""
        x = self.patch(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls.expand(len(x), -1, -1), x], 1) + self.pos
        for block in self.blocks:
            x = block(x)
        return self.head(self.ln(x)[:, 0])


class Residual(nn.Module):
    """Two convolutions with batch norm, and ReLU in place."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1, self.conv2 = (nn.Conv2d(channels, channels, 3, padding=1) for _ in range(2))
        self.ln1, self.ln2 = nn.BatchNorm2d(channels), nn.BatchNorm2d(channels)
        self.relu = nn.ReLU(inplace=True)
        self.residual = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [B, C, H, W] to the same."""
        y = self.ln2(self.conv2(self.relu(self.ln1(self.conv1(x)))))
        return self.relu(y + x if self.residual else y)


class ConvNet(nn.Module):
    """A residual network."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 12, 3, padding=1), nn.BatchNorm2d(12), nn.ReLU(inplace=True))
        self.blocks = nn.ModuleList(Residual(12) for _ in range(3))
        self.head = nn.Linear(12, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return logits [B, 10]."""
        x = F.max_pool2d(self.stem(images), 2)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((2, 3)))


class EncDec(nn.Module):
    """An encoder and a decoder that attends to it."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.tok, self.pos = nn.Embedding(VOCAB, D), nn.Embedding(T, D)
        self.encoder = nn.ModuleList(Block(dropout) for _ in range(2))
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(3))
        self.cross = nn.ModuleList(Attention() for _ in range(3))
        self.ln, self.head = nn.LayerNorm(D), nn.Linear(D, VOCAB)
        self.register_buffer("mask", torch.ones(T, T).tril(), persistent=False)

    def forward(self, tokens: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Return logits [B, T, VOCAB]."""
        memory = self.tok(tokens) + self.pos.weight
        for block in self.encoder:
            memory = block(memory)
        x = self.tok(target) + self.pos.weight
        for block, cross in zip(self.blocks, self.cross, strict=True):
            x = block(x, self.mask)
            x = x + cross(x, memory)
        return self.head(self.ln(x))


def _tokens(generator: torch.Generator) -> torch.Tensor:
    return torch.randint(0, VOCAB, (4, T), generator=generator)


@dataclass(frozen=True)
class Case:
    """An architecture: how to make it, its loss on one batch, and the block in which differences are planted."""

    make: Callable[[], nn.Module]
    loss: Callable[[nn.Module, torch.Generator], torch.Tensor]
    block: str = "blocks.1"


def _images_loss(model: nn.Module, generator: torch.Generator) -> torch.Tensor:
    images, labels = torch.randn(6, 3, 16, 16, generator=generator), torch.randint(0, 10, (6,), generator=generator)
    return F.cross_entropy(model(images), labels)


def _pairs_loss(model: nn.Module, generator: torch.Generator) -> torch.Tensor:
    tokens, target = _tokens(generator), _tokens(generator)
    return F.cross_entropy(model(tokens, target).flatten(0, 1), target.flatten())


CASES = {
    "gpt": Case(lambda: GPT(dropout=0.1), lambda m, g: m(_tokens(g))),
    "llama": Case(Llama, lambda m, g: m(_tokens(g))),
    "vit": Case(ViT, _images_loss),
    "conv": Case(ConvNet, _images_loss),
    "encdec": Case(EncDec, _pairs_loss),
}


class InBfloat16(nn.Linear):
    """A linear layer that computes in bfloat16."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return x @ weight.T + bias, rounded."""
        low = torch.bfloat16
        bias = None if self.bias is None else self.bias.to(low)
        return F.linear(x.to(low), self.weight.to(low), bias).to(x.dtype)


def _epsilon(_model: nn.Module, part: Any) -> None:
    part.ln2.eps *= 100


def _mask(_model: nn.Module, part: Any) -> None:
    part.attn.transposed = True


def _scale(_model: nn.Module, part: Any) -> None:
    part.attn.scale *= 1.25


def _bf16(_model: nn.Module, part: Any) -> None:
    part.fc2.__class__ = InBfloat16


def _gelu(_model: nn.Module, part: Any) -> None:
    part.act = nn.GELU(approximate="tanh")


def _residual(_model: nn.Module, part: Any) -> None:
    part.residual = False


@torch.no_grad()
def plant(name: str, model: nn.Module, block: str) -> dict[str, Any]:
    """Plant a difference; return settings for the training loop."""
    in_loop = {"seed": {"seed": 5}, "rate": {"rate": (block, 3.0)}}
    if name in in_loop:
        return in_loop[name]
    in_model = {
        "epsilon": _epsilon, "mask": _mask, "scale": _scale, "bf16": _bf16, "gelu": _gelu, "buffer": _stale,
        "residual": _residual, "swap": _swap,
    }  # fmt: skip
    in_model[name](model, model.get_submodule(block))
    return {}


def _stale(model: Any, part: Any) -> None:
    if hasattr(model, "rope"):
        model.rope.cos.mul_(0.99)
    else:
        part.ln1.register_forward_pre_hook(_old_mean)


def _old_mean(norm: Any, _args: Any) -> None:
    norm.running_mean.fill_(0.25)


def _swap(model: nn.Module, part: Any) -> None:
    other = model.get_submodule("blocks.2")
    a, b = (next(p for p in m.parameters() if p.dim() > 1) for m in (part, other))
    kept = a.clone()
    a.copy_(b)
    b.copy_(kept)


def record(
    out: Path, case: Case, difference: str | None = None, *, steps: int = 2, threads: int = 1, **settings: Any
) -> Path:
    """Train a little, recording; return the run folder."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = case.make()
    loop = plant(difference, model, case.block) if difference else {}
    generator = torch.Generator().manual_seed(1)
    named = dict(model.named_parameters())
    chosen, factor = loop.get("rate", ("?", 1.0))
    groups = [[p for n, p in named.items() if n.startswith(chosen) == flag] for flag in (False, True)]
    optimizer = torch.optim.AdamW(
        [{"params": ps, "lr": 1e-3 * f} for ps, f in zip(groups, (1.0, factor), strict=True) if ps], lr=1e-3
    )
    torch.manual_seed(loop.get("seed", 3))
    torch.set_num_threads(threads)
    try:
        with bw.Recorder(model, out=out, **settings) as recorder:
            for _ in range(steps):
                case.loss(model, generator).backward()
                optimizer.step()
                optimizer.zero_grad()
    finally:
        torch.set_num_threads(1)
    assert recorder.folder is not None
    return Path(recorder.folder)
