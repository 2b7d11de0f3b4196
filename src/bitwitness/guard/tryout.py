"""A few steps of somebody's script under guard, to see what is covered: ended between two steps, whatever it catches."""

from __future__ import annotations

import _thread
import signal
import sys
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from types import TracebackType
from typing import Any, Self

from torch.optim.optimizer import Optimizer

from bitwitness.guard.auto import AutoGuard
from bitwitness.guard.guard import Guard
from bitwitness.guard.repeats import Repeats
from bitwitness.respond.process_exit import end_now
from bitwitness.tap.optimizerhooks import told_of_steps

_ENOUGH = 3  # times that one thread catches the end before the process is ended from here
_UNJUDGED = 4  # optimizers' steps for each that is asked for, where none is judged: nothing will be
_GRACE_S = 30.0


class EnoughSteps(BaseException):
    """Ends a script after the steps that were asked for; no `Exception`, which scripts may catch."""


class Tryout:
    """Guards a script while entered, and ends it after so many steps, right after an optimizer's step.

    Parameters
    ----------
    guards
        Finds and guards its models.
    steps
        Steps of one model after which it is ended.
    deadline_s
        Seconds after which its main thread is interrupted.
    last
        Called where the script goes on whatever is raised, before the process is ended; returns the exit code.

    Attributes
    ----------
    ended
        Whether it was ended from here.
    late
        Whether the deadline passed.

    """

    def __init__(self, guards: AutoGuard, *, steps: int, deadline_s: float, last: Callable[[], int]) -> None:
        self.guards, self.repeats = guards, Repeats()
        self._steps, self._deadline, self._last = steps, deadline_s, last
        self._met: dict[Guard, None] = {}
        self._optimized: Counter[int] = Counter()
        self._caught: Counter[int] = Counter()
        self._stack = ExitStack()
        self.ended = self.late = False

    def __enter__(self) -> Self:
        timer = threading.Timer(self._deadline, self._too_late)
        timer.daemon = True
        self._stack.callback(timer.cancel)
        self._stack.enter_context(self.guards)
        self._stack.enter_context(self.repeats)
        self._stack.callback(told_of_steps(self._stepped))  # not heard of before the guards are, at the first step
        timer.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # To the guards a script that was ended from here is one that has finished.
        ours = kind is not None and (
            issubclass(kind, EnoughSteps) or (self.late and issubclass(kind, KeyboardInterrupt))
        )
        self._stack.__exit__(*((None, None, None) if ours else (kind, error, trace)))

    @property
    def tables(self) -> list[dict[str, Any]]:
        """The coverage of each model, that which was trained most first."""
        self._note_guards()
        tables = [table for guard in self._met if (table := guard.coverage())]
        trained = [table for table in tables if table["steps"]["held"]]
        return sorted(trained or tables[-1:], key=lambda table: -int(table["steps"]["held"]))

    def _note_guards(self) -> None:
        self._met |= dict.fromkeys(guard for guard in self.guards.entered if isinstance(guard, Guard))

    def _stepped(self, optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        self._optimized[id(optimizer)] += 1
        self._note_guards()
        judged = max((g.watch.steps_judged for g in self._met if g.watch is not None), default=0)
        if judged < self._steps and max(self._optimized.values()) < _UNJUDGED * self._steps:
            return
        self.ended = True
        thread = threading.get_ident()
        self._caught[thread] += 1
        if self._caught[thread] > _ENOUGH:
            end_now(self._last())
        raise EnoughSteps(f"doctor ends the script after {judged} steps")

    def _too_late(self) -> None:
        """Interrupt the script; end the process where that does not help."""
        self.late = True
        sys.stderr.write(f"bitwitness: doctor's deadline of {self._deadline:g} s has passed; the script is ended\n")
        timer = threading.Timer(_GRACE_S, lambda: end_now(self._last()))
        timer.daemon = True
        self._stack.callback(timer.cancel)
        timer.start()
        main = threading.main_thread()
        if hasattr(signal, "pthread_kill") and main.ident is not None:
            signal.pthread_kill(main.ident, signal.SIGINT)  # a real signal also wakes a thread that waits
        else:
            _thread.interrupt_main()
