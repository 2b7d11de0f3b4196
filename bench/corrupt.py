"""The campaign over every kind of silent corruption: what is sensed, how soon, who is blamed, what is healed.

    python bench/corrupt.py                      # at least 5,000 faults, then bench/results/corrupt.md and its figure
    python bench/corrupt.py --faults 120         # a short form

Fault class x place x bit or pattern x phase x dtype x parallelism, drawn by number: a trial depends on the seed, its cell and
its number only. Accounts lie in ``--data``, a line a trial: started again, the campaign goes on where it was. Beside ours the
reference schemes are given the very same numbers (V1, V2, V3, combined, and their checksum on each product that is struck).
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from corruption import alone, files, group
from corruption.accounts import begun
from corruption.cells import ALONE, GROUPS, MODES
from corruption.table import figure, is_wrong, page

SHARES = {"alone": 0.86, "group": 0.06, "checkpoint": 0.08}
"""Of the faults: a trial among ranks takes ten times as long as one of one process."""


def read(folder: Path) -> list[dict[str, Any]]:
    """Return the accounts that were written so far; a line that a kill has cut is left out."""
    accounts = []
    for path in sorted(folder.glob("*.jsonl")):
        for line in path.read_text().splitlines():
            try:
                accounts.append(json.loads(line))
            except ValueError:
                continue
    return accounts


def alone_part(task: tuple[int, str, int, int, Path]) -> str:
    """Run one cell and mode to its end, a line a trial; what is there already is not run again."""
    index, mode, seed, count, folder = task
    cell = ALONE[index]
    torch.set_num_threads(1)
    path = folder / f"alone-{_plain(cell.name)}-{_plain(mode)}.jsonl"
    done = begun(path)
    if done < count:
        with path.open("a") as file:
            for account in alone.campaign(cell, mode, seed, range(done, count)):
                file.write(json.dumps(account, default=str) + "\n")
                file.flush()
    return path.name


def _plain(name: str) -> str:
    return "".join(c if c.isalnum() else "-" for c in name)


def tasks(faults: int, seed: int, folder: Path, only: str) -> Iterator[tuple[int, str, int, int, Path]]:
    """Yield the cells of one process, by their places in the list, with their share of the faults."""
    cells = [index for index, cell in enumerate(ALONE) if only in cell.name]
    each = -(-round(faults * SHARES["alone"]) // (len(cells) * len(MODES))) if cells else 0
    for index in cells:
        for mode in MODES:
            yield index, mode, seed, each, folder


def main() -> int:
    """Run what is not done yet; tell, and return 1 where a verdict was wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--faults", type=int, default=5200)
    parser.add_argument("--seed", type=int, default=17)
    parser.add_argument("--only", default="", help="cells whose name holds this")
    parser.add_argument("--parts", nargs="+", choices=list(SHARES), default=list(SHARES))
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--data", type=Path, default=Path("corrupt-data"))
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    args = parser.parse_args()
    args.data.mkdir(parents=True, exist_ok=True)
    if "checkpoint" in args.parts:
        files.campaign(args.seed, round(args.faults * SHARES["checkpoint"]), args.data / "checkpoint.jsonl")
    if "alone" in args.parts:
        context = multiprocessing.get_context("spawn")
        with context.Pool(args.jobs, maxtasksperchild=1) as pool:
            for name in pool.imap_unordered(alone_part, list(tasks(args.faults, args.seed, args.data, args.only))):
                print(f"done: {name}", file=sys.stderr, flush=True)
    if "group" in args.parts:
        groups = [cell for cell in GROUPS if args.only in cell.name]
        each = -(-round(args.faults * SHARES["group"]) // max(1, len(groups)))
        for cell in groups:
            group.campaign(cell, args.seed, each, args.data / f"group-{_plain(cell.name)}.jsonl")
    accounts = read(args.data)
    told = page(accounts, "python bench/corrupt.py " + f"--faults {args.faults} --seed {args.seed}")
    print(told)
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "corrupt.md").write_text(told)
    (args.out / "corrupt.svg").write_text(figure(accounts))
    return int(any(map(is_wrong, accounts)))


if __name__ == "__main__":
    sys.exit(main())
