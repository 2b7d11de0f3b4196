"""What keeps a recording from being whole: said once it happens, kept for its end; the training goes on."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import torch

from bitwitness.finding import Note, Severity
from bitwitness.store import RunWriter
from bitwitness.tap.ownwork import own_work


class Problems:
    """Runs the parts of one rank's recording, each of which may fail.

    Parameters
    ----------
    run, rank
        The run folder's writer, and whose recording it is.
    step
        Returns the number of the step that runs.

    """

    def __init__(self, run: RunWriter, rank: int, step: Callable[[], int]) -> None:
        self._run, self._rank, self._step = run, rank, step
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
        """Say what ended the recording of a part."""
        self._note(f"the recording of {part} ended at step {self._step()}: {type(error).__name__}: {error}")

    def ended(self, problem: str) -> None:
        """Say that nothing can be written any more; called on the writer's thread."""
        self._note(
            f"the recording in {self._run.path} ended at step {self._step()}: {problem}. The training goes on; what was "
            "written before is readable. Free the space or give another --out"
        )

    def _note(self, text: str) -> None:
        self.first = self.first or text
        with suppress(Exception):
            sys.stderr.write(f"bitwitness: rank {self._rank}: {text}\n")
        self._run.event(Note(text, self._step(), self._rank, "record", Severity.WARNING))
