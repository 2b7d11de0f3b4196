"""``bitwitness stress``: the device's own test."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from bitwitness.cli.options import add_json, add_quiet, answer
from bitwitness.errors import UsageError

if TYPE_CHECKING:
    from bitwitness.inject.faults import Fault
    from bitwitness.stress.answer import Answer
    from bitwitness.stress.catalogue import Outside, Plan
    from bitwitness.stress.course import Outcome, Progress
    from bitwitness.trial.call import Call

_UNITS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0}
_EMULATION = ("bitwitness.inject.device", "torch._dynamo")  # the latter by torch, when a dispatch mode is first entered
_MOST_CORES = 8  # of a CPU that are tested where nobody says how many: each takes a process
_DIAGNOSIS = 3600.0  # seconds for ascend-dmi, whose guide says up to 24 minutes


def add_parser(verbs: Any) -> None:
    """Add the verb."""
    parser = verbs.add_parser(
        "stress",
        help="the device's own test: which of them computes wrongly?",
        description="Has every device of this machine do the same work (matrix products, attention, reductions, functions, "
        "memory patterns, collectives, in every dtype) again and again, and compares all bits: with its own, with the other "
        "devices', with what is right. Exit code 0: all healthy; 1: a device is faulty, and is named; 3: not everything "
        "could be tested.",
    )
    parser.add_argument(
        "--device", metavar="KIND", help="cpu, cuda, npu (default: the accelerator that is here, or cpu)"
    )
    parser.add_argument(
        "--devices", metavar="N|A,B", help="how many, or which (default: all; of a CPU a process for each core)"
    )
    parser.add_argument(
        "--time", metavar="T", default="60s", help="for how long: 60s (default), 10m, 2h; one pass at least"
    )
    parser.add_argument("--dtypes", metavar="A,B", help="only these dtypes")
    parser.add_argument(
        "--only", metavar="GLOB", action="append", default=[], help="only these workloads; may be repeated"
    )
    parser.add_argument(
        "--repeats", metavar="N", type=int, default=4, help="runs of a workload one after another (default: 4)"
    )
    parser.add_argument(
        "--deadline", metavar="S", type=float, default=120.0, help="seconds until a silent device is ended"
    )
    parser.add_argument(
        "--golden", metavar="FILE", help="compare with a device known to be good (same model, same torch)"
    )
    parser.add_argument("--golden-out", metavar="FILE", help="write this device's fingerprints, if all is well")
    parser.add_argument(
        "--replay", metavar="RUN", help="the work is a recorded step (bitwitness record --content tensors)"
    )
    add_json(parser, "the answer as JSON; '-', the default, prints it instead of the words")
    add_quiet(parser)
    parser.set_defaults(main=main)


def main(args: argparse.Namespace) -> int:
    """Run the test; return the exit code."""
    from bitwitness.files.writing import distinct, target_of
    from bitwitness.stress.answer import Answer
    from bitwitness.stress.ascend_dmi import diagnosed
    from bitwitness.stress.course import run_test
    from bitwitness.stress.golden import read_golden

    distinct({"--golden-out": args.golden_out, "--json": args.json}, {"--golden": args.golden})
    for option, path in (("--golden-out", args.golden_out), ("--json", None if args.json == "-" else args.json)):
        if path is not None:
            target_of(path, option)  # an hour later is too late
    golden = read_golden(args.golden) if args.golden is not None else None
    plan = _plan(args)
    outside, injected = _outside()
    with _progress(args, plan.seconds) as heard:
        outcome = run_test(plan, outside, golden=golden, heard=heard)
    diagnosis = diagnosed(plan.devices, _DIAGNOSIS) if plan.kind == "npu" and not outcome.interrupted else None
    found = Answer(outcome, diagnosis, injected)
    answer(args, found.as_dict, lambda: print("\n".join(found.told())))
    if args.golden_out is not None:
        _write_golden(args.golden_out, outcome, found)
    return found.exit_code


def _plan(args: argparse.Namespace) -> Plan:
    import torch

    from bitwitness.stress.catalogue import DTYPES, Plan

    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    kind = args.device or (accelerator.type if accelerator is not None else "cpu")
    for name, value, least in (("--repeats", args.repeats, 1), ("--deadline", args.deadline, 1)):
        if value < least:
            raise UsageError(f"{name} {value:g} is too little; expected {least} or more")
    return Plan(
        kind=kind,
        devices=_devices(kind, args.devices),
        dtypes=tuple(part.strip() for part in args.dtypes.split(",")) if args.dtypes else DTYPES,
        only=tuple(args.only),
        recorded=_recorded(args.replay) if args.replay is not None else (),
        seconds=_seconds(args.time),
        repeats=args.repeats,
        deadline=args.deadline,
    )


def _seconds(text: str) -> float:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smh]?)", text)
    if found is None:
        raise UsageError(f"--time {text!r} is no time; expected seconds, minutes or hours: 60s, 10m, 2h")
    return float(found[1]) * _UNITS[found[2]]


def _devices(kind: str, text: str | None) -> tuple[int, ...]:
    """Return the indices of the devices; raises `UsageError` for one that is not here."""
    import torch

    from bitwitness.cli.usable import usable

    usable(kind)
    here = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    here = min(here, _MOST_CORES) if kind == "cpu" else int(torch.get_device_module(kind).device_count())
    if text is None:
        return tuple(range(here))
    if not re.fullmatch(r"\d{1,4}(,\d{1,4})*", text):
        raise UsageError(f"--devices {text!r} is neither a number of devices nor a list of them; expected 4, or 0,2,5")
    numbers = tuple(dict.fromkeys(int(part) for part in text.split(",")))
    if "," not in text:
        numbers = tuple(range(numbers[0]))
    if not numbers:
        raise UsageError("--devices 0 tests none; expected 1 or more")
    if kind != "cpu" and max(numbers) >= here:
        raise UsageError(f"--devices {text}: there are {here} devices of {kind} here, 0 to {here - 1}")
    return numbers


def _recorded(run: str) -> tuple[Mapping[str, Any], ...]:
    """Return the calls of a recording that can be run again."""
    from bitwitness.precheck.sources import run_cases

    cases = [case.as_dict() for case in run_cases(run) if not case.refused]
    if not cases:
        raise UsageError(
            f"{run} holds no operator call that can be run again; record it with --level mix --content tensors"
        )
    return tuple(cases)


def _outside() -> tuple[Outside, str]:
    """Return what device processes are given, and which faults are injected, in words."""
    from bitwitness.config.variables import INJECT
    from bitwitness.inject.faults import load_faults
    from bitwitness.stress.catalogue import Outside

    path = os.environ.get(INJECT)
    if not path:
        return Outside(recorded=recorded_call), ""
    faults = load_faults(path)
    words = f"{len(faults)} declared" + "".join(f", {fault.kind} at {fault.site}" for fault in faults[:3])
    return Outside(partial(emulated, faults), recorded_call, _EMULATION), words


@contextmanager
def emulated(faults: tuple[Fault, ...], slot: int) -> Iterator[Callable[[int], None]]:
    """Be the device of a slot, with the faults whose ``rank`` that is; passes are its steps."""
    from bitwitness.inject.device import FaultyDevice
    from bitwitness.session.clock import StepClock

    clock = StepClock()
    with FaultyDevice(faults, slot, clock):
        yield clock.go_on_with


def recorded_call(told: Mapping[str, Any]) -> Call:
    """Make a recorded call, on the CPU."""
    import torch

    from bitwitness.precheck.attempt import prepared_of
    from bitwitness.precheck.case import Case

    return prepared_of(Case(**told), torch.device("cpu")).call


@contextmanager
def _progress(args: argparse.Namespace, seconds: float) -> Iterator[Callable[[Progress], None] | None]:
    """Show where the test stands: a bar on a terminal, a line for news and each tenth of the time in a log."""
    if args.quiet:
        yield None
        return
    if not sys.stderr.isatty():
        yield _Lines(seconds)
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    with Progress(
        TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), console=Console(stderr=True), transient=True
    ) as bar:
        task = bar.add_task("pass 1", total=seconds)

        def heard(one: Any) -> None:
            bar.update(
                task, completed=min(one.seconds, seconds), description=f"pass {one.passes + 1}, {one.done}/{one.of}"
            )
            if one.text:
                bar.console.print(one.text, markup=False, highlight=False)

        yield heard


class _Lines:
    def __init__(self, seconds: float) -> None:
        self._every = max(seconds / 10, 10.0)
        self._next = self._every

    def __call__(self, one: Progress) -> None:
        if one.text:
            print(one.text, file=sys.stderr, flush=True)
        elif one.seconds >= self._next:
            self._next = one.seconds + self._every
            print(f"{one.seconds:.0f} s: pass {one.passes + 1}, {one.done} of {one.of}", file=sys.stderr, flush=True)


def _write_golden(path: str, outcome: Outcome, found: Answer) -> None:
    """Write the fingerprints of devices in which nothing was found."""
    from bitwitness.files.shown import say
    from bitwitness.files.writing import target_of
    from bitwitness.stress.golden import golden_of, write_golden

    if found.exit_code:
        say(f"{path} was not written: only a device on which all was tested and found well makes a golden file")
        return
    golden = golden_of(outcome.devices[0].model, outcome.seen, outcome.workloads)
    write_golden(target_of(path, "--golden-out"), golden)
