"""What `bitwitness stress` finds in a stated time: injected faults by kind and frequency, and passes in a minute.

    python bench/stress.py [--trials 2] [--seconds 3]    writes bench/results/stress.md

Each trial has three device processes on this CPU, one of which is faulty: which one, and the fault's random numbers, change
from trial to trial. A fault counts as found where its device is convicted; trials in which it never struck are left out.
"""

from __future__ import annotations

import argparse
import os
import platform
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch

from bitwitness.files.writing import write_text
from bitwitness.inject.device import FaultyDevice
from bitwitness.inject.faults import Fault
from bitwitness.session.clock import StepClock
from bitwitness.stress.answer import FAULTY, HEALTHY, Answer
from bitwitness.stress.catalogue import Outside, Plan
from bitwitness.stress.course import run_test

RESULTS = Path(__file__).parent / "results" / "stress.md"
DEVICES = (0, 1, 2)
ONLY = ("matmul", "attention", "softmax", "gelu", "checkerboard", "addresses", "broadcast", "all_reduce", "all_gather")
DTYPES = ("float32", "bfloat16")
KINDS: dict[str, dict[str, object]] = {
    "lowest bit of one number, matrix product": {"kind": "bitflip", "bit": 0, "site": "*/mm:*"},
    "high mantissa bit of one number, matrix product": {"kind": "bitflip", "bit": 6, "site": "*/mm:*"},
    "a tile of a matrix product times 1.01": {"kind": "multiply", "factor": 1.01, "pattern": "tile", "site": "*/mm:*"},
    "a column of a softmax is 0": {"kind": "nullify", "pattern": "column", "site": "*/_softmax:forward"},
    "one bit of memory": {"kind": "bitflip", "bit": 5, "site": "*/clone:*"},
    "one number that is sent": {"kind": "bitflip", "site": "*:comm.in0"},
    "one number that is received": {"kind": "bitflip", "site": "*:comm.out0"},
}
FREQUENCIES = (1.0, 0.05)


@contextmanager
def emulated(fault: Fault, seed: int, strikes: str, slot: int) -> Iterator[Callable[[int], None]]:
    """Be a device; make a file once something struck."""
    clock = StepClock()
    with FaultyDevice([fault], slot, clock, seed) as device:

        def passed(number: int) -> None:
            if device.fired:
                Path(strikes).touch()
            clock.go_on_with(number)

        yield passed
        passed(0)


def trial(kind: str, frequency: float, number: int, seconds: float, strikes: Path) -> tuple[bool, bool, int]:
    """Return whether the fault struck, whether its device alone was named, and how many others were."""
    faulty = number % len(DEVICES)
    fault = Fault(**KINDS[kind], rank=faulty, probability=frequency)  # type: ignore[arg-type]
    strikes.unlink(missing_ok=True)
    outside = Outside(partial(emulated, fault, number, str(strikes)), imported=("torch._dynamo",))
    plan = Plan(devices=DEVICES, dtypes=DTYPES, only=ONLY, seconds=seconds)
    answer = Answer(run_test(plan, outside))
    verdicts = [answer.verdict(one) for one in answer.outcome.devices]
    wrong = sum(verdict not in (HEALTHY, "undecided") for slot, verdict in enumerate(verdicts) if slot != faulty)
    return strikes.exists(), verdicts[faulty] == FAULTY, wrong


def table(trials: int, seconds: float, strikes: Path) -> list[str]:
    """Return the rows of the table."""
    rows = [
        "| fault | "
        + " | ".join(f"in {frequency:.0%} of calls" for frequency in FREQUENCIES)
        + " | healthy ones named |",
        "|---" * (len(FREQUENCIES) + 2) + "|",
    ]
    for kind in KINDS:
        cells, others = [], 0
        for frequency in FREQUENCIES:
            found = [trial(kind, frequency, number, seconds, strikes) for number in range(trials)]
            struck = [one for one in found if one[0] or one[1]]
            others += sum(one[2] for one in found)
            cells.append(f"{sum(one[1] for one in struck)} of {len(struck)}")
        rows.append(f"| {kind} | " + " | ".join(cells) + f" | {others} |")
        print(rows[-1], flush=True)
    return rows


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=3.0)
    args = parser.parse_args()
    rows = table(args.trials, args.seconds, RESULTS.with_suffix(".struck"))
    RESULTS.with_suffix(".struck").unlink(missing_ok=True)
    began = time.monotonic()
    clean = run_test(Plan(devices=DEVICES, seconds=20.0), Outside())
    runs = sum(count.total() for seen in clean.seen for count in seen.counts.values())
    passes = clean.passes / (clean.seconds / 60)
    named = [Answer(clean).verdict(one) for one in clean.devices]
    where = (
        f"`python bench/stress.py --trials {args.trials} --seconds {args.seconds:g}`: torch {torch.__version__}, "
        f"{platform.machine()}, three device processes on {os.cpu_count()} cores that had much else to do."
    )
    healthy = (
        f"Healthy devices, everything: {clean.passes} whole passes of {len(clean.workloads)} workloads, {runs} runs, in "
        f"{clean.seconds:.0f} s ({passes:.1f} passes a minute); verdicts: {', '.join(named)}; remarks: {len(clean.remarks)}. "
        f"Start and end of the processes: {time.monotonic() - began - clean.seconds:.0f} s."
    )
    lines = [
        "# What bitwitness stress finds",
        "",
        where,
        "",
        f"Found of those that struck, {args.trials} trials a cell, {args.seconds:g} seconds and at least one pass each:",
        "",
        *rows,
        "",
        healthy,
        "",
    ]
    write_text(RESULTS, "\n".join(lines))
    print("\n".join(lines))


if __name__ == "__main__":
    main()
