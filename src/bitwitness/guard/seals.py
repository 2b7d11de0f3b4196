"""What becomes of a broken seal: the script's own doing, which comes again or is done on every rank, or a proven corruption.

State is sealed from a step's end to the next use of gradients, and gradients from their backward's end to their use
(`guard/keptgradients.py`). Where other ranks hold the same tensors, they decide at once. Where none does, a number's highest
exponent bit that flips alone is proof, for no script writes such. One flipped bit of a mantissa in all that was sealed is
watched for: if nothing changes without a trace in the next steps, no script did it, for scripts do what they do again.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from bitwitness.finding import SEEN, Finding, Severity
from bitwitness.sense.held import Name
from bitwitness.sense.seal import Broken
from bitwitness.session.reporter import Reporter

QUIET = 8
"""Sealed steps in a row without a change, after which a flipped bit was no script's write."""
_SEVERAL = 3  # tensors
_BY_SCRIPT = "the script writes {0} {1}, past torch's count of writes: corruption there cannot be told from it"
_OPEN = (
    "{0} changed {1} without a trace; no other rank holds the same, so that it is not proven whether the script "
    "wrote it (p.data) or memory lost it"
)


@dataclass(frozen=True, slots=True)
class Span:
    """Whose name findings bear, and from when to when something is sealed, in words: short ones, and those of a finding."""

    sensor: str
    short: str
    full: str


STATE = Span("seal", "between two steps", "between the end of a step and the next use of gradients")
GRADIENTS = Span("gradients", "between a backward and its use", "between the end of the backward and its use")


@dataclass(slots=True)
class _Suspected:
    finding: Finding
    quiet: int = 0


class SealJudgement:
    """Follows one rank's broken seals; ``span``: what they were to hold over."""

    def __init__(self, reporter: Reporter, rank: int, span: Span = STATE) -> None:
        self._reporter, self._rank, self._span = reporter, rank, span
        self._suspected: _Suspected | None = None
        self._times: Counter[Name] = Counter()
        self.by_script: set[Name] = set()
        """What the script was seen to write to; not sealed any more."""
        self._lost_a_word: set[Name] = set()
        self._told: list[Name] = []

    @property
    def left_open(self) -> int:
        """In how many tensors a word changed, as memory loses it, and nothing told whether the script or a fault did it."""
        return len(self._lost_a_word - self.by_script) + (self._suspected is not None)

    @property
    def explained(self) -> int:
        """How many suspicions were told of tensors that changed again, as scripts change them."""
        return sum(name in self.by_script for name in self._told)

    @property
    def watching(self) -> bool:
        """Whether every step is to be sealed for now."""
        return self._suspected is not None

    def judge(self, broken: list[Broken], step: int, *, compared: bool, desync: bool) -> list[Finding]:
        """Return what is proven now.

        Parameters
        ----------
        broken
            What has changed without a trace; empty where nothing has.
        step
            The step before whose use of gradients it was found.
        compared, desync
            Whether other ranks hold the same tensors and were asked; whether theirs differ now.

        """
        if desync:
            # the others' tensors tell that it happened here alone
            return [self._finding(one, step, Severity.ERROR) for one in broken]
        if not broken:
            return self._go_on(step)
        if compared:  # all ranks did the same
            self._leave([one.name for one in broken])
        elif len(broken) == 1 and broken[0].by_no_script:
            return [self._finding(broken[0], step, Severity.ERROR)]
        elif self._suspected is not None or len(broken) > 1 or not broken[0].of_mantissa:
            self._count(broken, step)
        else:
            self._suspected = _Suspected(self._tell(broken[0], step))
        return []

    def _go_on(self, step: int) -> list[Finding]:
        if self._suspected is None:
            return []
        self._suspected.quiet += 1
        if self._suspected.quiet < QUIET:
            return []
        found, self._suspected = self._suspected.finding, None
        message = f"{found.message}; nothing changed in this way in the {QUIET} steps since: no script did it"
        evidence = {**found.evidence, "quiet_steps": QUIET, SEEN: found.step}
        return [Finding(self._span.sensor, found.site, Severity.ERROR, message, evidence, step, self._rank)]

    def _count(self, broken: list[Broken], step: int) -> None:
        """Take changes for the script's that come again, or are more than a bit; say once that nothing is proven."""
        suspected, self._suspected = self._suspected, None
        if suspected is None and all(one.few for one in broken):
            for one in broken:
                self._tell(one, step)
        again = suspected is not None or self._is_habit(broken)
        if not again:
            self._lost_a_word |= {one.name for one in broken if one.few or one.change.word is not None}
            name = str(broken[0].name) if len(broken) == 1 else f"{broken[0].name} and {len(broken) - 1} more"
            self._reporter.once(f"{self._span.sensor}: inconclusive: {_OPEN.format(name, self._span.short)}")
        for one in broken:
            self._times[one.name] += 1
            again |= self._times[one.name] > 1
        if again:
            self._leave([one.name for one in broken])

    def _is_habit(self, broken: list[Broken]) -> bool:
        """Tell whether whole tensors changed, several at once or as others did before: what a script does to all of them."""
        return not any(one.few for one in broken) and (len(broken) >= _SEVERAL or bool(self.by_script))

    def _leave(self, names: list[Name]) -> None:
        new = [name for name in names if name not in self.by_script]
        self.by_script |= set(new)
        if new:
            self._reporter.once(f"{self._span.sensor}: {self.reason(len(new), new[0])}")

    def reason(self, count: int | None = None, first: Name | None = None) -> str:
        """Say what is not sealed, and why."""
        count = len(self.by_script) if count is None else count
        first = first or min(self.by_script)
        what = str(first) if count == 1 else f"{first} and {count - 1} more tensors"
        return _BY_SCRIPT.format(what, self._span.short)

    def _tell(self, broken: Broken, step: int) -> Finding:
        finding = self._finding(broken, step, Severity.WARNING)
        self._told.append(broken.name)
        self._reporter.finding(finding)
        return finding

    def _finding(self, broken: Broken, step: int, severity: Severity) -> Finding:
        evidence = broken.evidence()
        what = f"{broken.name} changed {self._span.full}, and nothing wrote to it"
        if "element" in evidence:
            flipped = evidence["bits_flipped"]
            bits = "one bit" if flipped == 1 else f"{flipped} bits"
            what += (
                f": {bits} of element {evidence['element']} ({evidence['bits_before']} became {evidence['bits_after']})"
            )
        site = broken.name.site.at(rank=self._rank, step=step)
        return Finding(self._span.sensor, site, severity, what, evidence, step, self._rank)
