"""The instruments of one session: told of its moments in the order in which they came, without harm to the training."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from types import TracebackType
from typing import Any

from bitwitness.session.instrument import Instrument


class Members:
    """Holds the instruments, and tells those that are awake.

    Parameters
    ----------
    remove
        Called with an instrument that failed, after it was told so.

    """

    def __init__(self, remove: Callable[[Instrument], None]) -> None:
        self._remove = remove
        self._all: list[Instrument] = []

    def __iter__(self) -> Iterator[Instrument]:
        return iter(tuple(self._all))

    def __bool__(self) -> bool:
        return bool(self._all)

    def add(self, instrument: Instrument) -> None:
        """Take one in."""
        self._all.append(instrument)

    def discard(self, instrument: Instrument) -> bool:
        """Let one go; return whether it was there."""
        if not any(instrument is other for other in self._all):
            return False
        self._all = [other for other in self._all if other is not instrument]
        return True

    def clear(self) -> None:
        """Let all go."""
        self._all = []

    @property
    def awake(self) -> list[Instrument]:
        """Those that are not paused."""
        return [instrument for instrument in self._all if not instrument.resting]

    def tell(self, moment: str, *args: Any, **kwargs: Any) -> None:
        """Call a method of each; one that fails is taken off."""
        for instrument in self.awake:
            self.tell_one(instrument, moment, *args, **kwargs)

    def tell_one(self, instrument: Instrument, moment: str, *args: Any, **kwargs: Any) -> None:
        """Call a method of one; it is taken off if it fails."""
        try:
            getattr(instrument, moment)(*args, **kwargs)
        except Exception as error:
            self._take_off(instrument, moment, error)

    def enter(self, stack: ExitStack, moment: str, about: Any) -> None:
        """Enter the context that a method of each returns; neither its beginning nor its end may break the training."""
        for instrument in self.awake:
            try:
                context: AbstractContextManager[None] = getattr(instrument, moment)(about)
                context.__enter__()
            except Exception as error:
                self._take_off(instrument, moment, error)
            else:
                stack.push(self._leaving(instrument, moment, context))

    def _leaving(
        self, instrument: Instrument, moment: str, context: AbstractContextManager[None]
    ) -> Callable[[type[BaseException] | None, BaseException | None, TracebackType | None], None]:
        def leave(kind: type[BaseException] | None, raised: BaseException | None, trace: TracebackType | None) -> None:
            try:
                context.__exit__(kind, raised, trace)
            except Exception as error:
                if error is not raised:  # the training's own error goes on by itself
                    self._take_off(instrument, moment, error)

        return leave

    def _take_off(self, instrument: Instrument, moment: str, error: Exception) -> None:
        instrument.failed(moment, error)
        self._remove(instrument)
