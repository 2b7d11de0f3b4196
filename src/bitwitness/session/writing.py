"""What users enter to have a training's numbers written into a run folder (`Recorder`, `Monitor`), and its ways in common."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Protocol, TypeVar

from torch import nn

from bitwitness.errors import UsageError
from bitwitness.ranks import Ranks
from bitwitness.session.entered import Entered
from bitwitness.session.session import Session
from bitwitness.store import RunWriter
from bitwitness.store.environment import describe
from bitwitness.tap.ownwork import own_work

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

_DEADLINE_S = 60.0  # for the ranks to agree on a folder; they come here together


class StepWriter(Protocol):
    """The instrument that writes a training's steps."""

    @property
    def problem(self) -> str | None:
        """What kept something from being written, the first of it."""

    def close_step(self) -> None:
        """Write what there is of the step."""

    def flush(self) -> None:
        """Write what there is of whole steps; return when it is on disk."""

    def finish(self) -> None:
        """The same, and take nothing more, while the training may still go on."""

    def drop(self) -> None:
        """End, and leave nothing."""


W = TypeVar("W", bound=StepWriter)
C = TypeVar("C", bound="DataclassInstance")


class Writing(Entered, Generic[W]):
    """Writes one model's training into a run folder while entered.

    Parameters
    ----------
    model
        The module that the training calls; wrapped by DistributedDataParallel or ``torch.compile`` if it is there.
    out
        The run folder; where it holds a run already, this one goes beside it (``RUN-2``).

    """

    role: ClassVar[str]
    """What the run folder is used for."""

    def __init__(self, model: nn.Module, out: str | os.PathLike[str]) -> None:
        super().__init__(model)
        self.folder: str | None = None
        self.is_first_rank = True
        """Whether this process speaks for all ranks."""
        self._out = os.fspath(out)
        self._writer: W | None = None
        """None where this rank's numbers are not asked for."""
        self._run: RunWriter | None = None

    def _configured(self, kind: type[C], config: C | None, settings: Mapping[str, Any]) -> C:
        """Return the configuration that was given, or the one that keywords make."""
        if config is not None and settings:
            raise UsageError(f"give either config or its fields as keywords, not both ({', '.join(settings)})")
        try:
            return config or kind(**settings)
        except TypeError as error:
            known = ", ".join(field.name for field in fields(kind))
            raise UsageError(f"{type(self).__name__}: {error}; the settings are {known}") from error

    def _open(self, session: Session) -> tuple[Ranks, RunWriter]:
        """Have all ranks agree on the run folder; it is left at the end."""
        ranks = session.run.ranks(_DEADLINE_S)
        self._run = run = session.run.folder(self._out, self.role, _DEADLINE_S)
        self._stack.callback(session.run.leave, run, self.role)
        self.folder, self.is_first_rank = str(run.path), ranks.rank == 0 and run.keeps_run
        return ranks, run

    @staticmethod
    def _environment(root: nn.Module) -> dict[str, Any]:
        """Return what is known as a training begins; what is computed for that is none of another model's that is watched."""
        with own_work():
            return describe(root)

    @property
    def problem(self) -> str | None:
        """What kept something from being written; None if all was."""
        unwritten = None if self._run is None else self._run.problem
        return unwritten or (None if self._writer is None else self._writer.problem)

    def let_go(self) -> bool:
        """Leave the model to another one; what was written is deleted if it is of no whole step."""
        if self._writer is None or self.session.clock.ended:
            self.close()
            return True
        self._writer.drop()
        self._writer = None
        if self._run is not None:
            self.session.run.leave(self._run, self.role, unused=True)
        self._stack.close()
        return False

    def _last_words(self) -> None:
        if self._writer is not None:
            self._writer.finish()  # no more is taken: the training goes on until the process ends
        super()._last_words()

    def flush(self) -> None:
        """Write what was seen of the steps that have ended; return when it is on disk."""
        if self._writer is not None:
            self._writer.flush()

    def step(self) -> None:
        """Say that a step ended, where no optimizer tells it (inference)."""
        if self._writer is not None:
            self._writer.close_step()
        self.session.clock.end_step()

    def join(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Look at a call of the model that has just begun, whose pre-hooks torch had already listed when ours was made."""
        self.session.join_call(module, args, kwargs)

    @property
    def is_empty(self) -> bool:
        """Whether no rank has written a row as yet."""
        raise NotImplementedError
