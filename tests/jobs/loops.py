"""Training loops as people write them, each small and deterministic.

Each takes ``watch(model, optimizers)``, which returns the context in which to train, and returns a line of bits a step.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from scenarios import bits
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

Watch = Callable[[nn.Module, Any], AbstractContextManager[Any]]
STEPS = 9
_DATA = torch.Generator()


class Net(nn.Module):
    """A small regressor that returns its loss; ``act`` is what stands in the middle."""

    def __init__(
        self, act: Callable[[torch.Tensor], torch.Tensor] = torch.tanh, *, reentrant: bool | None = None
    ) -> None:
        super().__init__()
        self.up, self.mid, self.down = nn.Linear(8, 24), nn.Linear(24, 24), nn.Linear(24, 2)
        self.act = act
        self.reentrant = reentrant

    def body(self, x):
        return self.act(self.mid(self.act(self.up(x))))

    def forward(self, x, y):
        kept = self.reentrant is None
        hidden = self.body(x) if kept else checkpoint(self.body, x.requires_grad_(), use_reentrant=self.reentrant)
        return (self.down(hidden) - y).square().mean()


def draw(rows: int = 6) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(rows, 8, generator=_DATA), torch.randn(rows, 2, generator=_DATA)


def seed() -> None:
    torch.manual_seed(3)
    _DATA.manual_seed(5)


def plain(
    watch: Watch, *, build=Net, make=None, steps: int = STEPS, between=None, before_backward=None, after_backward=None
):
    """The loop most people write, with holes for what they add to it."""
    seed()
    net = build()
    optimizer = (make or (lambda p: torch.optim.AdamW(p, lr=1e-2)))(net.parameters())
    lines = []
    with watch(net, optimizer):
        for step in range(steps):
            loss = net(*draw())
            if before_backward is not None:
                before_backward(net, optimizer, step)
            loss.backward()
            if after_backward is not None:
                after_backward(net, optimizer, step)
            optimizer.step()
            if before_backward is None:
                optimizer.zero_grad()
            lines.append(bits(net, [loss.item()], optimizer))
            if between is not None:
                between(net, optimizer, step)
    return lines


def zero_before_backward(watch: Watch):
    return plain(watch, before_backward=lambda net, optimizer, _: optimizer.zero_grad())


def zero_in_place_before_backward(watch: Watch):
    return plain(watch, before_backward=lambda net, optimizer, _: net.zero_grad(set_to_none=False))


def none_by_hand(watch: Watch):
    def clear(net, _optimizer, _step):
        for p in net.parameters():
            p.grad = None

    return plain(watch, before_backward=clear)


def edited_gradients(watch: Watch):
    def edit(net, _optimizer, _step):
        for p in net.parameters():
            p.grad.div_(3.0)

    return plain(watch, after_backward=edit)


def replaced_gradients(watch: Watch):
    def replace(net, _optimizer, _step):
        for p in net.parameters():
            p.grad = p.grad * 0.5 + 0.01

    return plain(watch, after_backward=replace)


def quietly_edited_gradients(watch: Watch):
    """Through ``.data``, which no version counter notices."""

    def edit(net, _optimizer, _step):
        for p in net.parameters():
            p.grad.data.mul_(0.5)

    return plain(watch, after_backward=edit)


def skipped_where_not_finite(watch: Watch):
    seed()
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    lines = []
    with watch(net, optimizer):
        for step in range(STEPS + 1):
            x, y = draw()
            if step == 4:
                x = x * 1e30  # an overflow in the data
            loss = net(x, y * (1e30 if step == 4 else 1.0))
            loss.backward()
            norm = nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            lines.append(bits(net, [loss.item()], optimizer))
            if not torch.isfinite(norm):
                optimizer.zero_grad()
                continue
            optimizer.step()
            optimizer.zero_grad()
    return lines


def adversarial(watch: Watch):
    """A GAN: the generator's loss goes through the discriminator, whose gradients of it are thrown away."""
    seed()
    maker, judge = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 8)), nn.Sequential(
        nn.Linear(8, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1)
    )  # fmt: skip
    first, second = torch.optim.Adam(maker.parameters(), lr=1e-3), torch.optim.Adam(judge.parameters(), lr=1e-3)
    lines = []
    with watch(maker, first), watch(judge, second):
        for _ in range(STEPS):
            noise, (real, _y) = torch.randn(6, 4, generator=_DATA), draw()
            first.zero_grad()
            cheat = F.softplus(-judge(maker(noise))).mean()
            cheat.backward()
            first.step()
            second.zero_grad()
            fake = maker(noise).detach()
            loss = F.softplus(-judge(real)).mean() + F.softplus(judge(fake)).mean()
            loss.backward()
            second.step()
            lines.append(bits(maker, [cheat.item()], first) + bits(judge, [loss.item()], second))
    return lines


def gradient_penalty(watch: Watch):
    seed()
    judge = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    optimizer = torch.optim.Adam(judge.parameters(), lr=1e-3)
    lines = []
    with watch(judge, optimizer):
        for _ in range(STEPS):
            x = draw()[0].requires_grad_()
            score = judge(x)
            (slope,) = torch.autograd.grad(score.sum(), x, create_graph=True)
            loss = score.mean() + (slope.norm(dim=1) - 1).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            lines.append(bits(judge, [loss.item()], optimizer))
    return lines


def closure(watch: Watch):
    seed()
    net = Net()
    optimizer = torch.optim.LBFGS(net.parameters(), lr=0.1, max_iter=3)
    lines = []
    with watch(net, optimizer):
        for _ in range(STEPS):
            batch = draw()

            def evaluate(batch=batch):
                optimizer.zero_grad()
                loss = net(*batch)
                loss.backward()
                return loss

            loss = optimizer.step(evaluate)
            lines.append(bits(net, [loss.item()], optimizer))
    return lines


def optimizer_in_backward(watch: Watch):
    seed()
    net = Net()
    optimizers = {p: torch.optim.SGD([p], lr=0.05, momentum=0.9) for p in net.parameters()}

    def use(p: torch.Tensor) -> None:
        optimizers[p].step()
        optimizers[p].zero_grad()

    handles = [p.register_post_accumulate_grad_hook(use) for p in net.parameters()]
    lines = []
    with watch(net, list(optimizers.values())):
        for _ in range(STEPS):
            loss = net(*draw())
            loss.backward()
            lines.append(bits(net, [loss.item()], next(iter(optimizers.values()))))
    for handle in handles:
        handle.remove()
    return lines


def reentrant_checkpointing(watch: Watch):
    return plain(watch, build=lambda: Net(F.gelu, reentrant=True))


def checkpointing(watch: Watch):
    return plain(watch, build=lambda: Net(lambda x: F.dropout(F.gelu(x), 0.1), reentrant=False))


def muon_beside_adamw(watch: Watch):
    seed()
    net = Net()
    matrices = [p for p in net.parameters() if p.ndim == 2]
    first = torch.optim.Muon(matrices, lr=0.02)
    second = torch.optim.AdamW([p for p in net.parameters() if p.ndim != 2], lr=1e-2)
    lines = []
    with watch(net, [first, second]):
        for _ in range(STEPS):
            loss = net(*draw())
            loss.backward()
            first.step()
            second.step()
            first.zero_grad()
            second.zero_grad()
            lines.append(bits(net, [loss.item()], first) + bits(net, [loss.item()], second))
    return lines


def foreach(watch: Watch):
    return plain(watch, make=lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=True))


def one_by_one(watch: Watch):
    return plain(watch, make=lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=False))


def fused(watch: Watch):
    return plain(watch, make=lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True))


def scaler_that_skips(watch: Watch):
    """The first loss scale overflows float16, so that the scaler skips some steps."""
    seed()
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**22, growth_interval=3)
    lines = []
    with watch(net, optimizer):
        for _ in range(STEPS + 6):
            with torch.autocast("cpu", dtype=torch.float16):
                loss = net(*draw())
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            lines.append(bits(net, [loss.item(), scaler.get_scale()], optimizer))
    return lines


def evaluation_between(watch: Watch):
    def evaluate(net, _optimizer, _step):
        with torch.no_grad():
            net(*draw(3))
        net.eval()
        net(*draw(3))
        net.train()

    return plain(watch, between=evaluate, build=lambda: Net(lambda x: F.dropout(torch.tanh(x), 0.2)))


def moving_average(watch: Watch):
    averages = []

    def average(net, _optimizer, step):
        if step == 0:
            averages.append(torch.optim.swa_utils.AveragedModel(net))
            averages.append(copy.deepcopy(net))
        averages[0].update_parameters(net)
        with torch.no_grad():
            averages[0](*draw(3))
            averages[1](*draw(3))

    return plain(watch, between=average)


class Sparse(nn.Module):
    """Looks its rows up with sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(40, 8, sparse=True)
        self.down = nn.Linear(8, 2)

    def forward(self, x, y):
        chosen = (x.abs() * 20).long().clamp(max=39)
        return (self.down(torch.tanh(self.rows(chosen).mean(1))) - y).square().mean()


def sparse_gradients(watch: Watch):
    return plain(watch, build=Sparse, make=lambda p: torch.optim.SGD(p, lr=0.1))


class Frozen(nn.Module):
    """Some of it frozen, some of it never used, one weight used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net()
        self.net.up.requires_grad_(False)
        self.unused = nn.Linear(3, 3)
        self.twin = nn.Linear(24, 24)
        self.twin.weight = self.net.mid.weight

    def forward(self, x, y):
        return self.net(x, y) + 0.1 * self.twin(torch.ones(1, 24)).square().mean()


def frozen_unused_shared(watch: Watch):
    return plain(watch, build=Frozen)


def spectral_norm(watch: Watch):
    def build():
        net = Net()
        parametrizations.spectral_norm(net.mid)
        parametrizations.weight_norm(net.down)
        return net

    return plain(watch, build=build)


class Doubling(torch.autograd.Function):
    """A custom function with a custom backward."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return 2 * torch.tanh(x)

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return 2 * grad * (1 - torch.tanh(x).square())


def custom_function(watch: Watch):
    return plain(watch, build=lambda: Net(Doubling.apply))


def loader_workers(watch: Watch):
    seed()
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    data = TensorDataset(torch.randn(36, 8, generator=_DATA), torch.randn(36, 2, generator=_DATA))
    lines = []
    with watch(net, optimizer):
        for x, y in DataLoader(data, batch_size=3, num_workers=2, multiprocessing_context="fork"):
            loss = net(x, y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            lines.append(bits(net, [loss.item()], optimizer))
    return lines


def clipped_twice_and_norm_asked(watch: Watch):
    def clip(net, _optimizer, _step):
        nn.utils.clip_grad_value_(net.parameters(), 0.5)
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)

    return plain(watch, after_backward=clip)
