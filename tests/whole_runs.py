"""Small trainings with one thing about the whole run turned, for `tests/test_whole_runs.py`."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import bitwitness as bw

V, D, T = 31, 16, 8


class Block(nn.Module):
    """Pre-norm attention and MLP."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(D), nn.LayerNorm(D)
        self.qkv, self.o = nn.Linear(D, 3 * D), nn.Linear(D, D)
        self.f1, self.f2, self.drop = nn.Linear(D, 4 * D), nn.Linear(4 * D, D), nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return [B, T, D]."""
        q, k, v = (t.view(*x.shape[:2], 2, -1).transpose(1, 2) for t in self.qkv(self.n1(x)).split(D, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(x.shape)
        x = x + self.drop(self.o(y))
        return x + self.drop(self.f2(F.gelu(self.f1(self.n2(x)))))


class GPT(nn.Module):
    """Two blocks between an embedding and a head."""

    def __init__(self, dropout: float = 0.0, *, tied: bool = False, rolled: int = 0) -> None:
        super().__init__()
        self.tok, self.pos = nn.Embedding(V, D), nn.Embedding(T, D)
        self.b = nn.ModuleList(Block(dropout) for _ in range(2))
        self.n, self.head, self.rolled = nn.LayerNorm(D), nn.Linear(D, V, bias=False), rolled
        nn.init.normal_(self.tok.weight, std=0.1)
        with torch.no_grad():
            self.head.weight.copy_(self.tok.weight)
        if tied:
            self.head.weight = self.tok.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return logits."""
        place = self.pos.weight[: x.shape[1]]
        x = self.tok(x) + (place.roll(self.rolled, 0) if self.rolled else place)
        for block in self.b:
            x = block(x)
        return self.head(self.n(x))


class Conv(nn.Module):
    """Two convolutions with BatchNorm and max-pooling."""

    def __init__(self) -> None:
        super().__init__()
        self.c1, self.b1, self.c2 = nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6), nn.Conv2d(6, 8, 3, padding=1)
        self.b2, self.pool, self.h = nn.BatchNorm2d(8), nn.MaxPool2d(2), nn.Linear(32, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return logits."""
        x = self.pool(F.relu(self.b1(self.c1(x))))
        return self.h(self.pool(F.relu(self.b2(self.c2(x)))).flatten(1))


class Recurrent(nn.Module):
    """An LSTM."""

    def __init__(self) -> None:
        super().__init__()
        self.tok, self.r, self.head = nn.Embedding(V, D), nn.LSTM(D, D, batch_first=True), nn.Linear(D, V)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return logits."""
        return self.head(self.r(self.tok(x))[0])


class Rewritten(nn.Module):
    """One computation, written in two ways."""

    def __init__(self, kind: str, *, other: bool) -> None:
        super().__init__()
        self.kind, self.other = kind, other
        self.tok, self.l = nn.Embedding(V, D), nn.Linear(D, V)
        self.w1, self.w2 = nn.Parameter(torch.randn(4, D, D) * 0.2), nn.Parameter(torch.randn(4, D, D) * 0.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return logits."""
        return self.l(getattr(self, f"_{self.kind}")(self.tok(x)))

    def _mean(self, h: torch.Tensor) -> torch.Tensor:
        mean = h.sum(1, keepdim=True) / h.shape[1] if self.other else h.mean(1, keepdim=True)
        square = ((h - mean) ** 2).sum(-1, keepdim=True) / D if self.other else ((h - mean) ** 2).mean(-1, keepdim=True)
        return (h - mean) * torch.rsqrt(square + 1e-5)

    def _bmm(self, h: torch.Tensor) -> torch.Tensor:
        w, bias = self.w1[:1].expand(len(h), D, D), self.w2[:1, :1].expand(len(h), 1, D)
        return torch.baddbmm(bias, h, w) if self.other else torch.bmm(h, w) + bias

    def _experts(self, h: torch.Tensor) -> torch.Tensor:
        flat = h.flatten(0, 1)
        weight, chosen = (flat @ self.w1[0, :, :4]).softmax(-1).topk(2, -1)
        if self.other:
            y = torch.einsum("enf,efd->end", F.silu(torch.einsum("nd,edf->enf", flat, self.w1)), self.w2)
            out = torch.einsum("end,ne->nd", y, torch.zeros(len(flat), 4).scatter(1, chosen, weight))
        else:
            out = torch.zeros_like(flat)
            for e in range(4):
                token, k = torch.where(chosen == e)
                y = F.silu(flat[token] @ self.w1[e]) @ self.w2[e]
                out = out.index_add(0, token, y * weight[token, k, None])
        return (flat + out).view(h.shape)

    def _attention(self, h: torch.Tensor) -> torch.Tensor:
        q, k, v = h @ self.w1[0], h @ self.w1[1], h @ self.w1[2]
        if not self.other:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)
        scores = (q @ k.transpose(-1, -2) / D**0.5).masked_fill(torch.ones(T, T).triu(1).bool(), float("-inf"))
        return scores.softmax(-1) @ v

    def _masked(self, h: torch.Tensor) -> torch.Tensor:
        filling = torch.finfo(h.dtype).min
        scores = h @ self.w1[0] @ h.transpose(-1, -2) + torch.full((T, T), filling).triu(1)
        return scores.softmax(-1) @ h

    def _rms(self, h: torch.Tensor) -> torch.Tensor:
        square = h.pow(2).mean(-1, keepdim=True) + 1e-5
        return h / square.sqrt() if self.other else h * torch.rsqrt(square)

    def _gelu(self, h: torch.Tensor) -> torch.Tensor:
        h = h @ self.w1[0] * 4
        return F.relu(h) if self.other else F.gelu(h)


class Grouped(nn.Module):
    """A GroupNorm between an embedding and a head."""

    def __init__(self, groups: int) -> None:
        super().__init__()
        self.tok, self.n, self.l = nn.Embedding(V, D), nn.GroupNorm(groups, D), nn.Linear(D, V)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return logits."""
        return self.l(self.n(self.tok(x).transpose(1, 2)).transpose(1, 2))


class Returning(nn.Module):
    """A GPT that computes its loss by itself, as transformers' models do; ``padded``: samples end at other places."""

    def __init__(self, *, padded: bool = False) -> None:
        super().__init__()
        self.gpt, self.padded = GPT(), padded

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return loss and logits."""
        if self.padded:
            y = y.masked_fill(torch.arange(T) > (x[:, :1] % T), -100)
        logits = self.gpt(x)
        return {"loss": F.cross_entropy(logits.flatten(0, -2), y.flatten()), "logits": logits}


class HandSGD(torch.optim.Optimizer):
    """SGD with momentum, written by a user."""

    def __init__(self, parameters: Any, lr: float, weight_decay: float, momentum: float) -> None:
        super().__init__(parameters, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Step."""
        for group in self.param_groups:
            for p in group["params"]:
                buffer = self.state[p].setdefault("momentum_buffer", torch.zeros_like(p))
                buffer.mul_(group["momentum"]).add_(p.grad)
                p.add_(buffer, alpha=-group["lr"])


Change = Callable[[Any], Any]


@dataclass(frozen=True)
class Training:
    """A training; each field is one thing that two runs may differ in."""

    make: Callable[[], nn.Module] = GPT
    steps: int = 2
    first: int = 0
    optimizer: str = "AdamW"
    lr: float = 1e-2
    decay: float = 0.0
    warm_up: int = 0
    maximize: bool = False
    clip: float | None = None
    zero: bool = True
    batch: int = 8
    micros: int = 1
    divide: bool = True
    scale: float = 1.0
    reduction: str = "mean"
    autocast: bool = False
    scaler: float = 0.0  # the first scale of a gradient scaler, with float16
    seed: int = 3
    mkldnn: bool = True
    prepare: Change | None = None
    edit: Change | None = None
    again: bool = False
    mean_of_sum: bool = False
    unscale: bool = False
    between: Change | None = None
    data: Change | None = None
    saved: dict[str, Any] | None = None
    lost: bool = False

    def record(self, out: Path, **settings: Any) -> Path:
        """Train, recording; return the run folder."""
        torch.manual_seed(0)
        model = self.make()
        if self.prepare is not None:
            self.prepare(model)
        optimizer = (HandSGD if self.optimizer == "HandSGD" else getattr(torch.optim, self.optimizer))(
            [p for p in model.parameters() if p.requires_grad],
            lr=self.lr,
            weight_decay=self.decay,
            **({"maximize": True} if self.maximize else {}),
            **({"momentum": 0.9} if "SGD" in self.optimizer else {}),
        )
        if self.first and self.saved:
            model.load_state_dict(self.saved["model"])
            if not self.lost:
                optimizer.load_state_dict(self.saved["optimizer"])
        rates = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda n: min(1.0, (n + self.warm_up) / 4) if self.warm_up else 1.0
        )
        torch.manual_seed(self.seed)
        with self._kernels(), bw.Recorder(model, out=out, **settings) as recorder:
            for x, y in self._batches()[self.first :]:
                self._step(model, optimizer, x, y)
                if self.between is not None:
                    self.between(model)
                rates.step()
        if self.saved is not None and not self.first:
            self.saved.update(model=copy.deepcopy(model.state_dict()), optimizer=copy.deepcopy(optimizer.state_dict()))
        assert recorder.folder is not None
        return Path(recorder.folder)

    @contextmanager
    def _kernels(self) -> Iterator[None]:
        before = torch.backends.mkldnn.enabled
        torch._C._set_mkldnn_enabled(self.mkldnn)  # flags() of torch 2.13 warns of graphics cards that are not there
        try:
            yield
        finally:
            torch._C._set_mkldnn_enabled(before)

    def _rate(self, number: int) -> float:
        return min(1.0, (number + self.warm_up) / 4) if self.warm_up else 1.0

    def _batches(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        generator = torch.Generator().manual_seed(1)
        found = []
        for _ in range(self.first + self.steps):
            if self.make is Conv:
                x, y = torch.randn(self.batch, 3, 8, 8, generator=generator), torch.arange(self.batch)
            else:
                x = torch.randint(0, V, (self.batch, T), generator=generator)
                y = x.roll(-1, 1)
            found.append((x if self.data is None else self.data(x), y))
        return found

    def _step(self, model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor) -> None:
        scaler = torch.amp.GradScaler("cpu", self.scaler, enabled=bool(self.scaler))
        for part, target in zip(x.chunk(self.micros), y.chunk(self.micros), strict=True):
            dtype = torch.float16 if self.scaler else torch.bfloat16
            with torch.autocast("cpu", dtype, enabled=self.autocast or bool(self.scaler)):
                if isinstance(model, Returning):
                    loss = model(part, target)["loss"]
                else:
                    loss = F.cross_entropy(model(part).flatten(0, -2), target.flatten(), reduction=self.reduction)
                    loss = loss / target.numel() if self.mean_of_sum else loss
            scaler.scale(loss * self.scale / (self.micros if self.divide else 1)).backward()
        if self.scaler:
            scaler.unscale_(optimizer)
        if self.unscale:
            for p in model.parameters():
                p.grad.div_(self.scale)
        if self.clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), self.clip)
        if self.edit is not None:
            self.edit(model)
        optimizer.step()
        if self.again:
            optimizer.step()
        if self.zero:
            optimizer.zero_grad()

    def but(self, **changes: Any) -> Training:
        """Return the same training with something changed."""
        return replace(self, **changes)


# -- what is changed -----------------------------------------------------------------------------------------------


def parameter(name: str, change: Change) -> Change:
    """Return what changes one parameter of a model."""

    def prepare(model: nn.Module) -> None:
        with torch.no_grad():
            p = dict(model.named_parameters())[name]
            p.copy_(change(p.detach().clone()))

    return prepare


def gradient(name: str, factor: float) -> Change:
    """Return what multiplies one parameter's gradient between backward and step."""
    return lambda model: dict(model.named_parameters())[name].grad.mul_(factor)


def hooked(name: str, factor: float) -> Change:
    """Return what hooks one parameter, so that its gradient is multiplied in the backward."""
    return lambda model: dict(model.named_parameters())[name].register_hook(lambda g: g * factor)


def unseen(model: nn.Module) -> None:
    """Divide all gradients by 100 where torch counts no version."""
    for p in model.parameters():
        if p.grad is not None:
            p.grad.data.mul_(0.01)


def clip_by_hand(most: float) -> Change:
    """Return what clips gradients as `clip_grad_norm_` does, without it."""

    def clip(model: nn.Module) -> None:
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(g) for g in gradients]))
        for gradient in gradients:
            gradient.mul_(torch.clamp(most / (norm + 1e-6), max=1.0))

    return clip


def one_ulp(model: nn.Module) -> None:
    """Move half of all weights to the next number."""
    generator = torch.Generator().manual_seed(9)
    with torch.no_grad():
        for p in model.parameters():
            up = torch.rand(p.shape, generator=generator) < 0.5
            p.copy_(torch.where(up, torch.nextafter(p, torch.full_like(p, 9.0)), p))


def larger_row(w: torch.Tensor) -> torch.Tensor:
    """Return a weight of which one row is half as large again."""
    w[7] *= 1.5
    return w
