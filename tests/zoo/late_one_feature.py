"""One training in many variants, by seed: each switches one thing on in the middle. `make campaign` goes through them all."""

import collections
import contextlib
import copy
import functools
import os
import queue
import random
import threading
import types
import warnings

import numpy as np
import torch
import torch.nn.functional as F
from bits import fingerprint
from torch import nn
from torch.nn.utils import parametrizations, prune
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

SEED = int(os.environ.get("ZOO_SEED", "0"))
times = int(os.environ.get("ZOO_TIMES", "1"))
torch.manual_seed(SEED)
LATE = 8
SEEN = collections.Counter()
BANK = collections.deque(maxlen=4)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 5)
        self.inside = None
        self.space = types.SimpleNamespace(n=0)

    def forward(self, x):
        h = F.gelu(self.norm(self.a(x)))
        if self.inside is not None:
            h = self.inside(self, h)
        return self.b(h)


class Counting(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 1.0

    @staticmethod
    def backward(ctx, g):
        SEEN["backward"] += 1
        return g * (1 + 0.01 * (SEEN["backward"] % 3))


class Functions(TorchFunctionMode):
    def __torch_function__(self, func, kinds, args=(), kwargs=None):
        SEEN["functions"] += func is F.gelu
        return func(*args, **(kwargs or {}))


class Operators(TorchDispatchMode):
    def __torch_dispatch__(self, func, kinds, args=(), kwargs=None):
        SEEN["operators"] += func is torch.ops.aten.gelu.default
        return func(*args, **(kwargs or {}))


def counted(net, h):
    net.space.n += 1
    return h * (1 + 0.001 * net.space.n)


def banked(net, h):
    BANK.append(h.detach().mean(0))
    return h + 0.1 * torch.stack(list(BANK)).mean(0)


def drawn(rng):
    return lambda net, h: h * (1 + 0.1 * float(rng.random()))


def warned(net, h):
    warnings.warn("old", FutureWarning)
    return h


def thread_inside(net, h):
    out = []
    worker = threading.Thread(target=lambda: out.append(h.detach().mean()))
    worker.start()
    worker.join()
    return h + out[0]


@functools.lru_cache
def table(n):
    return torch.linspace(0.9, 1.1, n)


def saliency(net):
    net.requires_grad_(False)
    x = torch.ones(4, 8, requires_grad=True)
    torch.autograd.grad(net(x).sum(), x)
    net.requires_grad_(True)


def inside(f):
    return lambda t: setattr(t.net, "inside", f)


def every(f):
    return lambda t: t.every.append(f)


def context(make):
    return lambda t: setattr(t, "context", make)


def loss(f):
    return lambda t: setattr(t, "loss", f)


def edit(f):
    return lambda t: setattr(t, "edit", f)


def patched(t):
    def forward(self, x):
        SEEN["patched"] += 1
        return self.b(F.relu(self.norm(self.a(x)))) * (1 + 0.001 * SEEN["patched"])

    t.net.forward = types.MethodType(forward, t.net)


def forward_hook(t):
    t.net.b.register_forward_hook(lambda m, a, out: out * 1.1)


def gradient_hook(t):
    t.net.a.weight.register_hook(lambda g: g.clamp(-0.01, 0.01))


def backward_hook(t):
    t.net.b.register_full_backward_hook(lambda m, gi, go: SEEN.update(hook=1))


def spectral(t):
    parametrizations.spectral_norm(t.net.b)
    t.opt = torch.optim.SGD(t.net.parameters(), lr=0.05)


def pruned(t):
    prune.l1_unstructured(t.net.b, "weight", 0.3)
    t.opt = torch.optim.SGD(t.net.parameters(), lr=0.05)


def grown(t):
    t.net.b = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 5))
    t.opt = torch.optim.SGD(t.net.parameters(), lr=0.05)


def frozen(t):
    t.net.a.requires_grad_(False)


def optimizer_exchanged(t):
    t.opt = torch.optim.AdamW(t.net.parameters(), lr=1e-3)


def copied(t):
    t.net = copy.deepcopy(t.net)
    t.opt = torch.optim.SGD(t.net.parameters(), lr=0.05)


def teacher(t):
    t.teacher = copy.deepcopy(t.net).eval().requires_grad_(False)
    t.loss = lambda t, x, y: (
        F.kl_div(t.net(x).log_softmax(1), t.teacher(x).softmax(1), reduction="batchmean") + F.cross_entropy(t.net(x), y)
    )


def ema(t):
    t.average = copy.deepcopy(t.net)

    def step(t):
        with torch.no_grad():
            for a, b in zip(t.average.parameters(), t.net.parameters()):
                a.lerp_(b, 0.1)

    t.every.append(step)


def evaluate_in_training_mode(t):
    with torch.no_grad():
        t.net(torch.ones(4, 8))


def vat(t, x, y):
    d = torch.randn_like(x).mul_(1e-2).requires_grad_()
    (g,) = torch.autograd.grad(F.cross_entropy(t.net(x + d), y), d)
    return F.cross_entropy(t.net(x + 0.1 * F.normalize(g)), y)


def views(t, x, y):
    a, b = t.net(x), t.net(x + 0.1 * torch.randn_like(x))
    return F.cross_entropy(a, y) + F.mse_loss(a.softmax(1), b.softmax(1))


def target(t, x, y):
    return F.mse_loss(t.net(x), t.net(x + 1).detach())


def mixed(t, x, y):
    w = float(np.random.default_rng(SEEN["mix"]).beta(0.5, 0.5))
    SEEN["mix"] += 1
    return F.cross_entropy(t.net(w * x + (1 - w) * x.flip(0)), y)


def l1(t, x, y):
    return F.cross_entropy(t.net(x), y) + 1e-3 * sum(p.abs().sum() for p in t.net.parameters())


def inplace(t, x, y):
    out = t.net(x)
    out /= 0.5
    total = F.cross_entropy(out, y)
    total *= 2
    return total


def penalty(t, x, y):
    x = x.requires_grad_()
    out = t.net(x)
    (g,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    return F.cross_entropy(out, y) + 0.1 * g.square().sum()


def clip_data(t):
    for p in t.net.parameters():
        p.grad.data.clamp_(-0.01, 0.01)


def noise(t):
    for p in t.net.parameters():
        p.grad.add_(torch.randn_like(p), alpha=1e-3)


def norm(t):
    SEEN["norm"] += float(torch.nn.utils.clip_grad_norm_(t.net.parameters(), 0.5)) > 0.5


VARIANTS = [
    inside(counted), inside(banked), inside(drawn(random.Random(1))), inside(drawn(np.random.default_rng(1))),
    inside(warned), inside(thread_inside), inside(lambda net, h: h * table(16)), inside(lambda net, h: F.dropout(h, 0.2)),
    inside(lambda net, h: checkpoint(torch.tanh, h, use_reentrant=False)), inside(lambda net, h: Counting.apply(h)),
    context(Functions), context(Operators), context(lambda: torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x)),
    context(lambda: torch.autocast("cpu", dtype=torch.bfloat16)), context(torch.autograd.detect_anomaly),
    context(lambda: torch.random.fork_rng()), context(lambda: torch.device("cpu")),
    patched, forward_hook, gradient_hook, backward_hook, spectral, pruned, grown, frozen, optimizer_exchanged, copied,
    teacher, ema, every(lambda t: saliency(t.net)), every(evaluate_in_training_mode), every(lambda t: t.net.zero_grad(set_to_none=False)),
    loss(vat), loss(views), loss(target), loss(mixed), loss(l1), loss(inplace), loss(penalty),
    loss(lambda t, x, y: Counting.apply(F.cross_entropy(t.net(x), y))), loss(lambda t, x, y: F.mse_loss(t.net(x[:2]), x[:2, :5])),
    edit(clip_data), edit(noise), edit(norm),
]  # fmt: skip


class Training:
    def __init__(self):
        self.net = Net()
        self.opt = torch.optim.SGD(self.net.parameters(), lr=0.05, momentum=0.9)
        self.loss = lambda t, x, y: F.cross_entropy(t.net(x), y)
        self.edit = lambda t: None
        self.context = contextlib.nullcontext
        self.every = []


t = Training()
losses = []
warnings.simplefilter("ignore")
for step in range(18 * times):
    if step == LATE:
        VARIANTS[SEED % len(VARIANTS)](t)
    x = torch.randn(12, 8)
    y = x[:, :5].argmax(1)
    with t.context() if step >= LATE else contextlib.nullcontext():
        value = t.loss(t, x, y)
        t.opt.zero_grad()
        value.backward()
        t.edit(t)
        t.opt.step()
    losses.append(value.item())
    for call in t.every:
        call(t)
print("BITS", fingerprint(t.net, t.opt, losses, sorted(SEEN.items()), t.net.space.n, list(BANK)))
