"""What keeps an instrument from seeing all: said once it happens, kept for its end; the training goes on."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import torch

from bitwitness.finding import Note, Severity
from bitwitness.store import RunWriter
from bitwitness.tap.ownwork import own_work


class Problems:
    """Runs the parts of one rank's instrument, each of which may fail.

    Parameters
    ----------
    run, rank
        The run folder's writer, and whose instrument it is.
    step
        Returns the number of the step that runs.
    source
        What events are from: ``record``, ``monitor``.
    failing
        What is said of a part that fails, with a place for its name.
    repeats
        Whether each is said; where a part is tried again in each step, the first alone is. Events are written of all.

    Attributes
    ----------
    first
        The first of them, if there was one.

    """

    def __init__(
        self, run: RunWriter, rank: int, step: Callable[[], int], *, source: str, failing: str, repeats: bool = True
    ) -> None:
        self._run, self._rank, self._step = run, rank, step
        self._source, self._failing, self._repeats = source, failing, repeats
        self.first: str | None = None

    @contextmanager
    def safely(self, part: str) -> Iterator[None]:
        """Run a part as bitwitness's own work; say its error."""
        try:
            with own_work(), torch.no_grad():
                yield
        except Exception as error:
            self.fail(part, error)

    def fail(self, part: str, error: BaseException) -> None:
        """Say what a part failed with."""
        self.note(f"{self._failing.format(part)} at step {self._step()}: {type(error).__name__}: {error}")

    def note(self, text: str, *, severity: Severity = Severity.WARNING) -> None:
        """Say something, and keep it; what is for information alone keeps nothing from being whole."""
        said = self.first is not None and not self._repeats
        if severity is not Severity.INFO:
            self.first = self.first or text
        if not said:
            with suppress(Exception):
                sys.stderr.write(f"bitwitness: rank {self._rank}: {text}\n")
        self._run.event(Note(text, self._step(), self._rank, self._source, severity))
