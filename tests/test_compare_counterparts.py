"""Which operator is whose counterpart, where a run has more of them: beside another kernel, micro-batches, a rewrite."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import bitwitness as bw

TOKENS = 48


class Attention(nn.Module):
    """Grouped-query attention: torch's kernel or written out, its heads repeated side by side or one after the other."""

    def __init__(self, *, eager: bool, tiled: bool) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = nn.Linear(32, 32), nn.Linear(32, 16), nn.Linear(32, 16), nn.Linear(32, 32)
        self.eager, self.tiled = eager, tiled

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, _ = x.shape
        q, k, v = (f(x).view(b, t, -1, 8).transpose(1, 2) for f in (self.q, self.k, self.v))
        if self.tiled:
            k, v = k.repeat(1, 2, 1, 1), v.repeat(1, 2, 1, 1)
        else:
            k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
        if self.eager:
            scores = q @ k.transpose(-2, -1) / 8**0.5 + torch.full((t, t), float("-inf")).triu(1)
            y = scores.softmax(-1) @ v
        else:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o(y.transpose(1, 2).flatten(2))


class LM(nn.Module):
    """An embedding, one layer with a residual, a head."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.embed, self.layer, self.head = nn.Embedding(TOKENS, 32), layer, nn.Linear(32, TOKENS)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        return self.head(x + self.layer(x))


def trained(
    out: Path, layer: nn.Module, *, parts: int = 1, smoothing: float = 0.0, dtype: torch.dtype = torch.float32
) -> Path:
    """Record two steps, in some micro-batches that are weighed by their size."""
    torch.manual_seed(0)
    model = LM(layer).to(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(1)
    with bw.Recorder(model, level="mix", out=out):
        for _ in range(2):
            tokens = torch.randint(0, TOKENS, (8, 13), generator=generator)
            for part in tokens.chunk(parts):
                out_ = model(part[:, :-1]).float()
                loss = F.cross_entropy(out_.flatten(0, 1), part[:, 1:].flatten(), label_smoothing=smoothing)
                (loss * len(part) / len(tokens)).backward()
            optimizer.step()
            optimizer.zero_grad()
    return out


def attention(out: Path, *, eager: bool = False, tiled: bool = False, **how: Any) -> Path:
    torch.manual_seed(3)
    return trained(out, Attention(eager=eager, tiled=tiled), **how)


def test_another_loss_beside_micro_batches_is_not_said_to_be_weighed_otherwise(tmp_path: Path) -> None:
    a = attention(tmp_path / "a")
    report = bw.compare(a, attention(tmp_path / "b", parts=2, smoothing=0.1))
    assert report.first is not None
    assert report.first.reason == "loss"
    assert "the loss is made by log_softmax, nll_loss in run A and by log_softmax, nll_loss, sum" in report.conclusion
    assert "weigh" not in report.conclusion
    assert "test_compare_counterparts.py" in report.first.line
    assert bw.compare(a, attention(tmp_path / "c", parts=2)).status == "fine"


def test_a_scale_is_not_taken_for_one_of_another_use(tmp_path: Path) -> None:
    """Run B's loss multiplies, too, inside cross_entropy, and before the script does."""
    report = bw.compare(attention(tmp_path / "a"), attention(tmp_path / "b", smoothing=0.1))
    assert "/mul#" not in report.conclusion.partition(":forward")[0], report.conclusion
    assert "its inputs agree and its result does not" not in report.conclusion
    assert "only run B has it" in report.conclusion


def test_heads_that_are_repeated_otherwise_are_named_beside_another_kernel(tmp_path: Path) -> None:
    a = attention(tmp_path / "a")
    report = bw.compare(a, attention(tmp_path / "b", eager=True, tiled=True))
    assert "layer/Attention: its inputs agree and its result does not" in report.conclusion
    assert "by repeat, repeat" in report.conclusion
    assert "layer.k/" not in report.conclusion  # nor is a copy of the query held against one of the keys
    assert bw.compare(a, attention(tmp_path / "c", eager=True)).status == "fine"


class Mixture(nn.Module):
    """Two of four experts a token; the router's probabilities in float32, or in the model's own dtype."""

    def __init__(self, *, coarse: bool) -> None:
        super().__init__()
        self.router = nn.Linear(32, 4, bias=False)
        self.experts = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))
        self.coarse = coarse

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.reshape(-1, 32)
        logits = self.router(flat)
        if self.coarse:
            weights = torch.exp(logits) / torch.exp(logits).sum(-1, keepdim=True)
        else:
            weights = logits.softmax(-1, dtype=torch.float32)
        weights, index = weights.topk(2, -1)
        weights = (weights / weights.sum(-1, keepdim=True)).to(x.dtype)
        out = torch.zeros_like(flat)
        for i, expert in enumerate(self.experts):
            token, slot = (index == i).nonzero(as_tuple=True)
            out.index_add_(0, token, expert(flat[token]) * weights[token, slot, None])
        return out.view_as(x)


def mixture(out: Path, *, coarse: bool) -> Path:
    torch.manual_seed(5)
    layer = Mixture(coarse=coarse)
    with torch.no_grad():
        layer.router.weight *= 0.1  # so that some experts are nearly as probable as others
    return trained(out, layer, dtype=torch.bfloat16)


def test_a_choice_that_rounding_tips_is_named_and_not_what_follows(tmp_path: Path) -> None:
    report = bw.compare(mixture(tmp_path / "a", coarse=False), mixture(tmp_path / "b", coarse=True))
    assert "layer/topk#0:forward.out1" in report.conclusion
    assert "chooses otherwise" in report.conclusion
    assert (
        "by _to_copy, _softmax in float32 in run A and by exp, exp, sum, div in bfloat16 in run B" in report.conclusion
    )
