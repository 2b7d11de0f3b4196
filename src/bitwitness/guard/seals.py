"""What becomes of a broken seal: the script's own doing, which comes again or is done on every rank, or a proven corruption.

Where other ranks hold the same tensors, they decide at once. Where none does, a number's highest exponent bit that flips alone
is proof, for no script writes such. One flipped bit of a mantissa in all that was sealed is watched for: if nothing changes
without a trace in the next steps, no script did it, for scripts do what they do again.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from bitwitness.finding import Finding, Severity
from bitwitness.sense.held import Name
from bitwitness.sense.seal import Broken
from bitwitness.session.reporter import Reporter

QUIET = 8
"""Sealed steps in a row without a change, after which a flipped bit was no script's write."""
_BY_SCRIPT = (
    "the script writes {0} between steps, past torch's count of writes: corruption there cannot be told from it"
)
_OPEN = (
    "{0} changed between two steps without a trace; no other rank holds the same, so that it is not proven whether the script "
    "wrote it (p.data) or memory lost it"
)


@dataclass(slots=True)
class _Suspected:
    finding: Finding
    quiet: int = 0


class SealJudgement:
    """Follows one rank's broken seals."""

    def __init__(self, reporter: Reporter, rank: int) -> None:
        self._reporter, self._rank = reporter, rank
        self._suspected: _Suspected | None = None
        self._times: Counter[Name] = Counter()
        self.by_script: set[Name] = set()
        """What the script was seen to write to; not sealed any more."""

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
            return [_finding(one, step, self._rank, Severity.ERROR) for one in broken]
        if not broken:
            return self._go_on(step)
        if compared:  # all ranks did the same
            self._leave([one.name for one in broken])
        elif len(broken) == 1 and broken[0].by_no_script:
            return [_finding(broken[0], step, self._rank, Severity.ERROR)]
        elif self._suspected is not None or len(broken) > 1 or not broken[0].of_mantissa:
            self._count(broken, step)
        else:
            finding = _finding(broken[0], step, self._rank, Severity.WARNING)
            self._reporter.finding(finding)
            self._suspected = _Suspected(finding)
        return []

    def _go_on(self, step: int) -> list[Finding]:
        if self._suspected is None:
            return []
        self._suspected.quiet += 1
        if self._suspected.quiet < QUIET:
            return []
        found, self._suspected = self._suspected.finding, None
        message = f"{found.message}; nothing changed in this way in the {QUIET} steps since: no script did it"
        evidence = {**found.evidence, "quiet_steps": QUIET, "seen_before_step": found.step}
        return [Finding("seal", found.site, Severity.ERROR, message, evidence, step, self._rank)]

    def _count(self, broken: list[Broken], step: int) -> None:
        """Take changes for the script's that come again, or are more than a bit; say once that nothing is proven."""
        suspected, self._suspected = self._suspected, None
        if suspected is None and all(one.few for one in broken):
            for one in broken:
                self._reporter.finding(_finding(one, step, self._rank, Severity.WARNING))
        name = str(broken[0].name) if len(broken) == 1 else f"{broken[0].name} and {len(broken) - 1} more"
        self._reporter.once(f"seal: inconclusive: {_OPEN.format(name)}")
        again = suspected is not None
        for one in broken:
            self._times[one.name] += 1
            again |= self._times[one.name] > 1
        if again:
            self._leave([one.name for one in broken])

    def _leave(self, names: list[Name]) -> None:
        new = [name for name in names if name not in self.by_script]
        self.by_script |= set(new)
        if new:
            self._reporter.once(f"seal: {self.reason(len(new), new[0])}")

    def reason(self, count: int | None = None, first: Name | None = None) -> str:
        """Say what is not sealed, and why."""
        count = len(self.by_script) if count is None else count
        first = first or min(self.by_script)
        return _BY_SCRIPT.format(str(first) if count == 1 else f"{first} and {count - 1} more tensors")


def _finding(broken: Broken, step: int, rank: int, severity: Severity) -> Finding:
    evidence = broken.evidence()
    what = f"{broken.name} changed between the end of a step and the next use of gradients, and nothing wrote to it"
    if "element" in evidence:
        flipped = evidence["bits_flipped"]
        bits = "one bit" if flipped == 1 else f"{flipped} bits"
        what += f": {bits} of element {evidence['element']} ({evidence['bits_before']} became {evidence['bits_after']})"
    return Finding("seal", broken.name.site.at(rank=rank, step=step), severity, what, evidence, step, rank)
