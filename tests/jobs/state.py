"""State that is struck in memory, or that scripts change by themselves, on real ranks; prints one JSON line a case."""

from __future__ import annotations

import json
import sys
import time
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from bitwitness import Guard
from bitwitness.stats.digest import bit_hashes
from bitwitness.testing import contained

STEPS, WHEN, WHO = 12, 7, 1
ADAM = sys.modules["torch.optim.adam"]


def flip(tensor: torch.Tensor, byte: int, bit: int) -> None:
    """Flip a bit of memory; torch counts no write."""
    torch.tensor([], dtype=torch.uint8).set_(tensor.untyped_storage())[byte] ^= 1 << bit


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.BatchNorm1d(64), nn.Linear(64, 8))


class Training:
    """A model, its optimizer, and what a case does to them before the forward of each step."""

    def __init__(self, case: str) -> None:
        self.case, self.rank = case, dist.get_rank()
        self.inner = net()
        self.ema = [p.detach().clone() for p in self.inner.parameters()]
        if case.startswith(("hsdp", "fsdp")):
            shape = ("replicate", "shard") if case.startswith("hsdp") else ("shard",)
            mesh = init_device_mesh("cpu", (2,) * len(shape), mesh_dim_names=shape)
            self.inner = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 8))
            self.model = fully_shard(self.inner, mesh=mesh)
        else:
            if case == "ignored buffer":  # beside BatchNorm's, which are broadcast
                self.inner.register_buffer("mine", torch.tensor([self.rank]))
                DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(self.inner, ["mine"])
            self.model = DistributedDataParallel(self.inner, broadcast_buffers=case != "own buffers")
        if case == "zero":
            parameters = self.model.parameters()
            self.optimizer = ZeroRedundancyOptimizer(parameters, optimizer_class=torch.optim.AdamW, lr=1e-3)
        else:
            self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)

    def disturb(self, step: int) -> None:
        """Do what the case is about."""
        weight = self.inner[0].weight
        state = self.optimizer.state.get(weight, {})
        if step == WHEN and self.rank == WHO:
            if self.case in ("weight", "hsdp weight"):
                flip(weight.to_local() if self.case.startswith("hsdp") else weight, 1003, 5)
            if self.case == "fsdp weight":  # nobody else holds it: the highest exponent bit
                flip(weight.to_local(), 1003, 6)
            if self.case in ("exp_avg", "exp_avg_sq", "hsdp exp_avg"):
                kept = state[self.case.rpartition(" ")[2]]
                flip(kept.to_local() if self.case.startswith("hsdp") else kept, 1003, 5)
        if self.case == "clamped":
            weight.data.clamp_(-0.1, 0.1)
        if self.case == "averages" and step % 2:
            for mine, average in zip(self.inner.parameters(), self.ema, strict=True):
                average.mul_(0.9).add_(mine.detach(), alpha=0.1)
                mine.data, average.data = average.data, mine.data
        if self.case == "own state" and state:
            state.setdefault("error", torch.zeros(300)).add_(self.rank + 1)

    def disturb_gradients(self, step: int) -> None:
        """Do what the case is about, behind the backward."""
        if self.case.endswith("gradient") and step == WHEN and self.rank == WHO:
            grad = self.inner[0].weight.grad
            flip(grad if self.case == "gradient" else grad.to_local(), 1003, 6 if self.case.startswith("fsdp") else 5)
        if self.case == "clipped by hand":
            for parameter in self.inner.parameters():
                parameter.grad.data.clamp_(-1e-3, 1e-3)

    def train(self) -> None:
        """Train; local SGD shares no gradients."""
        for step in range(STEPS):
            torch.manual_seed(1000 * self.rank + step)
            local = self.case == "local sgd"
            with self.model.no_sync() if local else nullcontext():
                self.optimizer.zero_grad()
                self.disturb(step)
                self.model(torch.randn(16, 32)).square().mean().backward()
            self.disturb_gradients(step)
            self.optimizer.step()
            if local and step % 4 == 3:
                for parameter in self.inner.parameters():
                    dist.all_reduce(parameter.data)
                    parameter.data /= dist.get_world_size()


class Once:
    """Stands for a device: torch's AdamW writes a wrong number into a weight, once, on one rank."""

    def __init__(self, at: int) -> None:
        self.left, self.original = at, ADAM.adam

    def __call__(self, params, *args, **kwargs) -> None:
        self.original(params, *args, **kwargs)
        self.left -= 1
        if not self.left:
            flip(params[0], 1003, 5)


def act_of(case: str) -> str:
    """Return what is done about verdicts: gradients are healed, and state is only told of."""
    return "protect" if "gradient" in case else "observe"


def run(case: str) -> dict:
    rank = dist.get_rank()
    training = Training(case)
    guard = Guard(training.model, training.optimizer, deep_every=1, trend={"warmup": 3}, act=act_of(case), quiet=True)
    original = ADAM.adam
    with guard:
        if case == "step" and rank == WHO:
            # checks of the optimizer run its code, too: two calls a step
            ADAM.adam = Once(2 * WHEN + 1)
        try:
            training.train()
        finally:
            ADAM.adam = original
    table = guard.coverage()
    return {
        "verdicts": [[v.step, str(v.cause), list(v.ranks), str(v.site), v.message] for v in guard.verdicts[:1]],
        "action": [str(v.action) for v in guard.verdicts[:1]],
        "bits": bit_hashes(list(training.inner.parameters())).tolist(),
        "findings": [f"{f.sensor}: {f.message}" for f in guard.findings],
        "failures": guard.reporter.failures,
        "not_covered": table["not_covered"],
        "state": table["state"],
    }


@contained()
def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for case in sys.argv[1].split(","):
        told = [None] * dist.get_world_size()
        dist.all_gather_object(told, run(case))
        if dist.get_rank() == 0:
            print(json.dumps({"case": case, "ranks": told}), flush=True)
    time.sleep(0.2)  # gloo's threads let go of the last exchange before the interpreter ends
    dist.destroy_process_group()


main()
