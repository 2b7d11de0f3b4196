"""The demo's story in plain lines, told from the run folder alone."""

from __future__ import annotations

import json
from pathlib import Path

from bitwitness.store import read_events
from bitwitness.store.verdicts import tell_verdicts


def read_weights(path: Path) -> dict[int, str]:
    """Return the weights' hash after each step."""
    lines = path.read_text().splitlines() if path.exists() else []
    return {entry["step"]: entry["weights"] for entry in map(json.loads, lines)}


def tell(run: Path, guarded: Path, clean: Path) -> list[str]:
    """Return the lines: each verdict with its evidence, then the weights against a fault-free run's."""
    events, problems = read_events(run / "events.jsonl")
    lines = [f"({problem})" for problem in problems]
    lines += tell_verdicts([event for event in events if event["type"] == "verdict"])
    lines += _weights(read_weights(guarded), read_weights(clean))
    return lines


def _weights(guarded: dict[int, str], clean: dict[int, str]) -> list[str]:
    heading = ["", "weights after each step, guarded run with faults against fault-free run without guard:"]
    common = sorted(guarded.keys() & clean.keys())
    if not common:
        return [*heading, "  nothing to compare"]
    differ = [step for step in common if guarded[step] != clean[step]]
    if differ:
        return [*heading, f"  DIFFER from step {differ[0]} on"]
    last = common[-1]
    return [
        *heading,
        f"  bit-equal after all {len(common)} steps; the last is step {last}: {guarded[last]} = {clean[last]}",
    ]
