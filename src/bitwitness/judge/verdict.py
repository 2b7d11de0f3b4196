"""The verdict of a suspicious step: its cause, whom it names and by which numbers, its words and its evidence.

What is decided comes from `judge.decide`, and from those who changed its judgement since; here it is put into words.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from bitwitness.finding import SEEN, Action, Cause, Device, Finding, Severity, Verdict, to_jsonable
from bitwitness.judge.agreement import NAMES, PAIRS, Match
from bitwitness.judge.decide import PARTIAL, Judgement
from bitwitness.judge.executions import Experiments
from bitwitness.judge.localize import Located
from bitwitness.judge.replicas import Desync
from bitwitness.ranks import Ranks
from bitwitness.replay.run import Replayer
from bitwitness.site import Site
from bitwitness.stats import in_hex

FAULT_CODE = "80818C00"
"""The error code of the reference systems' alert for a device that computes wrongly (`respond.reference_log`)."""
TRAINED_APART = (
    "the ranks share no gradients and hold other weights (local SGD?): each senses its own, nothing is run again"
)
_NUMBERED = re.compile(r"\b(ranks? )(\d+(?:, \d+)*)")  # every message and key names ranks in this way


@dataclass(slots=True)
class Outcome:
    """The verdict (action still ``reported``), and what acting on it needs."""

    verdict: Verdict
    experiments: Experiments | None = None
    judgement: Judgement | None = None
    apart: bool = False
    """The ranks share no gradients, and hold other weights for that: none can speak for another."""

    @property
    def came_out_otherwise(self) -> bool:
        """Whether any rank's replay gave another result than its training had; all ranks know it."""
        rows = [] if self.experiments is None else self.experiments.rows
        return any(row.match(0, 1) in (Match.FAR, Match.NEAR) for row in rows)

    @property
    def differs(self) -> bool:
        """Whether anything spoke against anybody: executions that differ, or replicas."""
        if self.apart:
            return False
        found = self.judgement
        return found is None or (not found.weak and bool(found.wrong or found.disputed))

    def follows(self, earlier: Verdict) -> None:
        """Blame no data and no software for what may follow from a proven fault that was only reported."""
        if self.verdict.cause in (Cause.DATA, Cause.SOFTWARE, Cause.INCONCLUSIVE):
            why = f"it may follow from the {earlier.cause} of step {earlier.step}, which was reported and not healed"
            self.verdict = replace(self.verdict, cause=Cause.DISMISSED, message=f"{self.verdict.message}; {why}")

    def parted(self, why: str) -> None:
        """Blame no device for weights that differ because the ranks trained unevenly."""
        self.verdict = replace(self.verdict, cause=Cause.SOFTWARE, ranks=(), message=why)

    def suspected(self, suspicions: dict[str, Any], alert: dict[str, Any]) -> None:
        """Put every rank's suspicions beside the verdict, so that the file of all ranks tells the story.

        ``alert``: what the reference systems say of a device that computes wrongly.
        """
        evidence = {**self.verdict.evidence, "suspicions": suspicions}
        if self.verdict.fault_code is not None:
            evidence["alert"] = alert
        self.verdict = replace(self.verdict, evidence=evidence)


class VerdictBuilder:
    """Builds the outcomes of one root's experiments.

    Parameters
    ----------
    ranks
        The side channel.
    replayer
        What ran the steps again: knows the parameters' names, and whether code was compiled.
    devices
        Every rank's device.

    """

    def __init__(self, ranks: Ranks, replayer: Replayer, devices: list[Device]) -> None:
        self._ranks = ranks
        self._replayer = replayer
        self._devices = devices

    def trained_apart(self, step: int) -> Outcome:
        """Return the outcome where nothing can be said, for the ranks train each a model of its own."""
        message = f"step {step} is suspicious, but nothing is proven: {TRAINED_APART}"
        verdict = Verdict(
            Cause.INCONCLUSIVE, step, (), (), Action.REPORTED, message, evidence={"reason": TRAINED_APART}
        )
        return Outcome(verdict, apart=True)

    def corrupt_state(self, step: int, desync: Desync, findings: list[Finding]) -> Outcome:
        """Return the outcome of replicas that differ; without a majority it names no rank."""
        who = desync.ranks if desync.majority else ()
        named = f"rank {', '.join(map(str, who))}" if who else "no majority tells which rank"
        message = (
            f"replicated state differs between ranks before step {step}: {desync.name}{desync.others}; "
            f"{named} holds other bits than the rest"
        )
        evidence = {
            "hashes_by_rank": [in_hex(value) for value in desync.hashes],
            "tensors_that_differ": desync.count,
            "suspicions_here": [finding.message for finding in findings],
        }
        verdict = Verdict(
            Cause.CORRUPT_STATE,
            step,
            who,
            tuple(self._devices[rank] for rank in who),
            Action.REPORTED,
            message,
            desync.site,
            evidence=evidence,
            fault_code=FAULT_CODE,
        )
        return Outcome(verdict)

    def state_changed(self, step: int, accused: tuple[int, ...], findings: list[Finding]) -> Outcome:
        """Return the outcome where ranks have proven themselves that their state is wrong; collective.

        ``findings``: what has proven it on this rank, if anything has.
        """
        mine = next((f for f in findings if f.severity is Severity.ERROR), None)
        said = ["", ""] if mine is None else [mine.message, mine.site.short]
        told = {**({} if mine is None else to_jsonable(mine.evidence)), "said": said}
        first = json.loads(self._ranks.broadcast_text(json.dumps(told), accused[0]))
        what, where = first.pop("said")
        numbers = self._numbers(accused)
        since = int(first.get(SEEN, step))
        proven = f" (proven by step {step}; checkpoints made since hold it)" if since < step else ""
        message = (
            f"the state of rank {', '.join(map(str, numbers))} is corrupt since before step {since}{proven}: {what}"
        )
        verdict = Verdict(
            Cause.CORRUPT_STATE,
            step,
            numbers,
            tuple(self._devices[rank] for rank in accused),
            Action.REPORTED,
            message,
            Site.parse(where) if where else None,
            evidence=first,
            fault_code=FAULT_CODE,
        )
        return Outcome(verdict)

    def evidence(self, found: Experiments, judgement: Judgement, located: Located | None) -> dict[str, Any]:
        """Return the executions side by side: what each gave for the accused rank's step, then who agrees; collective."""
        whose = judgement.ranks[0] if judgement.ranks else 0
        sent = self._ranks.broadcast_text(
            json.dumps(self._executions(found)) if self._ranks.rank == whose else "", whose
        )
        evidence: dict[str, Any] = {
            "whose": f"rank {self._numbers((whose,))[0]}'s step",
            **(json.loads(sent) if sent else {}),
            "ranks": [_row_text(row.matches) for row in found.rows],
        }
        if located is not None:
            evidence["operator"] = {"site": located.site, "line": located.line, **located.evidence}
        if found.problem:
            evidence["problem"] = found.problem
        return evidence

    def _executions(self, found: Experiments) -> dict[str, Any]:
        """Return what each execution of this rank's step gave for the parameter at which they differ most."""
        made = [(name, x) for name, x in zip(NAMES, found.executions, strict=True) if x is not None]
        if len(made) < 2:
            return {}
        original = made[0][1]
        other = max((x for _, x in made[1:]), key=original.distance)
        worst = original.worst(other)
        return {
            "parameter": list(self._replayer.parameters)[worst],
            "l2_by_execution": {name: float(x.l2[worst]) for name, x in made},
            "hash_by_execution": {name: in_hex(x.digest[worst]) for name, x in made},
        }

    def concluded(
        self,
        step: int,
        found: Experiments,
        judgement: Judgement,
        located: Located | None,
        evidence: dict[str, Any],
    ) -> Outcome:
        """Return the outcome that a judgement comes to; ``evidence`` is what else is known, as `evidence` gives it."""
        evidence = evidence | {"wrong_executions": judgement.wrong, "reason": judgement.reason or found.problem or ""}
        hardware = judgement.cause in (Cause.TRANSIENT_HARDWARE, Cause.PERSISTENT_HARDWARE)
        verdict = Verdict(
            judgement.cause,
            step,
            self._numbers(judgement.ranks),
            tuple(self._devices[rank] for rank in judgement.ranks),
            Action.REPORTED,
            self._message(step, judgement, located, found),
            None if located is None else Site.parse(located.site),
            evidence=evidence,
            fault_code=FAULT_CODE if hardware else None,
        )
        return Outcome(verdict, found, judgement)

    def _numbers(self, ranks: tuple[int, ...]) -> tuple[int, ...]:
        """Return the numbers by which messages call these ranks."""
        return tuple(self._ranks.in_job for _ in ranks) if self._ranks.size == 1 else ranks

    def _message(self, step: int, judgement: Judgement, located: Located | None, found: Experiments) -> str:
        numbers = self._numbers(judgement.ranks)
        who = ", ".join(f"rank {n}: {self._devices[rank]}" for n, rank in zip(numbers, judgement.ranks, strict=True))
        what = f" in {located.site}" + (f" ({located.line})" if located and located.line else "") if located else ""
        match judgement.cause:
            case Cause.TRANSIENT_HARDWARE:
                one = who or f"one of the ranks, which is not known ({judgement.reason}),"
                text = f"{one} computed step {step} wrongly once{what}; repeated executions agree on another result"
            case Cause.PERSISTENT_HARDWARE if any(row.failed for row in found.rows):
                text = f"{who} computed step {step} wrongly{what}: {judgement.reason}"
            case Cause.PERSISTENT_HARDWARE:
                kind = "intermittently" if judgement.intermittent else "every time"
                text = f"{who} computes step {step} wrongly {kind}{what or self._unnamed(found)}"
            case Cause.DISMISSED | Cause.DATA | Cause.SOFTWARE:
                text = f"step {step}: {judgement.reason}"
            case _:
                why = found.problem or (found.unrepeated if judgement.reason.endswith(PARTIAL) else None)
                reason = judgement.reason + (f" ({why})" if why else "")
                unnamed = self._unnamed(found) if judgement.disputed else ""
                text = f"step {step} is suspicious, but nothing is proven: {reason}{what or unnamed}"
        return text

    def _unnamed(self, found: Experiments) -> str:
        """Return why no operator is named where the fault is in compiled code; empty if that is not known."""
        if found.problem or not self._replayer.compiled:
            return ""
        return "; run eagerly its operators agree, so compiled code produced it, and no operator can be named"


def _row_text(matches: tuple[Match, ...]) -> dict[str, str]:
    return {
        f"{NAMES[a]} = {NAMES[b]}": match.name.lower()
        for (a, b), match in zip(PAIRS, matches, strict=True)
        if match is not Match.MISSING
    }


def numbered_in_job(verdict: Verdict, members: Sequence[int]) -> Verdict:
    """Return a verdict of a group in which every rank has the number that the job gives it.

    ``members``: the group's ranks, by their numbers in the job; empty, or all of them in order: the verdict as it is.
    """
    if list(members) == list(range(len(members))):
        return verdict

    def renumbered(text: str) -> str:
        return _NUMBERED.sub(lambda m: m[1] + ", ".join(str(members[int(n)]) for n in m[2].split(", ")), text)

    def inside(value: Any) -> Any:
        if isinstance(value, str):
            return renumbered(value)
        if isinstance(value, dict):
            return {inside(key): inside(item) for key, item in value.items()}
        return [inside(item) for item in value] if isinstance(value, list | tuple) else value

    ranks = tuple(members[rank] for rank in verdict.ranks)
    return replace(verdict, ranks=ranks, message=renumbered(verdict.message), evidence=inside(verdict.evidence))
