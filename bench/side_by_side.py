"""Twelve plants, recorded by bitwitness and by msprobe, and who names their place: see `plants.py`.

    python bench/side_by_side.py [--content stats tensors] [--peer-python PYTHON]

Three columns: our comparison of our own recordings; ours of msprobe's dumps; msprobe's of its own, of which the first row counts
that it calls an error or, without any, a warning. Right: that place is the plant's.
"""

from __future__ import annotations

import argparse
import csv
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from plants import PLANTS, Plant
from record import VARIABLE, usable

import bitwitness as bw

HERE = Path(__file__).parent
DUMPS = """
from msprobe.pytorch import compare
"""


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
    place = report.first
    right = place is not None and re.search(plant.place, place.site) is not None and place.step == plant.step
    return right, report.conclusion


def main() -> None:
    """Plant, record, compare, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--content", nargs="+", choices=("stats", "tensors"), default=["stats", "tensors"])
    parser.add_argument("--only", nargs="+", choices=PLANTS, default=list(PLANTS), metavar="PLANT")
    parser.add_argument("--peer-python", default=os.environ.get(VARIABLE))
    args = parser.parse_args()
    for content in args.content:
        for name in args.only:
            with tempfile.TemporaryDirectory(prefix="side-by-side-") as scratch:
                right, said = ours(PLANTS[name], recorded(sys.executable, "own", name, content, Path(scratch)))
            print(content, name, right, said[:200], flush=True)


if __name__ == "__main__":
    main()
