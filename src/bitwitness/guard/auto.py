"""Guarding a script that knows nothing of us: the models that it trains are found as it runs."""

from __future__ import annotations

import os
from contextlib import ExitStack, suppress
from dataclasses import replace
from types import TracebackType
from typing import Any, Self
from weakref import WeakSet

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from bitwitness.config import Config
from bitwitness.errors import BitwitnessError
from bitwitness.guard.children import children_guarded
from bitwitness.guard.commands import commands_named
from bitwitness.guard.discovery import Blocks, contents, is_entered, root_of, trainable
from bitwitness.guard.forked import inert_in_children
from bitwitness.guard.guard import Guard
from bitwitness.guard.roots import guarded_roots
from bitwitness.guard.unguarded import Unguarded, parameters_of
from bitwitness.respond.reporter import Reporter
from bitwitness.tap.company import is_alone, wrappers_noticed
from bitwitness.tap.compat import being_traced, outside_transforms
from bitwitness.tap.compiled import CompileNotices, is_compiled
from bitwitness.tap.modes import scripts_modes_off
from bitwitness.tap.modules import in_backward, keywords_of_call, unwrap

_MANY = 2  # models met between two steps (a GAN's); where there are more, each optimizer's are guarded as one


class AutoGuard:
    """Guards every model whose training begins inside the ``with``.

    A model is the outermost module around a call in training mode with gradients enabled (`discovery.root_of`); in evaluation
    mode, where an optimizer has stepped its parameters. What was guarded is let go where it turns out to be a part: a
    DistributedDataParallel is made around it, a module that holds it is called, it is compiled, sharded or rebuilt. Blocks
    that no module holds are guarded together, by their optimizer.

    The search rests, so that nothing stays hooked globally, while every optimizer that steps has its parameters guarded, and
    goes on where one does not. A model with compiled modules ends the search: torch would compile the search's hooks into
    it. Processes that the script starts with ``multiprocessing`` search, too; commands that it starts are named.

    Parameters
    ----------
    config
        How to guard each of them; a second model's records go to ``out`` with its number behind.
    warnings
        What is to be said once about where the configuration came from.
    child
        This is a process that the script started: where it trains nothing, nothing is said.

    """

    def __init__(self, config: Config, warnings: tuple[str, ...] = (), *, child: bool = False) -> None:
        self._config = config
        self._warnings = warnings
        self._child = child
        self._stack = ExitStack()
        self._search: list[Any] = []
        self._ended = False
        self._resting = False
        self._inert = False
        self._reporter = Reporter(None, int(os.environ.get("RANK", "0")))
        self._forget()

    def _forget(self) -> None:
        self.guards: list[Guard] = []
        self._contents: dict[Guard, frozenset[tuple[int, bool]]] = {}
        self._trained = 0
        self._theirs = False
        self._passed: WeakSet[nn.Module] = WeakSet()
        # Called without gradients, or inside a backward: there is no forward to guard, but a name to tell.
        self._met: WeakSet[nn.Module] = WeakSet()
        self._fresh: list[Guard] = []
        self._leaving: list[Guard] = []
        self._blocks: list[nn.Module] = []
        self._stepping: set[int] = set()
        self._unguarded = Unguarded()
        self._steppers: dict[Guard, WeakSet[Optimizer]] = {}

    def __enter__(self) -> Self:
        for warning in self._warnings:
            self._reporter.say(warning)
        inert_in_children(self)
        self._stack.enter_context(children_guarded(self._config, guarded_child, self._reporter.say))
        self._stack.enter_context(commands_named(self._reporter.say))
        self._stack.enter_context(wrappers_noticed(self._wrapped))
        self._stack.callback(register_optimizer_step_post_hook(self._stepped).remove)
        self._begin_search()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end_search()
        if self._inert:
            return
        for guard in reversed(self.guards):
            guard.__exit__(kind, error, trace)
        self._stack.close()
        if kind is not None and not issubclass(kind, SystemExit):
            return
        lines = self._unguarded.lines([*self._passed, *self._met])
        if not (self.guards or self._trained or self._theirs or lines or self._child):
            lines.append(
                "no model was trained under guard: no module with trainable parameters was called in training mode with "
                "gradients enabled"
            )
        for line in lines:
            self._reporter.say(line)

    def after_fork(self, *, worker: bool) -> None:
        """Let the parent's models be the parent's; search anew in a process that the script forks by itself."""
        self._end_search()
        self._stack.close()
        self._forget()
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
            if self._unguarded.stepped(optimizer):
                self._note_stepper(optimizer)
                # Torch is iterating over its hooks now: whoever leaves, and takes hooks away, does so at the next forward.
                self._leave_later([guard for guard in self.guards if self._outgrown(guard) or self._abandoned(guard)])
            self._fresh.clear()
            self._resting = not self._unguarded.looked_for and not self._leaving
            if not self._resting and not self._search:
                self._begin_search()
        except Exception as error:
            self._fail(error)

    def _wrapped(self, wrapper: DistributedDataParallel, module: nn.Module) -> None:
        """Let go what the script wraps now: the wrapper is guarded at its first forward, on all ranks at the same moment."""
        try:
            parts = {id(part) for part in module.modules()}
            for guard in list(self.guards):
                if guard.model is wrapper or parts.isdisjoint(map(id, unwrap(guard.model).modules())):
                    continue
                if is_entered(unwrap(guard.model)):  # its hooks are to see the end of the call
                    self._leave_later([guard])
                else:
                    self._let_go(guard)
            self._passed -= WeakSet(module.modules())
            self._blocks = [block for block in self._blocks if id(block) not in parts]
            self._ended = self._resting = False
            if not self._search:
                self._begin_search()
        except Exception as error:
            self._fail(error)

    def _meet(self, module: nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling() or being_traced():
            return
        try:
            for guard in [guard for guard in self._leaving if not is_entered(unwrap(guard.model))]:
                self._let_go(guard)
            if self._resting:
                self._end_search()
            elif torch.is_grad_enabled() and not in_backward():
                self._guard_blocks()
                self._consider(module, args)
            else:
                self._met.add(module)
        except Exception as error:
            self._fail(error)

    # -- the search ----------------------------------------------------------------------------------------------

    def _begin_search(self) -> None:
        if not self._ended:
            self._search = [register_module_forward_pre_hook(self._meet), CompileNotices(self._meet)]

    def _end_search(self) -> None:
        for handle in self._search:
            handle.remove()
        self._search.clear()

    def _fail(self, error: Exception) -> None:
        """End the search by an error of our own; the training goes on."""
        self._ended = True
        self._reporter.failure("search for models", error, 0)
        with suppress(Exception):
            self._end_search()

    def _consider(self, module: nn.Module, args: Any) -> None:
        if module in self._passed:
            own = next((guard for guard in self.guards if unwrap(guard.model) is unwrap(module)), None)
            if own is None or not self._outgrown(own):
                return
        inner = unwrap(module)
        if any(not isinstance(parameter, nn.Parameter) for parameter in inner.parameters()):
            return  # ``functional_call`` lends it others for as long as it runs: guarded, these would be watched
        if not inner.training and (not self._stepping or self._stepping.isdisjoint(map(id, inner.parameters()))):
            return  # an evaluation, unless an optimizer steps what it holds: some train in evaluation mode
        if not trainable(inner):
            return  # as yet: a generator is frozen while its discriminator trains
        root = root_of(module)
        if root is None or not self._take_over(root, module):
            return
        self._passed.update(root.modules())
        if is_alone(root) and (len(self._fresh) >= _MANY or self._blocks):
            self._gather(root)
        else:
            self._guard(root, module, args)

    def _take_over(self, root: nn.Module, module: nn.Module) -> bool:
        """Let go the guards of what is a part of ``root``, or holds it and was rebuilt; return whether it may be guarded."""
        parts = set(map(id, unwrap(root).modules()))
        for guard in list(self.guards):
            held = unwrap(guard.model)
            if id(held) in parts or any(part is unwrap(root) for part in held.modules()):
                if held is not unwrap(module) and is_entered(held):
                    return False  # it makes its parts as it runs; its next call finds it rebuilt
                self._let_go(guard)
        theirs = any(id(other) in parts for other in guarded_roots())  # the script guards it by itself
        self._theirs |= theirs
        if theirs:
            self._passed.update(root.modules())
        return not theirs

    def _guard(self, root: nn.Module, module: nn.Module | None, args: Any) -> None:
        """Guard ``root``; ``module``, if any, is being called now."""
        if any(map(is_compiled, root.modules())):
            self._ended = True
            self._end_search()
        number = self._trained + len(self.guards)
        config = self._config
        if number and config.out is not None:
            config = replace(config, out=f"{config.out}-{number + 1}")
        try:
            with outside_transforms(), scripts_modes_off():
                guard = Guard(root, config=config).start()
        except BitwitnessError as error:
            self._reporter.say(f"{type(unwrap(root)).__name__} trains unguarded: {error}")
            return
        self.guards.append(guard)
        if number and guard.reporter is not None:
            guard.reporter.model = f"{type(unwrap(root)).__name__}, model {number + 1}"
        if is_alone(root):
            self._fresh.append(guard)
        self._contents[guard] = contents(root)
        for optimizer in self._unguarded.optimizers():
            self._note_whom_it_steps(guard, optimizer)
        kwargs = keywords_of_call()
        if module is not None and guard.watch is not None and kwargs is not None:
            guard.watch.root.join(module, args, kwargs)

    def _outgrown(self, guard: Guard) -> bool:
        """Tell whether a model was rebuilt, sharded or compiled since it was guarded, as long as it is guarded alone."""
        if guard.watch is None or guard.watch.ranks.size > 1 or isinstance(guard.model, Blocks):
            return False
        return contents(guard.model) != self._contents[guard]

    def _note_stepper(self, optimizer: Optimizer) -> None:
        self._stepping |= set(map(id, parameters_of(optimizer)))
        for guard in self.guards:
            self._note_whom_it_steps(guard, optimizer)

    def _note_whom_it_steps(self, guard: Guard, optimizer: Optimizer) -> None:
        if not set(map(id, parameters_of(optimizer))).isdisjoint(map(id, guard.model.parameters())):
            self._steppers.setdefault(guard, WeakSet()).add(optimizer)

    def _abandoned(self, guard: Guard) -> bool:
        """Tell whether all optimizers that stepped a model are gone: a copy that was trained for a few steps, say."""
        return guard in self._steppers and not self._steppers[guard]

    def _let_go(self, guard: Guard) -> None:
        """Leave a model that is to be guarded anew, or as a part of another."""
        self._passed -= WeakSet(guard.model.modules())
        for known in (self.guards, self._fresh, self._leaving):
            if guard in known:
                known.remove(guard)
        self._contents.pop(guard, None)
        self._steppers.pop(guard, None)
        self._trained += guard.let_go()

    def _leave_later(self, guards: list[Guard]) -> None:
        self._leaving += [guard for guard in guards if guard not in self._leaving]

    # -- blocks --------------------------------------------------------------------------------------------------

    def _gather(self, root: nn.Module) -> None:
        """Take the models that were met since the last step for blocks, to be guarded once their optimizer is known."""
        for guard in list(self._fresh):
            self._blocks.append(guard.model)
            self._let_go(guard)
            self._passed.update(guard.model.modules())
        self._blocks.append(root)

    def _guard_blocks(self) -> None:
        for _, missing in self._unguarded.missing() if self._blocks else ():
            together = [block for block in self._blocks if not missing.isdisjoint(trainable(block))]
            if together:
                self._blocks = [block for block in self._blocks if all(block is not other for other in together)]
                self._guard(together[0] if len(together) == 1 else Blocks(together), None, ())


def guarded_child(config: Config) -> AutoGuard:
    """Return the guard of a process that a guarded script started."""
    return AutoGuard(config, child=True)
