"""Why a run's numbers may be believed: what was looked at, and how."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bitwitness.report.alerts import believed_of
from bitwitness.report.clean import mapping, text
from bitwitness.store.answer import Answer

WHOLE = "The run folder is whole: all its checksums were verified for this report."


def believed(answer: Answer) -> list[str]:
    """Say what was looked at and how: nobody believes a tool that only says that all is well."""
    guards = [table for table in answer.tables if "parameters" in table]
    watched = [text(line) for line in believed_of(answer)]
    whole = [] if answer.health.doubts else [WHOLE]
    if not guards:
        return [*watched, *whole] if watched else []
    first = guards[0]
    steps, parameters = mapping(first.get("steps")), mapping(first.get("parameters"))
    size = f" on each of {len(guards)} ranks" if len(guards) > 1 else ""
    gradients = f"the gradients of {parameters.get('watched')} of {parameters.get('of')} parameters"
    lines = [
        f"In each of {steps.get('held', 0)} steps {gradients} were looked at{size}, before the optimizer used them."
    ]
    lines += _looked_deep(first, steps)
    replay = mapping(first.get("replay"))
    if replay.get("calibrations"):
        same = "with equal bits" if replay.get("same_bits") else f"within a spread of {replay.get('spread')}"
        lines.append(f"{replay['calibrations']} healthy steps were run again as a trial, {same}: a replay can tell.")
    suspicions, dismissed = (sum(int(table.get(key, 0)) for table in guards) for key in ("suspicions", "dismissed"))
    if suspicions:
        lines.append(f"Of {suspicions} suspicions {dismissed} were dismissed by running the step again.")
    else:
        lines.append("Nothing looked suspicious.")
    if mapping(answer.description.get("config")).get("self_test") and not any(
        table.get("failures") for table in guards
    ):
        lines.append("At the start each sensor proved on a planted fault that it sees (self-test).")
    return [*(text(line) for line in lines), *watched, *whole]


def _looked_deep(table: Mapping[str, Any], steps: Mapping[str, Any]) -> list[str]:
    operators = mapping(table.get("operators"))
    if not steps.get("deep"):
        return []
    share = operators.get("share_checked")
    told = (
        f", {share:.1%} of their floating-point work"
        if isinstance(share, float) and operators.get("flops_seen")
        else ""
    )
    return [f"In {steps['deep']} of them every matrix product and attention kernel was checked as well{told}."]
