"""What a monitor costs, beside msprobe's and trainscope: process-CPU time a step, by turns, one thread.

    python bench/monitor.py [--rounds 20] [--only NAME …] [--quick] [--peer-python PYTHON]

Each way to monitor trains in a process of its own, and one trains unmonitored. A round has four steps of each, one process at a
time, in random order; the figure is the median over rounds of monitored over unmonitored in the same round, with a 95 %
interval from the order statistics. What the monitor's thread spends (tables, rules, the disk) is in it: it is waited for,
and written to the disk, at the end of the four. The peers run where ``mindstudio-probe`` and ``trainscope`` are installed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

from monitor_own import WAYS
from monitor_turns import SEEN
from overhead import ratio
from record import VARIABLE

HERE = Path(__file__).parent
NOTHING = "nothing"
TARGETS = {"gradients": 1.03, "everything": 1.3}
PEERS = ("msprobe: gradients", "msprobe: everything", "trainscope: default", "trainscope: every step")
STEPS, WARM_UP = 4, 2
NO_PEER = (
    "The peers were not measured. To measure them beside, give them an environment of their own: `python -m venv peer && "
    "peer/bin/pip install torch==2.13.0 mindstudio-probe==26.2.0 trainscope==1.8.0`, then `--peer-python peer/bin/python` "
    f"(or {VARIABLE})."
)


class Worker:
    """A training in a process of its own; see `monitor_turns`."""

    def __init__(self, way: str, python: str, *, tiny: bool) -> None:
        self.way = way
        self.seconds: list[float] = []
        script = "monitor_peer.py" if way in PEERS else "monitor_own.py"
        self._process = subprocess.Popen(
            [python, str(HERE / script), "--way", way, *(["--tiny"] if tiny else [])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(SEEN):
                found: dict[str, Any] = json.loads(line.removeprefix(SEEN))
                return found
        raise SystemExit(f"{self.way}: the training ended with exit code {self._process.wait()}")

    def turn(self, *, count: bool) -> None:
        """Have some steps trained."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{STEPS}\n")
        self._process.stdin.flush()
        spent = self._answer()["seconds"]
        if count:
            self.seconds.append(spent)

    def end(self) -> None:
        """Have it end, and wait for it."""
        self._process.communicate()


def by_turns(ways: list[str], rounds: int, peer_python: str | None, *, tiny: bool) -> dict[str, list[float]]:
    """Return what a step takes in each way, for each round."""
    pythons = {way: peer_python or "" if way in PEERS else sys.executable for way in (NOTHING, *ways)}
    workers = [Worker(way, python, tiny=tiny) for way, python in pythons.items()]
    shuffle = random.Random(2)
    for number in range(rounds + WARM_UP):
        for worker in shuffle.sample(workers, len(workers)):
            worker.turn(count=number >= WARM_UP)
    for worker in workers:
        worker.end()
    return {worker.way: worker.seconds for worker in workers}


def table(found: dict[str, list[float]]) -> list[str]:
    """Return the lines of a table."""
    plain = found[NOTHING]
    lines = ["| monitored | CPU ms/step | ratio | 95 % interval | target |", "|---|---|---|---|---|"]
    lines += [f"| {NOTHING} | {1e3 * statistics.median(plain):.0f} | 1 | | |"]
    for way, seconds in found.items():
        if way != NOTHING:
            middle, low, high = ratio(seconds, plain)
            target = TARGETS.get(way)
            told = "" if target is None else f"≤ {target:g}: {'kept' if middle <= target else 'missed'}"
            spent = f"{1e3 * statistics.median(seconds):.0f}"
            lines.append(f"| {way} | {spent} | {middle:.3f} | {low:.3f} – {high:.3f} | {told} |")
    return lines


def main() -> None:
    """Measure, print, and write ``bench/results/monitor.md``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--only", nargs="+", choices=(*WAYS, *PEERS), metavar="NAME", help="these; nothing is written")
    parser.add_argument("--quick", action="store_true", help="a tiny model, one round, two ways; nothing is written")
    parser.add_argument(
        "--peer-python", default=os.environ.get(VARIABLE), help=f"a Python with the peers (default: ${VARIABLE})"
    )
    args = parser.parse_args()
    ways = args.only or (["gradients", "everything"] if args.quick else [*WAYS, *(PEERS if args.peer_python else ())])
    if not args.peer_python and any(way in PEERS for way in ways):
        parser.error(NO_PEER)
    rounds = 1 if args.quick else args.rounds
    lines = table(by_turns(ways, rounds, args.peer_python, tiny=args.quick))
    of = f"torch {version('torch')}, {platform.machine()}, Python {sys.version.split()[0]}, one thread"
    text = f"`python bench/monitor.py --rounds {rounds}`: {of}."
    text += "" if args.peer_python else "\n\n" + NO_PEER
    print(text, *lines, sep="\n")
    if not args.only and not args.quick:
        where = HERE / "results" / "monitor.md"
        where.write_text(f"# What a monitor costs\n\n{text}\n\n" + "\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
