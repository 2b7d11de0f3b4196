"""Wrong variants of operators: how many are caught, and by whom.

    python bench/mutation.py [PART OF A NAME …] [--only-model] [--out FILE]

Each mutant of `mutants` is verified against its right function by ``bw.verify_op``; beside it, the same results are judged
by other rules: ``allclose`` with torch.testing's tolerances, msprobe's pre-check, BackendBench's. The right functions are
verified, too: a rule that calls one of them wrong has a false failure.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import torch
from mutants import Mutant, mutants

import bitwitness as bw
from bitwitness.trial.call import Call
from bitwitness.trial.oracle import Oracle
from bitwitness.trial.standards import judge_by

OTHERS = ("allclose", "thousandths", "backendbench")


def main() -> None:
    """Run it, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="parts of mutants' names")
    parser.add_argument("--only-model", action="store_true", help="without the other rules")
    parser.add_argument("--every", type=int, default=1, help="only every n-th mutant")
    parser.add_argument("--first", type=int, default=0, help="and which one of them is the first")
    parser.add_argument("--read", type=Path, nargs="*", help="run nothing: print the table of what --out has written")
    parser.add_argument("--out", type=Path, help="write a JSON line for each")
    args = parser.parse_args()
    if args.read:
        report([json.loads(line) for path in args.read for line in path.read_text().splitlines()])
        return
    chosen = [m for m in mutants() if not args.names or any(n in m.name for n in args.names)][args.first :: args.every]
    found = []
    for mutant in chosen:
        found.append(tried(mutant, others=not args.only_model))
        if args.out is not None:
            with args.out.open("a") as file:
                file.write(json.dumps(found[-1]) + "\n")
    report(found)


def tried(mutant: Mutant, *, others: bool) -> dict[str, Any]:
    """Return who calls a mutant wrong, and who its right function."""
    inputs = mutant.inputs()
    began = time.process_time()
    wrong = bw.verify_op(mutant.wrong, inputs, mutant.right)
    seconds = time.process_time() - began
    right = bw.verify_op(mutant.right, inputs, mutant.right)
    found: dict[str, Any] = {
        "name": mutant.name,
        "fault": mutant.fault,
        "operator": mutant.operator,
        "seconds": seconds,
    }
    found["bitwitness"] = {
        "wrong": wrong.verdict,
        "right": right.verdict,
        "why": wrong.reason,
        "right_why": right.reason,
    }
    if others:
        found |= {
            name: {"wrong": ruled(name, mutant.wrong, mutant), "right": ruled(name, mutant.right, mutant)}
            for name in OTHERS
        }
    return found


def ruled(name: str, fn: Any, mutant: Mutant) -> str:
    """Return the worst verdict of one rule over outputs and gradients."""
    call = Call(fn, tuple(mutant.inputs()))
    results = call.run()
    exact = Oracle(call, results, mutant.right).exact
    due = dict(exact.slots())
    verdicts = {
        judge_by(name, t.detach(), due[slot]).verdict if slot in due else "fail" for slot, t in results.slots().items()
    }
    return next((v for v in ("fail", "warn", "not judged") if v in verdicts), "pass")


def report(found: list[dict[str, Any]]) -> None:
    """Print who caught how many, by fault, and what was missed."""
    judges = [j for j in ("bitwitness", *OTHERS) if j in found[0]]
    by: dict[str, Counter[str]] = defaultdict(Counter)
    for one in found:
        by[one["fault"]].update({"": 1} | {j: one[j]["wrong"] == "fail" for j in judges})
    print(f"{'fault':<34}{'mutants':>8}" + "".join(f"{j:>14}" for j in judges))
    for fault, counts in sorted(by.items()):
        print(f"{fault:<34}{counts['']:>8}" + "".join(f"{counts[j]:>14}" for j in judges))
    total = len(found)
    print(
        f"{'caught':<34}{total:>8}"
        + "".join(f"{sum(o[j]['wrong'] == 'fail' for o in found) / total:>13.1%} " for j in judges)
    )
    print(
        f"{'right ones called wrong':<34}{'':>8}"
        + "".join(f"{sum(o[j]['right'] == 'fail' for o in found):>14}" for j in judges)
    )
    print(f"{len({o['operator'] for o in found})} operators, {sum(o['seconds'] for o in found):.0f} CPU seconds")
    for one in found:
        if one["bitwitness"]["wrong"] != "fail":
            print(f"missed ({one['bitwitness']['wrong']}): {one['name']}: {one['bitwitness']['why'][:120]}")
        if one["bitwitness"]["right"] == "fail":
            print(f"false failure: {one['operator']}: {one['bitwitness']['right_why'][:200]}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
