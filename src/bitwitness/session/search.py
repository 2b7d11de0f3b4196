"""Finding the models of a script that knows nothing of us, as it runs: what guarding and recording it have in common."""

from __future__ import annotations

from contextlib import ExitStack, suppress
from typing import Any, Generic, TypeVar
from weakref import WeakSet

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from bitwitness.session.closures import closures_told
from bitwitness.session.entered import Entered
from bitwitness.session.modulecalls import ModuleCalls
from bitwitness.session.roots import is_entered
from bitwitness.tap.modules import unwrap
from bitwitness.tap.threads import OneAtATime

E = TypeVar("E", bound=Entered)


class ModelSearch(Generic[E]):
    """Meets every module that a script calls, and has those watched that are models of its own.

    Who searches says which calls count, what the model around one is (`session.roots`), and what watches it. A model is let go
    where it turns out to be a part: a DistributedDataParallel is made around it, or a module that holds it is called.
    """

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._calls = ModuleCalls(self._meet)
        self._ended = False
        self._begin_anew()

    def _begin_anew(self) -> None:
        self._hears_closures = False
        self._searching = OneAtATime()  # a fork may have left it taken
        self.entered: list[E] = []
        self._passed: WeakSet[nn.Module] = WeakSet()
        """Modules that are watched, or whose model is."""
        self._leaving: dict[E, None] = {}
        self._theirs = False
        """Whether the script itself has something watched in this way."""

    # -- what differs --------------------------------------------------------------------------------------------

    def _consider(self, module: nn.Module, args: Any) -> None:
        """Have a module that is called now watched, or the model that it is a part of, if it counts."""
        raise NotImplementedError

    def _watched_already(self) -> list[nn.Module]:
        """Return the modules that are watched in this way, by the script itself, too."""
        raise NotImplementedError

    def _left(self, one: E) -> None:
        """Note that a model was let go."""

    def _failed(self, error: Exception) -> None:
        """Say that the search ended by an error of our own; the training goes on."""
        raise NotImplementedError

    # -- what is noticed -----------------------------------------------------------------------------------------

    def _begin_search(self) -> None:
        if not self._hears_closures:
            self._hears_closures = True
            self._stack.callback(closures_told(lambda: self.entered))
        if not self._ended:
            self._calls.begin()

    def _meet(self, module: nn.Module, args: Any) -> None:
        try:
            with self._searching:
                self._meet_alone(module, args)
        except Exception as error:
            self._fail(error)

    def _meet_alone(self, module: nn.Module, args: Any) -> None:
        for one in [one for one in self._leaving if not is_entered(unwrap(one.model))]:
            self._let_go(one)
        if module in self._passed or not self._is_lent(module):
            self._consider(module, args)

    def _is_lent(self, module: nn.Module) -> bool:
        """Tell whether a watched model that runs now made a module of its own parts, as a slice of an ``nn.Sequential`` is."""
        running = [one.model for one in self.entered if is_entered(unwrap(one.model))]
        held = {id(parameter) for parameter in module.parameters()} if running else set()
        return bool(held) and any(held <= set(map(id, model.parameters())) for model in running)

    def _fail(self, error: Exception) -> None:
        self._ended = True
        self._failed(error)
        with suppress(Exception):
            self._calls.end()

    def _wrapped(self, wrapper: DistributedDataParallel, module: nn.Module) -> None:
        """Let go what the script wraps now: the wrapper is watched from its first forward on, by all ranks together."""
        try:
            with self._searching:
                self._let_go_parts(wrapper, module)
        except Exception as error:
            self._fail(error)

    def _let_go_parts(self, wrapper: DistributedDataParallel, module: nn.Module) -> None:
        parts = {id(part) for part in module.modules()}
        for one in list(self.entered):
            if one.model is wrapper or parts.isdisjoint(map(id, unwrap(one.model).modules())):
                continue
            if is_entered(unwrap(one.model)):  # its hooks are to see the end of the call
                self._leaving[one] = None
            else:
                self._let_go(one)
        self._passed -= WeakSet(module.modules())
        self._ended = False
        self._begin_search()

    def _take_over(self, root: nn.Module, module: nn.Module) -> bool:
        """Let go what is a part of ``root``, or holds it and was rebuilt; return whether ``root`` may be watched."""
        parts = set(map(id, unwrap(root).modules()))
        for one in list(self.entered):
            held = unwrap(one.model)
            if id(held) in parts or any(part is unwrap(root) for part in held.modules()):
                if held is not unwrap(module) and is_entered(held):
                    return False  # it makes its parts as it runs; its next call finds it rebuilt
                self._let_go(one)
        if any(id(other) in parts for other in self._watched_already()):
            self._theirs = True
            self._passed.update(root.modules())
            return False
        return True

    def _let_go(self, one: E) -> None:
        """Leave a model that is to be watched anew, or as a part of another."""
        self._passed -= WeakSet(one.model.modules())
        self._leaving.pop(one, None)
        if one in self.entered:
            self.entered.remove(one)
        self._left(one)
