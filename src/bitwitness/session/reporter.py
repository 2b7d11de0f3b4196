"""Where everything that the guard has to say goes: the run folder, and plain lines on this rank's stderr."""

from __future__ import annotations

import sys
import traceback
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

from bitwitness.errors import SideChannelError
from bitwitness.files.shown import shown_lines
from bitwitness.finding import Event, Finding, Note, Severity, Verdict
from bitwitness.ranks import Ranks
from bitwitness.store import RunWriter
from bitwitness.tap.emulated import injected

_SPEAKS_FREELY = 8  # lines of one kind, then only the 8th, 16th, 32nd …: a terminal is read by people
_LONGEST_LINE = 4000  # characters: fifty lines of a terminal; a parameter's name may be of any length
_FINDINGS_KEPT = 10_000  # a kilobyte each


class Reporter:
    """Writes events and prints lines for one rank.

    Parameters
    ----------
    writer
        The run folder's writer; None records nothing.
    rank
        Whose lines these are.
    quiet
        Print verdicts, warnings and errors only.
    on_event
        Called with each event, as it is recorded; an error in it is told once, and ends it.

    Attributes
    ----------
    findings, verdicts
        What was recorded so far; of findings the newest 10,000.

    """

    def __init__(
        self,
        writer: RunWriter | None,
        rank: int,
        *,
        quiet: bool = False,
        on_event: Callable[[Event], None] | None = None,
    ) -> None:
        self._writer = writer
        self._rank = rank
        self._quiet = quiet
        self.model = ""
        """Which model its lines are about, where a process trains several: ``Critic, model 2``."""
        self._said: set[str] = set()
        self._spoken: Counter[str] = Counter()
        self.failures: dict[str, str] = {}
        self.findings: deque[Finding] = deque(maxlen=_FINDINGS_KEPT)
        self.verdicts: list[Verdict] = []
        self._on_event = on_event
        self.also: Callable[[Event], None] | None = None
        """Called with each event after that, by whoever tells others of it; an error in it ends it, too."""

    def say(self, text: str) -> None:
        """Print a line on stderr."""
        try:
            model = f", {self.model}" if self.model else ""
            cut = text if len(text) <= _LONGEST_LINE else f"{text[:_LONGEST_LINE]}… ({len(text):,} characters)"
            sys.stderr.write(f"bitwitness [rank {self._rank}{model}] {shown_lines(cut)}\n")
            sys.stderr.flush()
        except (OSError, ValueError):
            pass  # a closed stderr must not end a training

    def event(self, event: Event, *, shared: bool = False) -> None:
        """Record an event; with ``shared`` it also goes to the file of all ranks (kept by the lowest one)."""
        if self._writer is not None:
            self._writer.event(event)
            if shared:
                self._writer.shared_event(event)
        if isinstance(event, Finding):
            self.findings.append(event)
        elif isinstance(event, Verdict):
            self.verdicts.append(event)
        self._pass_on(event)
        if (tell := self.also) is not None:
            try:
                tell(event)
            except Exception as error:
                self.also = None
                self.failure("alerts", error, event.step)

    def _pass_on(self, event: Event) -> None:
        """Hand an event to the caller's function, which may do no harm."""
        if (tell := self._on_event) is None:
            return
        try:
            tell(event)
        except Exception as error:
            self._on_event = None
            self.failure("on_event callback", error, event.step)

    @property
    def records(self) -> bool:
        """Whether there is a run folder, whose ``run.json`` this rank keeps."""
        return self._writer is not None and self._rank == 0

    def describe(self, **fields: Any) -> None:
        """Set fields of ``run.json``."""
        if self._writer is not None:
            self._writer.describe(**fields)

    def keep_tensors(self, step: int, tensors: Mapping[str, torch.Tensor]) -> str | None:
        """Keep tensors beside the events; return the file's name in the run folder, or None."""
        return None if self._writer is None else self._writer.tensors(step, tensors)

    def finding(self, finding: Finding) -> None:
        """Record a suspicion, and print it unless it is only informative."""
        self.event(finding)
        if finding.severity is Severity.INFO or self._quiet:
            return
        self._spoken[finding.sensor] += 1
        times = self._spoken[finding.sensor]
        # A sensor that has spoken often is printed at the 8th, 16th, 32nd … time only; all of it is recorded.
        if times < _SPEAKS_FREELY or not times & (times - 1):
            often = f" (time {times}; those between are recorded only)" if times >= _SPEAKS_FREELY else ""
            self.say(f"step {finding.step}: suspicion ({finding.sensor}): {finding.message}{often}")

    def verdict(self, verdict: Verdict, *, speak: bool) -> None:
        """Record a verdict on every rank; one rank prints it. Under injected faults it says so."""
        if what := injected():
            message = f"{verdict.message} [faults are injected here: {what}]"
            verdict = replace(verdict, message=message, evidence={**verdict.evidence, "injected": what})
        self.event(verdict, shared=True)
        if speak:
            self.say(f"VERDICT step {verdict.step}: {verdict.cause}, action {verdict.action}: {verdict.message}")

    def note(self, note: Note, *, speak: bool = False) -> None:
        """Record a remark; print it where it is a warning, or to ``speak`` and not quiet."""
        self.event(note)
        if note.severity is not Severity.INFO or (speak and not self._quiet):
            self.say(note.message)

    def once(self, message: str, *, severity: Severity = Severity.WARNING) -> None:
        """Say something the first time only."""
        if message not in self._said:
            self._said.add(message)
            self.note(Note(message, rank=self._rank, severity=severity))

    def aside(self, text: str) -> None:
        """Say a warning from a thread of ours: it is printed and recorded, and not passed on."""
        self.say(text)
        if self._writer is not None:
            self._writer.event(Note(text, rank=self._rank, sensor="alerts", severity=Severity.WARNING))

    def failure(self, part: str, error: BaseException, step: int) -> None:
        """Report an error of our own, once for each part; it is kept for the coverage table."""
        if part in self.failures:
            return
        self.failures[part] = f"{type(error).__name__}: {error}"
        where = traceback.extract_tb(error.__traceback__)
        at = f" at {where[-1].filename}:{where[-1].lineno}" if where else ""
        message = (
            f"the guard failed in its {part} and does without it; the training is untouched: {self.failures[part]}{at}"
        )
        self.note(Note(message, step, self._rank, severity=Severity.WARNING), speak=True)

    def rank_lost(self, error: SideChannelError, ranks: Ranks, step: int) -> str:
        """Say that a rank is gone; return the line."""
        self.say(f"step {step}: {error}")  # at once: a launcher may end this process within a tenth of a second
        found = ranks.check_liveness()
        line = f"step {step}: the ranks can no longer be questioned ({found}); this rank ends instead of waiting"
        self.say(line)
        if self._writer is not None:
            self._writer.take_over(found.absent)
        evidence = {"absent": list(found.absent), "late": list(found.late)}
        self.event(Note(line, step, self._rank, "ranks", Severity.ERROR, evidence=evidence), shared=True)
        return line
