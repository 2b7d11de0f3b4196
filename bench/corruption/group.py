"""Faults among several ranks: DDP, FSDP2, HSDP. Each trial is a training from its first step; all share one process group."""

from __future__ import annotations

import json
import random
import shutil
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from detection.apart import flat
from detection.faults import Places, survey
from detection.subjects import CONTEXT, TEXT
from forking import together
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from bitwitness import Guard, Note, TrainingStopped
from bitwitness.demo.model import batch
from bitwitness.stats.digest import bit_hashes
from bitwitness.stats.local import local_parts
from bitwitness.testing import FaultyDevice, contained
from corruption.accounts import begun
from corruption.cells import WATCHFUL, Cell
from corruption.heard import listen
from corruption.strikes import COMPUTED, RECEIVED, SENT, STATE, as_fault, draw, strike, strike_state

STEPS = 14
STRIKE = 11
_PLACES = ("forward", "backward", "weight", "optimizer state", "received", "collective")
_COLLECTIVES = {
    "ddp": ("*/allreduce_:comm.in0", "*/allreduce_:comm.out0"),
    "fsdp2": ("*/_reduce_scatter_base_:comm.in0", "*/_reduce_scatter_base_:comm.out0", "*/_allgather_base_:comm.out0"),
    "hsdp": (
        "*/_reduce_scatter_base_:comm.out0", "*/_allgather_base_:comm.out0", "*/allreduce_:comm.in0", "*/allreduce_:comm.out0",
    ),
}  # fmt: skip


class Job:
    """One training of this cell on this rank."""

    def __init__(self, cell: Cell, number: int) -> None:
        torch.manual_seed(number)
        self.cell = cell
        self.inner = cell.subject.model()
        self.model = self._shared()
        self.optimizer = cell.subject.optimizer(list(self.model.parameters()))
        self.generator = torch.Generator().manual_seed(1000 * number + dist.get_rank())
        self.text = TEXT(1 << 20)

    def _shared(self) -> nn.Module:
        if self.cell.way == "ddp":
            return DistributedDataParallel(self.inner)
        if self.cell.way == "hsdp":
            mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("replicas", "shards"))
        else:
            mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for layer in self.inner.layers:  # type: ignore[union-attr]
            fully_shard(layer, mesh=mesh)
        return fully_shard(self.inner, mesh=mesh)

    def backward(self) -> None:
        """Run a forward and a backward on this rank's next batch."""
        with self.cell.subject.precision():
            loss = self.model(*batch(self.text, self.generator, self.cell.subject.size, CONTEXT))
        loss.backward()

    def finish(self) -> None:
        """Use the gradients."""
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def digest(self) -> list[int]:
        """Return the bits of what this rank holds, hashed."""
        return bit_hashes(list(self.model.parameters())).tolist()  # type: ignore[no-any-return]


def train(
    cell: Cell, number: int, drawn: dict[str, Any] | None, steps: int, mode: str | None, notice: Callable[[Any], None]
) -> tuple[list[list[int]], torch.Tensor, Guard | None, bool, bool]:
    """Train; ``drawn``: with a fault; ``mode``: under guard.

    Return the bits at the end and after the struck step, that step's raw gradient, the guard, whether it stopped, whether a bit
    was struck.
    """
    job, guard, struck, stopped = Job(cell, number), None, False, False
    if mode is not None:
        guard = Guard(
            job.model, job.optimizer, act="protect", deep_every=1 if mode == WATCHFUL else 10,
            trend={"warmup": 6}, self_test=False,
        ).start()  # fmt: skip
        listen(guard, notice)
    mine = drawn is not None and drawn["rank"] == dist.get_rank()
    gradient, then = torch.zeros(0), list[int]()
    try:
        for step in range(steps):
            now = drawn is not None and mine and step == STRIKE
            if now and drawn["place"] in STATE:
                struck |= strike_state(job.inner, job.optimizer, drawn, drawn["seed"])
            job.backward()
            if now and drawn["place"] in RECEIVED:
                found = dict(job.inner.named_parameters())[drawn["where"]].grad
                struck |= found is not None and strike(found, drawn, drawn["seed"])
            if step == STRIKE:
                grads = [p.grad for p in job.model.parameters() if p.grad is not None]
                gradient = flat(local_parts(g)[0] for g in grads)
            job.finish()
            if step == STRIKE:
                then = job.digest()
    except TrainingStopped:
        stopped = True
    finally:
        if guard is not None:
            guard.close()
    return [job.digest(), then], gradient, guard, stopped, struck


def run_trial(cell: Cell, number: int, drawn: dict[str, Any], mode: str) -> dict[str, Any]:
    """Run one trial on all ranks; return what this one saw."""
    heard: list[Any] = []
    (clean, then), good, *_ = train(cell, number, None, STEPS, None, heard.append)
    faults = []
    if drawn["place"] in (*COMPUTED, *SENT):
        when = {"steps": [STRIKE]} if drawn["class"] == "transient" else {"from_step": STRIKE}
        faults = [as_fault(drawn, site=drawn["where"], rank=drawn["rank"], **when)]
    with FaultyDevice(faults, rank=dist.get_rank(), seed=drawn["seed"]):
        (_, after), bad, *_ = train(cell, number, drawn, STRIKE + 1, None, heard.append)
    error = torch.stack([(bad - good).square().sum(), good.square().sum()])
    dist.all_reduce(error)
    harm = float((error[0] / error[1]).sqrt())
    heard.clear()
    with FaultyDevice(faults, rank=dist.get_rank(), seed=drawn["seed"]) as device:
        (weights, _), _, guard, stopped, struck = train(cell, number, drawn, STEPS, mode, heard.append)
    struck |= any(firing.changed for firing in device.fired)
    assert guard is not None
    suspected = [said for said in heard if isinstance(said, Note) or said.step >= STRIKE]
    steps = [STRIKE if isinstance(said, Note) else said.step for said in suspected]
    return {
        "harm": harm if harm == harm else float("inf"),  # noqa: PLR0124 - NaN
        "struck": struck, "moved": after != then, "equal": weights == clean, "stopped": stopped,
        "steps": min(steps, default=None), "sensors": sorted({f.sensor for f in suspected}),
        "early": len(heard) - len(suspected), "texts": [f"{f.site}: {f.message}" for f in suspected],
        "verdicts": [
            {"cause": str(v.cause), "ranks": list(v.ranks), "action": str(v.action), "why": v.message}
            for v in guard.verdicts
        ],
    }  # fmt: skip


def merged(told: list[dict[str, Any]], drawn: dict[str, Any]) -> dict[str, Any]:
    """Return one account of what all ranks saw."""
    steps = [t["steps"] for t in told if t["steps"] is not None]
    where, moved = drawn["where"].split("#")[0], told[0]["harm"] != 0 or any(t["moved"] for t in told)
    texts = [text for t in told for text in t["texts"]] + [v["why"] for v in told[0]["verdicts"]]
    return {
        # what is written to a collective's result before it has arrived is overwritten, and strikes nothing
        "harm": told[0]["harm"],
        "struck": any(t["struck"] for t in told) and not (drawn["place"] in SENT and not moved),
        "steps": min(steps) - STRIKE + 1 if steps else None,
        "sensors": sorted({s for t in told for s in t["sensors"]}), "verdicts": told[0]["verdicts"],
        "as_clean": all(t["equal"] for t in told), "named": any(where in text for text in texts),
        "references": None, "early": sum(t["early"] for t in told),
    }  # fmt: skip


@contained()
def worker(cell: Cell, seed: int, numbers: range, lines: Path) -> None:
    """Run trials on this rank; rank 0 writes a line a trial."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    places = _places(cell)
    for number in numbers:
        rng = random.Random(f"{seed} {cell.name} {number}")
        mode = WATCHFUL if number % 2 else "every tenth step"
        drawn = {**draw(rng, places, cell.subject.model(), _PLACES, _COLLECTIVES[cell.way]),
                 "rank": rng.randrange(cell.ranks), "seed": rng.randrange(1 << 30)}  # fmt: skip
        told: list[Any] = [None] * cell.ranks
        dist.all_gather_object(told, run_trial(cell, number, drawn, mode))
        if dist.get_rank() == 0:
            account = {"number": number, "cell": cell.name, "dtype": cell.dtype, "parallelism": cell.parallelism,
                       "mode": mode, **drawn, **merged(told, drawn)}  # fmt: skip
            with lines.open("a") as file:
                file.write(json.dumps(account, default=str) + "\n")
    time.sleep(0.2)  # gloo's threads let go of the last exchange before the interpreter ends
    dist.destroy_process_group()


def _places(cell: Cell) -> Places:
    model, text = cell.subject.model(), TEXT(1 << 20)
    return survey(model, lambda: model(*batch(text, torch.Generator().manual_seed(0), cell.subject.size, CONTEXT)))


def campaign(cell: Cell, seed: int, count: int, lines: Path) -> None:
    """Run one cell's trials that are not there yet; ranks are forks of this process."""
    scratch = Path(tempfile.mkdtemp(prefix="corrupt-"))
    try:
        if not together(cell.ranks, partial(worker, cell, seed, range(begun(lines), count), lines), scratch):
            logs = "\n".join(log.read_text()[-2000:] for log in sorted(scratch.glob("rank*.log")))
            raise RuntimeError(f"{cell.name}: a rank failed\n{logs}")
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
