"""What a trial of an operator found: its checks, and one verdict of all."""

from __future__ import annotations

from dataclasses import dataclass, field

from bitwitness.trial.result import NOT_JUDGED, OutputResult


@dataclass(frozen=True, slots=True)
class Check:
    """One way in which the operator was tried, with what it gave: see `OutputResult`."""

    name: str
    verdict: str
    reason: str = ""
    outputs: tuple[OutputResult, ...] = ()


@dataclass(frozen=True, slots=True)
class Verification:
    """What a trial found. ``str()`` gives it as text.

    Attributes
    ----------
    verdict
        ``pass``, ``warn`` or ``fail``: the worst of the checks. What could not be judged is ``warn``, never ``pass``.
    reason
        Why, in one sentence; empty where it passed.
    checks
        Each way in which it was tried.
    deterministic
        Whether it gave the same bits each time.
    batch_invariant
        Whether a row's bits are the same in a smaller batch; None where there is no batch.

    """

    verdict: str
    reason: str
    checks: tuple[Check, ...]
    deterministic: bool = True
    batch_invariant: bool | None = None
    operators: tuple[str, ...] = field(default=())

    @property
    def judged(self) -> bool:
        """Whether its results on the inputs as they were given could be judged."""
        return bool(self.checks) and self.checks[0].verdict != NOT_JUDGED

    def __str__(self) -> str:
        head = self.verdict + (f": {self.reason}" if self.reason else "")
        lines = [f"  {c.verdict:<10} {c.name}" + (f": {c.reason}" if c.reason else "") for c in self.checks]
        return "\n".join([head, *lines])
