"""What recording costs: bitwitness and msprobe by turns, each in processes of its own, on GPTs of two sizes.

    python bench/record.py [--rounds 10] [--only NAME …] [--quick] [--peer-python PYTHON]

A process trains rounds of some unrecorded and some recorded steps in random order; the figure is the median over rounds
of the process-CPU time of recorded over unrecorded steps, what a recorder's threads spend and its last flush included,
with a 95 % interval from the order statistics. The two tools' processes alternate, since a machine's speed changes by
the minute. Megabytes, files and peak memory are taken from further processes that record (or do not) without a break
for some seconds. The peer runs where ``mindstudio-probe`` is installed, in an environment of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from overhead import ratio
from rounds import Job

HERE = Path(__file__).parent
OWN, PEER = "bitwitness", "msprobe"
SCRIPTS = {OWN: "record_own.py", PEER: "record_peer.py"}
VARIABLE = "BITWITNESS_PEER_PYTHON"
NO_PEER = (
    "msprobe was not measured. To measure it beside bitwitness, give it an environment of its own: "
    "`python -m venv peer && peer/bin/pip install torch==2.13.0 mindstudio-probe==26.2.0`, "
    f"then `--peer-python peer/bin/python` (or {VARIABLE})."
)
CALLS = 2
_MUCH_MEMORY = 2048
"""Tokens from which on glibc gives freed memory back at once: in its pools 300 million parameters' activations take over 23 GB,
and 15 GB without. Unrecorded and recorded steps are of one process."""
MEMORY = 1.3
FILES = 3.0


@dataclass(frozen=True)
class Case:
    """One way to record, and what it may cost at most, in steps without recording (None: nothing was promised)."""

    job: Job
    target: float | None = None

    @property
    def is_stats(self) -> bool:
        """Whether its memory has a target."""
        return self.job.content == "stats"


_DEEP: dict[str, Any] = {"model": "deep", "batch": 1, "context": 32, "foreach": True, "steps": 2}
_LONG: dict[str, Any] = {**_DEEP, "batch": 8, "context": 256, "steps": 1}
CASES = [
    Case(Job("modules stats", level="modules"), 1.1),
    Case(Job("ops stats", level="ops"), 1.5),
    Case(Job("mix stats"), 1.4),
    Case(Job("mix stats async", async_dump=True), 1.6),
    Case(Job("mix stats bf16", bf16=True), 2.0),
    Case(Job("mix stats eager", model="eager"), 1.5),
    Case(Job("modules stats foreach", level="modules", foreach=True), 1.15),
    Case(Job("mix stats foreach", foreach=True), 1.6),
    Case(Job("mix structure", content="structure")),
    Case(Job("mix hash", content="hash"), 2.0),
    Case(Job("mix tensors", content="tensors", steps=2), 6.0),
    Case(Job("modules stats deep", level="modules", **_DEEP), 1.4),
    Case(Job("mix stats deep", **_DEEP), 2.2),
    Case(Job("modules stats deep long", level="modules", **_LONG), 1.1),
    Case(Job("mix stats deep long", **_LONG), 1.4),
]


@dataclass
class Found:
    """What is known of one case with one tool."""

    plain: list[float] = field(default_factory=list)
    recorded: list[float] = field(default_factory=list)
    weighed: dict[str, Any] = field(default_factory=dict)
    problem: str = ""


class Bench:
    """Starts processes and keeps what they print.

    Parameters
    ----------
    peer
        The Python that has msprobe; None to leave it out.

    """

    def __init__(self, peer: str | None) -> None:
        self.pythons = {OWN: sys.executable} | ({PEER: peer} if peer else {})
        self.found: dict[tuple[str, str], Found] = defaultdict(Found)
        self.plain_mb: dict[tuple[Any, ...], float] = {}
        self.versions: dict[str, str] = {}

    def run(self, tool: str, jobs: Sequence[Job]) -> None:
        """Run jobs in one process."""
        command = [self.pythons[tool], str(HERE / SCRIPTS[tool]), "--jobs", json.dumps([asdict(job) for job in jobs])]
        drop = {"PYTHONPATH"} if tool == PEER else set()  # what is installed here is not meant for the peer
        env = {**{k: v for k, v in os.environ.items() if k not in drop}, "OMP_NUM_THREADS": "1"}
        if any(job.batch * job.context >= _MUCH_MEMORY for job in jobs):
            env["MALLOC_MMAP_THRESHOLD_"] = str(1 << 18)
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
        for line in done.stdout.splitlines():
            if line.startswith('{"job"'):
                self._take(tool, json.loads(line))
        if done.returncode:
            last = (done.stderr.strip() or "no message").splitlines()[-1]
            print(f"{tool}, {jobs[0].name}: {last}", file=sys.stderr)
            self.found[jobs[0].name, tool].problem = last

    def _take(self, tool: str, line: dict[str, Any]) -> None:
        job = Job(**line["job"])
        found = self.found[job.name, tool]
        if not job.recorded:
            self.plain_mb[tool, job.training] = line["peak_mb"]
            return
        self.versions[tool] = f"{line['tool']} (torch {line['torch']})"
        if job.rounds:
            found.plain += line["plain"]
            found.recorded += line["recorded"]
        else:
            found.weighed = line

    def memory(self, tool: str, job: Job) -> float | None:
        """Return peak memory over that of the same training unrecorded."""
        plain = self.plain_mb.get((tool, job.training))
        peak = self.found[job.name, tool].weighed.get("peak_mb")
        return None if plain is None or peak is None else peak / plain


def measure(bench: Bench, cases: Sequence[Case], rounds: int) -> None:
    """Measure each case with each tool, in turns."""
    for case in cases:
        for job_of_tool in zip(*(list(_jobs(case, tool, rounds)) for tool in bench.pythons), strict=True):
            for tool, job in zip(bench.pythons, job_of_tool, strict=True):
                if job is not None:
                    bench.run(tool, [job])
        for tool in bench.pythons:
            if (tool, case.job.training) not in bench.plain_mb:
                bench.run(tool, [replace(case.job, recorded=False)])
        print("\n".join(lines(bench, case)), flush=True)


def _jobs(case: Case, tool: str, rounds: int) -> Iterator[Job | None]:
    """Yield the jobs of a case, some of them None so that all tools have equally many; the peer's figures need fewer rounds."""
    job = case.job
    if job.content == "tensors":
        yield replace(job, rounds=3) if tool == OWN else replace(job, rounds=2, steps=1)
        yield None
    else:
        share = rounds if tool == OWN else (rounds + 1) // 2
        for call in range(CALLS):
            count = (share + call) // CALLS
            yield replace(job, rounds=count) if count else None
    yield job


def smoke(bench: Bench, cases: Sequence[Case]) -> None:
    """Run everything once with a tiny model: ours in one process, of the peer the first case only."""
    tiny = [replace(case.job, tiny=True, seconds=0.0, rounds=rounds) for case in cases for rounds in (1, 0)]
    of_tool = {OWN: [*tiny, replace(tiny[0], rounds=0, recorded=False)], PEER: tiny[:1]}
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda tool: bench.run(tool, of_tool[tool]), bench.pythons))
    for case in cases:
        print("\n".join(lines(bench, case)))


HEAD = [
    "| recorded | tool | CPU ms/step | recorded | ratio | 95 % interval | target | MB/step | files/step | peak memory |",
    "|---|---|---|---|---|---|---|---|---|---|",
]


def lines(bench: Bench, case: Case) -> list[str]:
    """Return a case's lines of the table."""
    return [line(bench, case, tool) for tool in bench.pythons if (case.job.name, tool) in bench.found]


def line(bench: Bench, case: Case, tool: str) -> str:
    """Return one line of the table."""
    found = bench.found[case.job.name, tool]
    own = tool == OWN
    cells = [case.job.name, tool]
    if found.recorded:
        middle, low, high = ratio(found.recorded, found.plain)
        cells += [f"{1e3 * statistics.median(times):.0f}" for times in (found.plain, found.recorded)]
        cells += [f"{middle:.2f}", f"{low:.2f} – {high:.2f}", against(middle, case.target) if own else ""]
    else:
        cells += [f"failed: {found.problem[:80]}", "", "", "", ""]
    if weighed := found.weighed:
        files = weighed["files"] / weighed["steps"]
        memory = bench.memory(tool, case.job)
        cells += [f"{weighed['mb'] / weighed['steps']:.3g}"]
        cells += [f"{files:.2g}" + (f" ({against(files, FILES)})" if own else "")]
        told = "–" if memory is None else f"x {memory:.2f}"
        cells += [told + (f" ({against(memory, MEMORY)})" if own and memory and case.is_stats else "")]
    else:
        cells += ["", "", ""]
    return "| " + " | ".join(cells) + " |"


def against(figure: float, target: float | None) -> str:
    """Say whether a target is kept."""
    return "" if target is None else f"≤ {target:g}: {'kept' if figure <= target else 'missed'}"


def chosen(names: Sequence[str] | None) -> list[Case]:
    """Return the cases whose name is given, or all."""
    known = [case.job.name for case in CASES]
    for name in names or []:
        if name not in known:
            raise SystemExit(f"--only {name!r}: expected some of " + ", ".join(repr(n) for n in known))
    return [case for case in CASES if not names or case.job.name in names]


def about(bench: Bench, args: argparse.Namespace) -> str:
    """Return how the figures were come by."""
    arguments = " ".join([f"--rounds {args.rounds}", *(["--only", *map(repr, args.only)] if args.only else [])])
    tools = ", ".join(bench.versions.get(tool, tool) for tool in bench.pythons)
    text = (
        f"`python bench/record.py {arguments}`: {tools}; {platform.machine()}, {os.cpu_count()} cores, one thread.\n\n"
        "GPT of 11.2 million parameters, 4 x 128 tokens, fp32 (bf16: the whole model; eager: attention operator by operator), "
        "AdamW as a for-loop (foreach where it says so). Deep: 300 million parameters in 1,987 modules, 32 tokens (long: "
        "2,048), foreach. CPU ms/step: unrecorded, then recorded, of the whole process. Peak memory: resident set, over that "
        "of the same training without recorder. MB = 10^6 bytes."
    )
    return text if PEER in bench.pythons else f"{text}\n\n{NO_PEER}"


def usable(peer: str | None) -> str | None:
    """Return the peer's Python if msprobe is installed there, else None, having said what is missing."""
    if not peer:
        print(f"{NO_PEER}\n")
        return None
    code = "from importlib.metadata import version; version('mindstudio-probe')"
    try:
        done = subprocess.run([peer, "-c", code], capture_output=True, text=True, check=False)
        problem = done.stderr.strip().splitlines()[-1] if done.returncode else ""
    except OSError as error:
        problem = str(error)
    if problem:
        raise SystemExit(f"--peer-python {peer}: {problem}; expected a Python with msprobe.\n{NO_PEER}")
    return peer


def main() -> None:
    """Measure, print, and write ``bench/results/record.md``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="cases, as the table names them; nothing is written")
    parser.add_argument("--quick", action="store_true", help="a tiny model and one round; nothing is written")
    parser.add_argument(
        "--peer-python", default=os.environ.get(VARIABLE), help=f"a Python with msprobe (default: ${VARIABLE})"
    )
    args = parser.parse_args()
    if args.rounds < 1:
        parser.error(f"--rounds {args.rounds}: expected at least 1")
    cases = chosen(args.only)
    bench = Bench(usable(args.peer_python))
    print("\n".join(HEAD), flush=True)
    if args.quick:
        smoke(bench, cases)
    else:
        measure(bench, cases, args.rounds)
    text = about(bench, args)
    print("\nA tiny model: that it runs is all that this shows." if args.quick else f"\n{text}")
    if not args.quick and not args.only:
        table = "\n".join([*HEAD, *(text for case in cases for text in lines(bench, case))])
        (HERE / "results" / "record.md").write_text(f"# What recording costs\n\n{text}\n\n{table}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
