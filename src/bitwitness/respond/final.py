"""A stop is final: whatever the script catches, no further step is taken, and the process ends with the stop's exit code.

After a stop every optimizer's step, every backward and every training forward of a guarded model raises it again, and so
does a new guard. A thread that comes back the third time ends the process. Where a person sits at the process (a notebook), the
refusals are all that happens: it is not ended under their hands.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from typing import Any, NoReturn
from weakref import WeakSet

import torch
from torch import nn
from torch.amp import GradScaler
from torch.optim.optimizer import Optimizer

from bitwitness.errors import EXIT_CONVICTED, TrainingStopped
from bitwitness.respond.process_exit import end_from_elsewhere, end_now, interactive, let_end, seal
from bitwitness.tap.compiled import EntryPoint, HookedCall
from bitwitness.tap.hooks import ModuleHook
from bitwitness.tap.moments import BackwardCall, StepListener, StepMoments

_ENOUGH = 3  # catches of the stop in one thread: a script may wrap a step in one handler and its loop in another


@dataclass(frozen=True, slots=True)
class Stop:
    """Why the training of this process ended."""

    code: int
    reason: str


class Finality:
    """What a process knows of its one stop, for all its guards."""

    def __init__(self) -> None:
        self.stop: Stop | None = None
        self._came_back: Counter[int] = Counter()
        self._entries: WeakSet[nn.Module] = WeakSet()
        self._on: list[Callable[[], None]] = []
        self._told: list[Callable[[Stop], None]] = []
        self._contained = 0

    @contextmanager
    def over(self, entry: EntryPoint, close: Callable[[], None]) -> Iterator[None]:
        """Take a guard in, for as long as it is on; ``close`` is called where the process is ended from here."""
        self._entries.add(entry.module)
        self._on.append(close)
        try:
            yield
        finally:
            self._on.remove(close)

    @contextmanager
    def declared(self) -> Iterator[None]:
        """Make a stop that is raised inside final."""
        try:
            yield
        except TrainingStopped as error:
            self.declare(error)
            raise

    def exit_code(self, otherwise: int) -> int:
        """Return the process's exit code."""
        return otherwise if self.stop is None else self.stop.code

    def refuse(self) -> None:
        """Raise the stop again, if there was one; end the process if this thread has heard it often enough."""
        if self.stop is None:
            return
        self._came_back[threading.get_ident()] += 1
        if self._came_back[threading.get_ident()] >= _ENOUGH and not interactive():
            why = f"the training was stopped ({self.stop.reason}), and the script keeps training"
            end_now(self.stop.code, why, self._close_all)
        self._raise(self.stop)

    def declare(self, error: TrainingStopped) -> None:
        """Make a stop final: refuse further steps, and settle the process's exit code."""
        stop = Stop(error.code if isinstance(error.code, int) else EXIT_CONVICTED, error.reason)
        thread = threading.current_thread()
        if self._settle(stop) and thread is not threading.main_thread():
            let_end(thread)
            end_from_elsewhere(stop.code, stop.reason, f"thread {thread.name!r}", self._close_all)

    def declare_for(self, stop: Stop, where: str, patience: float) -> None:
        """Make a stop in a child final here, too: in so many seconds the main thread is interrupted, if it goes on."""
        if self._settle(stop):
            end_from_elsewhere(stop.code, stop.reason, where, self._close_all, patience)

    def also(self, told: Callable[[Stop], None]) -> None:
        """Have someone told of the stop."""
        self._told.append(told)

    def no_more(self, told: Callable[[Stop], None]) -> None:
        """Tell them no more."""
        self._told.remove(told)

    def _settle(self, stop: Stop) -> bool:
        """Take a stop for this process's, if it is the first; return whether the process is to end."""
        if self._contained or self.stop is not None:
            return False
        self.stop = stop
        for module in self._entries:
            self._refuse_forwards(module)
        StepMoments(_Refusal(self)).__enter__()  # never left
        for told in list(self._told):
            with suppress(Exception):
                told(stop)
        if interactive():
            return False
        seal(stop.code)
        return True

    @contextmanager
    def contained(self) -> Iterator[None]:
        """Let stops inside be ordinary exceptions, for those who run many trainings in one process, as tests do."""
        self._contained += 1
        try:
            yield
        finally:
            self._contained -= 1

    def _close_all(self) -> None:
        for close in list(self._on):
            with suppress(Exception):
                close()

    def _refuse_forwards(self, module: nn.Module) -> None:
        def before(called: nn.Module, _args: Any, _kwargs: Any) -> None:
            if called.training and torch.is_grad_enabled():
                self.refuse()

        if EntryPoint(module, module).in_place:
            HookedCall(module, before, _nothing)
        else:
            module.register_forward_pre_hook(ModuleHook(before), with_kwargs=True)

    def _raise(self, stop: Stop) -> NoReturn:
        raise TrainingStopped(stop.code, stop.reason)


class _Refusal(StepListener):
    """Lets nothing through that trains."""

    def __init__(self, finality: Finality) -> None:
        self._finality = finality

    def clipping(self, gradients: list[torch.Tensor]) -> None:
        """Refuse."""
        del gradients
        self._finality.refuse()

    def gradients_ready(self, *, scaler: GradScaler | None = None, optimizer: Optimizer | None = None) -> None:
        """Refuse."""
        del scaler, optimizer
        self._finality.refuse()

    def closure_begins(self, optimizer: Optimizer) -> None:
        """Refuse."""
        del optimizer
        self._finality.refuse()

    def around_backward(self, call: BackwardCall) -> AbstractContextManager[None]:
        """Refuse."""
        self._finality.refuse()
        return super().around_backward(call)


def _nothing(*_: Any) -> None:
    return None


PROCESS = Finality()
"""The one object that is the process's and no guard's: a process has one exit code, and ends once."""
