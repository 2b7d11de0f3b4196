"""The experiments that all ranks make together, in lockstep, before anyone acts on a suspicion.

Every method is collective. What one rank cannot do (its step cannot be run again) it tells the others, so that none waits.
"""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

import torch

from bitwitness.capture.step import Pass, StepRecord
from bitwitness.judge.agreement import LOCAL, PAIRS, Agreement, Match
from bitwitness.judge.decide import decide
from bitwitness.judge.exchanging import judge_exchanging
from bitwitness.judge.executions import Experiments
from bitwitness.judge.fingerprint import Fingerprint
from bitwitness.judge.otherinputs import HiddenState
from bitwitness.judge.spread import HealthySpread
from bitwitness.ranks import Ranks
from bitwitness.replay.errors import ReplayError, reason_of
from bitwitness.replay.payload import pack, unpack
from bitwitness.replay.run import Execution, Replayer

# Times a replay's duration that ranks may wait for one another. Naming an operator takes three traced replays on two ranks,
# each several times as long as a plain one, while the others wait. Longer would find a lost rank later.
_LONGEST_WAIT = 20

_NOT_LEARNED = "a step to learn from cannot be run again: {}"


class ReplayExperiments:
    """Makes the experiments for one root.

    Parameters
    ----------
    ranks
        The side channel, or `ranks.Alone`.
    replayer
        Runs captured steps again.
    tolerance
        Distance between two executions' gradients that counts as rounding (`fingerprint.NEAR`).

    """

    def __init__(self, ranks: Ranks, replayer: Replayer, tolerance: float) -> None:
        self.ranks = ranks
        self.replayer = replayer
        self.tolerance = tolerance
        self._healthy = HealthySpread(ranks, len(replayer.parameters))
        self.calibrated = 0
        self._repeated = 0  # suspected steps, all of whose executions gave the same bits on every rank
        self.odd = self.odd_here = False
        self.mismatched = False
        """Whether the last step that was replayed here came out otherwise than the training's own."""
        self.covered: Counter[str] = Counter()
        """What was not repeated, or not asked, in how many experiments."""
        self.agreed: Counter[int] = Counter()
        self._problem: str | None = None
        self._ways_vary = False  # an execution with other nodes gave the same: their number says nothing of this model
        self._hidden = HiddenState(ranks, replayer)

    @property
    def spread(self) -> float:
        """How far apart healthy replays were, at most, over the parameters."""
        return self._healthy.largest

    @property
    def reproducible(self) -> bool:
        """Whether healthy replays gave the same bits on every rank and every device they were tried on."""
        return (self.calibrated > 0 or self._repeated > 0) and self.spread == 0.0

    @property
    def _own(self) -> set[int]:
        return {id(parameter) for parameter in self.replayer.parameters.values()}

    def state(self) -> dict[str, Any]:
        """Return what was learned of this model, to be kept over a restart."""
        return {"spreads": self._healthy.gaps, "calibrated": self.calibrated}

    def load(self, state: dict[str, Any]) -> None:
        """Go on with what `state` gave."""
        self._healthy.gaps, self.calibrated = state["spreads"].clone(), int(state["calibrated"])

    def remember(self, before: ReplayExperiments) -> None:
        """Go on with what was learned of the same parameters earlier in this process."""
        self.load(before.state())
        self._repeated, self.agreed, self.mismatched = before._repeated, before.agreed, before.mismatched

    def calibrate(self, record: StepRecord, original: Fingerprint) -> str | None:
        """Replay a step that nobody suspects, here and on the next rank; return why it could not, if so.

        What differs here by rounding is the model's own spread, not a fault: later differences of a parameter up to
        `fingerprint.MARGIN` times as large prove nothing. What differs by more teaches nothing but caution.
        """
        self._problem = None
        ready = self._all_ready(record)
        here = self._fingerprint(record) if ready else None
        if self._any(here is None) or here is None:
            return _NOT_LEARNED.format(self._problem or "another rank could not replay its step")
        elsewhere = here
        if self.ranks.size > 1 and not self._exchanging():
            found, _ = self._elsewhere(record, 1)
            if self._any(found is None) or found is None:
                self._note_uncovered("another rank's device could not be asked")
            else:
                elsewhere = found
        if (hidden := self._hidden.ends_replays(record, [original, here], self.tolerance)) is not None:
            return _NOT_LEARNED.format(hidden)
        far = self._healthy.learn(original, here, elsewhere, self.tolerance)
        self._note_match(record, original, here)
        self.calibrated += 1
        # A large difference on a few ranks is no property of the model.
        many = int(self.ranks.sum(torch.tensor([int(far)])))
        self.odd = 0 < many <= self.ranks.size // 2
        self.odd_here = self.odd and far
        differing = int(self.ranks.sum(torch.tensor([int(far or here.compare(original, 0.0) is not Match.EQUAL)])))
        if many:
            return f"healthy replays differ by more than kernels do, on {many} of {self.ranks.size} ranks: nothing is learned"
        told = f"healthy replays differ by {self.spread:.3g} on {differing} of {self.ranks.size} ranks"
        return f"{told}; such differences will not be taken for faults" if differing else None

    def learn_algorithm(self, found: Experiments) -> None:
        """Take executions that differ, each within its operators' allowance, for another algorithm's; collective."""
        self._healthy.learn_algorithm(found.executions)

    def question(
        self, record: StepRecord, original: Fingerprint, *, suspicious: bool, proven_by_checksum: bool
    ) -> Experiments:
        """Make the experiments on the step at hand.

        Parameters
        ----------
        record
            This rank's captured step.
        original
            Its local gradients as they were, before reduction.
        suspicious
            A sensor fired on this rank.
        proven_by_checksum
            An operator's invariant failed on this rank.

        """
        self._problem = None
        started = time.monotonic()
        # Twice in place: where both agree, the training's own was wrong once; where not, the device does not repeat.
        ready = self._all_ready(record)
        first = self._fingerprint(record) if ready else None
        good = self._execute(record) if ready else None
        second = None if good is None else Fingerprint.of(good)
        seconds = (time.monotonic() - started) / 2
        executions: list[Fingerprint | None] = [original, first, second, None, None]
        received: dict[int, list[Pass]] = {}
        replayed = self._all_replayed(first is not None and second is not None, seconds)
        if replayed and self.ranks.size > 1 and not self._exchanging():
            self._ask_elsewhere(record, executions, received)
        # Where no other device bears a replay out, one that came out otherwise undoes what earlier steps showed.
        never = not self.agreed[record.shape] or ((self.ranks.size == 1 or self.replayer.shared) and self.mismatched)
        if first is not None:
            self._note_match(record, original, first)
            # A rare branch of the script's, taken once: what it left behind may be nowhere that anybody looks.
            never |= first.other_way and not self._ways_vary
        dependent = torch.tensor(record.value_dependent(), dtype=torch.bool)
        changed = False
        # Where the loss code was not repeated, the replay began with gradients that belong to the training's own outputs.
        if first is not None and not first.whole:
            changed = bool((original.outputs != first.outputs)[dependent].any())
        made = [x for x in executions[1:] if x is not None]
        # Of what another device bears out, the training's own does not count: it may have been wrong.
        asked = executions[: len(LOCAL)] if self.ranks.size == 1 else executions[1 : len(LOCAL)]
        hidden = self._hidden.ends_replays(record, asked, self.tolerance) if replayed else None
        self._problem = self._problem or hidden
        row = Agreement(
            tuple(self._match(executions[a], executions[b]) for a, b in PAIRS),
            suspicious=suspicious,
            proven_by_checksum=proven_by_checksum,
            outputs_changed=changed,
            never_repeated=never,
            failed=first is None or second is None or hidden is not None,
            partial=any(not x.whole for x in made),
            spread=any(original.compare(x, 0.0) is not Match.EQUAL for x in made),
        )
        gathered = self.ranks.gather(torch.tensor(row.as_numbers(), dtype=torch.int64))
        # From here on every rank knows the same, and concludes the same.
        rows = [Agreement.from_numbers(line.tolist()) for line in gathered]
        judgement = decide(rows, reproducible=self.reproducible)
        self._repeated += not any(row.failed or row.spread for row in rows)
        if self.replayer.shared:
            judgement = judge_exchanging(judgement, rows)
        no_loss = good.no_loss if good else None
        found = Experiments(executions, judgement, rows, good, received, self._problem, no_loss, self._healthy.gaps)
        if not judgement.wrong and {m for row in rows for m in row.matches} & {Match.NEAR, Match.FAR} == {Match.NEAR}:
            self.learn_algorithm(found)  # by rounding, and on no device more than on others
        return found

    def _note_match(self, record: StepRecord, original: Fingerprint, here: Fingerprint) -> None:
        """Remember whether a replay gave the training's own result."""
        self.mismatched = self._match(original, here) is not Match.EQUAL
        self._ways_vary |= here.other_way and not self.mismatched
        if not self.mismatched:
            self.agreed[record.shape] += 1

    def _exchanging(self) -> bool:
        """Return whether any rank's forward exchanges something with others. Then no rank runs another's step."""
        if self.replayer.shared:
            self._note_uncovered("ranks exchange something inside the forward, so no step was run on another device")
        return self.replayer.shared

    def _ask_elsewhere(
        self, record: StepRecord, executions: list[Fingerprint | None], received: dict[int, list[Pass]]
    ) -> None:
        for by in (1, 2):
            if by == 2:  # a third device is asked only to break a tie
                differs = len({tuple(x.digest.tolist()) for x in executions if x is not None}) > 1
                if self.ranks.size < 3 or not self._any(differs):
                    return
            executions[2 + by], passes = self._elsewhere(record, by)
            here, there = executions[1], executions[2 + by]
            if here is not None and there is not None and here.whole and not there.whole:
                self._problem = self._problem or "the loss code could not be run on another rank's device"
                executions[2 + by] = None  # what went back from this rank's own gradients says nothing of its loss
            if passes is not None:
                received[(self.ranks.rank - by) % self.ranks.size] = passes
            if self._any(executions[2 + by] is None):  # agreements are compared over all ranks, so all or none
                executions[2 + by] = None
                self._note_uncovered(self._problem or "another rank's device could not be asked")
                return

    def _elsewhere(self, record: StepRecord, by: int) -> tuple[Fingerprint | None, list[Pass] | None]:
        """Have this rank's payload executed ``by`` ranks further on; execute the one that arrives here."""
        parcel = self.ranks.shift(pack(record.passes(), self._own), by)
        passes: list[Pass] | None = None
        found: Fingerprint | None = None
        try:
            passes = unpack(parcel, record.passes(), self.replayer.device, self._own)
        except Exception as error:
            self._note(error)
        # Where all ranks run together, one that cannot keeps the others from running, too.
        if passes is not None if not self.replayer.lockstep else not self._any(passes is None):
            try:
                found = Fingerprint.of(self.replayer.run(record, passes))
            except Exception as error:
                self._note(error)
        back = self.ranks.shift([] if found is None else found.tensors(), -by)
        return (Fingerprint.received(back) if back else None), passes

    def _all_ready(self, record: StepRecord) -> bool:
        """Return whether this rank may run its step; where ranks must run together, whether all can. Collective."""
        try:
            self.replayer.check(record, record.passes())
        except ReplayError as error:
            self._note(error)
        if self.replayer.lockstep:
            return not self._any(self._problem is not None)
        return self._problem is None

    def _execute(self, record: StepRecord) -> Execution | None:
        try:
            return self.replayer.run(record, keep=True)
        except Exception as error:
            self._note(error)
            return None

    def _fingerprint(self, record: StepRecord) -> Fingerprint | None:
        execution = self._execute(record)
        return None if execution is None else Fingerprint.of(execution)

    def _note(self, error: Exception) -> None:
        self._problem = self._problem or reason_of(error)

    def _note_uncovered(self, reason: str) -> None:
        self.covered[reason] += 1

    def _match(self, a: Fingerprint | None, b: Fingerprint | None) -> Match:
        if a is None or b is None:
            return Match.MISSING
        return a.compare(b, self.tolerance, self._healthy.gaps)

    def _all_replayed(self, here: bool, seconds: float) -> bool:
        """Return whether all ranks could replay; what that took says how long they may have to wait for one another."""
        failed, seconds = self.ranks.max(torch.tensor([float(not here), seconds])).tolist()
        self.ranks.expect(_LONGEST_WAIT * seconds)
        return not failed

    def _any(self, here: bool) -> bool:
        return bool(float(self.ranks.max(torch.tensor([float(here)]))))
