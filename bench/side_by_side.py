"""Twelve plants, recorded by bitwitness and by msprobe, and who names their place: see `plants.py`.

    python bench/side_by_side.py [--content stats tensors] [--peer-python PYTHON]

Three columns: our comparison of our own recordings; ours of the dumps of msprobe; its own of those, of which the first row
counts that it calls an error or, without any, a warning. Right: that place is the plant's.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from plants import PLANTS, STEPS, Plant
from record import VARIABLE, usable

import bitwitness as bw

HERE = Path(__file__).parent
SHOWN = 110
WAYS = ("bitwitness of its own recording", "bitwitness of msprobe's dump", "msprobe of its own dump")


def recorded(python: str, tool: str, name: str, content: str, folder: Path) -> tuple[Path, Path]:
    """Record both runs of a plant with a tool; return the folders."""
    found = []
    for run in "ab":
        out = folder / f"{tool}-{run}" / "run"
        out.parent.mkdir()
        command = [python, str(HERE / "plants.py"), name, run, "--tool", tool, "--content", content, "--out", str(out)]
        env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH" or tool == "own"}
        done = subprocess.run(command, env={**env, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"{tool}, {name}, run {run}: {done.stderr.strip().splitlines()[-1]}")
        found.append(out)
    return found[0], found[1]


def ours(plant: Plant, runs: tuple[Path, Path]) -> tuple[bool, str]:
    """Return whether our comparison names the plant's place first, and what it says."""
    report = bw.compare(*runs)
    if report.first is None:
        return False, report.conclusion
    said = f"{report.first.site} {report.first.text}"
    return re.search(plant.place, said) is not None and report.first.step == plant.step, report.conclusion


def theirs(python: str, plant: Plant, runs: tuple[Path, Path], out: Path) -> tuple[bool, str]:
    """Return the same of msprobe's comparison, step by step: the first row that it calls an error, else a warning."""
    first: dict[str, tuple[int, str]] = {}
    for step in range(STEPS):
        paths = ["-tp", str(runs[1] / f"step{step}"), "-gp", str(runs[0] / f"step{step}"), "-o", str(out / str(step))]
        command = [str(Path(python).with_name("msprobe")), "compare", *paths]
        env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
        tables = sorted((out / str(step)).glob("*.csv"))
        if not tables:
            return False, f"no table: {(done.stderr or done.stdout).strip().splitlines()[-1]}"
        with tables[0].open(newline="", encoding="utf-8") as file:
            for row in csv.DictReader(file):
                name = row["NPU Name"] if row["NPU Name"] != "N/A" else row["Bench Name"]
                first.setdefault(row["Result"], (step, name))
    for result in ("error", "warning"):
        if result in first:
            step, name = first[result]
            known = module_of(runs[0] / f"step{step}", name)
            right = re.search(plant.place, known.replace("Module.", "")) is not None and step == plant.step
            return right, f"step {step}, {result}: {known}"
    return False, "all pass"


def module_of(step: Path, name: str) -> str:
    """Return a row's name with the module around it, which stands in a file beside."""
    (construct,) = step.rglob("construct.json")
    parents = json.loads(construct.read_text(encoding="utf-8"))
    call = re.sub(r"\.(input|output|parameters)\b.*", "", name)
    return f"{name} in {parents[call]}" if parents.get(call) else name


def asked(name: str, content: str, peer: str | None) -> list[tuple[bool, str]]:
    """Return the answers to one plant, in the order of `WAYS`."""
    with tempfile.TemporaryDirectory(prefix="side-by-side-") as scratch:
        folder = Path(scratch)
        answers = [ours(PLANTS[name], recorded(sys.executable, "own", name, content, folder))]
        if peer:
            dumps = recorded(peer, "peer", name, content, folder)
            answers += [ours(PLANTS[name], dumps), theirs(peer, PLANTS[name], dumps, folder / "compared")]
    return answers


def main() -> None:
    """Plant, record, compare, print; write ``bench/results/side_by_side.md``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--content", nargs="+", choices=("stats", "tensors"), default=["stats", "tensors"])
    parser.add_argument("--only", nargs="+", choices=PLANTS, metavar="PLANT", help="these alone; nothing is written")
    parser.add_argument("--peer-python", default=os.environ.get(VARIABLE))
    args = parser.parse_args()
    peer = usable(args.peer_python)
    ways = WAYS if peer else WAYS[:1]
    lines = [f"| content | plant | {' | '.join(ways)} |", "|---" * (2 + len(ways)) + "|"]
    print("\n".join(lines))
    counts = dict.fromkeys(((content, way) for content in args.content for way in ways), 0)
    for content in args.content:
        for name in args.only or PLANTS:
            answers = asked(name, content, peer)
            for way, (right, _) in zip(ways, answers, strict=True):
                counts[content, way] += right
            cells = [f"{'right' if right else 'NOT'}: {said[:SHOWN]}" for right, said in answers]
            lines.append(f"| {content} | {name} | {' | '.join(cells)} |")
            print(lines[-1], flush=True)
    sums = [f"{content}, {way}: {count} of {len(args.only or PLANTS)}" for (content, way), count in counts.items()]
    print("\n".join(sums))
    if not args.only:
        text = "\n\n".join(
            ["# Twelve plants, side by side", f"`python bench/side_by_side.py`, torch {torch.__version__}", *sums]
        )
        (HERE / "results" / "side_by_side.md").write_text(f"{text}\n\n" + "\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
