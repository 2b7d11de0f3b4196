"""Guarding a script that knows nothing of us: the models that it trains are found as it runs."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from types import TracebackType
from typing import Any, Self

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook

from bitwitness.config import Config
from bitwitness.errors import BitwitnessError
from bitwitness.guard.guard import Guard
from bitwitness.respond.reporter import Reporter
from bitwitness.tap.compiled import CompileNotices, is_compiled
from bitwitness.tap.modules import unwrap


class AutoGuard:
    """Guards every model whose training begins inside the ``with``.

    A model is a module with trainable parameters that is called in training mode with gradients enabled, by no other
    module. The search ends with the first optimizer step (a model that comes later is not found), so that nothing stays
    hooked globally. A model called without a DistributedDataParallel wrapper is found in its first forward, which
    itself is not recorded. A model with compiled modules ends the search, too: torch would compile the search's hooks into it.

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
        self._over = False
        self.guards: list[Guard] = []
        self._passed: set[int] = set()

    def __enter__(self) -> Self:
        for warning in self._warnings:
            Reporter(None, 0).say(warning)
        self._search = [
            register_module_forward_pre_hook(self._meet),
            register_optimizer_step_post_hook(lambda *_: self._stepped()),
            CompileNotices(self._meet),
        ]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end_search()
        self._stack.__exit__(kind, error, trace)
        if not self.guards and (kind is None or issubclass(kind, SystemExit)):
            Reporter(None, 0).say(
                "no model was trained under guard: no module with trainable parameters was called in training mode with "
                "gradients enabled before the first optimizer step"
            )

    def _stepped(self) -> None:
        # torch is iterating over these hooks now, so they are taken away at the next forward.
        self._over = True

    def _end_search(self) -> None:
        for handle in self._search:
            handle.remove()
        self._search.clear()

    def _meet(self, module: nn.Module, _args: Any) -> None:
        if torch.compiler.is_compiling():
            return
        if self._over:
            self._end_search()
            return
        if id(module) in self._passed or not module.training or not torch.is_grad_enabled():
            return
        root = unwrap(module)
        self._passed |= {id(part) for part in module.modules()}
        if not any(p.requires_grad for p in root.parameters()):
            return
        if any(map(is_compiled, module.modules())):
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
