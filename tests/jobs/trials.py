"""One training on all ranks, plain, guarded with every step questioned, and with faults: what came of each, as JSON lines.

With ``TRIAL_STEPS`` in the environment: so many steps, and no faults.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from scenarios import fingerprint
from torch import nn

from bitwitness import Guard, TrainingStopped
from bitwitness.testing import FaultyDevice, contained, from_mapping

ALWAYS = {"trend": {"z": 1e-9, "warmup": 1}, "replay": {"rest": False}, "ranks": {"deadline_s": 60}}
ALWAYS |= {"act": "protect", "deep_every": 0, "self_test": False}
STEPS = 5
LONG = int(os.environ.get("TRIAL_STEPS", "0"))
STRUCK_AT = 3
FAR = {"kind": "multiply", "factor": 1e4, "pattern": "column", "element": 1}
TRANSIENT, PERSISTENT = {"steps": [STRUCK_AT], "times": 1}, {"from_step": STRUCK_AT}


@dataclass
class Training:
    """What a script has made before its loop: what is guarded, and one step."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    step: Callable[[int], Any]


@dataclass(frozen=True)
class Trial:
    """A training, and the devices that it runs on.

    ``device`` returns a context that all runs of the training are made in, the plain one included; ``repeats``: two plain runs
    have the same bits. ``faults``: by name; each is a table of `inject.faults` without the times.
    """

    build: Callable[[], Training]
    device: Callable[[], AbstractContextManager[Any]] = nullcontext
    faults: dict[str, dict[str, Any]] = field(default_factory=dict)
    repeats: bool = True
    steps: int = STEPS
    settings: dict[str, Any] = field(default_factory=dict)


def both(site: str, rank: int = 1, **more: Any) -> dict[str, dict[str, Any]]:
    """Return a transient and a persistent fault at one site."""
    fault = {"site": site, "rank": rank, **FAR, **more}
    return {"transient": fault | TRANSIENT, "persistent": fault | PERSISTENT}


def size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def drawn(*shape: int, seed: int = 7) -> Callable[[], torch.Tensor]:
    """Return what draws this rank's batches."""
    generator = torch.Generator().manual_seed(seed + rank())
    return lambda: torch.randn(*shape, generator=generator)


def bits(training: Training) -> list[Any]:
    """Return everything that a guard must not change."""
    held = [*training.model.parameters(), *training.model.buffers()]
    for state in training.optimizer.state.values():
        held += [value for value in state.values() if isinstance(value, torch.Tensor)]
    values = [value.to_local() if hasattr(value, "to_local") else value for value in held]
    return [fingerprint(values), int(torch.get_rng_state().sum())]


@contained()
def run(trial: Trial, fault: dict[str, Any] | None, *, guarded: bool) -> dict[str, Any]:
    """Train; return what this rank saw."""
    told: dict[str, Any] = {"stopped": None, "error": None}
    with ExitStack() as stack:
        stack.enter_context(trial.device())
        table = from_mapping({"fault": [] if fault is None else [fault]})
        device = stack.enter_context(FaultyDevice(table, rank=rank(), seed=rank())) if table else None
        torch.manual_seed(0)
        training = trial.build()
        torch.manual_seed(100 + rank())
        guard = Guard(training.model, training.optimizer, **(ALWAYS | trial.settings)) if guarded else None
        try:
            with guard or nullcontext():
                for index in range(LONG or trial.steps):
                    training.step(index)
        except TrainingStopped as stop:
            told["stopped"] = stop.code
        except Exception as error:
            told["error"] = f"{type(error).__name__}: {error}"[:300]
        told["bits"] = bits(training)
        if guard is not None:
            table = guard.coverage()
            kept = ("verdicts", "failures", "suspicions", "dismissed", "left_open", "not_covered")
            told |= {key: table[key] for key in kept} | {"spread": table["replay"]["spread"]}
            told["messages"] = [[str(v.site), v.message] for v in guard.verdicts]
        told["struck"] = 0 if device is None else len(device.fired)
    return told


def gathered(mine: dict[str, Any]) -> list[dict[str, Any]]:
    if size() == 1:
        return [mine]
    told: list[Any] = [None] * size()
    dist.all_gather_object(told, mine)
    return told


def report(name: str, fault: str, told: list[dict[str, Any]], plain: list[dict[str, Any]]) -> None:
    """Print what all ranks saw, as one line."""
    row = {"trial": name, "fault": fault, "same": [t["bits"] == p["bits"] for t, p in zip(told, plain, strict=True)]}
    row |= {key: [t.get(key) for t in told] for key in told[0] if key != "bits"}
    if rank() == 0:
        print(json.dumps(row), flush=True)


def attempt(name: str, trial: Trial) -> None:
    """Make all runs of one trial."""
    plain = gathered(run(trial, None, guarded=False))
    if any(t["error"] for t in plain):
        report(name, "plain", plain, plain)
        return
    report(name, "clean", gathered(run(trial, None, guarded=True)), plain)
    for kind, fault in () if LONG else trial.faults.items():
        report(name, kind, gathered(run(trial, fault, guarded=True)), plain)


def main(trials: dict[str, Trial]) -> None:
    """Make the trials whose names were given, or all."""
    torch.set_num_threads(1)
    if "RANK" in os.environ:
        dist.init_process_group("gloo", timeout=timedelta(seconds=90))
    for name, trial in trials.items():
        if len(sys.argv) > 1 and not any(word in name for word in sys.argv[1:]):
            continue
        began = time.monotonic()
        attempt(name, trial)
        if rank() == 0:
            print(f"# {name}: {time.monotonic() - began:.1f} s", flush=True)
    time.sleep(0.2)  # gloo's threads let go of the last exchange before the interpreter ends
    if dist.is_initialized():
        dist.destroy_process_group()
