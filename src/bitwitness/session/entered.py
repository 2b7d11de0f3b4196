"""What users enter to have a model watched (`Guard`, `Recorder`): it holds the model's session while it is on."""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import partial
from types import TracebackType
from typing import Self
from weakref import ref

from torch import nn

from bitwitness.errors import UsageError
from bitwitness.session.instrument import Instrument
from bitwitness.session.run import Ending
from bitwitness.session.session import Session
from bitwitness.session.signals import TERMINATION


class Entered:
    """Takes part in the session of one model while entered, once.

    Parameters
    ----------
    model
        What the training calls: a module, or the DistributedDataParallel or compiled module around it.

    Raises
    ------
    UsageError
        If ``model`` is no module.

    """

    def __init__(self, model: nn.Module) -> None:
        if not isinstance(model, nn.Module):
            raise UsageError(
                f"{type(self).__name__} expects a torch.nn.Module as its first argument, not {type(model).__name__}"
            )
        self.model = model
        self._stack = ExitStack()
        self._used = False
        self._session: Session | None = None
        self._instrument: Instrument | None = None
        self._at_exit: Callable[[], None] = _nothing

    def _refuse(self) -> None:
        """Refuse to be entered, where that cannot be."""

    def _begin(self, session: Session) -> None:
        """Join the session; what ``_stack`` holds is undone at the end, and where this fails."""
        raise NotImplementedError

    def _join(self, session: Session, instrument: Instrument) -> None:
        session.add(instrument)
        self._instrument = instrument
        self._stack.callback(session.remove, instrument)

    def __enter__(self) -> Self:
        if self._used:
            raise UsageError(f"this {type(self).__name__} was used before; make a new one for another training")
        self._refuse()
        self._used = True
        try:
            self._session = session = Session.of(self.model)
            session.keep()
            self._stack.callback(session.let_go)
            self._stack.enter_context(TERMINATION.told(self._last_words))
            self._begin(session)
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._note_ending(error)
        self._stack.close()

    def _last_words(self) -> None:
        """Bring to the disk what there is, where SIGTERM ends the process; called in a thread of its own."""
        if self._session is not None:
            self._session.run.ended(Ending("terminated", "SIGTERM"))

    def _note_ending(self, error: BaseException | None) -> None:
        """Have the run folder say how the training ended."""
        atexit.unregister(self._at_exit)
        if self._session is not None:
            self._session.run.ended_by(error)

    def start(self) -> Self:
        """Enter it without a ``with``, as in a notebook; `close` leaves it, or the end of the process does."""
        entered = self.__enter__()
        self._at_exit = partial(_close_at_exit, ref(self), os.getpid())
        atexit.register(self._at_exit)
        return entered

    def close(self) -> None:
        """Leave it, as at the end of a ``with``."""
        self.__exit__(None, None, None)

    def let_go(self) -> bool:
        """Leave the model to another watch, with nothing collective; return whether steps were looked at until now.

        Where none was, as in a dry run, nothing is said and the run folder is given back.
        """
        raise NotImplementedError

    def pause(self) -> None:
        """Look away until `resume`; steps are counted meanwhile, and no more."""
        if self._session is not None and self._instrument is not None:
            self._session.pause(self._instrument)

    def resume(self) -> None:
        """Look again, from the next forward on."""
        if self._session is not None and self._instrument is not None:
            self._session.resume(self._instrument)

    @property
    def session(self) -> Session:
        """The session of the model, shared with all that watches it; ``session.step = n`` numbers the next step.

        Raises
        ------
        UsageError
            If it is not on.

        """
        if self._session is None:
            name = type(self).__name__
            raise UsageError(f"this {name} is not on yet: enter it (with {name}(...)) first")
        return self._session


def _nothing() -> None:
    """Stand for what is not registered."""


def _close_at_exit(started: ref[Entered], process: int) -> None:
    """Leave what was started and never closed, where the process ends; what needs the other ranks is left out."""
    one = started()
    if one is None or os.getpid() != process:  # a fork's, which has its parent's list
        return
    with suppress(Exception):
        one.__exit__(SystemExit, SystemExit(0), None)
