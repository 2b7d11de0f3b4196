"""Trainings that exchange numbers, some of which arrive wrongly: ``exchanges.py faults|innocent|buffers``."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from bitwitness import Guard

STEPS = 7
SETTINGS = {"deep_every": 1, "trend": {"warmup": 3}, "quiet": True}


class Broken(TorchDispatchMode):
    """A link: spoils what one collective brings to some ranks, once it has arrived."""

    __module__ = "bitwitness.testing"  # no mode of the script's: what those do in a replay is not known

    def __init__(self, name: str, ranks: tuple[int, ...], call: int, *, times: int = 1, unseen: bool = False) -> None:
        super().__init__()
        self.unseen = unseen
        self.name, self.here, self.call, self.times = name, dist.get_rank() in ranks, call, times
        self.on, self.received = False, None
        self.calls = self.struck = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if self.on and str(func).startswith(self.name):
            self.calls += 1
            if self.here and self.call < self.calls <= self.call + self.times:
                self.received = args[0]
                while isinstance(self.received, list):
                    self.received = self.received[0]
                if "allreduce" in self.name or self.unseen:  # the reducer's, which nobody waits for in Python
                    dist.Work.unbox(result[-1]).wait()
                    self.spoil()
        return result

    def spoil(self) -> None:
        if self.received is not None:
            self.received.view(-1)[3] += 0.5
            self.struck += 1
        self.received = None

    def __enter__(self):
        original = self.original = dist.Work.wait

        def wait(work, *args):
            done = original(work, *args)
            self.spoil()
            return done

        dist.Work.wait = wait
        return super().__enter__()

    def __exit__(self, *error):
        dist.Work.wait = self.original
        return super().__exit__(*error)


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 24), nn.ReLU(), nn.Linear(24, 4))


def with_statistics() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 24), nn.BatchNorm1d(24), nn.ReLU(), nn.Linear(24, 4))


def batch(generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(8, 12, generator=generator), torch.randint(0, 4, (8,), generator=generator)


def reduced(net, generator, optimizer, step):
    x, y = batch(generator)
    F.cross_entropy(net(x), y).backward()
    optimizer.step()
    optimizer.zero_grad()


def with_exchanges(net, generator, optimizer, step):
    """Call every kind of collective between the backward and the optimizer, and use what comes."""
    x, y = batch(generator)
    size, rank = dist.get_world_size(), dist.get_rank()
    F.cross_entropy(net(x), y).backward()
    gathered = [torch.empty(6) for _ in range(size)]
    dist.all_gather(gathered, x[0, :6].contiguous())
    whole = torch.empty(size * 6)
    handle = dist.all_gather_single(whole, x[1, :6].contiguous(), async_op=True)
    piece = torch.empty(5)
    dist.reduce_scatter_single(piece, torch.full((5 * size,), float(rank + 1)) * x[0, 0])
    out = torch.empty(4 * size)
    dist.all_to_all_single(out, torch.arange(4.0 * size) + rank)
    sent = x[2].clone()
    dist.broadcast(sent, src=1)
    count = torch.tensor([rank, step, 7, 2**40 + rank])
    dist.all_reduce(count)
    most = x[3].clone()
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    dist.all_gather_object([None] * size, {"rank": rank})
    dist.barrier()
    handle.wait()
    most.div_(3)  # what was received is used, and changed
    with torch.no_grad():
        net.module[0].bias.grad += 1e-4 * (whole.sum() + sent.sum() + sum(gathered).sum() + most.sum())
    optimizer.step()
    optimizer.zero_grad()


def train(
    step_once: Callable[..., None],
    *,
    guarded: dict[str, Any] | None,
    link: Broken | None = None,
    ddp: dict[str, Any] | None = None,
    prepare: Callable[[Any], None] = lambda _: None,
    make: Callable[[], nn.Module] = model,
    steps: int = STEPS,
) -> tuple[str, Guard | None]:
    net = DistributedDataParallel(make(), **(ddp or {}))
    prepare(net)
    optimizer = torch.optim.AdamW(net.parameters(), 0.01)
    generator = torch.Generator().manual_seed(dist.get_rank())
    guard = None if guarded is None else Guard(net, optimizer, **guarded)
    with link or nullcontext(), guard or nullcontext():
        for step in range(steps):
            if link is not None:
                link.on = step >= 4
            step_once(net, generator, optimizer, step)
    whole = hashlib.sha256()
    for value in [*net.state_dict().values(), torch.get_rng_state()]:
        whole.update(value.reshape(-1).view(torch.uint8).numpy().tobytes())
    return whole.hexdigest(), guard


def tell(name: str, here: dict[str, Any]) -> None:
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, here)
    if dist.get_rank() == 0:
        print(json.dumps({"name": name, "ranks": told}), flush=True)


def outcome(guard: Guard, bits: str, clean: str, link: Broken | None = None) -> dict[str, Any]:
    table = guard.coverage()
    return {
        "same": bits == clean,
        "struck": 0 if link is None else link.struck,
        "verdicts": table["verdicts"],
        "messages": [verdict.message for verdict in guard.verdicts],
        "findings": [f"{f.sensor}: {f.message}" for f in guard.findings if f.sensor in ("collective", "recompute")],
        "failures": table["failures"],
        "collectives": table.get("collectives"),
        "gaps": [line for line in table["not_covered"] if line.startswith("collective")],
    }


def accumulating(net, generator, optimizer, step):
    for micro in range(3):
        x, y = batch(generator)
        with net.no_sync() if micro < 2 else nullcontext():
            F.cross_entropy(net(x), y).backward()
    torch.nn.utils.clip_grad_norm_(net.parameters(), 0.1)
    optimizer.step()
    optimizer.zero_grad()


def evaluating(net, generator, optimizer, step):
    """Accumulate in some forwards whose buffers are not broadcast, and evaluate between steps."""
    accumulating(net, generator, optimizer, step)
    net.eval()
    for _ in range(2):
        with torch.no_grad():
            net.module(batch(generator)[0])
    net.train()


def scaled(net, generator, optimizer, step):
    """Overflow in the first step, as a gradient scaler does until it has found its scale."""
    x, y = batch(generator)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127 if step < 2 else 2.0**10)
    scaler.scale(F.cross_entropy(net(x), y)).backward()
    for parameter in net.parameters():
        parameter.grad.mul_(2)  # edited after the reduction
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()


def uneven_calls(net, generator, optimizer, step):
    """Call a collective of a group of two, and reuse its buffer at once."""
    x, y = batch(generator)
    F.cross_entropy(net(x), y).backward()
    pair = uneven_calls.pair
    if dist.get_rank() in (0, 1):
        value = x[0].clone()
        for _ in range(2):
            dist.all_reduce(value, group=pair)
            value.data.zero_()
        other = x[1].clone()
        handle = dist.all_reduce(other, group=pair, async_op=True)
        handle.get_future().wait()
        other.fill_(dist.get_rank())
    optimizer.step()
    optimizer.zero_grad()


def joined(net, generator, optimizer, step):
    """Give one rank fewer batches."""
    with Join([net]):
        for _ in range(2 + (dist.get_rank() == 0)):
            reduced(net, generator, optimizer, step)


def hooked(name: str) -> Callable[[Any], None]:
    def register(net: Any) -> None:
        if name == "power":
            state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2)
            net.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        elif name == "builtin":
            net._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)
        else:
            net.register_comm_hook(None, getattr(default_hooks, name))

    return register


INNOCENT = {
    "reduced": (reduced, {}),
    "exchanges": (with_exchanges, {}),
    "views": (accumulating, {"ddp": {"gradient_as_bucket_view": True}}),
    "unused": (reduced, {"ddp": {"find_unused_parameters": True}}),
    "bfloat16": (reduced, {"make": lambda: BFloat(model())}),
    "scaled": (scaled, {}),
    "pair": (uneven_calls, {}),
    "joined": (joined, {"steps": 2}),
    "builtin": (reduced, {"prepare": hooked("builtin")}),
    "fp16": (reduced, {"prepare": hooked("fp16_compress_hook")}),
    "allreduce_hook": (reduced, {"prepare": hooked("allreduce_hook")}),
    "power": (reduced, {"prepare": hooked("power")}),
    "statistics": (evaluating, {"make": with_statistics}),
}


class BFloat(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner.bfloat16()

    def forward(self, x):
        return self.inner(x.bfloat16()).float()


def innocent() -> None:
    uneven_calls.pair = dist.new_group([0, 1])
    for name, (step_once, how) in INNOCENT.items():
        clean, _ = train(step_once, guarded=None, **how)
        bits, guard = train(step_once, guarded={**SETTINGS, "act": "protect"}, **how)
        tell(name, outcome(guard, bits, clean))


FAULTS = {
    "one received a wrong bucket": (reduced, "c10d.allreduce_", (1,), 0),
    "all received a wrong bucket": (reduced, "c10d.allreduce_", (0, 1, 2), 0),
    "all_gather": (with_exchanges, "c10d.allgather_", (2,), 0),
    "all_gather_into_tensor": (with_exchanges, "c10d._allgather_base_", (2,), 0),
    "reduce_scatter": (with_exchanges, "c10d._reduce_scatter_base_", (1,), 0),
    "all_to_all": (with_exchanges, "c10d.alltoall_base_", (2,), 0),
    "broadcast": (with_exchanges, "c10d.broadcast_", (2,), 0),
}


def faults() -> None:
    usual = {step_once: train(step_once, guarded=None)[0] for step_once in (reduced, with_exchanges)}
    for name, (step_once, op, ranks, call) in FAULTS.items():
        clean = usual[step_once]
        link = Broken(op, ranks, call)
        bits, guard = train(step_once, guarded={**SETTINGS, "act": "protect"}, link=link)
        tell(name, outcome(guard, bits, clean, link))


def buffers() -> None:
    """Spoil what one rank holds of the buffers that DistributedDataParallel has broadcast, the sender's or another's."""
    for rank in (0, 1):
        link = Broken("c10d.broadcast_", (rank,), 0, unseen=True)
        guarded = {**SETTINGS, "act": "observe"}
        bits, guard = train(reduced, guarded=guarded, link=link, make=with_statistics, steps=5)
        tell(str(rank), outcome(guard, bits, "", link))


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    globals()[sys.argv[1]]()
    dist.destroy_process_group()
