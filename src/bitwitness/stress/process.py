"""The device processes as the test sees them: asked all at once, waited for until a deadline, ended where they hang."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from typing import Any, Self

from bitwitness.finding import Device
from bitwitness.stress.catalogue import Outside, Plan
from bitwitness.stress.worker import Answer, serve

_GRACE = 5.0  # seconds that a process has to end by itself, once it is told to
_IMPORTED = ["bitwitness.stress.worker", "torch.fx.experimental.symbolic_shapes"]
"""What is imported once for all: the second is what `torch.autograd.grad` imports when it is first called."""
_START = 240.0  # seconds for imports, drivers and contexts, on top of the deadline


@dataclass(slots=True)
class DeviceProcess:
    """One device and its process.

    Attributes
    ----------
    slot
        Its place in the plan.
    device, model, core
        What it told of itself; ``core``: of a CPU, where it is pinned to one.
    lost
        How it was lost; empty while it lives.

    """

    slot: int
    process: BaseProcess
    connection: Connection
    device: Device | None = None
    model: Mapping[str, str] = field(default_factory=dict)
    core: int | None = None
    lost: str = ""

    @property
    def label(self) -> str:
        """The device in words."""
        if self.device is None:
            return f"device {self.slot}"
        return str(self.device) + (f", core {self.core}" if self.core is not None else "")


class DeviceProcesses:
    """A process for each device of a plan; a context manager, which leaves none behind."""

    def __init__(self, plan: Plan, outside: Outside, port: int) -> None:
        self._plan = plan
        self._answers: queue.Queue[tuple[int, Answer | None]] = queue.Queue()
        context = _context(outside.imported)
        self.all = [self._start(context, slot, outside, port) for slot in range(len(plan.devices))]

    def _start(self, context: ForkServerContext, slot: int, outside: Outside, port: int) -> DeviceProcess:
        mine, its = context.Pipe()
        process = context.Process(
            target=serve, args=(its, self._plan, slot, outside, port), name=f"device-{slot}", daemon=True
        )
        process.start()
        its.close()
        threading.Thread(target=self._read, args=(slot, mine), daemon=True).start()
        return DeviceProcess(slot, process, mine)

    def _read(self, slot: int, connection: Connection) -> None:
        """Hand on what a process says; a message of which only a half comes holds nobody else up."""
        with suppress(EOFError, OSError):
            while True:
                self._answers.put((slot, connection.recv()))
        self._answers.put((slot, None))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for one in self.living:
            with suppress(OSError, ValueError):
                one.connection.send({"do": "end"})
        until = time.monotonic() + _GRACE
        for one in self.all:
            one.process.join(max(0.0, until - time.monotonic()))
            if one.process.is_alive():
                one.process.kill()
                one.process.join(_GRACE)

    @property
    def living(self) -> list[DeviceProcess]:
        """Those that still answer."""
        return [one for one in self.all if not one.lost]

    def greet(self) -> None:
        """Wait until each has said who it is."""
        for slot, answer in self._gather({one.slot for one in self.all}, self._plan.deadline + _START).items():
            if "raised" in answer:
                self._lose(slot, f"it could not be used: {answer['raised']}")
                continue
            one = self.all[slot]
            one.device, one.model, one.core = Device(**answer["device"]), answer["model"], answer["core"]

    def ask(self, asked: Mapping[int, Mapping[str, Any]]) -> dict[int, Answer]:
        """Ask devices, by slot, at once; return the answers of those that gave one. The others are lost from here on."""
        waiting = set()
        for slot, what in asked.items():
            try:
                self.all[slot].connection.send(what)
                waiting.add(slot)
            except (OSError, ValueError):
                self._lose(slot, self._how(slot))
        return self._gather(waiting, self._plan.deadline)

    def _gather(self, waiting: set[int], seconds: float) -> dict[int, Answer]:
        found: dict[int, Answer] = {}
        until = time.monotonic() + seconds
        while waiting - found.keys():
            try:
                slot, answer = self._answers.get(timeout=max(0.0, until - time.monotonic()))
            except queue.Empty:
                break
            if answer is None:
                waiting.discard(slot)
                self._lose(slot, self._how(slot))
            elif slot in waiting:
                found[slot] = answer
        for slot in waiting - found.keys():
            self._lose(slot, f"it did not answer within {seconds:g} seconds, and was ended")
        return found

    def _lose(self, slot: int, how: str) -> None:
        one = self.all[slot]
        one.lost = one.lost or how
        one.process.kill()

    def _how(self, slot: int) -> str:
        process = self.all[slot].process
        process.join(_GRACE)
        code = process.exitcode
        if code is None:
            return "it closed its connection"
        return f"its process died ({f'signal {-code}' if code < 0 else f'exit code {code}'})"


def _context(imported: Sequence[str]) -> ForkServerContext:
    """Return what makes processes of one that has imported torch, and never touched a device."""
    context = get_context("forkserver")
    context.set_forkserver_preload([*_IMPORTED, *imported])
    return context
