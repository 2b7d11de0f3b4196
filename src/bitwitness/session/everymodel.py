"""Every model that a script runs, written into run folders: what recording and monitoring it have in common."""

from __future__ import annotations

import os
from types import TracebackType
from typing import Any, ClassVar, Self, TypeVar

from torch import nn

from bitwitness.errors import BitwitnessError
from bitwitness.ranks.process_groups import wrappers_noticed
from bitwitness.session.instrument import Instrument
from bitwitness.session.reporter import Reporter
from bitwitness.session.roots import root_of, trains_past_wrapper
from bitwitness.session.search import ModelSearch
from bitwitness.session.session import sessions
from bitwitness.session.signals import TERMINATION
from bitwitness.session.writing import Writing
from bitwitness.tap.compat import outside_transforms
from bitwitness.tap.modules import in_backward, keywords_of_call, unwrap

W = TypeVar("W", bound=Writing[Any])


class EveryModel(ModelSearch[W]):
    """Takes every model with parameters that is called by no other module inside the ``with``."""

    instrument: ClassVar[type[Instrument]]
    """What watches a model that the script itself has watched in this way."""
    done: ClassVar[str]
    """What is done to a model, in a word: ``recorded``."""

    def __init__(self) -> None:
        super().__init__()
        self._reporter = Reporter(None, int(os.environ.get("RANK", "0")))
        self.taken: list[W] = []
        """All that were entered, but for those that turned out to be parts."""
        self._speaks_last = False
        self.quiet = False
        """Whether `say` is to be quiet where SIGTERM ends the process."""

    def _made_for(self, module: nn.Module) -> W:
        """Return what is to be entered for a model."""
        raise NotImplementedError

    def say(self, *, quiet: bool = False) -> None:
        """Print where the run folders are, or that there is none; if ``quiet``, only what is wrong."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        self._stack.enter_context(wrappers_noticed(self._wrapped))
        self._begin_search()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._calls.end()
        for one in reversed(self.entered):
            one.__exit__(kind, error, trace)
        self._stack.close()

    @property
    def incomplete(self) -> bool:
        """Whether something that was asked for was not written."""
        return not self.taken or any(one.problem or one.is_empty for one in self.taken)

    @property
    def folders(self) -> list[str]:
        """The run folders, in the order in which the models were met."""
        return [str(one.folder) for one in self.taken]

    # -- the search ----------------------------------------------------------------------------------------------

    def _failed(self, error: Exception) -> None:
        self._reporter.failure("search for models", error, 0)

    def _watched_already(self) -> list[nn.Module]:
        return [one.root for one in sessions() if any(isinstance(other, self.instrument) for other in one.instruments)]

    def _consider(self, module: nn.Module, args: Any) -> None:
        if module in self._passed or in_backward():
            return
        first = next(unwrap(module).parameters(), None)
        if first is None or first.is_meta:  # the latter holds no numbers
            self._passed.update(module.modules())
        elif root_of(module) is None and not trains_past_wrapper(module):
            return  # it comes back as, or in, a model
        elif self._take_over(module, module):
            self._passed.update(module.modules())
            self._take(module, args)

    def _take(self, module: nn.Module, args: Any) -> None:
        if not self.taken and not self._speaks_last:
            # Before the first of them, so that it comes after theirs; and no earlier: until then the signal is the script's.
            self._stack.enter_context(TERMINATION.told(self._last_words))
            self._speaks_last = True
        try:
            with outside_transforms():
                one = self._made_for(module)
                one.start()
        except BitwitnessError as error:
            self._reporter.say(f"{type(unwrap(module)).__name__} is not {self.done}: {error}")
            return
        self.entered.append(one)
        self.taken.append(one)
        one.join(module, args, keywords_of_call() or {})

    def _last_words(self) -> None:
        """Say where everything is, where SIGTERM ends the process: no script comes back to have it said."""
        self.say(quiet=self.quiet)

    def _left(self, one: W) -> None:
        if not one.let_go():
            self.taken.remove(one)
