"""What becomes of a checkpoint that is not what was written: a finding, a verdict, and where it is so configured, the end."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Self

from bitwitness.checkpoint.verifying import Checked, Damage
from bitwitness.checkpoint.watched import Told, WatchedCheckpoints
from bitwitness.config import Config
from bitwitness.errors import EXIT_CONVICTED, TrainingStopped
from bitwitness.files.shown import quoted, shown
from bitwitness.finding import Action, Cause, Event, Finding, Note, Severity, Verdict
from bitwitness.respond.final import PROCESS
from bitwitness.session.reporter import Reporter
from bitwitness.site import Site

_EARLY = 1000  # events that wait for a run folder: a training reads a handful of checkpoints before it begins
_NAMED = 20  # damaged tensors in a verdict's evidence


class GuardedCheckpoints:
    """Seals and verifies a script's checkpoints while entered, and reports.

    Parameters
    ----------
    config
        ``seal.checkpoints`` turns it on, ``act`` says what follows.
    reporter
        Where events go.
    rank
        Of this process in the job; before there is a process group, what the launcher says.
    on
        Whether the instrument that this is for wants it at all.
    step
        Returns the training's step.
    ended
        Told of a stop before it is raised.

    """

    def __init__(
        self,
        config: Config,
        reporter: Reporter,
        rank: int | None = None,
        *,
        on: bool = True,
        step: Callable[[], int] = lambda: 0,
        ended: Callable[[TrainingStopped], None] = lambda _: None,
    ) -> None:
        self._config, self._reporter = config, reporter
        self._rank = int(os.environ.get("RANK", "0")) if rank is None else rank
        self._step, self._ended = step, ended
        self._early: deque[Event] = deque(maxlen=_EARLY)
        self._watched = WatchedCheckpoints(self._tell) if on and config.seal.checkpoints else None

    def __enter__(self) -> Self:
        if self._watched is not None:
            try:
                self._watched.__enter__()
            except Exception as error:  # a guard without this is still one
                self._reporter.failure("watch over checkpoints", error, self._step())
                self._watched.__exit__(None, None, None)
                self._watched = None
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._watched is None:
            return
        watched, self._watched = self._watched, None
        watched.__exit__(kind, error, trace)
        if watched.sealed or watched.verified:
            evidence = {"sealed": watched.sealed, "verified": watched.verified}
            message = f"checkpoints: {watched.sealed} sealed, {watched.verified} verified"
            self._reporter.note(Note(message, self._step(), self._rank, "seal", evidence=evidence))

    def hand_over(self, reporter: Reporter | None) -> None:
        """Have a model's run folder tell, too, what was found before there was a model."""
        while self._early and reporter is not None:
            reporter.event(event := self._early.popleft(), shared=isinstance(event, Verdict))

    # -- telling -------------------------------------------------------------------------------------------------

    def _tell(self, told: Told) -> None:
        if told.error is not None:
            self._reporter.failure("watch over checkpoints", told.error, self._step())
        elif told.read is not None:
            self._read(told.read)
        elif told.differs:
            self._written(told)
        else:
            self._note(f"a checkpoint that is read cannot be verified: {told.unread}")

    def _written(self, told: Told) -> None:
        """Tell of tensors that another thread may have changed while they were written: no proof."""
        names = ", ".join(map(quoted, told.differs[:3]))
        message = (
            f"{shown(told.path)} was just written, and read back {names} ({len(told.differs)} in all) is not what it was in "
            "memory before: damaged on its way to the disk, or changed by another thread meanwhile; it was not sealed"
        )
        self._event(self._finding(told.differs[0], Severity.WARNING, message, {"path": str(told.path)}))

    def _read(self, checked: Checked) -> None:
        proven = [one for one in checked.damage if one.identity == "same"]
        copied = [one for one in checked.damage if one.identity == "copy"]
        if proven:
            self._convict(checked, proven)
        elif copied:
            message = (
                f"{shown(checked.path)} is a copy of a checkpoint that was sealed, with its length and time of writing, but "
                f"not its contents: {copied[0]}; another program may have made it so on purpose"
            )
            evidence = {"damage": [one.to_dict() for one in copied[:_NAMED]]}
            self._event(self._finding(copied[0].tensor, Severity.WARNING, message, evidence))
        elif checked.damage:
            self._note(
                f"{shown(checked.path)} is not the sealed file any more: {checked.damage[0]}. If it was replaced on purpose, "
                "seal it anew: bitwitness checkpoint seal PATH"
            )
        else:
            self._note(f"{checked}")

    def _convict(self, checked: Checked, damage: list[Damage]) -> None:
        step, first = self._step(), damage[0]
        more = f" (and {len(damage) - 1} more)" if len(damage) > 1 else ""
        message = (
            f"the checkpoint {shown(checked.path)} that the script reads is not what was sealed: {first}{more}; nobody has "
            "written to it since"
        )
        stops = self._config.act != "observe"
        evidence = {"path": str(checked.path), "damage": [one.to_dict() for one in damage[:_NAMED]]}
        finding = self._finding(first.tensor, Severity.ERROR, message, evidence)
        self._event(finding)
        action = Action.STOPPED if stops else Action.REPORTED
        verdict = Verdict(Cause.CORRUPT_STATE, step, (), (), action, message, finding.site, "seal", evidence)
        self._early.append(verdict)
        self._reporter.verdict(verdict, speak=True)
        if not stops:
            return
        stop = TrainingStopped(EXIT_CONVICTED, message)
        self._ended(stop)
        with PROCESS.declared():
            raise stop

    def _finding(self, tensor: str | None, severity: Severity, message: str, evidence: Mapping[str, Any]) -> Finding:
        site = Site.of_parameter(tensor or "checkpoint", "param").at(rank=self._rank, step=self._step())
        return Finding("seal", site, severity, message, evidence, self._step(), self._rank)

    def _event(self, finding: Finding) -> None:
        self._early.append(finding)
        self._reporter.finding(finding)

    def _note(self, message: str) -> None:
        note = Note(message, self._step(), self._rank, "seal")
        self._early.append(note)
        self._reporter.note(note, speak=True)
