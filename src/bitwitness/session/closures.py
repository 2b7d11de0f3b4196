"""Models that are met inside an optimizer's closure, as all of Lightning's are: their own moments come too late for it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from torch.optim.optimizer import Optimizer

from bitwitness.session.entered import Entered
from bitwitness.tap.optimizerhooks import told_of_steps, with_closure


def closures_told(entered: Callable[[], Sequence[Entered]]) -> Callable[[], None]:
    """Tell those that are entered within a closure that it has completed the gradients; return what ends that.

    ``entered`` says who is, at any time. Who was before the optimizer's step began hears it from its session.
    """

    def before(optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        return with_closure(args, kwargs, functools.partial(told_at_its_end, optimizer))

    def told_at_its_end(optimizer: Optimizer, original: Callable[..., Any]) -> Callable[..., Any]:
        known = set(map(id, entered()))

        @functools.wraps(original)
        def closure(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            for one in entered():
                if id(one) not in known:
                    one.session.closure_ended(optimizer)
            return result

        return closure

    return told_of_steps(_nothing, before)


def _nothing(_optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
    """Stand for what would be told after a step."""
