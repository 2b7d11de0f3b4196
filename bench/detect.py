"""The trial of the sensors: how many harmful faults each of them sees, ours and the reference schemes', on the same faults.

    python bench/detect.py                    # collects until every class has 500 harmful faults, then writes docs/detection.md
    python bench/detect.py --harmful 20       # a short form

Faults are drawn by class (where they strike, and whether a bit or a pattern of elements is wrong), their operator, parameter
or module uniformly. A fault is *harmful* where it changes the local gradient by more than its own norm. What is collected
lies in ``--data`` in parts, each whole or absent: started again, the trial goes on where it was.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from detection.collect import HARMFUL, Part, collect, load, save
from detection.evaluate import evaluate
from detection.faults import CLASSES
from detection.persistent import campaign
from detection.recall import write
from detection.report import figure, page
from detection.subjects import SUBJECTS, Subject

ROOT = Path(__file__).parents[1]


def harmful(parts: list[Part]) -> Counter[tuple[str, str]]:
    """Count harmful faults by class."""
    return Counter(
        (trial["place"], trial["sort"]) for part in parts for trial in part.trials if trial["harm"] > HARMFUL
    )


def gather(
    folder: Path, subjects: list[Subject], *, wanted: int, steps: int, trials: int, seed: int, limit: int
) -> list[Part]:
    """Collect parts, subject by subject, until every class has ``wanted`` harmful faults."""
    folder.mkdir(parents=True, exist_ok=True)
    parts = [load(path) for path in sorted(folder.glob("part-*.npz"))]
    while len(parts) < limit:
        counts = harmful(parts)
        classes = [kind for kind in CLASSES if counts[kind] < wanted]
        if not classes:
            break
        number = len(parts)
        subject = subjects[number % len(subjects)]
        part = collect(
            subject, ranks=4, steps=steps, first=min(40, steps // 2), trials=trials, seed=seed + number, classes=classes
        )
        save(part, folder / f"part-{number:04d}.npz")
        parts.append(part)
        done = min(harmful(parts)[kind] for kind in CLASSES)
        print(f"part {number}: {subject.name}; rarest class has {done} of {wanted} harmful faults", flush=True)
    return parts


def main() -> int:
    """Collect, evaluate, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--harmful", type=int, default=500, help="harmful faults in each class")
    parser.add_argument("--steps", type=int, default=240, help="steps of each training")
    parser.add_argument("--trials", type=int, default=1500, help="faults tried on each training")
    parser.add_argument("--parts", type=int, default=100, help="trainings at most")
    parser.add_argument("--persistent", type=int, default=200, help="harmful persistent faults under a real guard")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--data", type=Path, default=ROOT / "build" / "detect")
    parser.add_argument("--out", type=Path, default=ROOT / "docs", help="where detection.md and detection.svg go")
    parser.add_argument("--only", default="", metavar="TEXT", help="trainings whose names have this")
    args = parser.parse_args()
    subjects = [subject for subject in SUBJECTS if args.only in subject.name]
    if not subjects:
        parser.error(f"no training is called so: {args.only}; there are: {'; '.join(s.name for s in SUBJECTS)}")
    torch.set_num_threads(1)
    parts = gather(
        args.data, subjects, wanted=args.harmful, steps=args.steps, trials=args.trials, seed=args.seed, limit=args.parts
    )
    results: list[dict[str, Any]] = []
    alarms: Counter[str] = Counter()
    for number, part in enumerate(parts):
        found, seen = evaluate(part, lambda name, number=number: print(f"judged part {number}: {name}", flush=True))
        results += found
        alarms.update(seen)
    lasting = campaign(subjects, args.persistent, args.seed) if args.persistent else []
    args.out.mkdir(parents=True, exist_ok=True)
    text = page(results, alarms, lasting, " ".join(["python bench/detect.py", *sys.argv[1:]]))
    (args.out / "detection.md").write_text(text)
    (args.out / "detection.svg").write_text(figure(results))
    if args.out == ROOT / "docs":
        write(text)
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
