"""What a pre-check of one training step costs: ours of msprobe's dump and of our own recording, and msprobe's of its dump.

    python bench/precheck.py [--only WAY …] [--quick] [--peer-python PYTHON]

The step is the second of a GPT's training, forward, backward and AdamW; see `precheck_peer.py`, which also tells what msprobe
needs to run on a CPU. Each pre-check is a command, one after another, and its figure the CPU time (user and system) of all the
processes that it starts, imports included. Calls: those that the recording holds and the pre-check takes. Cases: how many it
tried them in; one of ours stands for all calls with the same operator, dtypes, shapes and arguments, one of msprobe's for one.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from record import NO_PEER, OWN, PEER, VARIABLE, usable

HERE = Path(__file__).parent
SCRIPT = str(HERE / "precheck_peer.py")
SECONDS, REFERENCE = 60.0, 552.0
_TOLD = 12  # kinds of cases that did not pass


@dataclass(frozen=True)
class Way:
    """Which tool checks whose recording, and what else it is told."""

    name: str
    tool: str
    recorded_by: str
    arguments: tuple[str, ...] = ()

    @property
    def needs_peer(self) -> bool:
        """Whether msprobe has a part in it."""
        return PEER in {self.tool, self.recorded_by}


WAYS = [
    Way("msprobe's dump", OWN, PEER),
    Way("our recording", OWN, OWN),
    Way("our recording, every call", OWN, OWN, ("--every-call",)),
    Way("msprobe's dump, by msprobe", PEER, PEER),
]


@dataclass
class Found:
    """What a pre-check said and took."""

    cpu: float
    wall: float
    calls: int = 0
    cases: int = 0
    verdicts: Counter[str] = field(default_factory=Counter)
    odd: Counter[str] = field(default_factory=Counter)


class Bench:
    """Records, and has the recordings checked.

    Parameters
    ----------
    peer
        The Python that has msprobe; None to leave it out.
    scratch
        Where recordings and results go.
    tiny
        A model that proves only that it runs.

    """

    def __init__(self, peer: str | None, scratch: Path, *, tiny: bool) -> None:
        self.pythons = {OWN: sys.executable} | ({PEER: peer} if peer else {})
        self.recordings = {tool: scratch / f"recorded-by-{tool}" for tool in self.pythons}
        self.said: dict[str, Any] = {}
        self._scratch = scratch
        self._tiny = ["--tiny"] if tiny else []

    def record(self, tool: str) -> None:
        """Have a tool record the step."""
        folder = str(self.recordings[tool])
        if tool == OWN:
            how = ["-m", "bitwitness", "record", "--steps", "1", "--level", "mix", "-q", "-o", folder, SCRIPT, "train"]
        else:
            how = [SCRIPT, "record", "--dump", folder]
        done = self._run(tool, [*how, *self._tiny])
        if done.returncode:
            raise SystemExit(f"{tool} did not record: {_last(done)}")
        if tool == PEER:
            self.said = json.loads(done.stdout.splitlines()[-1])

    def check(self, way: Way) -> Found:
        """Have a recording checked."""
        run, out = str(self.recordings[way.recorded_by]), self._scratch / f"way-{WAYS.index(way)}"
        if way.tool == OWN:
            how = ["-m", "bitwitness", "precheck", run, "-o", str(out), "--jobs", "1", *way.arguments]
        else:
            how = [SCRIPT, "check", "--dump", run, "--out", str(out)]
        cpu, wall = _children(), time.perf_counter()
        done = self._run(way.tool, how)
        found = Found(_children() - cpu, time.perf_counter() - wall)
        if not any(out.glob("*result*")) or (way.tool == PEER and done.returncode):
            raise SystemExit(f"{way.name}: {_last(done)}")
        (_read_own if way.tool == OWN else _read_peer)(out, found)
        return found

    def _run(self, tool: str, how: Sequence[str]) -> subprocess.CompletedProcess[str]:
        drop = {"PYTHONPATH"} if tool == PEER else set()  # what is installed here is not meant for the peer
        env = {**{k: v for k, v in os.environ.items() if k not in drop}, "OMP_NUM_THREADS": "1"}
        return subprocess.run([self.pythons[tool], *how], env=env, capture_output=True, text=True, check=False)


def _children() -> float:
    """Return the CPU seconds of all processes that ended as this one's children, and of theirs."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _last(done: subprocess.CompletedProcess[str]) -> str:
    return (done.stderr.strip() or done.stdout.strip() or "no message").splitlines()[-1]


def _read_own(out: Path, found: Found) -> None:
    results = json.loads((out / "results.json").read_text(encoding="utf-8"))["results"]
    for one in results:
        found.verdicts[one["verdict"]] += 1
        found.calls += one["calls"]
        if one["verdict"] != "pass":
            found.odd[f"{one['verdict']} {one['operator']}: {one['reason']}"] += 1
    found.cases = len(results)


def _read_peer(out: Path, found: Found) -> None:
    """Read the table of calls: forward, backward (blank without one); a call's verdict is the worse of the two."""
    (table,) = out.glob("accuracy_checking_result_*.csv")
    with table.open(newline="", encoding="utf-8-sig") as file:
        for row in csv.DictReader(file):
            said = {row["Forward Test Success"].strip().lower(), row["Backward Test Success"].strip().lower()} - {""}
            verdict = next((v for v in ("error", "warning", "skip", "pass") if v in said), "nothing")
            found.verdicts[verdict] += 1
            found.calls += 1
            if verdict != "pass":
                found.odd[f"{verdict} {row['API name'].rsplit('.', 1)[0]}: {row['Message'] or ''}"] += 1
    found.cases = found.calls


HEAD = ["| checked | by | calls | cases | verdicts | CPU s | wall s | target |", "|---|---|---|---|---|---|---|---|"]


def line(way: Way, found: Found) -> str:
    """Return one line of the table."""
    target = ""
    if way.tool == OWN:
        target = f"≤ {SECONDS:g}: {'kept' if found.cpu <= SECONDS else 'missed'}"
    verdicts = ", ".join(f"{count} {verdict}" for verdict, count in found.verdicts.most_common())
    figures = f"{found.calls:,} | {found.cases:,} | {verdicts} | {found.cpu:.1f} | {found.wall:.1f}"
    return f"| {way.name.split(', by')[0]} | {way.tool} | {figures} | {target} |"


def odd(way: Way, found: Found) -> Iterator[str]:
    """Yield what did not pass."""
    for text, count in found.odd.most_common(_TOLD):
        yield f"- {way.name}: {count} x {text}"
    if len(found.odd) > _TOLD:
        yield f"- {way.name}: {len(found.odd) - _TOLD} more kinds"


def about(bench: Bench) -> str:
    """Return how the figures were come by."""
    said = bench.said
    peer = f", {said['tool']} (torch {said['torch']})" if said else ""
    text = (
        f"`python bench/precheck.py`: bitwitness (torch {torch.__version__}){peer}; {platform.machine()}, "
        f"{os.cpu_count()} cores, one thread, one process at a time.\n\n"
        "One training step of the GPT of 11.2 million parameters, 4 x 128 tokens, fp32, AdamW as a for-loop; statistics were "
        "recorded, and inputs are made from them. CPU s: user and system, of all processes of the command, imports included. "
        "Calls: recorded ones that the pre-check takes. Cases: how many it tried them in; ours runs calls of the same "
        "operator, dtypes, shapes and arguments once. Of msprobe's dump each forward call is run with its gradients, the "
        "optimizer's too; of our recording each forward and backward operator, not the optimizer's."
    )
    if not said:
        return f"{text}\n\n{NO_PEER}"
    return (
        f"{text}\n\nTarget: {SECONDS:g} s where msprobe needed {REFERENCE:g} s for 1,018 calls. Its dump here has "
        f"{said['forward']:,} forward calls, {said['backward']:,} of them with a backward. It runs each of them; asked to "
        f"filter (`-f`), it would leave {said['filtered']:,}. It refuses to run without a CUDA or NPU device, so "
        "`precheck_peer.py` puts `cpu` in the place of its device's name and does nothing for `torch.cuda.set_device`; all "
        "else is its own."
    )


def main() -> None:
    """Record, check, print, and write ``bench/results/precheck.md``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=[w.name for w in WAYS], metavar="WAY", help="nothing is written")
    parser.add_argument("--quick", action="store_true", help="a tiny model; nothing is written")
    parser.add_argument(
        "--peer-python", default=os.environ.get(VARIABLE), help=f"a Python with msprobe (default: ${VARIABLE})"
    )
    args = parser.parse_args()
    peer = usable(args.peer_python)
    ways = [w for w in WAYS if (peer or not w.needs_peer) and (not args.only or w.name in args.only)]
    lines, oddities = [*HEAD], []
    with tempfile.TemporaryDirectory(prefix="bench-precheck-") as scratch:
        bench = Bench(peer, Path(scratch), tiny=args.quick)
        for tool in dict.fromkeys(way.recorded_by for way in ways):
            bench.record(tool)
        print("\n".join(HEAD), flush=True)
        for way in ways:
            found = bench.check(way)
            lines.append(line(way, found))
            print(lines[-1], flush=True)
            oddities += odd(way, found)
    print("\n".join(["", about(bench), "", *oddities]))
    if not args.quick and not args.only:
        table, rest = "\n".join(lines), "\n".join(["", "Did not pass:", "", *oddities, ""] if oddities else [""])
        (HERE / "results" / "precheck.md").write_text(
            f"# What a pre-check costs\n\n{about(bench)}\n\n{table}\n{rest}", encoding="utf-8"
        )


if __name__ == "__main__":
    main()
