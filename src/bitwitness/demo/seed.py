"""``bitwitness demo --seed``: the Ascend document's own demonstration, its own searches in the logs, and our verdict."""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from bitwitness.demo.launch import Launched, fresh_folder, torchrun
from bitwitness.demo.silent_detect import FAULTY_RANK, STEPS
from bitwitness.store import read_events
from bitwitness.store.verdicts import tell_verdicts

RANKS = 8
ASD_CONFIG = "enable:true,with_checksum:true,grad_sample_interval:1,cooldown:1,strikes_num:1"
EXPECTED = ("Silent detect strike", "Feature value detection strikes out", "Global CheckSum result is")
ONLY_IF_A_PRODUCT_FAILS = ("CheckSum detects MatMul error on rank", "SilentCheck detects SDC error")


def main(args: argparse.Namespace, launch: Callable[..., Launched] = torchrun) -> int:
    """Run it; return 0 if every line that the document shows was found, and the faulty rank was named.

    ``launch``: what starts the ranks, as `torchrun` does.
    """
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="bitwitness-seed-") as scratch:
        out = fresh_folder(args.out, scratch)
        found = _run(out, launch)
    print(f"\n({time.monotonic() - started:.0f} s in all)")
    return 0 if found else 1


def _run(out: Path, launch: Callable[..., Launched]) -> bool:
    print(
        f"Dense(1, 8), ReLU, fault operator, Dense(8, 8) on {RANKS} gloo ranks, {STEPS} steps; every 5th step the operator"
    )
    print(f"sets the highest exponent bit of one element on rank {FAULTY_RANK}. One step counts as one second.")
    print(f"$ export MS_NPU_ASD_CONFIG={ASD_CONFIG!r}", flush=True)
    launched = launch(
        RANKS,
        ["-m", "bitwitness.demo.silent_detect", str(out / "run")],
        out / "logs",
        echo=False,
        environment={"MS_NPU_ASD_CONFIG": ASD_CONFIG},
    )
    logs = {int(log.parent.name): log for log in launched.logs if log.name == "stderr.log"}
    seen = [_grep(keyword, logs) for keyword in EXPECTED]
    for keyword in ONLY_IF_A_PRODUCT_FAILS:
        _grep(keyword, logs)
    print("  (as in the document: the fault sits in the operator between the products, so no MatMul fails its check)")
    events, _ = read_events(out / "run" / "events.jsonl")
    verdicts = [event for event in events if event["type"] == "verdict"]
    print("\nbitwitness's verdict:")
    for line in tell_verdicts(verdicts[:1]):
        print(f"  {line}" if line else "")
    if len(verdicts) > 1:
        print(f"  ({len(verdicts) - 1} more verdicts in {out / 'run' / 'events.jsonl'})")
    named = [event["ranks"] for event in verdicts if event["cause"] == "persistent_hardware"]
    return all(seen) and bool(named) and all(ranks == [FAULTY_RANK] for ranks in named)


def _grep(keyword: str, logs: dict[int, Path]) -> bool:
    """Print what ``grep -m1`` finds in rank 0's log, and how many ranks' logs hold it; return whether rank 0's does."""
    print(f"\n$ grep -m1 '{keyword}' rank 0's log")
    holding = [rank for rank, log in sorted(logs.items()) if keyword in log.read_text()]
    if 0 in holding:
        print("  " + next(line for line in logs[0].read_text().splitlines() if keyword in line))
    print(f"  in the logs of {len(holding)} of {len(logs)} ranks")
    return 0 in holding
