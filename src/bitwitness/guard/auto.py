"""Guarding a script that knows nothing of us: the models that it trains are found as it runs."""

from __future__ import annotations

import functools
import importlib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Self

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from bitwitness.config import Config
from bitwitness.errors import BitwitnessError
from bitwitness.guard.guard import Guard
from bitwitness.respond.reporter import Reporter
from bitwitness.tap.compiled import CompileNotices, is_compiled
from bitwitness.tap.modules import keywords_of_call, unwrap

_TRIES = 3  # steps for which an optimizer's model is looked for


class AutoGuard:
    """Guards every model whose training begins inside the ``with``.

    A model is a module with trainable parameters that is called in training mode with gradients enabled, by no other
    module; in evaluation mode, where an optimizer has stepped its parameters. The search rests, so that nothing stays hooked
    globally, while every optimizer that steps has its parameters guarded, and goes on where one does not. A model with
    compiled modules ends the search: torch would compile the search's hooks into it. Processes that the script starts with
    ``torch.multiprocessing`` search, too.

    Parameters
    ----------
    config
        How to guard each of them; a second model's records go to ``out`` with its number behind.
    warnings
        What is to be said once about where the configuration came from.

    """

    def __init__(self, config: Config, warnings: tuple[str, ...] = ()) -> None:
        self._config = config
        self._warnings = warnings
        self._stack = ExitStack()
        self._search: list[Any] = []
        self._ended = False
        self._resting = False
        self._unguarded_steps: Counter[int] = Counter()
        self.guards: list[Guard] = []
        self._passed: set[int] = set()
        self._stepping: set[int] = set()

    def __enter__(self) -> Self:
        for warning in self._warnings:
            Reporter(None, 0).say(warning)
        self._stack.enter_context(children_guarded(self._config))
        self._stack.callback(register_optimizer_step_post_hook(self._stepped).remove)
        self._begin_search()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end_search()
        self._stack.__exit__(kind, error, trace)
        if not self.guards and (kind is None or issubclass(kind, SystemExit)):
            Reporter(None, 0).say(
                "no model was trained under guard: no module with trainable parameters was called in training mode with "
                "gradients enabled"
            )

    def _stepped(self, optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        guarded = {id(p) for guard in self.guards for p in unwrap(guard.model).parameters()}
        if any(id(p) in guarded for group in optimizer.param_groups for p in group["params"]):
            self._unguarded_steps.pop(id(optimizer), None)
        else:
            self._unguarded_steps[id(optimizer)] += 1
            self._stepping |= {id(p) for group in optimizer.param_groups for p in group["params"]}
        # torch is iterating over these hooks now, so the search's are taken away at the next forward.
        self._resting = not any(0 < steps <= _TRIES for steps in self._unguarded_steps.values())
        if not self._resting and not self._search:
            self._begin_search()

    def _begin_search(self) -> None:
        if not self._ended:
            self._search = [register_module_forward_pre_hook(self._meet), CompileNotices(self._meet)]

    def _end_search(self) -> None:
        for handle in self._search:
            handle.remove()
        self._search.clear()

    def _meet(self, module: nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling():
            return
        if self._resting:
            self._end_search()
            return
        if id(module) in self._passed or not torch.is_grad_enabled():
            return
        if not module.training and self._stepping.isdisjoint(id(p) for p in module.parameters()):
            return  # an evaluation, unless an optimizer steps what it holds: some train in evaluation mode
        root = unwrap(module)
        self._passed |= {id(part) for part in module.modules()}
        if not any(p.requires_grad for p in root.parameters()):
            return
        if any(map(is_compiled, module.modules())):
            self._ended = True
            self._end_search()
        number = len(self.guards)
        config = self._config
        if number and config.out is not None:
            config = replace(config, out=f"{config.out}-{number + 1}")
        try:
            guard = Guard(module, config=config)
            self._stack.enter_context(guard)
        except BitwitnessError as error:
            Reporter(None, 0).say(f"{type(root).__name__} trains unguarded: {error}")
            return
        self.guards.append(guard)
        kwargs = keywords_of_call()
        if guard.watch is not None and kwargs is not None:
            guard.watch.root.join(module, args, kwargs)


@dataclass(frozen=True)
class _GuardedChild:
    """A function to be run in a process of its own, under guard there; it can be pickled where the function can."""

    function: Callable[..., Any]
    config: Config

    def __call__(self, *args: Any) -> Any:
        with AutoGuard(self.config):
            return self.function(*args)


@contextmanager
def children_guarded(config: Config) -> Iterator[None]:
    """Have ``torch.multiprocessing.spawn`` and ``start_processes`` guard what they start."""
    module = importlib.import_module("torch.multiprocessing.spawn")  # the package has a function of that name
    original = module.start_processes

    @functools.wraps(original)
    def start_processes(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return original(_GuardedChild(fn, config), *args, **kwargs)

    owners = [owner for owner in (module, torch.multiprocessing) if getattr(owner, "start_processes", None) is original]
    for owner in owners:
        owner.start_processes = start_processes  # type: ignore[attr-defined]
    try:
        yield
    finally:
        for owner in owners:
            if owner.start_processes is start_processes:
                owner.start_processes = original  # type: ignore[attr-defined]
