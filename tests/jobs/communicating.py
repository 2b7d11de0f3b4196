"""Models and loss code that exchange something between the ranks by themselves."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F


class SummedAlike(torch.autograd.Function):
    """A sum over the ranks, with the sum over the ranks as its gradient: what synchronised statistics need."""

    @staticmethod
    def forward(ctx, values, group=None):
        ctx.group = group
        total = values.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx, grad):
        total = grad.clone()
        dist.all_reduce(total, group=ctx.group)
        return total, None


class SyncNorm(nn.Module):
    """Batch normalisation by the statistics of all ranks."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))
        self.register_buffer("running", torch.zeros(width))

    def forward(self, x):
        ranks = dist.get_world_size()
        sums = SummedAlike.apply(torch.stack([x.mean(0), x.square().mean(0)])) / ranks
        mean, variance = sums[0], sums[1] - sums[0].square()
        if self.training:
            self.running.lerp_(mean.detach(), 0.1)
        return (x - mean) * (variance + 1e-5).rsqrt() * self.weight + self.bias


class SyncNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(8, 16), SyncNorm(16), nn.Linear(16, 4)

    def forward(self, x):
        return self.b(torch.relu(self.norm(self.a(x))))


class Gathered(torch.autograd.Function):
    """All ranks' features, with their gradients summed over the ranks."""

    @staticmethod
    def forward(_ctx, mine):
        rows = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(rows, mine.contiguous())
        return torch.cat(rows)

    @staticmethod
    def backward(_ctx, grad):
        total = grad.clone()
        dist.all_reduce(total)
        return total.chunk(dist.get_world_size())[dist.get_rank()]


def info_nce(a, b):
    """Return the contrastive loss of two views, against all ranks' second views."""
    a, b = F.normalize(a, dim=1), Gathered.apply(F.normalize(b, dim=1))
    labels = torch.arange(len(a)) + len(a) * dist.get_rank()
    return F.cross_entropy(a @ b.T / 0.2, labels)


class Twins(nn.Module):
    """Encodes two views; computes the contrastive loss itself if ``inside``."""

    def __init__(self, *, inside: bool) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 6))
        self.inside = inside

    def forward(self, x, y):
        a, b = self.body(x), self.body(y)
        return info_nce(a, b) if self.inside else (a, b)


class Entering(torch.autograd.Function):
    """The input of a column-parallel layer: nothing forward, a sum over the ranks backward."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        total = grad.clone()
        dist.all_reduce(total, group=ctx.group)
        return total, None


class Leaving(torch.autograd.Function):
    """The output of a row-parallel layer: a sum over the ranks forward, nothing backward."""

    @staticmethod
    def forward(_ctx, x, group):
        total = x.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(_ctx, grad):
        return grad, None


class SplitMlp(nn.Module):
    """An MLP of which each rank of a group holds a slice, written by hand."""

    def __init__(self, group=None) -> None:
        super().__init__()
        torch.manual_seed(5 + dist.get_rank(group))
        self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8, bias=False)
        torch.manual_seed(1)
        self.head = nn.Linear(8, 4)
        self.group = [group]  # no attribute of its own: a group can be neither copied nor compared

    def forward(self, x):
        x = Entering.apply(x, self.group[0])
        return self.head(x + Leaving.apply(self.down(torch.relu(self.up(x))), self.group[0]))


class Dispatched(torch.autograd.Function):
    """Each rank's slices of its tokens, sent to the ranks that they are for."""

    @staticmethod
    def forward(_ctx, x):
        result = torch.empty_like(x)
        dist.all_to_all_single(result, x.contiguous())
        return result

    @staticmethod
    def backward(_ctx, grad):
        result = torch.empty_like(grad)
        dist.all_to_all_single(result, grad.contiguous())
        return result


class Experts(nn.Module):
    """One expert a rank; tokens go there and come back."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5 + dist.get_rank())
        self.expert = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))

    def forward(self, x):
        return Dispatched.apply(self.expert(Dispatched.apply(x)))
