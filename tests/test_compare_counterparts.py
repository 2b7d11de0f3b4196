"""Which operator is whose counterpart, where a run has more of them: beside another kernel, micro-batches, a rewrite."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from extent import chosen
from ranks import forked
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


class Whole(nn.Module):
    """Two layers and a norm between them, as modules or as functions of parameters that have other names."""

    def __init__(self, *, functional: bool) -> None:
        super().__init__()
        first, second = nn.Linear(16, 32), nn.Linear(32, 4)
        self.functional = functional
        if functional:
            self.w_in, self.b_in = first.weight, first.bias
            self.gamma, self.beta = nn.Parameter(torch.ones(32)), nn.Parameter(torch.zeros(32))
            self.w_out, self.b_out = second.weight, second.bias
        else:
            self.fc1, self.norm, self.fc2 = first, nn.LayerNorm(32), second

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.functional:
            return self.fc2(self.norm(torch.tanh(self.fc1(x))))
        h = torch.tanh(torch.einsum("bi,oi->bo", x, self.w_in) + self.b_in)
        mean = h.mean(-1, keepdim=True)
        variance = ((h - mean) ** 2).mean(-1, keepdim=True)
        h = (h - mean) / torch.sqrt(variance + 1e-5) * self.gamma + self.beta
        return F.linear(h, self.w_out, self.b_out)


def classified(out: Path, *, functional: bool, scale: float = 1.0, content: str = "stats") -> Path:
    torch.manual_seed(0)
    model = Whole(functional=functional)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(1)
    with bw.Recorder(model, level="mix", out=out, content=content):
        for _ in range(3):
            x, y = torch.randn(16, 16, generator=generator), torch.randint(0, 4, (16,), generator=generator)
            F.cross_entropy(scale * model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    return out


@pytest.mark.parametrize("content", chosen(["stats", "tensors"], ["stats"]))
def test_a_functional_rewrite_with_other_names_accuses_nobody(tmp_path: Path, content: str) -> None:
    a = classified(tmp_path / "a", functional=False, content=content)
    report = bw.compare(a, classified(tmp_path / "b", functional=True, content=content))
    assert (report.status, report.suspects) == ("fine", []), report.conclusion
    assert "have no counterpart" in report.conclusion
    other = bw.compare(a, classified(tmp_path / "c", functional=True, scale=1.1, content=content))
    assert other.status != "fine", other.conclusion


def q_learned(out: Path, *, detached: bool) -> Path:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 4))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(1)
    with bw.Recorder(model, level="mix", out=out):
        for _ in range(2):
            now, later = torch.randn(2, 8, 6, generator=generator)
            value = model(later).max(-1).values
            target = 0.9 * (value.detach() if detached else value)
            F.smooth_l1_loss(model(now)[:, 0], target).backward()
            optimizer.step()
            optimizer.zero_grad()
    return out


def test_a_path_that_is_detached_is_named_where_it_begins(tmp_path: Path) -> None:
    report = bw.compare(q_learned(tmp_path / "a", detached=True), q_learned(tmp_path / "b", detached=False))
    assert "smooth_l1_loss_backward#1:backward" in report.conclusion, report.conclusion
    assert "only run B goes backward here" in report.conclusion
    assert "what the other run detaches" in report.conclusion
    assert report.first is not None
    assert "test_compare_counterparts.py" in report.first.line


class Norm(nn.Module):
    """Root mean square, in float32 or as it comes."""

    def __init__(self, *, wide: bool) -> None:
        super().__init__()
        self.weight, self.wide = nn.Parameter(torch.ones(32)), wide

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x.float() if self.wide else x
        return (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype) * self.weight


def test_another_dtype_that_rounding_hides_is_said(tmp_path: Path) -> None:
    a, b = (
        trained(tmp_path / name, Norm(wide=wide), dtype=torch.bfloat16) for name, wide in (("a", True), ("b", False))
    )
    report = bw.compare(a, b)
    assert "layer is computed by pow in float32 in run A and by pow in bfloat16 in run B" in report.conclusion
    assert "cannot be told in that precision" in report.conclusion


def test_a_loss_of_logits_that_were_not_widened_is_named(tmp_path: Path) -> None:
    def recorded(out: Path, *, wide: bool) -> Path:
        torch.manual_seed(0)
        model, draw = LM(nn.Linear(32, 32)).bfloat16(), torch.Generator().manual_seed(1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        with bw.Recorder(model, out=out):
            for _ in range(2):
                tokens = torch.randint(0, TOKENS, (4, 12), generator=draw)
                logits = model(tokens[:, :-1]).flatten(0, 1)
                F.cross_entropy(logits.float() if wide else logits, tokens[:, 1:].flatten()).backward()
                optimizer.step()
                optimizer.zero_grad()
        return out

    report = bw.compare(recorded(tmp_path / "a", wide=True), recorded(tmp_path / "b", wide=False))
    assert report.suspects
    assert "log_softmax#0:forward.out0" in report.conclusion
    assert "computed in float32 against bfloat16" in report.conclusion


SHARED_OUT = """
import sys, torch, torch.distributed as dist
from torch import nn
import bitwitness as bw
dist.init_process_group("gloo")
rank, (out, how) = dist.get_rank(), sys.argv[1:]
torch.manual_seed(0)
model = nn.Sequential(nn.Embedding(32, 16), nn.Flatten(), nn.Linear(64, 8))
ddp = nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
generator = torch.Generator().manual_seed(1)
with bw.Recorder(model if how == "past" else ddp, level="mix", out=out):
    for _ in range(2):
        batch = torch.randint(0, 32, (8, 4), generator=generator)
        mine = batch[rank::2] if how == "interleaved" else batch[4 * rank : 4 * rank + 4]
        (model if how == "past" else ddp)(batch[:4] if how == "same" else mine).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
dist.destroy_process_group()
"""


@pytest.mark.ranks
def test_a_batch_that_ranks_share_out_otherwise_is_the_same_batch(tmp_path: Path) -> None:
    script = tmp_path / "job.py"
    script.write_text(SHARED_OUT)
    for how in ("contiguous", "interleaved", "same"):
        done = forked(2, [str(script), str(tmp_path / how), how], tmp_path / f"logs_{how}")
        assert done.code == 0, done
    report = bw.compare(tmp_path / "contiguous", tmp_path / "interleaved")
    assert report.status == "fine", report.conclusion
    assert "the ranks share the batch out otherwise, and read the same samples together" in report.notes
    other = bw.compare(tmp_path / "contiguous", tmp_path / "same")
    assert "(rank 1, step 0): input in0 differs" in other.conclusion


PAST = """
import sys, torch, torch.distributed as dist
from torch import nn
dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=0, world_size=1)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
ddp = nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
with torch.no_grad():
    model(torch.zeros(1, 8))
for _ in range(2):
    (model if sys.argv[2] == "past" else ddp)(torch.randn(4, 8)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    model.eval()(torch.zeros(1, 8))
    model.train()
"""


@pytest.mark.parametrize("how", ["past", "through"])
def test_a_model_that_is_trained_past_its_wrapper_is_recorded(tmp_path: Path, how: str) -> None:
    script = tmp_path / "train.py"
    script.write_text(PAST)
    run = tmp_path / "run"
    command = [
        sys.executable,
        "-m",
        "bitwitness",
        "record",
        "--out",
        str(run),
        str(script),
        str(tmp_path / "init"),
        how,
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert f"recorded in {run}" in done.stderr
    assert not (tmp_path / "run-2").exists()
