"""Compiled models on real ranks: the same bits, and a compiled kernel that computes wrongly on rank 1.

The kernel is a mock: a compiler backend that runs the captured graph as it is and, on rank 1 and from the step told on,
makes a tanh too large. Eagerly executed, the same model is right.
"""

from __future__ import annotations

import json
import sys
import time

import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo.utils import counters
from torch.nn.parallel import DistributedDataParallel

from bitwitness import Guard, TrainingStopped
from bitwitness.testing import EVERY_STEP, contained

STEPS = 6
ALWAYS = {**EVERY_STEP, "self_test": True}


class Net(nn.Module):
    """Two layers and dropout; returns its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.drop, self.down = nn.Linear(8, 16), nn.Dropout(0.2), nn.Linear(16, 1)

    def forward(self, x):
        return self.down(self.drop(torch.tanh(self.up(x)))).square().mean()


class FaultyKernel:
    """The mock: a backend whose compiled code multiplies a tanh's output on rank 1, ``times`` times from step 4 on."""

    def __init__(self, times: int) -> None:
        self.left = times if dist.get_rank() == 1 else 0
        self.armed = False
        self.struck = 0

    def __call__(self, graph: torch.fx.GraphModule, _inputs):
        for node in list(graph.graph.nodes):
            if node.op == "call_function" and "tanh" in str(node.target):
                with graph.graph.inserting_after(node):
                    spoiled = graph.graph.call_function(self.spoil, (node,))
                node.replace_all_uses_with(spoiled, delete_user_cb=lambda user, s=spoiled: user is not s)
        graph.recompile()
        return graph.forward

    def spoil(self, value: torch.Tensor) -> torch.Tensor:
        if not self.armed or not self.left:
            return value * 1.0
        self.left -= 1
        self.struck += 1
        return value * 1e3


def train(form: str, backend, guarded=None, odd_shapes=False, **ddp) -> tuple[list[str], Guard | None, dict]:
    torch.compiler.reset()
    counters.clear()
    torch.manual_seed(0)
    net = Net()
    if form == "below":
        net = torch.compile(net, backend=backend)
    if form == "below in place":
        net.compile(backend=backend)
    model = DistributedDataParallel(net, **ddp)
    if form == "around":
        model = torch.compile(model, backend=backend)
    if form == "around in place":
        model.compile(backend=backend)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(dist.get_rank())
    torch.manual_seed(dist.get_rank())
    guard = None if guarded is None else guarded(model, optimizer).__enter__()
    lines, losses = [], []
    try:
        for step in range(STEPS):
            if isinstance(backend, FaultyKernel):
                backend.armed = step >= 4
            rows = 4 + (odd_shapes and 3 * dist.get_rank())
            loss = model(torch.randn(rows, 8, generator=generator))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            state = [*model.parameters(), *(v for s in optimizer.state.values() for v in s.values())]
            lines.append(f"{[v.double().sum().item() for v in state]} {torch.get_rng_state().sum()}")
            losses.append(loss.item())
        lines = [losses, *lines, [dict(counters["frames"]), dict(counters["stats"])]]
    finally:
        if guard is not None:
            guard.close()
    return lines, guard, {} if guard is None else guard.coverage()


def told(case: str, **found) -> None:
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, found)
    if dist.get_rank() == 0:
        print(json.dumps({"case": case, "ranks": everyone}), flush=True)


def identity(form: str, backend: str = "aot_eager", **ddp) -> None:
    """Train with and without the guard; the last line counts what dynamo compiled."""
    plain, *_ = train(form, backend, **ddp)
    watched, guard, table = train(form, backend, lambda m, o: Guard(m, o, deep_every=2, **ALWAYS), **ddp)
    said = {v.message for v in guard.verdicts}
    name = " ".join(["identity", form, *ddp])
    # Of contextlib's own frames dynamo looks at some only in a process's first run; none may come on top under guard.
    frames, seen = plain[-1].pop(0), watched[-1].pop(0)
    same = plain == watched and seen["total"] <= frames["total"]
    told(name, same=same, suspicions=table["suspicions"], dismissed=table["dismissed"],
         verdicts=sorted(said), failures=table["failures"], gaps=table["not_covered"])  # fmt: skip


def fault(form: str, times: int, clean: list[str]) -> None:
    kernel = FaultyKernel(times)
    guards = []

    def guarded(model, optimizer):
        guards.append(Guard(model, optimizer, act="protect", deep_every=3, trend={"warmup": 3}))
        return guards[-1]

    stopped, lines = None, []
    try:
        lines, *_ = train(form, kernel, guarded)
    except TrainingStopped as stop:
        stopped = stop.code
    found = guards[0].verdicts
    told(f"fault {form} {times}", struck=kernel.struck, stopped=stopped, weights=lines[-2:-1] == clean[-2:-1],
         verdicts=[[v.step, str(v.cause), list(v.ranks), str(v.action), v.message] for v in found],
         failures=guards[0].reporter.failures)  # fmt: skip


@contained()
def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    everything = sys.argv[1] == "all"
    cheap = "aot_eager" if everything else "eager"  # the captured graph as it is, which takes half the time
    identity("below")
    identity("around", cheap)
    identity("around in place", cheap)
    if everything:
        identity("below in place")
        identity("below", gradient_as_bucket_view=True)
    identity("below", cheap, odd_shapes=True)
    for form in ("below", "around") if everything else ("below",):
        clean, *_ = train(form, FaultyKernel(0))
        fault(form, 1, clean)
        fault(form, 10**6, clean)
    time.sleep(0.2)  # gloo's threads let go of the last exchange before the interpreter ends
    dist.destroy_process_group()


main()
