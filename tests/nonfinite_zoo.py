"""Trainings that stop being finite, each with what is to be said about it; and trainings that look as if and are healthy.

A case's culprit line carries the comment ``# <- here``; its own line number is found in the source.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

STRUCK = 2  # the step at which a case's fault is there


class Custom(torch.autograd.Function):
    """A custom operator whose backward is given."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, how: str) -> torch.Tensor:
        ctx.how = how
        return x * 2

    @staticmethod
    def backward(ctx, grad: torch.Tensor):
        if ctx.how == "zero by zero":
            zero = grad * 0
            return zero / zero, None  # <- zero by zero
        if ctx.how == "inf":
            return torch.full_like(grad, float("inf")), None  # <- inf
        return grad * 2, None


def in_place(h: torch.Tensor) -> torch.Tensor:
    h = h.clone()
    h /= h * 0  # <- in place
    return h


def index_add(h: torch.Tensor, inner: Inner) -> torch.Tensor:
    table = (inner.table * 60000).half()
    return h + table.index_add(0, torch.tensor([0, 0, 1]), table[:3])[:1].to(h.dtype)  # <- index_add


INF = float("inf")
FAULTS: dict[str, Callable[[torch.Tensor, Inner], torch.Tensor]] = {
    "overflow": lambda h, inner: F.linear(h * 200, inner.fc.weight * 1000),  # <- overflow
    "sqrt": lambda h, _: h + (h - h.detach()).square().sqrt(),  # <- sqrt
    "zero by zero": lambda h, _: Custom.apply(h, "zero by zero"),
    "inf": lambda h, _: Custom.apply(h, "inf"),
    "log": lambda h, _: (h * 0).log(),  # <- log
    "hidden log": lambda h, _: torch.where(h > 100, (h * 0).log(), h),  # <- hidden log
    "softmax": lambda h, _: h.masked_fill(torch.ones_like(h, dtype=torch.bool), -INF).softmax(-1),  # <- softmax
    "mask": lambda h, _: h * 0 * torch.where(h > -100, -INF, h),  # <- mask
    "exp": lambda h, _: (h * 0 + 100).exp(),  # <- exp
    "reciprocal": lambda h, _: 1 / (h * 0),  # <- reciprocal
    "normalise": lambda h, _: h / (h - h).sum(-1, keepdim=True),  # <- normalise
    "std": lambda h, _: h + h[:1, :1].std(),  # <- std
    "float8": lambda h, _: h + (h * 1e6).to(torch.float8_e5m2).to(h.dtype),  # <- float8
    "index_add": index_add,
    "in place": lambda h, _: in_place(h),
    "pow": lambda h, _: h + (h * 0).pow(0.5),  # <- pow
    "batch norm": lambda h, inner: inner.norm(h),
}


class Inner(nn.Module):
    """Where the faults are: ``how`` says which; empty for a healthy step."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.fc = nn.Linear(width, width)
        self.norm = nn.BatchNorm1d(width)
        self.table = nn.Parameter(torch.ones(4, width))
        self.how = ""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.fc(x)
        return FAULTS[self.how](h, self) if self.how else h


class Net(nn.Module):
    """``checkpointed``: None, "reentrant" or "plain"."""

    def __init__(self, checkpointed: str | None = None) -> None:
        super().__init__()
        self.embed = nn.Linear(8, 16)
        self.inner = Inner()
        self.head = nn.Linear(16, 4)
        self.checkpointed = checkpointed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.embed(x))
        if self.checkpointed is None:
            h = self.inner(h)
        else:
            h = checkpoint(self.inner, h, use_reentrant=self.checkpointed == "reentrant")
        return self.head(h)


@dataclass(frozen=True)
class Case:
    """``op``, ``module``, ``phase`` and ``kind`` of the one origin; ``mark``: the comment on its line, if it has one."""

    how: str
    op: str
    module: str = "inner"
    phase: str = "forward"
    kind: str = "operator"
    mark: str | None = None
    half: bool = False

    @property
    def line(self) -> str | None:
        """The culprit's place, ``nonfinite_zoo.py:N in``."""
        mark = self.mark or self.how
        found = [
            number
            for number, text in enumerate(inspect.getsource(inspect.getmodule(Case)).splitlines(), 1)
            if text.endswith(f"# <- {mark}")
        ]
        return f"nonfinite_zoo.py:{found[0]} in" if found else None


CASES = [
    Case("overflow", "mm", half=True),
    Case("sqrt", "div", phase="backward"),
    Case("zero by zero", "div", phase="backward"),
    Case("inf", "full_like", phase="backward"),
    Case("log", "log"),
    Case("hidden log", "div", phase="backward"),
    Case("softmax", "_softmax"),
    Case("mask", "mul"),
    Case("exp", "exp"),
    Case("reciprocal", "reciprocal"),
    Case("normalise", "div"),
    Case("std", "std"),
    Case("float8", "_to_copy"),
    Case("index_add", "index_add"),
    Case("in place", "div_"),
    Case("pow", "pow", phase="backward"),
]


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs [6, 8] and labels [6]."""
    generator = torch.Generator().manual_seed(step)
    return torch.randn(6, 8, generator=generator), torch.randint(0, 4, (6,), generator=generator)


def train(net: Net, optimizer: torch.optim.Optimizer, how: str, *, half: bool = False, steps: int = 4) -> None:
    """Train with the loss outside the model; the fault is there at one step."""
    for step in range(steps):
        x, y = batch(step)
        net.inner.how = how if step == STRUCK else ""
        with torch.autocast("cpu", torch.float16, enabled=half):
            loss = F.cross_entropy(net(x).float(), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def log_outside(net: Net, optimizer: torch.optim.Optimizer, step: int) -> None:
    x, _ = batch(step)
    p = net(x).softmax(-1)
    if step == STRUCK:
        p = p * 0
    loss = -p.log().mean()  # <- log outside
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def bad_batch(net: Net, optimizer: torch.optim.Optimizer, step: int) -> None:
    x, y = batch(step)
    if step == STRUCK:
        x[3, 2] = float("nan")
    optimizer.zero_grad()
    F.cross_entropy(net(x), y).backward()
    optimizer.step()


def bad_label(net: Net, optimizer: torch.optim.Optimizer, step: int) -> None:
    x, _ = batch(step)
    target = torch.zeros(6, 4)
    if step == STRUCK:
        target[1, 1] = float("inf")
    optimizer.zero_grad()
    F.mse_loss(net(x), target).backward()
    optimizer.step()


def ignored_labels(net: Net, optimizer: torch.optim.Optimizer, step: int) -> None:
    x, y = batch(step)
    if step == STRUCK:
        y[:] = -100
    optimizer.zero_grad()
    F.cross_entropy(net(x), y).backward()  # <- ignored labels
    optimizer.step()


def bad_parameter(net: Net, optimizer: torch.optim.Optimizer, step: int) -> None:
    if step == STRUCK:
        with torch.no_grad():
            net.inner.fc.weight[1, 1] = float("nan")
    x, y = batch(step)
    optimizer.zero_grad()
    F.cross_entropy(net(x), y).backward()
    optimizer.step()


def bad_buffer(net: Net, optimizer: torch.optim.Optimizer, step: int) -> None:
    net.inner.how = "batch norm"
    net.inner.norm.eval()
    if step == STRUCK:
        net.inner.norm.running_var[3] = float("nan")
    x, y = batch(step)
    optimizer.zero_grad()
    F.cross_entropy(net(x), y).backward()
    optimizer.step()


LOOPS: list[tuple[Callable[..., None], Case]] = [
    (log_outside, Case("", "log", ".", mark="log outside")),
    (bad_batch, Case("", "input", ".", kind="batch")),
    (bad_label, Case("", "input", ".", kind="batch")),
    (ignored_labels, Case("", "nll_loss_forward", ".", mark="ignored labels")),
    (bad_parameter, Case("", "weight", "inner.fc", phase="param", kind="parameter")),
    (bad_buffer, Case("", "running_var", "inner.norm", phase="param", kind="buffer")),
]
