"""Guarding a script that knows nothing of us: the models that it trains are found as it runs."""

from __future__ import annotations

import os
import threading
from collections import defaultdict
from dataclasses import dataclass, field, replace
from functools import partial
from types import TracebackType
from typing import Any, Self
from weakref import WeakSet

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import Optimizer

from bitwitness.config import Config
from bitwitness.errors import BitwitnessError
from bitwitness.guard.checkpoints import GuardedCheckpoints
from bitwitness.guard.children import children_guarded
from bitwitness.guard.commands import commands_named
from bitwitness.guard.face import Face, note_models
from bitwitness.guard.guard import Guard
from bitwitness.guard.roots import watched_roots
from bitwitness.guard.steppers import Steppers
from bitwitness.guard.unguarded import NOTHING, Unguarded
from bitwitness.ranks.process_groups import is_alone, wrappers_noticed
from bitwitness.session.forked import inert_in_children
from bitwitness.session.reporter import Reporter
from bitwitness.session.roots import Blocks, contents, is_entered, root_of, trainable
from bitwitness.session.search import ModelSearch
from bitwitness.tap.compat import outside_transforms
from bitwitness.tap.compiled import is_compiled
from bitwitness.tap.modes import scripts_modes_off
from bitwitness.tap.modules import in_backward, keywords_of_call, unwrap
from bitwitness.tap.optimizerhooks import in_step, told_of_steps

_MANY = 2  # models met between two steps (a GAN's); where there are more, each optimizer's are guarded as one


@dataclass
class _Met:
    """Guards that were made since the last step, and models that wait for their optimizer's, to be guarded together."""

    fresh: list[Face] = field(default_factory=list)
    blocks: list[nn.Module] = field(default_factory=list)


class AutoGuard(ModelSearch[Face]):
    """Guards every model whose training begins inside the ``with``.

    A model is the outermost module around a call in training mode with gradients enabled (`discovery.root_of`); in evaluation
    mode, where an optimizer has stepped its parameters. What was guarded is let go where it turns out to be a part: a
    DistributedDataParallel is made around it, a module that holds it is called, it is compiled, sharded or rebuilt. Blocks
    that no module holds are guarded together, by their optimizer.

    The search rests, so that nothing stays hooked globally, while every optimizer that steps has its parameters guarded, and
    goes on where one does not, or where the script makes a model. A model with compiled modules ends the search: torch would
    compile the search's hooks into it. Processes that the script starts with ``multiprocessing`` search; commands are named.

    Parameters
    ----------
    config
        How to guard each of them; a second model's records go to ``out`` with its number behind.
    warnings
        What is to be said once about where the configuration came from.
    make
        What watches each: `Guard`, or `NonfiniteTracer`.
    child
        This is a process that the script started: where it trains nothing, nothing is said.

    """

    def __init__(
        self, config: Config, warnings: tuple[str, ...] = (), *, make: type[Face] = Guard, child: bool = False
    ) -> None:
        self._config = config
        self._make: Any = make
        self._warnings = warnings
        self._child = child
        self._resting = False
        self._inert = False
        self._reporter = Reporter(None, int(os.environ.get("RANK", "0")))
        super().__init__()

    def _begin_anew(self) -> None:
        super()._begin_anew()
        self._contents: dict[Face, frozenset[tuple[int, bool]]] = {}
        self._numbers, self._trained = dict[Face, int](), set[int]()  # of models; of those that are watched no more
        # Called without gradients, or inside a backward: there is no forward to guard, but a name to tell.
        self._met: WeakSet[nn.Module] = WeakSet()
        self._threads: defaultdict[int, _Met] = defaultdict(_Met)
        self._unguarded = Unguarded()
        self._steppers = Steppers()

    def __enter__(self) -> Self:
        for warning in self._warnings:
            self._reporter.say(warning)
        inert_in_children(self)
        say, child = self._reporter.say, partial(guarded_child, make=self._make)
        self._checkpoints = GuardedCheckpoints(self._config, self._reporter, on=self._make is Guard)
        self._stack.enter_context(self._checkpoints)
        self._stack.enter_context(children_guarded(self._config, child, say))
        self._stack.enter_context(commands_named(say))
        self._stack.enter_context(wrappers_noticed(self._wrapped, self._built))
        self._stack.callback(told_of_steps(self._stepped))
        self._begin_search()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._calls.end()
        if self._inert:
            return
        note_models(self.entered, self._config.out)
        lines = self._unguarded.lines([*self._passed, *self._met])
        for guard in self.entered[:1]:
            guard.beside = lines
        for guard in reversed(self.entered):
            guard.__exit__(kind, error, trace)
        self._stack.close()
        if kind is not None and not issubclass(kind, SystemExit):
            return
        nothing = not (self.entered or self._trained or self._theirs or lines or self._child)
        for line in [NOTHING] if nothing else lines:
            self._reporter.say(line)

    @property
    def _here(self) -> _Met:
        """What this thread has met since its last step: what another one trains is no part of it."""
        return self._threads[threading.get_ident()]

    @property
    def folders(self) -> list[str]:
        """The run folders, in the order in which the models were met."""
        return [one.folder for one in self.entered if one.folder is not None]

    def after_fork(self, *, worker: bool) -> None:
        """Let the parent's models be the parent's; search anew in a process that the script forks by itself."""
        self._calls.end()
        self._stack.close()
        self._begin_anew()
        self._child, self._warnings = True, ()
        self._resting = self._ended = False
        self._inert = worker  # it guards what it trains by itself, or is one that loads data
        if not worker:
            if self._config.out is not None:
                self._config = replace(self._config, out=f"{self._config.out}-{os.getpid()}")
            self.__enter__()

    # -- what is noticed -----------------------------------------------------------------------------------------

    def _stepped(self, optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        try:
            with self._searching:
                self._note_step(optimizer)
        except Exception as error:
            self._fail(error)

    def _note_step(self, optimizer: Optimizer) -> None:
        if self._unguarded.stepped(optimizer):
            self._steppers.stepped(optimizer, self.entered)
            # Torch is iterating over its hooks now: whoever leaves, and takes hooks away, does so at the next forward.
            gone = [guard for guard in self.entered if self._outgrown(guard) or self._steppers.are_gone(guard)]
            self._leaving |= dict.fromkeys(gone)
        self._here.fresh.clear()
        self._resting = not self._unguarded.looked_for and not self._leaving
        if not self._resting:
            self._begin_search()

    def _wrapped(self, wrapper: DistributedDataParallel, module: nn.Module) -> None:
        parts = {id(part) for part in module.modules()}
        self._here.blocks = [block for block in self._here.blocks if id(block) not in parts]
        self._resting = False
        super()._wrapped(wrapper, module)

    def _built(self) -> None:
        """Look for models again where the script makes one: its first step is to be seen, too."""
        try:
            if self._resting and not any(is_entered(unwrap(guard.model)) for guard in self.entered):
                self._resting = False
                self._begin_search()
        except Exception as error:
            self._fail(error)

    # -- the search ----------------------------------------------------------------------------------------------

    def _failed(self, error: Exception) -> None:
        self._reporter.failure("search for models", error, 0)

    def _consider(self, module: nn.Module, args: Any) -> None:
        if self._resting:
            self._calls.end()
        elif torch.is_grad_enabled() and not in_backward():
            self._guard_blocks()
            self._find(module, args)
        else:
            self._met.add(module)

    def _find(self, module: nn.Module, args: Any) -> None:
        if module in self._passed:
            own = next((guard for guard in self.entered if unwrap(guard.model) is unwrap(module)), None)
            if own is None or not self._outgrown(own):
                return
        inner = unwrap(module)
        if any(not isinstance(parameter, nn.Parameter) for parameter in inner.parameters()):
            return  # ``functional_call`` lends it others for as long as it runs: guarded, these would be watched
        if not inner.training and not self._steppers.step(inner):
            return  # an evaluation, unless an optimizer steps what it holds: some train in evaluation mode
        if not trainable(inner):
            return  # as yet: a generator is frozen while its discriminator trains
        root = root_of(module)
        if root is None or not self._take_over(root, module):
            return
        self._passed.update(root.modules())
        if is_alone(root) and (len(self._here.fresh) >= _MANY or self._here.blocks):
            self._gather(root)
        else:
            self._guard(root, module, args)

    def _watched_already(self) -> list[nn.Module]:
        return watched_roots()

    def _guard(self, root: nn.Module, module: nn.Module | None, args: Any) -> None:
        """Guard ``root``; ``module``, if any, is being called now."""
        if any(map(is_compiled, root.modules())):
            self._ended = True
            self._calls.end()
        if (guard := self._begin_guard(root)) is None:
            return
        if is_alone(root):
            self._here.fresh.append(guard)
        for optimizer in self._unguarded.optimizers():
            self._steppers.note(guard, optimizer)
        if guard.watch is not None:
            unseen = isinstance(guard, Guard) and in_step()  # whose closure was not known when the step began
            guard.watch.late = self._unguarded.steps_of(root) or int(unseen)
        if module is not None and (kwargs := keywords_of_call()) is not None:
            guard.session.join_call(module, args, kwargs)

    def _begin_guard(self, root: nn.Module) -> Face | None:
        """Enter a guard, with the first number that no model has; return None where that cannot be, which is said."""
        config, used = self._config, {*self._numbers.values(), *self._trained}
        number = min({*range(len(used) + 1)} - used)
        if number and config.out is not None:
            config = replace(config, out=f"{config.out}-{number + 1}")
        try:
            with outside_transforms(), scripts_modes_off():
                guard: Face = self._make(root, config=config).start()
        except BitwitnessError as error:
            self._reporter.say(f"{type(unwrap(root)).__name__} trains unguarded: {error}")
            return None
        self._contents[guard], self._numbers[guard] = contents(root), number
        self.entered.append(guard)
        self._checkpoints.hand_over(guard.reporter)
        if number and guard.reporter is not None:
            guard.reporter.model = f"{type(unwrap(root)).__name__}, model {number + 1}"
        return guard

    def _outgrown(self, guard: Face) -> bool:
        """Tell whether a model was rebuilt, sharded or compiled since it was guarded, as long as it is guarded alone."""
        if guard.watch is None or guard.watch.ranks.size > 1 or isinstance(guard.model, Blocks):
            return False
        return contents(guard.model) != self._contents[guard]

    def _left(self, one: Face) -> None:
        for met in self._threads.values():
            if one in met.fresh:
                met.fresh.remove(one)
        del self._contents[one]
        self._steppers.forget(one)
        number = self._numbers.pop(one)
        self._trained |= {number} if one.let_go() else set()

    # -- blocks --------------------------------------------------------------------------------------------------

    def _gather(self, root: nn.Module) -> None:
        """Take the models that were met since the last step for blocks, to be guarded once their optimizer is known."""
        for guard in list(self._here.fresh):
            self._here.blocks.append(guard.model)
            self._let_go(guard)
            self._passed.update(guard.model.modules())
        self._here.blocks.append(root)

    def _guard_blocks(self) -> None:
        for _, missing in self._unguarded.missing() if self._here.blocks else ():
            together = [block for block in self._here.blocks if not missing.isdisjoint(trainable(block))]
            if together:
                self._here.blocks = [
                    block for block in self._here.blocks if all(block is not other for other in together)
                ]
                self._guard(together[0] if len(together) == 1 else Blocks(together), None, ())


def guarded_child(config: Config, *, make: type[Face] = Guard) -> AutoGuard:
    """Return the guard of a process that a guarded script started."""
    return AutoGuard(config, make=make, child=True)
