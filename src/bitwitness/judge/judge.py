"""The order of the experiments, and the verdict.

0. Do all ranks hold the same parameters (and broadcast buffers)? If not: corrupt state.
1. Replay in place, twice. 2. Replay on other ranks' devices. 3. Name the operator, and ask float64 which result is right.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from bitwitness.finding import Action, Cause, Device, Finding, Verdict
from bitwitness.judge.decide import NAMES, PAIRS, PARTIAL, Judgement, Match
from bitwitness.judge.experiments import Experiments, Laboratory
from bitwitness.judge.localize import Located
from bitwitness.judge.ownresults import OwnResults
from bitwitness.judge.proof import OperatorProof
from bitwitness.judge.replicas import Desync, find_desync, train_apart
from bitwitness.nonfinite.origin import Kind, Told
from bitwitness.site import Site
from bitwitness.stats import bit_hash
from bitwitness.tap.capture import StepRecord

FAULT_CODE = "80818C00"
Follow = Callable[[], list[Told]]
"""Follows a non-finite step back to who made it, on all ranks; collective."""
TRAINED_APART = (
    "the ranks share no gradients and hold other weights (local SGD?): each senses its own, nothing is run again"
)
_REPEATED = 3  # transients on one device that make a persistent, intermittent fault


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


class Judge:
    """Questions a suspicious step and says who was wrong; remembers earlier transients.

    Parameters
    ----------
    laboratory
        Makes the experiments, over its ranks.
    root
        The guarded module.
    replicated
        Every rank holds the same parameters: no shards, and none that DistributedDataParallel was told to leave out.
    replicated_buffers
        Buffers are broadcast before each forward, so that they must be equal over the ranks, too.
    devices
        Every rank's device.

    """

    def __init__(
        self,
        laboratory: Laboratory,
        root: nn.Module,
        *,
        replicated: bool,
        replicated_buffers: bool,
        devices: list[Device],
    ) -> None:
        self._laboratory = laboratory
        self._ranks = laboratory.ranks
        self._root = root
        self._replicated = replicated
        self._replicated_buffers = replicated_buffers
        self._devices = devices
        self._proof = OperatorProof(laboratory)
        self._own_results = OwnResults(laboratory.ranks)
        self._transients: Counter[int] = Counter()

    def question(
        self,
        record: StepRecord,
        original: Any,
        findings: list[Finding],
        follow: Follow,
        local: NDArray[np.float64],
    ) -> Outcome:
        """Make the experiments; collective.

        Parameters
        ----------
        record, original
            The step, and what the training computed.
        findings
            What is suspicious on this rank.
        follow
            Finds who made NaN and Inf, where every execution makes them.
        local
            float64 [P], the L2 norms of the local gradients.

        Raises
        ------
        SideChannelError
            If a rank died or missed the deadline meanwhile.

        """
        suspicious = self._suspects(bool(findings))
        desync = self._state(record)
        if desync is not None:
            if self._apart(local):
                return self._trained_apart(record.step)
            return self._corrupt_state(record.step, desync, findings)
        proven = any(finding.sensor == "checksum" for finding in findings)
        found = self._laboratory.question(record, original, suspicious=bool(findings), proven_by_checksum=proven)
        judgement, located = self._proof.name_operator(record, found, anyone_suspicious=bool(suspicious))
        if located is None and any(row.proven_by_checksum for row in found.rows):
            judgement, located = self._own_results.judge(record.step, judgement, findings)
        evidence = self._evidence(found, judgement, located)
        if judgement.cause is Cause.PERSISTENT_HARDWARE and not any(row.failed for row in found.rows):
            evidence |= self._proof.by_checksum(record, judgement.ranks[0])
        if judgement.cause is Cause.DISMISSED:
            judgement = self._blame_nonfinite(judgement, findings, follow, evidence)
        evidence["suspected_by"] = suspicious
        return self._verdict(record.step, found, judgement, located, evidence)

    def _suspects(self, here: bool) -> list[int]:
        flags = self._ranks.gather(torch.tensor([int(here)])).reshape(-1)
        return [rank for rank, flag in enumerate(flags.tolist()) if flag]

    # -- experiment 0 --------------------------------------------------------------------------------------------

    def replicas(self, record: StepRecord, local: NDArray[np.float64]) -> Desync | None:
        """Compare replicated state over the ranks that share their gradients; collective."""
        desync = self._state(record)
        return None if desync is None or self._apart(local) else desync

    def _apart(self, local: NDArray[np.float64]) -> bool:
        parameters = self._laboratory.replayer.parameters.values()
        return train_apart(self._ranks, [p.grad for p in parameters], local)

    def _state(self, record: StepRecord) -> Desync | None:
        if self._ranks.size == 1 or not self._replicated:
            return None
        named: dict[str, torch.Tensor] = dict(self._root.named_parameters())
        if self._replicated_buffers and self._broadcast_everywhere(record):
            buffers = [name for name, _ in self._root.named_buffers()]
            named |= dict(zip(buffers, record.forwards[-1].buffers, strict=False))
        with torch.no_grad():
            hashes = [bit_hash(value.detach()) for value in named.values()]
        return find_desync(self._ranks, list(named), torch.stack(hashes) if hashes else torch.zeros(0).long())

    def _broadcast_everywhere(self, record: StepRecord) -> bool:
        """Tell whether the buffers of the last forward were made the same on all ranks before it; collective."""
        here = bool(record.forwards) and record.forwards[-1].broadcast
        return not bool(self._ranks.max(torch.tensor([float(not here)])))

    def _trained_apart(self, step: int) -> Outcome:
        message = f"step {step} is suspicious, but nothing is proven: {TRAINED_APART}"
        verdict = Verdict(
            Cause.INCONCLUSIVE, step, (), (), Action.REPORTED, message, evidence={"reason": TRAINED_APART}
        )
        return Outcome(verdict, apart=True)

    def _corrupt_state(self, step: int, desync: Desync, findings: list[Finding]) -> Outcome:
        module, _, leaf = desync.name.rpartition(".")
        who = desync.ranks if desync.majority else ()
        named = f"rank {', '.join(map(str, who))}" if who else "no majority tells which rank"
        message = (
            f"replicated state differs between ranks before step {step}: {desync.name} and "
            f"{desync.count - 1} more tensors; {named} holds other bits than the rest"
        )
        evidence = {
            "hashes_by_rank": [f"{value & (1 << 64) - 1:016x}" for value in desync.hashes],
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
            Site(module or ".", leaf, 0, "param", "value"),
            evidence=evidence,
            fault_code=FAULT_CODE,
        )
        return Outcome(verdict)

    # -- NaN and Inf ---------------------------------------------------------------------------------------------

    def _blame_nonfinite(
        self, judgement: Judgement, findings: list[Finding], follow: Follow, evidence: dict[str, Any]
    ) -> Judgement:
        """Tell data from software where every execution gives the same NaN or Inf; collective."""
        here = any(finding.sensor == "nonfinite" for finding in findings)
        if not bool(self._ranks.max(torch.tensor([int(here)]))):
            return judgement
        followed = follow()
        if followed and followed[0].kind is Kind.AFTERMATH:
            return Judgement(Cause.DISMISSED, reason=followed[0].text)
        told = [one for one in followed if one.own]
        if not told:
            where = "it was not made inside the model"
            if self._laboratory.replayer.compiled:
                where = "an eager re-execution of the compiled model does not make it"
            reason = f"NaN or Inf, the same in every execution; {where}"
            return Judgement(Cause.INCONCLUSIVE, reason=reason)
        first = told[0]
        evidence["origin"] = {"rank": first.rank, "kind": str(first.kind), "site": first.site, "line": first.line}
        if first.kind is Kind.BATCH:
            evidence["batch"] = f"the batch of rank {first.rank} holds NaN or Inf"
            return Judgement(Cause.DATA, reason=f"{evidence['batch']}: {first.text}")
        return Judgement(Cause.SOFTWARE, reason=f"on every device, {first.text}")

    # -- the verdict ---------------------------------------------------------------------------------------------

    def _evidence(self, found: Experiments, judgement: Judgement, located: Located | None) -> dict[str, Any]:
        """Lay the executions side by side: what each gave for the accused rank's step, then who agrees; collective."""
        whose = judgement.ranks[0] if judgement.ranks else 0
        told = self._ranks.tell(json.dumps(self._executions(found)) if self._ranks.rank == whose else "", whose)
        evidence: dict[str, Any] = {
            "whose": f"rank {self._numbers((whose,))[0]}'s step",
            **(json.loads(told) if told else {}),
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
            "parameter": list(self._laboratory.replayer.parameters)[worst],
            "l2_by_execution": {name: float(x.l2[worst]) for name, x in made},
            "hash_by_execution": {name: f"{int(x.digest[worst]) & (1 << 64) - 1:016x}" for name, x in made},
        }

    def _verdict(
        self,
        step: int,
        found: Experiments,
        judgement: Judgement,
        located: Located | None,
        evidence: dict[str, Any],
    ) -> Outcome:
        if judgement.cause is Cause.TRANSIENT_HARDWARE:
            judgement = self._repeated(judgement)
        evidence |= {"wrong_executions": judgement.wrong, "reason": judgement.reason or found.problem or ""}
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

    def _repeated(self, judgement: Judgement) -> Judgement:
        for rank in judgement.ranks:
            self._transients[rank] += 1
        often = [rank for rank in judgement.ranks if self._transients[rank] >= _REPEATED]
        if not often or self._ranks.size == 1:  # one process accuses nobody by its own replays alone
            return judgement
        reason = f"rank {often[0]} was caught in a transient fault {self._transients[often[0]]} times"
        return Judgement(
            Cause.PERSISTENT_HARDWARE, tuple(often), intermittent=True, reason=reason, wrong=judgement.wrong
        )

    def _message(self, step: int, judgement: Judgement, located: Located | None, found: Experiments) -> str:
        numbers = self._numbers(judgement.ranks)
        who = ", ".join(f"rank {n}: {self._devices[rank]}" for n, rank in zip(numbers, judgement.ranks, strict=True))
        what = f" in {located.site}" + (f" ({located.line})" if located and located.line else "") if located else ""
        match judgement.cause:
            case Cause.TRANSIENT_HARDWARE:
                one = who or f"one of the ranks, which is not known ({judgement.reason}),"
                text = f"{one} computed step {step} wrongly once; repeated executions agree on another result"
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
        """Say why no operator is named where the fault is in compiled code; empty if that is not known."""
        if found.problem or not self._laboratory.replayer.compiled:
            return ""
        return "; run eagerly its operators agree, so compiled code produced it, and no operator can be named"


def _row_text(matches: tuple[Match, ...]) -> dict[str, str]:
    return {
        f"{NAMES[a]} = {NAMES[b]}": match.name.lower()
        for (a, b), match in zip(PAIRS, matches, strict=True)
        if match is not Match.MISSING
    }
