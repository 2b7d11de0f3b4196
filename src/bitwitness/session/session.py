"""One training, told moment by moment to all instruments that watch it, with one count of its steps.

::

    with bw.Session(model) as session:
        session.add(MyInstrument())
        train()
"""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Self
from weakref import WeakKeyDictionary

from torch import nn
from torch.amp import GradScaler
from torch.optim.optimizer import Optimizer

from bitwitness.errors import UsageError
from bitwitness.session.forked import inert_in_children
from bitwitness.session.instrument import Instrument
from bitwitness.session.members import Members
from bitwitness.session.run import TrainingRun
from bitwitness.session.training import Training
from bitwitness.tap.modules import unwrap


class Session(Training):
    """Tells the instruments of one model of its training.

    Instruments join the session of their model by themselves (`Session.of`); it begins with the first of them and ends with
    the last, or lasts as long as it is entered by itself.

    Parameters
    ----------
    model
        What the training calls: a module, or the DistributedDataParallel or compiled module around it.

    Raises
    ------
    UsageError
        If ``model`` is no module, or has a session already.

    """

    def __init__(self, model: nn.Module) -> None:
        if not isinstance(model, nn.Module):
            raise UsageError(f"Session expects a torch.nn.Module, not {type(model).__name__}")
        if model in _sessions:
            raise UsageError(f"this {type(unwrap(model)).__name__} has a session already: Session.of(model) gives it")
        super().__init__(model, Members(self.remove))
        self.run = TrainingRun(model, self._steps_ended)
        """The ranks that train it, and where instruments record."""
        self._kept = 0

    @classmethod
    def of(cls, model: nn.Module) -> Session:
        """Return the session of a model, which is made if there is none."""
        return _sessions[model] if model in _sessions else cls(model)

    def __enter__(self) -> Self:
        self.keep()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.let_go()

    def keep(self) -> None:
        """Begin it, if it is not on, and keep it on until `let_go`."""
        self._kept += 1
        self._begin()

    def let_go(self) -> None:
        """End it with all that takes part, unless others hold it."""
        self._kept -= 1
        if not self._kept:
            for instrument in reversed(self.instruments):
                self.remove(instrument)
            self._end()

    @property
    def instruments(self) -> tuple[Instrument, ...]:
        """Those that take part, paused or not, in the order in which they came."""
        return tuple(self._members)

    def add(self, instrument: Instrument) -> None:
        """Tell an instrument of the moments from now on.

        Raises
        ------
        UsageError
            If it is no `Instrument`, or takes part in a session already.

        """
        if not isinstance(instrument, Instrument):
            raise UsageError(
                f"session.add expects a bitwitness.Instrument, not {type(instrument).__name__}: derive from it"
            )
        if any(instrument in session.instruments for session in sessions()):
            raise UsageError(f"this {type(instrument).__name__} takes part in a session already; add another one")
        self._begin()
        instrument.session = self
        self._members.add(instrument)
        self._hear()
        self._members.tell_one(instrument, "added")

    def remove(self, instrument: Instrument) -> None:
        """Tell it no more; the session ends with the last."""
        if not self._members.discard(instrument):
            return
        try:
            instrument.removed()
        finally:
            if self._members or self._kept:
                self._hear()
            else:
                self._end()

    def pause(self, instrument: Instrument) -> None:
        """Tell an instrument nothing until `resume`; steps are counted meanwhile."""
        if instrument in self.instruments and not instrument.resting:
            instrument.resting = True
            instrument.paused()
            self._hear()

    def resume(self, instrument: Instrument) -> None:
        """Tell it of the moments again."""
        if instrument in self.instruments and instrument.resting:
            instrument.resting = False
            self._hear()
            instrument.resumed()

    def _begin(self) -> None:
        if self.model in _sessions:
            return
        _sessions[self.model] = self
        inert_in_children(self)
        self._hear()

    def gradients_ready(self, *, scaler: GradScaler | None = None, optimizer: Optimizer | None = None) -> None:
        """Tell that gradients are complete, and leave a sign of life."""
        super().gradients_ready(scaler=scaler, optimizer=optimizer)
        self.run.beat()

    def _steps_ended(self) -> int:
        return self.clock.ended

    def _end(self) -> None:
        self._hear_nothing()
        self.run.close()
        if _sessions.get(self.model) is self:
            del _sessions[self.model]

    def after_fork(self, *, worker: bool) -> None:
        """Become inert in a forked child: hooks and patches go; ranks and run folders are the parent's."""
        del worker
        self._hear_nothing()
        _sessions.pop(self.model, None)
        for instrument in self._members:
            instrument.forked()
        self._members.clear()
        self._parents, self.run = (
            self.run,
            TrainingRun(self.model, self._steps_ended),
        )  # kept: to free it would close the parent's connections

    def say(self, text: str) -> None:
        """Print a line of an instrument's on stderr."""
        sys.stderr.write(f"bitwitness [rank {self.run.rank}] {text}\n")


_sessions: WeakKeyDictionary[nn.Module, Session] = WeakKeyDictionary()
"""The sessions that are on, so that instruments of one model find one another."""


def sessions() -> list[Session]:
    """Return the sessions that are on."""
    return list(_sessions.values())
