"""Trainings whose ranks exchange something inside the forward, in the loss code or by hand."""

from __future__ import annotations

import random
from contextlib import nullcontext

import torch
import torch.distributed as dist
from communicating import Experts, SplitMlp, SyncNet, Twins, info_nce
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook as post_local
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as low_rank
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from trials import Training, Trial, both, drawn, main, rank, size


def trained(model, loss, lr=0.05, around=lambda _: None):
    """Return a training by SGD; ``loss`` draws a batch and computes, ``around`` runs between backward and step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)

    def step(index: int) -> None:
        loss(index).backward()
        around(index)
        optimizer.step()
        optimizer.zero_grad()

    return Training(model, optimizer, step)


def sync_norm() -> Training:
    model, x = DistributedDataParallel(SyncNet()), drawn(6, 8)
    return trained(model, lambda _: F.cross_entropy(model(x()), torch.arange(6) % 4))


def contrastive(*, inside: bool):
    def build() -> Training:
        model, x = DistributedDataParallel(Twins(inside=inside)), drawn(6, 8)

        def loss(_):
            found = model(x(), x())
            return found if inside else info_nce(*found)

        return trained(model, loss)

    return build


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))


def token_count(*, bad: bool = False):
    """Return a training whose loss is divided by the number of all ranks' tokens; ``bad``: one rank's loss is NaN once."""

    def build() -> Training:
        model, x = DistributedDataParallel(mlp()), drawn(6, 8)

        def loss(index):
            keep = torch.arange(6) <= (index + rank()) % 6
            count = keep.sum()
            dist.all_reduce(count)
            total = (F.cross_entropy(model(x()), torch.arange(6) % 4, reduction="none") * keep).sum()
            if bad and index == 2 and rank() == 1:
                total = total * float("nan")
            return total * size() / count

        return trained(model, loss)

    return build


def count_after_the_forward() -> Training:
    """The count is exchanged between forward and loss."""
    model, x = DistributedDataParallel(mlp()), drawn(6, 8)

    def loss(index):
        scores = model(x())
        count = torch.tensor(3.0 + (index + rank()) % 3)
        dist.all_reduce(count)
        return F.cross_entropy(scores, torch.arange(6) % 4, reduction="sum") * size() / count

    return trained(model, loss)


def bad_count_after_the_forward() -> Training:
    training = count_after_the_forward()
    model, x = training.model, drawn(6, 8, seed=3)

    def loss(index):
        scores = model(x())
        count = torch.tensor(6.0)
        dist.all_reduce(count)
        total = F.cross_entropy(scores, torch.arange(6) % 4, reduction="sum") / count
        return total * float("nan") if index == 2 and rank() == 1 else total

    return trained(model, loss)


def split_by_hand() -> Training:
    model, x = SplitMlp(), drawn(6, 8, seed=7 - rank())
    return trained(model, lambda _: F.cross_entropy(model(x()), torch.arange(6) % 4))


def split_in_pairs() -> Training:
    """Two pairs of ranks split the layers, and reduce gradients with their counterparts in the other pair."""
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    twins = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    inner = SplitMlp(pairs[rank() // 2])
    model = DistributedDataParallel(inner, process_group=twins[rank() % 2])
    x = drawn(6, 8, seed=7 - rank() + rank() // 2)
    return trained(model, lambda _: F.cross_entropy(model(x()), torch.arange(6) % 4))


def experts() -> Training:
    model, x = Experts(), drawn(8, 8)
    return trained(model, lambda _: model(x()).square().mean())


def experts_in_a_wrapper() -> Training:
    model, x = DistributedDataParallel(nn.Sequential(nn.Linear(8, 8), Experts())), drawn(8, 8)
    return trained(model, lambda _: model(x()).square().mean())


def tensor_parallel() -> Training:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (size(),))
    model = parallelize_module(mlp(), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    x = drawn(6, 8, seed=7 - rank())
    return trained(model, lambda _: F.cross_entropy(model(x()), torch.arange(6) % 4))


def reduced_by_hand() -> Training:
    model, x = mlp(), drawn(6, 8)

    def reduce(_):
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= size()

    return trained(model, lambda _: F.cross_entropy(model(x()), torch.arange(6) % 4), around=reduce)


def local_sgd() -> Training:
    model, x = mlp(), drawn(6, 8)
    return averaged(trained(model, lambda _: F.cross_entropy(model(x()), torch.arange(6) % 4)))


def averaged(training: Training) -> Training:
    """Have the weights of all ranks averaged after every other step."""
    inner = training.step

    def step(index: int) -> None:
        inner(index)
        if index % 2:
            for parameter in training.model.parameters():
                dist.all_reduce(parameter.data)
                parameter.data /= size()

    training.step = step
    return training


def normed() -> nn.Module:
    return DistributedDataParallel(nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4)))


def accumulated_with_norm() -> Training:
    """The running statistics of micro-batches under ``no_sync`` are each rank's own until the next broadcast."""
    model, x = normed(), drawn(6, 8)

    def loss(_index):
        with model.no_sync():
            F.cross_entropy(model(x()), torch.arange(6) % 4).backward()
        return F.cross_entropy(model(x()), torch.arange(6) % 4)

    return trained(model, loss)


def reduced_twice() -> Training:
    """Each of two backwards reduces what the one before has left, as where ``no_sync`` was forgotten."""
    model, x = normed(), drawn(6, 8)

    def loss(_index):
        F.cross_entropy(model(x()), torch.arange(6) % 4).backward()
        return F.cross_entropy(model(x()), torch.arange(6) % 4)

    return trained(model, loss)


def probed_by_one_rank() -> Training:
    """Rank 0 alone looks at gradients of the bare model, and clips them, between two steps."""
    model, x = DistributedDataParallel(mlp()), drawn(6, 8)
    training = trained(model, lambda _: F.cross_entropy(model(x()), torch.arange(6) % 4))
    inner = training.step

    def step(index: int) -> None:
        inner(index)
        for way in (nullcontext, model.no_sync) if rank() == 0 else ():
            with way():
                scores = (model.module if way is nullcontext else model)(torch.ones(6, 8))
                F.cross_entropy(scores, torch.arange(6) % 4).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            training.optimizer.zero_grad()

    training.step = step
    return training


def post_local_sgd() -> Training:
    """From step 2 on, each rank takes its own gradients; every other step the weights are averaged."""
    model, x = DistributedDataParallel(mlp()), drawn(6, 8)
    alone, _ = dist.new_subgroups(1)
    state = post_local.PostLocalSGDState(process_group=None, subgroup=alone, start_localSGD_iter=2)
    model.register_comm_hook(state, post_local.post_localSGD_hook)
    return averaged(trained(model, lambda _: F.cross_entropy(model(x()), torch.arange(6) % 4)))


def power_sgd() -> Training:
    """What a low-rank reduction leaves out is kept, and added to the next step's gradients."""
    model, x = DistributedDataParallel(mlp()), drawn(6, 8)
    state = low_rank.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2, min_compression_rate=1)
    model.register_comm_hook(state, low_rank.powerSGD_hook)
    return trained(model, lambda _: F.cross_entropy(model(x()), torch.arange(6) % 4))


class Drawing(nn.Module):
    """Takes its strength from a Python generator, which nobody can put back."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.strengths = mlp(), (1.0 + 0.1 * number for number in range(1000))

    def forward(self, x):
        return self.body(x * next(self.strengths))


class Noisy(nn.Module):
    """Shifts its input by what it draws from its rank's own generator, if it is told to."""

    def __init__(self, *, noisy: bool) -> None:
        super().__init__()
        self.body, self.noisy, self.random = mlp(), noisy, random.Random(rank())

    def forward(self, x):
        return self.body(x + self.random.random() if self.noisy else x)


def held_generator(*, noisy: bool):
    def build() -> Training:
        model, x = DistributedDataParallel(Noisy(noisy=noisy)), drawn(6, 8)
        return trained(model, lambda _: F.cross_entropy(model(x()), torch.arange(6) % 4))

    return build


def drawn_from_a_generator() -> Training:
    model, x = DistributedDataParallel(Drawing()), drawn(6, 8)
    return trained(model, lambda _: F.cross_entropy(model(x()), torch.arange(6) % 4))


TRIALS = {
    "accumulated with norm": Trial(accumulated_with_norm, settings={"deep_every": 1}),
    "reduced twice": Trial(reduced_twice),
    "probed by one rank": Trial(probed_by_one_rank),
    "post-local sgd": Trial(post_local_sgd, settings={"deep_every": 1}),
    "power sgd": Trial(power_sgd, faults=both("2/addmm:forward")),
    "drawn from a generator": Trial(drawn_from_a_generator),
    "its own generator, unused": Trial(held_generator(noisy=False), faults=both("body.2/addmm:forward")),
    "its own generator, used": Trial(held_generator(noisy=True), faults=both("body.2/addmm:forward")),
    "sync norm": Trial(sync_norm, faults=both("a/addmm:forward")),
    "sync norm, backward": Trial(sync_norm, faults=both("b/mm:backward")),
    "contrastive outside": Trial(contrastive(inside=False), faults=both("body.2/addmm:forward")),
    "contrastive inside": Trial(contrastive(inside=True), faults=both("body.2/addmm:forward")),
    "token count": Trial(token_count(), faults=both("2/addmm:forward")),
    "count after the forward": Trial(count_after_the_forward, faults=both("2/addmm:forward")),
    "nan with a token count": Trial(token_count(bad=True)),
    "nan with a later count": Trial(bad_count_after_the_forward),
    "split by hand": Trial(split_by_hand, faults=both("up/addmm:forward")),
    "split in pairs": Trial(split_in_pairs, faults=both("up/addmm:forward")),
    "experts": Trial(experts, faults=both("expert.0/addmm:forward")),
    "wrapped experts": Trial(experts_in_a_wrapper, faults=both("0/addmm:forward")),
    "tensor parallel": Trial(tensor_parallel, faults=both("0/addmm:forward")),
    "reduced by hand": Trial(reduced_by_hand, faults=both("2/addmm:forward")),
    "local sgd": Trial(local_sgd),
}

if __name__ == "__main__":
    main(TRIALS)
