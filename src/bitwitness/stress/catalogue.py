"""All that is to be done, in its order; each process makes the same list."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch

from bitwitness.errors import UsageError
from bitwitness.stress.collectives import collective_workloads
from bitwitness.stress.compute import FLOAT8, FLOATS, INTEGERS, compute_workloads
from bitwitness.stress.patterns import memory_workloads
from bitwitness.stress.workload import Workload, dtype_name
from bitwitness.trial.call import Call

DTYPES = tuple(dtype_name(dtype) for dtype in (*FLOATS, *FLOAT8, *INTEGERS))
SetPass = Callable[[int], None]


def healthy(_slot: int) -> AbstractContextManager[SetPass]:
    """Return what a device process runs in where nothing is emulated."""
    return nullcontext(lambda _pass: None)


def none_recorded(made_of: Mapping[str, Any]) -> Call:
    """Refuse: there is no recording."""
    raise UsageError(f"nobody makes calls of recordings here; given was {made_of}")


@dataclass(frozen=True, slots=True)
class Outside:
    """What the test borrows from other parts; functions that another process imports by their names.

    Attributes
    ----------
    around
        Makes, for a slot, the context that a device process runs in, and in it what is told each pass's number: an
        emulated device that computes wrongly.
    recorded
        Makes a recorded call, its tensors on the CPU, from what was told of it.
    imported
        Modules that these need: imported once, and not by each device process.

    """

    around: Callable[[int], AbstractContextManager[SetPass]] = healthy
    recorded: Callable[[Mapping[str, Any]], Call] = none_recorded
    imported: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Plan:
    """What is tested.

    Attributes
    ----------
    kind
        ``cpu``, ``cuda``, ``npu``, …: the type of the devices.
    devices
        Their indices; a device's slot is its place here.
    dtypes, only
        Names of dtypes, and globs of workloads' names; all where ``only`` is empty.
    recorded
        A recorded step's calls, as plain values: they are the workload, instead of all others.
    seconds
        For how long; each workload is done at least once.
    repeats
        Runs of a workload, one after another, in a pass.
    deadline
        Seconds after which a device that has not answered is ended.

    """

    kind: str = "cpu"
    devices: tuple[int, ...] = (0,)
    dtypes: tuple[str, ...] = DTYPES
    only: tuple[str, ...] = ()
    recorded: tuple[Mapping[str, Any], ...] = field(default=(), repr=False)
    seconds: float = 60.0
    repeats: int = 4
    deadline: float = 120.0

    @property
    def large(self) -> bool:
        """Whether the devices are accelerators, which small work does not fill."""
        return self.kind != "cpu"

    def device(self, slot: int) -> torch.device:
        """Return the device of a slot."""
        return torch.device("cpu") if self.kind == "cpu" else torch.device(self.kind, self.devices[slot])


def workloads_of(plan: Plan, outside: Outside) -> list[Workload]:
    """Return the workloads of a plan.

    Raises
    ------
    UsageError
        If a dtype is unknown, or nothing is left.

    """
    if plan.recorded:
        return [_recorded(one, outside) for one in plan.recorded]
    if unknown := [name for name in plan.dtypes if name not in DTYPES]:
        raise UsageError(f"there is no workload in {', '.join(unknown)}; expected some of {', '.join(DTYPES)}")
    found: list[Workload] = []
    for dtype in (getattr(torch, name) for name in plan.dtypes):
        found += compute_workloads(dtype, large=plan.large)
        found += memory_workloads(dtype, large=plan.large)
        found += collective_workloads(dtype, large=plan.large, ranks=len(plan.devices))
    wanted = [one for one in found if not plan.only or any(fnmatchcase(one.name, glob) for glob in plan.only)]
    if not wanted:
        names = ", ".join(sorted({one.name for one in found}))
        raise UsageError(f"no workload is {' or '.join(plan.only)}; there are {names}")
    return wanted


def _recorded(told: Mapping[str, Any], outside: Outside) -> Workload:
    return Workload(str(told["name"]), str(told["dtype"]), str(told["shapes"]), partial(_same, told, outside))


def _same(told: Mapping[str, Any], outside: Outside, _variant: int, _rank: int) -> Call:
    """A recorded call has the one input that was recorded."""
    return outside.recorded(told)
