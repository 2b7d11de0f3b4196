"""Whether the ranks train in ``join()``: each as long as it has batches, so that a step of one may have no counterpart.

Torch's context manager is entered by all ranks, and left by all at the same time: after the last batch of the last, or
where it was asked to, by an error on all of them as soon as one rank has no more. A rank without any batch goes through
it, too.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from contextlib import ExitStack, suppress
from typing import Any

from torch import nn
from torch.distributed.algorithms.join import Join
from torch.optim.optimizer import Optimizer

from bitwitness.tap.compiled import distributed
from bitwitness.tap.patching import replaced

_ONE_IS_OUT = "Detected at least one rank that exhausted inputs"  # torch's words, on the ranks that are not


class JoinTap:
    """Tells when one root's training enters and leaves ``join()``, on all ranks alike.

    Parameters
    ----------
    model, parameters
        What the training calls, and what it trains: other models may be trained in contexts of their own.
    entered, left
        Called then. A context that one rank leaves by an error of its own is never left by all: nobody is told.

    """

    def __init__(
        self,
        model: nn.Module,
        parameters: Iterable[nn.Parameter],
        entered: Callable[[], None],
        left: Callable[[], None],
    ) -> None:
        self._wrapper = distributed(model)
        self._ours = {id(p) for p in parameters}
        self._entered, self._left = entered, left
        self._on = True
        self._stack = ExitStack()
        if self._wrapper is None:
            return
        self._stack.enter_context(replaced(Join, "__enter__", self._wrap_enter))
        self._stack.enter_context(replaced(Join, "__exit__", self._wrap_exit))
        if self._wrapper._join_config.enable:
            entered()  # before we came: it may be over by now, but the next one's end tells

    def close(self) -> None:
        """Hear no more."""
        self._on = False
        self._stack.close()

    def _concerns(self, join: Any) -> bool:
        return self._on and join._enable and any(map(self._is_ours, join._joinables))

    def _is_ours(self, joinable: Any) -> bool:
        if joinable is self._wrapper:
            return True
        groups = joinable.param_groups if isinstance(joinable, Optimizer) else []
        return any(id(p) in self._ours for group in groups for p in group["params"])

    def _wrap_enter(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def enter(join: Any) -> Any:
            result = original(join)
            with suppress(Exception):
                if self._concerns(join):
                    self._entered()
            return result

        return enter

    def _wrap_exit(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def leave(join: Any, kind: Any, value: Any, trace: Any) -> Any:
            try:
                result = original(join, kind, value, trace)
            except RuntimeError:
                if join._throw_on_early_termination:
                    self._tell_left(join)
                raise
            if kind is None or (join._throw_on_early_termination and str(value).startswith(_ONE_IS_OUT)):
                self._tell_left(join)
            return result

        return leave

    def _tell_left(self, join: Any) -> None:
        with suppress(Exception):
            if self._concerns(join):
                self._left()
