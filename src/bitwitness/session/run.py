"""What a session has for all of its instruments: the ranks, and the run folders, claimed by all ranks together."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from torch import nn

from bitwitness.errors import TrainingStopped, UsageError
from bitwitness.files.shown import shown
from bitwitness.ranks import Ranks
from bitwitness.ranks.process_groups import join_ranks
from bitwitness.session.jobfolder import in_job, job_folder, job_name
from bitwitness.store import RunWriter, claim_folder, release_folder
from bitwitness.store.life import this_process
from bitwitness.store.reader import read_description


@dataclass(frozen=True)
class Ending:
    """How a training ended; ``state``: a word of `bitwitness.store.life`."""

    state: str = "finished"
    by: str = "the end of the training"

    @classmethod
    def of(cls, error: BaseException | None) -> Ending:
        """Return what an exception that leaves the training makes of it."""
        error = getattr(error, "error", error)  # a script's own, in what the command line wraps it
        if error is None:
            return cls()
        if isinstance(error, TrainingStopped):
            return cls("stopped", f"bitwitness, with exit code {error.code}: {shown(error.reason)}")
        if isinstance(error, KeyboardInterrupt):
            return cls("interrupted", "Ctrl-C (SIGINT)")
        if isinstance(error, SystemExit):
            return (
                cls(by="the script")
                if error.code in (None, 0)
                else cls("failed", f"the script's exit code {error.code}")
            )
        return cls("failed", shown(f"{type(error).__name__}: {error}"))


@dataclass
class _Claimed:
    """A run folder, the name that was asked for, and what goes into it now."""

    out: str
    writer: RunWriter
    holds: set[str] = field(default_factory=set)
    used: bool = False


class TrainingRun:
    """The ranks that train one model, and the folders in which its instruments record.

    Parameters
    ----------
    model
        What the training calls.
    steps
        Returns how many steps have ended.

    """

    def __init__(self, model: nn.Module, steps: Callable[[], int]) -> None:
        self._model = model
        self._ranks: Ranks | None = None
        self._steps = steps
        self._claimed: list[_Claimed] = []
        self.ending = Ending()
        """How the training ends, as far as that is known."""

    @property
    def rank(self) -> int:
        """The number of this process in the job, as far as it is known."""
        return 0 if self._ranks is None else self._ranks.in_job

    def ranks(self, deadline_s: float) -> Ranks:
        """Return the ranks; joined at the first call, which all of them make. Collective."""
        if self._ranks is None:
            self._ranks = join_ranks(self._model, deadline_s)
        return self._ranks

    def folder(self, out: str, what: str, deadline_s: float) -> RunWriter:
        """Return the writer of the run folder ``out``, the same for all instruments that name it. Collective.

        ``what`` is to go there: where another run is, or the same, a folder beside it is taken.
        """
        ranks = self.ranks(deadline_s)
        shared = next((one for one in self._claimed if one.out == out and what not in one.holds), None)
        if shared is None:
            shared = _Claimed(out, _claim(out, ranks, deadline_s))
            self._claimed.append(shared)
        shared.holds.add(what)
        return shared.writer

    def beat(self) -> None:
        """Leave a sign of life in each folder, now and then."""
        for one in self._claimed:
            one.writer.beat(self._steps())

    def ended_by(self, error: BaseException | None) -> None:
        """Note what ended the training: None is its own end. A stop stays one, whatever the script makes of it."""
        if self.ending.state != "stopped":
            self.ending = Ending.of(error)

    def ended(self, ending: Ending) -> None:
        """Say in each folder how the training ended, where the process ends with it: nobody will leave."""
        self.ending = ending
        for one in list(self._claimed):
            one.writer.ended(ending.state, ending.by, self._steps(), final=True)

    def leave(self, writer: RunWriter, what: str, *, unused: bool = False) -> None:
        """Close a folder with the last that goes into it; remove it where nothing was recorded there."""
        for one in [one for one in self._claimed if one.writer is writer]:
            one.holds.discard(what)
            one.used |= not unused
            if not one.holds:
                self._claimed.remove(one)
                writer.ended(self.ending.state, self.ending.by, self._steps())
                writer.close()
                if not one.used:
                    release_folder(writer.path, writer.rank)

    def close(self) -> None:
        """Close what is open."""
        for one in self._claimed:
            one.writer.ended(self.ending.state, self.ending.by, self._steps())
            one.writer.close()
        self._claimed.clear()
        if self._ranks is not None:
            self._ranks.close()
            self._ranks = None


def _claim(out: str, ranks: Ranks, deadline_s: float) -> RunWriter:
    """Claim a folder for ranks that train together, or for those of a job that train each by itself."""
    if ranks.size == 1 and in_job():
        path, first = job_folder(out, deadline_s)
        writer = RunWriter(path, ranks.in_job, None, keeps_run=first)
    else:
        path = ranks.broadcast_text(str(claim_folder(out)) if ranks.rank == 0 else "", 0)
        writer = RunWriter(path, ranks.rank, ranks.size)
    if writer.keeps_run and (job := job_name()) is not None:
        writer.describe(job=job)
    if writer.keeps_run and path != os.path.abspath(out) and not _is_of_this_process(out):
        sys.stderr.write(f"bitwitness: {shown(out)} holds a run already; this one is recorded in {shown(path)}\n")
    return writer


def _is_of_this_process(out: str) -> bool:
    """Return whether the run in a folder is of another model that this process trains, or trained."""
    with suppress(UsageError):
        return bool(read_description(Path(out)).get("process") == this_process())
    return False
