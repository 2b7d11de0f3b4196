"""What users enter to have a model watched (`Guard`, `Recorder`): it holds the model's session while it is on."""

from __future__ import annotations

from contextlib import ExitStack
from types import TracebackType
from typing import Self

from torch import nn

from bitwitness.errors import UsageError
from bitwitness.session.instrument import Instrument
from bitwitness.session.session import Session


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
            self._begin(session)
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def start(self) -> Self:
        """Enter it without a ``with``, as in a notebook; `close` leaves it."""
        return self.__enter__()

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
