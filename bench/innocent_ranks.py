"""Healthy ranks that differ, vary, write to static memory or exchange something in their forwards: long, and nobody convicted.

    python bench/innocent_ranks.py --steps 60

Every training of four jobs of ``tests/jobs`` (devices that sum otherwise, noise of 1e-7 to 1e-3, gradients in static memory,
collectives in forwards and losses) runs plain and under guard with every step questioned. The bits at the end have to be the
same where two plain runs have the same; the only verdict may be that of the one training whose loss is NaN by its own code.
Writes ``bench/results/innocent_ranks.md``; exits with 1 if anything was disturbed or misjudged.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from bitwitness.demo.launch import torchrun

JOBS = Path(__file__).parents[1] / "tests" / "jobs"
RANKS = {"odd_trials": 4, "communicating_trials": 4, "static_memory": 2, "unfrozen_trials": 2}
ODD = "odd_trials"  # noise does not repeat itself: there are no bits to compare, but for the halves
KNOWN = {"nan with a token count": "software [] reported"}
NAMES = ("job", "training", "ranks", "steps", "questioned", "dismissed", "left open", "verdicts", "bits", "wrong")


def made(job: str, ranks: int, steps: int) -> list[dict[str, Any]]:
    """Run a job's trainings; return a row for each."""
    os.environ["TRIAL_STEPS"] = str(steps)
    with tempfile.TemporaryDirectory() as folder:
        launched = torchrun(ranks, [str(JOBS / f"{job}.py")], Path(folder), echo=False)
        text = "\n".join(log.read_text() for log in launched.logs)
    rows = [json.loads(line) for line in text.splitlines() if line.startswith('{"trial"')]
    if launched.code or not rows:
        sys.exit(f"{job} ended with {launched.code}:\n{text[-3000:]}")
    return [{**row, "job": job, "ranks": ranks, "steps": steps} for row in rows]


def problems(row: dict[str, Any]) -> list[str]:
    """Return what is wrong with a training's guarded run."""
    known = KNOWN.get(row["trial"])
    verdicts = [verdict for own in row["verdicts"] for verdict in own if not (known and verdict.endswith(known))]
    found = [f"verdict {verdict}" for verdict in sorted(set(verdicts))]
    found += [f"stopped with {code}" for code in row["stopped"] if code is not None]
    found += [str(error) for error in row["error"] if error]
    found += [f"failed: {failures}" for failures in row["failures"] if failures]
    repeats = row["job"] != ODD or row["trial"].startswith("halves")
    return found + ([] if all(row["same"]) or not repeats or known else ["other bits"])


def line(row: dict[str, Any]) -> str:
    """Return a row of the table; counts are of the first rank."""
    counts = [row[name][0] for name in ("suspicions", "dismissed", "left_open")]
    bits = "same" if all(row["same"]) else "vary"
    wrong = "; ".join(problems(row)) or "–"
    cells = (row["job"], row["trial"], row["ranks"], row["steps"], *counts, len(row["verdicts"][0]), bits, wrong)
    return "| " + " | ".join(map(str, cells)) + " |"


def main() -> None:
    """Make all of them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    args = parser.parse_args()
    rows = []
    for job, ranks in RANKS.items():
        rows += made(job, ranks, args.steps)
        print(*(line(row) for row in rows if row["job"] == job), sep="\n", flush=True)
    wrong = sum(bool(problems(row)) for row in rows)
    steps, of_ranks = (sum(row["steps"] * (row["ranks"] if each else 1) for row in rows) for each in (False, True))
    head = f"# Innocent ranks\n\n`python bench/innocent_ranks.py --steps {args.steps}`: {len(rows)} trainings, {steps:,} steps "
    head += f"({of_ranks:,} on all ranks together), every one questioned, {wrong} wrong.\n\n"
    table = ["| " + " | ".join(NAMES) + " |", "|" + "---|" * len(NAMES), *map(line, rows)]
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "innocent_ranks.md").write_text(head + "\n".join(table) + "\n")
    print(head)
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
