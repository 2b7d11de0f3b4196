"""Experiment 3: the operator that computes wrongly, by comparing two devices, or one device with float64."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import torch

from bitwitness.capture.step import StepRecord
from bitwitness.errors import SideChannelError
from bitwitness.finding import Cause, Severity, to_jsonable
from bitwitness.judge.agreement import LOCAL, Match, spreading
from bitwitness.judge.alone import contradicts_operators, examine
from bitwitness.judge.decide import CANNOT, Judgement
from bitwitness.judge.executions import Experiments
from bitwitness.judge.experiments import ReplayExperiments
from bitwitness.judge.fingerprint import Fingerprint
from bitwitness.judge.localize import Located, locate
from bitwitness.replay.errors import ReplayError
from bitwitness.sense.checksum import ChecksumSensor
from bitwitness.tap.inplace import functional_tap
from bitwitness.tap.modules import ModuleTracker

_CONTRADICTS = "an operator's result contradicts float64"
_ASKED = 2  # accused devices that are asked, one after the other: the other ranks wait


class OperatorProof:
    """Finds the operator on which a judgement rests; without one, a device that always gives the same is not convicted.

    Parameters
    ----------
    experiments
        Makes the experiments, over its ranks.

    """

    def __init__(self, experiments: ReplayExperiments) -> None:
        self._experiments = experiments
        self._ranks = experiments.ranks

    def name_operator(
        self, record: StepRecord, found: Experiments, *, anyone_suspicious: bool
    ) -> tuple[Judgement, Located | None]:
        """Find the operator where two devices part, or that float64 contradicts; settle a dispute with it. Collective."""
        judgement = found.judgement
        try:
            if judgement.disputed or judgement.unproven:
                pair = judgement.disputed or judgement.unproven
                located = locate(self._ranks, self._experiments.replayer, record, found.received, *pair)
                return self._settle(judgement, located, record, found)
            # Nobody else could be asked, so every operator is, one by one, against float64.
            if self._no_other_device(found) and anyone_suspicious:
                return self._each_alone(record, found)
            if judgement.cause is Cause.PERSISTENT_HARDWARE and not self._no_other_device(found):
                size, owner = self._ranks.size, judgement.ranks[0]
                # A device of the two that ran its step, and that is not accused itself.
                witness = next(r for r in ((owner + 1) % size, (owner + 2) % size) if r not in judgement.ranks[1:])
                located = locate(self._ranks, self._experiments.replayer, record, found.received, owner, witness)
                return judgement, located if located is not None and located.parted else None
            if judgement.reason != CANNOT:
                return self._accused(record, found)
        except SideChannelError:  # a rank is lost: that is somebody else's to handle
            raise
        except Exception as error:
            found.problem = f"the operator was not named: {type(error).__name__}: {error}"
            if judgement.cause is Cause.DISMISSED and anyone_suspicious and self._no_other_device(found):
                reason = f"{judgement.reason}; its operators could not be compared with float64"
                judgement = replace(judgement, cause=Cause.INCONCLUSIVE, reason=reason)
        return _without_proof(judgement), None

    def _no_other_device(self, found: Experiments) -> bool:
        """Return whether no rank's step was run on another rank's device."""
        return self._ranks.size == 1 or not any(row.made()[-1] > LOCAL[-1] for row in found.rows)

    def _settle(
        self, judgement: Judgement, located: Located | None, record: StepRecord, found: Experiments
    ) -> tuple[Judgement, Located | None]:
        """Conclude from the operator at which two devices part; collective."""
        pair = judgement.disputed or judgement.unproven
        wrong = judgement.wrong
        if located is not None and located.culprit is not None:
            reason = "two devices contradict each other, and float64 contradicts this one"
            return Judgement(Cause.PERSISTENT_HARDWARE, (located.culprit,), reason=reason, wrong=wrong), located
        # The first difference may lie within the allowance, or not repeat its bits, and the wrong one come later:
        # each operator is asked, on both devices.
        for rank in pair:
            alone = self._examined(record, rank)
            if alone is not None:
                return Judgement(Cause.PERSISTENT_HARDWARE, (rank,), reason=_CONTRADICTS, wrong=wrong), alone
        if located is not None and not located.parted:
            if self._experiments.replayer.compiled:
                return self._compiled_alone(judgement, record, found), None
            return _contradicts_itself(judgement), None
        if located is not None and located.within_allowance:
            self._experiments.learn_algorithm(found)
            reason = (
                f"rank {pair[0]} and rank {pair[1]} compute {located.site} in different ways, both within what "
                f"float64 allows: another "
                "algorithm, no fault"
            )
            return Judgement(Cause.DISMISSED, reason=reason, wrong=wrong), None
        return _without_proof(judgement), located

    def _accused(self, record: StepRecord, found: Experiments) -> tuple[Judgement, Located | None]:
        """Ask float64 where a device contradicts itself, or an operator's invariant failed; collective.

        No gradient may show the latter (a last layer's). One that was wrong once may be wrong each time, in another place.
        """
        accused = [*found.judgement.ranks, *(rank for rank, row in enumerate(found.rows) if row.proven_by_checksum)]
        if found.judgement.cause is Cause.INCONCLUSIVE:
            accused += spreading(found.rows)
        for rank in list(dict.fromkeys(accused))[:_ASKED]:
            located = self._examined(record, rank)
            if located is not None:
                wrong = found.judgement.wrong
                return Judgement(Cause.PERSISTENT_HARDWARE, (rank,), reason=_CONTRADICTS, wrong=wrong), located
        return found.judgement, None

    def _compiled_alone(self, judgement: Judgement, record: StepRecord, found: Experiments) -> Judgement:
        """Ask a device that alone gives another result whether its compiled code contradicts its own operators; collective."""
        owner, replayed = judgement.ranks[0] if judgement.ranks else -1, found.executions[1]
        gap: float | None = None
        if self._ranks.rank == owner and judgement.far and replayed is not None:
            gap = contradicts_operators(self._experiments.replayer, record, replayed)
        if not self._ranks.broadcast_text("" if gap is None else f"{gap:.3g}", max(owner, 0)):
            return _without_proof(judgement)
        reason = "on this device alone compiled code gives another result than its operators do, one by one"
        return Judgement(Cause.PERSISTENT_HARDWARE, judgement.ranks, reason=reason, wrong=judgement.wrong)

    def _examined(self, record: StepRecord, rank: int, unchecked: set[str] | None = None) -> Located | None:
        """Have each operator of one rank's step compared with float64 there; collective."""
        replayer, together = self._experiments.replayer, self._experiments.replayer.lockstep
        found: Located | None = None
        problem = ""
        if self._ranks.rank == rank or together:
            try:
                found = examine(replayer, record, rank, unchecked=unchecked, together=together).located
            except ReplayError as error:
                problem = str(error)
        if problem:
            self._experiments.covered[f"float64 was not asked: {problem}"] += 1
        mine = found is not None and self._ranks.rank == rank
        text = found.as_text() if found is not None and mine else ""
        heard = self._ranks.broadcast_text(text, rank)
        return Located.from_text(heard)

    def _each_alone(self, record: StepRecord, found: Experiments) -> tuple[Judgement, Located | None]:
        """Ask float64 on every rank by itself, where no other device could be asked; collective."""
        judgement, replayer = found.judgement, self._experiments.replayer
        if judgement.reason == CANNOT:
            return judgement, None
        unchecked: set[str] = set()
        together = replayer.lockstep or self._ranks.size > 1
        examined = examine(replayer, record, self._ranks.rank, unchecked=unchecked, together=together)
        told = self._ranks.gather_text("" if examined.located is None else examined.located.as_text())
        guilty = [rank for rank, text in enumerate(told) if text]
        if guilty:
            wrong = judgement.wrong
            located = Located.from_text(told[guilty[0]])
            return Judgement(Cause.PERSISTENT_HARDWARE, tuple(guilty), reason=_CONTRADICTS, wrong=wrong), located
        replayed = found.executions[1]
        # Two replays may share one fault of the device; a heal takes what they gave only if float64 bears them out.
        if judgement.heal and not self._vouched_for(found, examined.fingerprint):
            reason = (
                "two replays agree, and one whose operators float64 was asked about gives another result than they do"
            )
            return Judgement(Cause.INCONCLUSIVE, reason=reason, wrong=judgement.wrong), None
        if self._ranks.size == 1 and not judgement.wrong and replayer.compiled and replayed is not None:
            gap = contradicts_operators(replayer, record, replayed)
            if gap is not None:
                reason = (
                    f"compiled code gives, every time, another gradient than its operators do one by one (by {gap:.2g} of its "
                    "norm, no rounding): this device or the compiler is wrong"
                )
                wrong = {0: ["compiled code against its operators"]}
                return Judgement(Cause.INCONCLUSIVE, reason=reason, wrong=wrong), None
        if judgement.cause is Cause.DISMISSED and (names := sorted(unchecked)):
            reason = f"{judgement.reason}; float64 contradicts no operator, but could not judge {', '.join(names[:4])}"
            return replace(judgement, cause=Cause.INCONCLUSIVE, reason=reason), None
        return judgement, None

    def _vouched_for(self, found: Experiments, examined: Fingerprint) -> bool:
        """Return whether the replays that are to heal gave what the execution gave whose operators are right; collective."""
        replayed, tolerance = found.executions[2], self._experiments.tolerance
        far = replayed is None or replayed.compare(examined, tolerance, found.spreads) is Match.FAR
        agreed = self._experiments.replayer.compiled or not far
        return not bool(self._ranks.max(torch.tensor([float(not agreed)])))

    def by_checksum(self, record: StepRecord, culprit: int) -> dict[str, Any]:
        """Replay on the culprit with every matrix product checked; return the first that fails, for all ranks."""
        text = ""
        if self._ranks.rank == culprit or self._experiments.replayer.lockstep:
            sensor, tracker = ChecksumSensor(), ModuleTracker()
            try:
                self._experiments.replayer.run(record, around=lambda: functional_tap(tracker, sensor, sensor.select))
                failed = [
                    finding for finding in sensor.drain(record.step, culprit) if finding.severity is Severity.ERROR
                ]
            except ReplayError:
                failed = []
            text = json.dumps({"site": failed[0].site.short, **to_jsonable(failed[0].evidence)}) if failed else ""
        heard = self._ranks.broadcast_text(text, culprit)
        return {"checksum": json.loads(heard)} if heard else {}


def _without_proof(judgement: Judgement) -> Judgement:
    """Return what is left of a judgement whose operator was not found."""
    if not judgement.unproven:
        return judgement
    reason = (
        f"rank {judgement.ranks[0]} gives, every time, another result than other devices, but no operator was "
        f"found whose result "
        "float64 contradicts: a fault, or another algorithm"
    )
    return Judgement(Cause.INCONCLUSIVE, reason=reason, wrong=judgement.wrong)


def _contradicts_itself(judgement: Judgement) -> Judgement:
    """Conclude where two devices, compared operator by operator, agree, and one of them had given another result before."""
    if not judgement.unproven or not judgement.far:
        return _without_proof(judgement)
    reason = "this device gave another result than all others, and the same as they when it was asked again"
    return Judgement(
        Cause.PERSISTENT_HARDWARE, judgement.ranks, intermittent=True, reason=reason, wrong=judgement.wrong
    )
