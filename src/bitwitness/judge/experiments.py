"""The experiments that all ranks make together, in lockstep, before anyone acts on a suspicion.

Every method is collective. What one rank cannot do (its step cannot be run again) it tells the others, so that none waits.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import torch

from bitwitness.judge.decide import PAIRS, Judgement, Match, Row, decide
from bitwitness.judge.fingerprint import Fingerprint
from bitwitness.ranks import Ranks
from bitwitness.replay.capsule import Passes, pack, unpack
from bitwitness.replay.run import Execution, Replayer, ReplayError
from bitwitness.tap.capture import StepRecord

# Naming an operator takes three traced replays on two ranks, each several times as long as a plain one; the others wait.
_LONGEST_WAIT = 20


@dataclass(slots=True)
class Experiments:
    """What the experiments on one step brought to light on this rank.

    ``executions`` are fingerprints in the order of `decide.NAMES` (None where one was not made); ``good`` is the second
    local replay with its gradients; ``guests`` are other ranks' capsules that ran here, by rank.
    """

    executions: list[Fingerprint | None]
    judgement: Judgement
    rows: list[Row]
    good: Execution | None = None
    guests: dict[int, Passes] = field(default_factory=dict)
    problem: str | None = None


class Laboratory:
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
        self.spread = 0.0
        self.calibrated = 0
        self.repeats = False
        """Whether a replay here has given the training's own result at least once."""
        self.odd = self.odd_here = False
        self._problem: str | None = None

    @property
    def reproducible(self) -> bool:
        """Whether healthy replays gave the same bits on every rank and every device they were tried on."""
        return self.calibrated > 0 and self.spread == 0.0

    def calibrate(self, record: StepRecord, original: Fingerprint) -> str | None:
        """Replay a step that nobody suspects, here and on the next rank; return why it could not, if so.

        What differs here is the model's own spread (a nondeterministic kernel), not a fault: later differences up to ten
        times as large prove nothing.
        """
        self._problem = None
        if not self._all_ready(record):
            return self._problem or "another rank could not replay its step"
        here = self._fingerprint(record)
        elsewhere, _ = self._elsewhere(record, 1) if self.ranks.size > 1 else (here, None)
        failed = self.ranks.max(torch.tensor([float(here is None or elsewhere is None)]))
        if float(failed) or here is None or elsewhere is None:
            return self._problem or "another rank could not replay its step"
        spread = max(
            (0.0 if original.compare(x, 0.0) is Match.EQUAL else original.distance(x)) for x in (here, elsewhere)
        )
        self.repeats = self.repeats or original.compare(here, 0.0) is Match.EQUAL
        everywhere = self.ranks.max(torch.tensor([spread], dtype=torch.float64))
        # A large spread on a few ranks is no property of the model; one that most show, or of rounding's size, is.
        many = int(self.ranks.sum(torch.tensor([int(spread > 0)])))
        rounding = float(everywhere) <= self.tolerance
        self.odd = 0 < many <= self.ranks.size // 2 and not rounding
        self.odd_here = self.odd and spread > 0
        if many and not self.odd:
            self.spread = max(self.spread, float(everywhere))
            self.repeats = True  # up to its spread
        self.calibrated += 1
        return (
            f"healthy replays differ by {float(everywhere):.3g} on {many} of {self.ranks.size} ranks" if many else None
        )

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
        ready = self._all_ready(record)
        first = self._fingerprint(record) if ready else None
        good = self._execute(record) if ready else None
        second = None if good is None else Fingerprint.of(good)
        seconds = (time.monotonic() - started) / 2
        executions: list[Fingerprint | None] = [original, first, second, None, None]
        guests: dict[int, Passes] = {}
        if self._all_replayed(first is not None and second is not None, seconds) and self.ranks.size > 1:
            self._ask_elsewhere(record, executions, guests)
        local = self._match(original, first)
        never = not self.repeats and local is not Match.EQUAL
        self.repeats = self.repeats or local is Match.EQUAL
        dependent = torch.tensor(record.value_dependent(), dtype=torch.bool)
        changed = first is not None and bool((original.outputs != first.outputs)[dependent].any())
        row = Row(
            tuple(self._match(executions[a], executions[b]) for a, b in PAIRS),
            suspicious=suspicious,
            proven_by_checksum=proven_by_checksum,
            outputs_changed=changed,
            never_repeated=never,
            failed=first is None or second is None or (self.ranks.size > 1 and executions[3] is None),
        )
        rows = [_decode(line) for line in self.ranks.gather(_encode(row))]
        judgement = decide(rows, reproducible=self.reproducible)
        return Experiments(executions, judgement, rows, good, guests, self._problem)

    def _ask_elsewhere(
        self, record: StepRecord, executions: list[Fingerprint | None], guests: dict[int, Passes]
    ) -> None:
        for by in (1, 2):
            if by == 2:
                differs = len({tuple(x.digest.tolist()) for x in executions if x is not None}) > 1
                if self.ranks.size < 3 or not self._any(differs):
                    return
            executions[2 + by], passes = self._elsewhere(record, by)
            if passes is not None:
                guests[(self.ranks.rank - by) % self.ranks.size] = passes

    def _elsewhere(self, record: StepRecord, by: int) -> tuple[Fingerprint | None, Passes | None]:
        """Have this rank's capsule executed ``by`` ranks further on; execute the one that arrives here."""
        guest = self.ranks.shift(pack(record.passes()), by)
        passes: Passes | None = None
        found: Fingerprint | None = None
        try:
            passes = unpack(guest, record.passes(), self.replayer.device)
        except Exception as error:
            self._note(error)
        # Where all ranks run together, one that cannot keeps the others from running, too.
        if passes is not None if not self.replayer.lockstep else not self._any(passes is None):
            try:
                found = Fingerprint.of(self.replayer.run(record, passes))
            except Exception as error:
                self._note(error)
        back = self.ranks.shift([] if found is None else found.tensors(), -by)
        return (Fingerprint(*back) if back else None), passes

    def _all_ready(self, record: StepRecord) -> bool:
        """Tell whether this rank may run its step; where all must run together, whether all can."""
        if not self.replayer.lockstep:
            return True
        try:
            self.replayer.check(record, record.passes())
        except ReplayError as error:
            self._note(error)
        return not self._any(self._problem is not None)

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
        text = str(error) if isinstance(error, ReplayError) else f"{type(error).__name__}: {error}"
        self._problem = self._problem or text.splitlines()[0][:300]

    def _match(self, a: Fingerprint | None, b: Fingerprint | None) -> Match:
        if a is None or b is None:
            return Match.MISSING
        match = a.compare(b, self.tolerance)
        if match is not Match.EQUAL and self.spread and a.distance(b) <= 10 * self.spread:
            return Match.EQUAL  # no more than this model's healthy replays differ
        return match

    def _all_replayed(self, here: bool, seconds: float) -> bool:
        """Tell whether all ranks could replay; what that took says how long they may have to wait for one another."""
        failed, seconds = self.ranks.max(torch.tensor([float(not here), seconds])).tolist()
        self.ranks.expect(_LONGEST_WAIT * seconds)
        return not failed

    def _any(self, here: bool) -> bool:
        return bool(float(self.ranks.max(torch.tensor([float(here)]))))


def _encode(row: Row) -> torch.Tensor:
    flags = (row.suspicious, row.proven_by_checksum, row.outputs_changed, row.failed, row.never_repeated)
    return torch.tensor([*map(int, row.matches), *map(int, flags)], dtype=torch.int64)


def _decode(line: torch.Tensor) -> Row:
    values = line.tolist()
    count = len(PAIRS)
    return Row(tuple(Match(v) for v in values[:count]), *map(bool, values[count:]))
