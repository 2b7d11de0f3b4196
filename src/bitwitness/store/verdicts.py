"""Verdicts in plain lines, each with its evidence, as the run folder has them."""

from __future__ import annotations

from typing import Any


def tell_verdicts(verdicts: list[dict[str, Any]]) -> list[str]:
    """Return the lines of some verdicts, each with its evidence."""
    return [line for event in verdicts for line in _verdict(event)]


def _verdict(event: dict[str, Any]) -> list[str]:
    evidence = event["evidence"]
    who = ", ".join(f"rank {rank}" for rank in event["ranks"]) or "nobody"
    lines = [
        "",
        f"step {event['step']}: {event['cause'].replace('_', ' ')}, {who}; action: {event['action']}",
    ]
    for rank, items in evidence.get("suspicions", {}).items():
        lines += [f"  sensed    {rank}: {item['sensor']}: {item['message']}" for item in items[:2]]
    if "l2_by_execution" in evidence:
        lines.append(
            f"  replayed  L2 of the local gradient of {evidence['parameter']} in {evidence['whose']}, by execution:"
        )
        for name, value in evidence["l2_by_execution"].items():
            lines.append(f"            {name:12s} {value!s:>24.24}   bits {evidence['hash_by_execution'][name]}")
    lines.append("  compared  who agrees with the training's own result, rank by rank:")
    for rank, row in enumerate(evidence.get("ranks", [])):
        told = "  ".join(
            f"{name.split(' = ')[1]}: {match}" for name, match in row.items() if name.startswith("training =")
        )
        lines.append(f"            rank {rank}: {told}")
    operator = evidence.get("operator")
    if operator:
        lines.append(f"  named     {operator['site']}")
        lines.append(f"            {operator['line']}")
        both = {key: found for key, found in operator.items() if key.startswith("rank ") and found["comparable"]}
        for rank, found in both.items():
            lines.append(
                f"            {rank}: worst element {_number(found['value'])}, float64 says {_number(found['expected'])}; "
                f"error of the whole result {_number(found['error'])}"
            )
    check = evidence.get("checksum")
    if check:
        residual, threshold = _number(check["residual"]), _number(check["threshold"])
        lines.append(f"  checksum  {check['site']}: residual {residual} beside a threshold of {threshold}")
    lines += [f"  device    {d['kind']}:{d['index']} {d['uuid']} on {d['host']}" for d in event["devices"]]
    return lines


def _number(value: float | str) -> str:
    """Return a number short; NaN and infinities are words in a run folder."""
    return value if isinstance(value, str) else f"{value:.4g}"
