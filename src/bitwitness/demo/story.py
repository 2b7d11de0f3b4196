"""The demo's story in plain lines, told from the run folders alone."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bitwitness.store import read_events
from bitwitness.store.verdicts import tell_verdicts


def read_steps(path: Path) -> dict[int, dict[str, Any]]:
    """Return loss and weights' hash after each step; of one that was repeated the last time counts."""
    lines = path.read_text().splitlines() if path.exists() else []
    return {entry["step"]: entry for entry in map(json.loads, lines)}


def finished_alike(guarded: Path, clean: Path) -> bool:
    """Whether both trainings came to the same end: the same last step, with the same loss and bits."""
    one, other = read_steps(guarded), read_steps(clean)
    return bool(one) and one == other


def tell(runs: Sequence[Path], guarded: Path, clean: Path) -> list[str]:
    """Return the lines: each verdict of each attempt with its evidence, then the weights against a fault-free run's."""
    lines = []
    for path in [run / "events.jsonl" for run in runs]:
        if not path.exists():  # nothing happened in it
            continue
        events, problems = read_events(path)
        lines += [f"({problem})" for problem in problems]
        lines += tell_verdicts([event for event in events if event["type"] == "verdict"])
    lines += _weights(read_steps(guarded), read_steps(clean))
    return lines


def _weights(guarded: dict[int, dict[str, Any]], clean: dict[int, dict[str, Any]]) -> list[str]:
    heading = ["", "weights after each step, guarded run with faults against fault-free run without guard:"]
    common = sorted(guarded.keys() & clean.keys())
    if not common:
        return [*heading, "  nothing to compare"]
    differ = [step for step in common if guarded[step] != clean[step]]
    if differ:
        return [*heading, f"  DIFFER from step {differ[0]} on"]
    last = common[-1]
    one, other = guarded[last], clean[last]
    return [
        *heading,
        f"  bit-equal after all {len(common)} steps; the last is step {last}: {one['weights']} = {other['weights']}",
        f"  its loss: {one['loss']!r} = {other['loss']!r}",
    ]
