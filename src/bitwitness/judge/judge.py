"""The order of the experiments, from which the verdict of a step follows (`judge.verdict` puts it into words).

0. Do all ranks hold the same parameters (and broadcast buffers)? If not: corrupt state.
1. Replay in place, twice. 2. Replay on other ranks' devices. 3. Name the operator, and ask float64 which result is right.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from bitwitness.capture.step import StepRecord
from bitwitness.finding import Cause, Device, Finding, Severity
from bitwitness.judge.decide import Judgement
from bitwitness.judge.experiments import ReplayExperiments
from bitwitness.judge.ownresults import OwnResults
from bitwitness.judge.proof import OperatorProof
from bitwitness.judge.replicas import Desync, train_apart
from bitwitness.judge.replicated import Replicas
from bitwitness.judge.verdict import Outcome, VerdictBuilder
from bitwitness.nonfinite.kinds import BOUNDED
from bitwitness.nonfinite.origin import Kind, Told
from bitwitness.sense.held import Reading
from bitwitness.site import Site

Follow = Callable[[], list[Told]]
"""Follows a non-finite step back to who made it, on all ranks; collective."""
# Transients on one device that make a persistent, intermittent fault. One or two may be chance; a higher count would let a
# device spoil as many steps where a heal is not possible.
_REPEATED = 3
OF_STATE = ("seal", "optimizer")
"""Sensors whose errors are proof: each has made its experiments already."""


class Judge:
    """Questions a suspicious step and says who was wrong; remembers earlier transients.

    Parameters
    ----------
    experiments
        Makes the experiments, over its ranks.
    replicas
        Compares what all ranks are to hold alike.
    devices
        Every rank's device.

    """

    def __init__(
        self,
        experiments: ReplayExperiments,
        replicas: Replicas,
        *,
        devices: list[Device],
    ) -> None:
        self._experiments = experiments
        self._ranks = experiments.ranks
        self._replicas = replicas
        self._build = VerdictBuilder(self._ranks, experiments.replayer, devices)
        self._proof = OperatorProof(experiments)
        self._own_results = OwnResults(experiments.ranks)
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
        # Every rank comes here, whether or not it suspects anything itself: all that follows is collective.
        suspicious = self._flagged(bool(findings))
        desync = self._replicas.compare(record)
        accused = self._accused(findings)
        if accused and (desync is None or not desync.majority):
            return self._build.state_changed(record.step, accused, [f for f in findings if f.sensor in OF_STATE])
        if desync is not None:
            if self._apart(local):
                return self._build.trained_apart(record.step)
            return self._build.corrupt_state(record.step, desync, findings)
        proven = any(finding.sensor == "checksum" for finding in findings)
        found = self._experiments.question(record, original, suspicious=bool(findings), proven_by_checksum=proven)
        judgement, located = self._proof.name_operator(record, found, anyone_suspicious=bool(suspicious))
        # Where no step can be run again, what the checksum recomputed at once is all there is.
        if located is None and any(row.proven_by_checksum for row in found.rows):
            judgement, located = self._own_results.judge(record.step, judgement, findings)
        if judgement.cause is Cause.TRANSIENT_HARDWARE:
            located = located or self._own_results.struck(judgement, findings)
        evidence = self._build.evidence(found, judgement, located)
        if judgement.cause is Cause.PERSISTENT_HARDWARE and not any(row.failed for row in found.rows):
            evidence |= self._proof.by_checksum(record, judgement.ranks[0])
        # Every device computes the same: then a NaN is the data's or the script's, and somebody wants to know whose.
        if judgement.cause is Cause.DISMISSED:
            judgement = self._blame_nonfinite(judgement, findings, follow, evidence)
            judgement = self._own_results.doubted(judgement, findings)
        evidence["suspected_by"] = suspicious
        if judgement.cause is Cause.TRANSIENT_HARDWARE:
            judgement = self._repeated(judgement)
        return self._build.concluded(record.step, found, judgement, located, evidence)

    def _flagged(self, here: bool) -> list[int]:
        flags = self._ranks.gather(torch.tensor([int(here)])).reshape(-1)
        return [rank for rank, flag in enumerate(flags.tolist()) if flag]

    # -- experiment 0 --------------------------------------------------------------------------------------------

    def _accused(self, findings: list[Finding]) -> tuple[int, ...]:
        """Return the ranks whose own sensors of state have proven something; none where all have. Collective."""
        here = any(finding.sensor in OF_STATE and finding.severity is Severity.ERROR for finding in findings)
        ranks = self._flagged(here)
        return tuple(ranks) if len(ranks) < self._ranks.size or self._ranks.size == 1 else ()

    def replicas(self, record: StepRecord, local: NDArray[np.float64], reading: Reading) -> Desync | None:
        """Compare replicated state, as it was read, over the ranks that share their gradients; collective."""
        desync = self._replicas.compare(record, reading)
        return None if desync is None or self._apart(local) else desync

    def _apart(self, local: NDArray[np.float64]) -> bool:
        parameters = self._experiments.replayer.parameters.values()
        return train_apart(self._ranks, [p.grad for p in parameters], local, self._replicas.groups)

    # -- NaN and Inf ---------------------------------------------------------------------------------------------

    def _blame_nonfinite(
        self, judgement: Judgement, findings: list[Finding], follow: Follow, evidence: dict[str, Any]
    ) -> Judgement:
        """Return a judgement of data or of software where every execution gives the same NaN or Inf; collective."""
        here = any(finding.sensor == "nonfinite" for finding in findings)
        if not bool(self._ranks.max(torch.tensor([int(here)]))):
            return judgement
        followed = follow()
        if followed and followed[0].kind is Kind.AFTERMATH:
            return Judgement(Cause.DISMISSED, reason=followed[0].text)
        own = [origin for origin in followed if origin.own]
        if not own:
            where = "it was not made inside the model"
            if self._experiments.replayer.compiled:
                where = "an eager re-execution of the compiled model does not make it"
            reason = f"NaN or Inf, the same in every execution; {where}"
            return Judgement(Cause.INCONCLUSIVE, reason=reason)
        first = own[0]
        evidence["origin"] = {"rank": first.rank, "kind": str(first.kind), "site": first.site, "line": first.line}
        if first.kind is Kind.BATCH:
            evidence["batch"] = f"the batch of rank {first.rank} holds NaN or Inf"
            return Judgement(Cause.DATA, reason=f"{evidence['batch']}: {first.text}")
        if first.kind is Kind.GIVEN:
            return Judgement(Cause.INCONCLUSIVE, reason=f"in every execution the same; {first.text}")
        whose = f"on rank {first.rank}, " if self._ranks.size > 1 else ""
        if first.kind is Kind.OPERATOR and (op := Site.parse(first.site).op) in BOUNDED:
            never = f"{op} gives finite numbers alone, so that this is its device's doing, or its kernel's"
            return Judgement(Cause.INCONCLUSIVE, reason=f"{whose}in every execution, {first.text}; but {never}")
        return Judgement(Cause.SOFTWARE, reason=f"{whose}in every execution, {first.text}")

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
