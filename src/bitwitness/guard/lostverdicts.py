"""What is concluded from numbers lost on the way: in a collective, or between a backward and the use of its gradients.

They are the proof, no replay has to find one. The experiments are made all the same: they show whether anybody computed wrongly
besides, and give the gradients to heal by.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

from bitwitness.finding import SEEN, Cause, Device
from bitwitness.judge.decide import Judgement
from bitwitness.judge.verdict import FAULT_CODE, Outcome
from bitwitness.sense.mismatch import Mismatch

_REPEATED = 3
"""Losses of one rank that make it persistent, as many as of other transients (`judge.judge`)."""


class LostVerdicts:
    """Turns experiments that found nothing into the verdict of what was lost.

    Parameters
    ----------
    mismatch
        Returns that of the step, if any; the same on every rank.
    devices
        Returns every rank's.

    """

    def __init__(self, mismatch: Callable[[], Mismatch | None], devices: Callable[[], list[Device]]) -> None:
        self._mismatch, self._devices = mismatch, devices
        self._times: Counter[int] = Counter()

    def interpret(self, outcome: Outcome) -> None:
        """Change an outcome of a step with a mismatch, which nobody's computing explains."""
        wrong = self._mismatch()
        if wrong is None:
            return
        verdict = outcome.verdict
        evidence = {**verdict.evidence, **wrong.evidence}
        if verdict.cause is Cause.CORRUPT_STATE and not verdict.ranks and wrong.ranks:
            # two ranks hold other buffers, and one of them is seen to have received them wrongly
            message = f"{verdict.message}; {', '.join(f'rank {rank}' for rank in wrong.ranks)} does: {wrong.text}"
            named = tuple(self._devices()[rank] for rank in wrong.ranks)
            outcome.verdict = replace(verdict, ranks=wrong.ranks, devices=named, message=message, evidence=evidence)
            return
        # a gradient that is not what it was is held against replays as it is
        same = (
            "gradients" in wrong.evidence and verdict.cause is Cause.TRANSIENT_HARDWARE and verdict.ranks == wrong.ranks
        )
        if not (same or verdict.cause in (Cause.DISMISSED, Cause.INCONCLUSIVE)) or outcome.apart:
            outcome.verdict = replace(verdict, evidence=evidence, message=f"{verdict.message}; also: {wrong.text}")
            return
        self._times.update(wrong.ranks)
        often = tuple(rank for rank in wrong.ranks if self._times[rank] >= _REPEATED)
        cause = Cause.PERSISTENT_HARDWARE if often else Cause.TRANSIENT_HARDWARE
        ranks = often or wrong.ranks
        failed = outcome.experiments is None or outcome.experiments.good is None
        devices = self._devices()
        used = _used_in(wrong)
        outcome.judgement = Judgement(
            cause,
            ranks,
            heal=used is None and not failed,
            skip=used is None and failed,
            intermittent=bool(often),
            wrong={rank: [f"{wrong.site.short} in step {verdict.step}"] for rank in ranks},
        )
        outcome.verdict = replace(
            verdict,
            cause=cause,
            ranks=ranks,
            devices=tuple(devices[rank] for rank in ranks),
            message=f"step {verdict.step}: {wrong.text}; {self._who(wrong, ranks, devices, often=bool(often))}"
            + ("" if used is None else f"; step {used} has used it"),
            site=wrong.site,
            evidence=evidence,
            fault_code=FAULT_CODE,
        )

    @staticmethod
    def _who(wrong: Mismatch, ranks: tuple[int, ...], devices: list[Device], *, often: bool) -> str:
        named = ", ".join(f"rank {rank}: {devices[rank]}" for rank in ranks)
        times = f" ({_REPEATED} times so far)" if often else ""
        return f"{named} {wrong.did}{times}" if named else "by a device or a link that is not known"


def _used_in(wrong: Mismatch) -> int | None:
    """Return the step that has used what was lost, where that was proven only later; None where it still can be put right."""
    steps = [told[SEEN] for told in wrong.evidence.values() if SEEN in told]
    return int(steps[0]) if steps else None
