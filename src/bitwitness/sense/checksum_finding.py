"""What a failed checksum is told as."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from bitwitness.finding import Finding, Severity
from bitwitness.oracle.worst import WorstElement
from bitwitness.sense.invariant import NONE_IS_WRONG, Invariant
from bitwitness.site import Site
from bitwitness.stats.host import numbers_of
from bitwitness.tap.operators import OpCall

Kind = tuple[str, str, str]
"""An operator's name, an identity, and a dtype."""


def kind_of(call: OpCall, invariant: Invariant) -> Kind:
    """Return of which kind a check is."""
    return call.at or call.op, invariant.name, str(call.outputs[0].dtype).removeprefix("torch.")


def kind_told(finding: Finding) -> Kind | None:
    """Return of which kind a finding of the checksum is; None of an overflow."""
    evidence = finding.evidence
    name = evidence.get("invariant")
    return None if name is None else (finding.site.op, str(name), str(evidence["dtype"]))


@dataclass(frozen=True, slots=True)
class Pending:
    """A check whose figures are still on the device: the site and the shape, but no tensor of the call.

    ``by_columns``: what it calls a row is a column of the result.
    """

    site: Site
    invariant: Invariant
    dtype: torch.dtype
    shape: tuple[int, ...]
    inner: int | None
    element: WorstElement | None = None
    by_columns: bool = False


def brought_to_host(invariants: list[Invariant]) -> list[tuple[float, int, int]]:
    """Bring the worst ratio, its index and the overflows of all checks to the host."""
    none = torch.zeros((), dtype=torch.int64)
    return list(
        zip(
            numbers_of([i.worst.double() for i in invariants]),
            numbers_of([i.index for i in invariants]),
            numbers_of([none if i.overflowed is None else i.overflowed for i in invariants]),
            strict=True,
        )
    )


def failure(noted: Pending, figures: dict[str, float], step: int, rank: int) -> Finding:
    """Return the finding of an identity that does not hold."""
    site = noted.site.at(rank=rank, step=step)
    evidence: dict[str, Any] = {"kind": "residual", "invariant": noted.invariant.name, **_facts(noted), **figures}
    line, across = ("column", "row") if noted.by_columns else ("row", "column")
    evidence[line] = int(evidence.pop("index"))
    seen = f"{noted.invariant.name} is off by {figures['residual']:.4g} in {line} {evidence[line]}"
    explained = f"; rounding explains {figures['threshold']:.4g}"
    if figures["threshold"] == NONE_IS_WRONG:
        count = int(figures["residual"])
        seen = f"{count} number{'s' * (count != 1)} of {line} {evidence[line]} against '{noted.invariant.name}'"
        explained = ""
    if noted.element is not None:
        evidence |= {across: noted.element.at, "value": noted.element.value, "expected": noted.element.expected}
        seen += f" (element {noted.element.at} is {noted.element.value:.6g}, float64 {noted.element.expected:.6g})"
    message = (
        f"{site.short} computed a wrong result: {seen}{explained}; "
        "recompute this operator from the same inputs, on this device and on another"
    )
    return Finding("checksum", site, Severity.ERROR, message, evidence, step, rank)


def overflow(noted: Pending, figures: dict[str, float], step: int, rank: int) -> Finding:
    """Return the finding of rows that overflowed by their own values."""
    site = noted.site.at(rank=rank, step=step)
    count = int(figures["overflowed"])
    message = (
        f"{site.short} overflowed {noted.dtype} in {count} rows; its inputs are finite and large enough for that, so it is "
        "not suspected; use bfloat16, or a smaller loss scale"
    )
    evidence = {"kind": "overflow", "rows": count, **_facts(noted)}
    return Finding("overflow", site, Severity.INFO, message, evidence, step, rank)


def _facts(noted: Pending) -> dict[str, Any]:
    facts: dict[str, Any] = {"dtype": str(noted.dtype).removeprefix("torch."), "shape": list(noted.shape)}
    return facts if noted.inner is None else facts | {"inner": noted.inner}
