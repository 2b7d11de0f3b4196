"""Trainings whose ranks do not share all parameters in the same way from the first step to the last."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from trials import Training, Trial, drawn, main, rank


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))


def trained(model: nn.Module, first: nn.Module | None = None, at: int = 2) -> Training:
    """Return a training by SGD, gradients clipped by their common norm; ``first`` is unfrozen before step ``at``."""
    optimizer, x = torch.optim.SGD(model.parameters(), lr=0.05), drawn(6, 8)

    def step(index: int) -> None:
        if first is not None and index == at:
            first.requires_grad_(True)
        model(x()).square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        optimizer.step()
        optimizer.zero_grad()

    return Training(model, optimizer, step)


def sharded_and_unfrozen() -> Training:
    model = mlp()
    model[0].requires_grad_(False)
    fully_shard(model[0])
    return trained(fully_shard(model), model[0])


def wrapped_and_unfrozen() -> Training:
    model = mlp()
    model[0].requires_grad_(False)
    return trained(DistributedDataParallel(model), model[0])


def partly_each_ranks_own() -> Training:
    model = mlp()
    torch.manual_seed(1 + rank())
    model[2] = nn.Linear(16, 4)
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["2.weight", "2.bias"])
    return trained(DistributedDataParallel(model))


def with_a_hook_later() -> Training:
    """Rank 0 notes what a layer gives, from step 2 on, and trains with how often it did."""
    model = DistributedDataParallel(mlp())
    seen: list[float] = []
    training = trained(model)
    begun = training.step

    def step(index: int) -> None:
        if index == 2 and rank() == 0:
            model.module[0].register_forward_hook(lambda _m, _a, out: seen.append(float(out.detach().mean())))
        begun(index)
        assert len(seen) == max(0, index - 1) * (rank() == 0), seen

    return Training(training.model, training.optimizer, step)


TRIALS = {
    "sharded, unfrozen": Trial(sharded_and_unfrozen),
    "wrapped, unfrozen": Trial(wrapped_and_unfrozen),
    "partly each rank's own": Trial(partly_each_ranks_own),
    "a hook later": Trial(with_a_hook_later),
}

if __name__ == "__main__":
    main(TRIALS)
