"""The course of a test: passes over all workloads until the time is up, and a closer look where bits differ."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from bitwitness.stress.catalogue import Outside, Plan, workloads_of
from bitwitness.stress.conclude import concluded
from bitwitness.stress.golden import Golden
from bitwitness.stress.process import DeviceProcess, DeviceProcesses
from bitwitness.stress.tally import Seen, Slots
from bitwitness.stress.truth import Truths
from bitwitness.stress.verdict import MANY, UNDECIDED, Fault, Remark
from bitwitness.stress.workload import VARIANTS, Workload

_MOST_KEPT = 8  # results of one workload and input whose values are kept to be compared
_AGAIN = 8  # runs more, on all devices, of what has just differed: how it varies is part of the answer


@dataclass(frozen=True, slots=True)
class Progress:
    """Where a test stands. ``text``: news, if there are any."""

    passes: int
    done: int
    of: int
    seconds: float
    text: str = ""


Heard = Callable[[Progress], None]


@dataclass(slots=True)
class Outcome:
    """What a test found.

    Attributes
    ----------
    devices
        Each with its identity, and how it was lost, if it was.
    seen
        All counts.
    faults, remarks
        The answer.
    unsupported
        By workload: why no device can do it.
    untested
        By workload: why it was not done, or not to the end.
    passes, seconds
        How much was done.
    interrupted
        Whether Ctrl-C ended it.

    """

    plan: Plan
    workloads: list[Workload]
    devices: list[DeviceProcess] = field(default_factory=list)
    seen: list[Seen] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    remarks: list[Remark] = field(default_factory=list)
    unsupported: dict[str, str] = field(default_factory=dict)
    untested: dict[str, str] = field(default_factory=dict)
    passes: int = 0
    seconds: float = 0.0
    interrupted: bool = False


def run_test(plan: Plan, outside: Outside, *, golden: Golden | None = None, heard: Heard | None = None) -> Outcome:
    """Test devices as planned; Ctrl-C ends it with what was found so far.

    Raises
    ------
    UsageError
        If the plan names no workload, or a golden file is of another model or software.

    """
    test = _Test(plan, outside, golden, heard)
    return test.run()


class _Test:
    def __init__(self, plan: Plan, outside: Outside, golden: Golden | None, heard: Heard | None) -> None:
        self._plan, self._outside, self._golden, self._heard = plan, outside, golden, heard
        self._workloads = workloads_of(plan, outside)
        self._truths = Truths(self._workloads, len(plan.devices))
        self._out = Outcome(plan, self._workloads)
        self._seen: dict[tuple[int, int], Seen] = {}
        self._began = time.monotonic()
        self._grouped = ""

    def run(self) -> Outcome:
        together = len(self._plan.devices) > 1 and any(one.collective for one in self._workloads)
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if together else None
        try:
            with DeviceProcesses(self._plan, self._outside, store.port if store else 0) as processes:
                self._out.devices = processes.all
                processes.greet()
                self._compare_models()
                if store is not None:
                    self._group(processes)
                self._tell(f"{len(processes.living)} devices are ready")
                self._began = time.monotonic()
                self._passes(processes)
        except KeyboardInterrupt:
            self._out.interrupted = True
        self._out.seconds = time.monotonic() - self._began
        self._conclude()
        return self._out

    def _compare_models(self) -> None:
        if self._golden is not None:
            for one in self._out.devices:
                if not one.lost:
                    self._golden.fits(one.model, "the golden file")

    def _group(self, processes: DeviceProcesses) -> None:
        """Have the devices join one group; without all of them there is none."""
        count = len(self._plan.devices)
        if len(processes.living) < count:
            self._grouped = "not all devices could be used"
            return
        answers = processes.ask({slot: {"do": "group"} for slot in range(count)})
        self._grouped = next((one["raised"] for one in answers.values() if "raised" in one), "")
        if len(answers) < count:
            self._grouped = "a device was lost"

    def _passes(self, processes: DeviceProcesses) -> None:
        until = self._began + self._plan.seconds
        number = 0
        while number == 0 or time.monotonic() < until:
            for index in range(len(self._workloads)):
                if number and time.monotonic() >= until:
                    return
                if not processes.living:
                    return
                self._batch(processes, index, number)
                self._tell("", index + 1)
            number += 1
            self._out.passes = number

    def _batch(self, processes: DeviceProcesses, index: int, number: int) -> None:
        workload = self._workloads[index]
        if workload.key in self._out.unsupported or workload.key in self._out.untested:
            return
        if workload.collective and (self._grouped or len(processes.living) < len(self._plan.devices)):
            self._out.untested[workload.key] = self._grouped or "a device was lost"
            return
        variant = 0 if self._plan.recorded else number % VARIANTS
        seen = self._seen.setdefault((index, variant), Seen(index, variant))
        differed = self._differs(seen)
        self._run(processes, seen, number, self._plan.repeats)
        if self._differs(seen) and not differed:
            self._tell(f"{workload.key}: results differ; looking closer")
            self._run(processes, seen, number, _AGAIN)

    def _run(self, processes: DeviceProcesses, seen: Seen, number: int, repeats: int) -> None:
        workload = self._workloads[seen.workload]
        asked = {"do": "run", "workload": seen.workload, "variant": seen.variant, "repeats": repeats, "pass": number}
        before = len(processes.living)
        answers = processes.ask({one.slot: asked for one in processes.living})
        for slot, answer in answers.items():
            seen.nondeterministic = seen.nondeterministic or answer.get("nondeterministic", "")
            if "runs" in answer:
                seen.add(slot, answer["runs"])
        if len(processes.living) < before and workload.collective:
            self._out.untested[workload.key] = "a device was lost in it"
        self._refused(workload, answers)
        self._look(processes, seen, {slot: one["runs"] for slot, one in answers.items() if "runs" in one})
        for one in processes.all:
            if one.lost and one.slot not in answers and before > len(processes.living):
                self._tell(f"{one.label} is lost: {one.lost}")

    def _refused(self, workload: Workload, answers: Mapping[int, Mapping[str, Any]]) -> None:
        """Note what devices cannot do: all of them, by design; or one of them, where the others can."""
        unable = {
            slot: str(one.get("unsupported") or one.get("raised")) for slot, one in answers.items() if "runs" not in one
        }
        if not unable:
            return
        said = next(iter(unable.values()))
        if len(unable) == len(answers) and all("unsupported" in one for one in answers.values()):
            self._out.unsupported[workload.key] = said
        else:
            self._out.untested[workload.key] = f"on device {', '.join(map(str, unable))}: {said}"

    def _differs(self, seen: Seen) -> bool:
        workload = self._workloads[seen.workload]
        if workload.exact:
            return any(one != self._truths.due(seen, slot)[0] for slot, count in seen.counts.items() for one in count)
        return len(seen.fingerprints | self._golden_of(seen)) > 1

    def _golden_of(self, seen: Seen) -> set[str]:
        found = self._golden.of(seen, self._workloads[seen.workload]) if self._golden is not None else None
        return set() if found is None else {found}

    def _look(self, processes: DeviceProcesses, seen: Seen, runs: Mapping[int, list[str]]) -> None:
        """Fetch the values behind results that differ, and have float64 judge them."""
        exact = self._workloads[seen.workload].exact
        few = len(self._plan.devices) < MANY and not exact  # float64 looks at the first results, too
        differs = self._differs(seen)
        if not differs and not few:
            return
        for slot, of in runs.items():
            for fingerprint in dict.fromkeys(of):
                known = fingerprint in seen.values if exact else fingerprint in seen.within
                if known and (not differs or fingerprint in seen.values or len(seen.values) >= _MOST_KEPT):
                    continue
                values = self._fetched(processes, slot, fingerprint)
                if values is None:
                    continue
                if not exact and fingerprint not in seen.within:
                    seen.within[fingerprint] = self._truths.within(seen, values)
                if differs and len(seen.values) < _MOST_KEPT:
                    seen.values[fingerprint] = values

    def _fetched(self, processes: DeviceProcesses, slot: int, fingerprint: str) -> Slots | None:
        if processes.all[slot].lost:
            return None
        answer = processes.ask({slot: {"do": "tensors", "fingerprint": fingerprint}}).get(slot, {})
        return None if answer.get("slots") is None else {name: _tensor(*one) for name, one in answer["slots"].items()}

    def _conclude(self) -> None:
        self._out.seen = [one for one in self._seen.values() if one.counts]
        models = {one.slot: one.model for one in self._out.devices if one.device is not None}
        self._out.faults, self._out.remarks = concluded(
            self._out.seen, self._workloads, models, self._truths.due, self._golden
        )
        for slot, model in models.items():
            if len(models) > 1 and list(models.values()).count(model) == 1:
                text = (
                    f"device {slot} is the only one of its model here: its rounded results had none to be compared with"
                )
                self._out.remarks.append(Remark(UNDECIDED, (slot,), "all", text))

    def _tell(self, text: str, done: int = 0) -> None:
        if self._heard is not None:
            with suppress(OSError):
                seconds = time.monotonic() - self._began
                self._heard(Progress(self._out.passes, done, len(self._workloads), seconds, text))


def _tensor(dtype: str, shape: tuple[int, ...], data: bytes) -> torch.Tensor:
    kind: torch.dtype = getattr(torch, dtype.removeprefix("torch."))
    if not data:
        return torch.empty(shape, dtype=kind)
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).view(kind).reshape(shape)
