"""``bw.trace_nonfinite``, ``bw.NonfiniteTracer``: who made the first NaN, for users without the guard.

with bw.trace_nonfinite(model, optimizer) as trace:
    train()
print(trace.findings)
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from types import TracebackType
from typing import Any, Self

from torch import nn
from torch.optim.optimizer import Optimizer

from bitwitness.config import Config, only_nonfinite
from bitwitness.finding import Finding
from bitwitness.guard.guard import Guard


class NonfiniteTracer:
    """Watches a training for NaN and Inf and names who made the first ones.

    Each step's loss, gradients and buffers are looked at when they are complete, at the price of one wait; a step
    that is not finite is run again, operator by operator, and the first operator that made NaN or Inf from finite
    inputs is reported with its module, line, dtypes and ranges, on stderr and in ``findings``.

    Parameters
    ----------
    model, optimizer
        As for `Guard`; the optimizer may be left out.
    out
        Folder for what is recorded: events, and what the origin read and wrote as tensors; none by default.
    mode
        Which operators to name: ``compute`` (``aicore_overflow``), ``accumulate`` (``atomic_overflow``), or ``all``.
    show_all
        Print all origins of a step, not the earliest alone.
    config
        A `Config`, or a path to a TOML file.
    **overrides
        Single settings.

    Raises
    ------
    UsageError, ConfigError
        As `Guard`.

    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | Iterable[Optimizer] | None = None,
        *,
        out: str | os.PathLike[str] | None = None,
        mode: str = "all",
        show_all: bool = False,
        config: Config | str | os.PathLike[str] | None = None,
        **overrides: Any,
    ) -> None:
        settings = {**only_nonfinite(), "nonfinite.mode": mode, "nonfinite.show_all": show_all, **overrides}
        self._guard = Guard(model, optimizer, out=out, config=config, **settings)

    def __enter__(self) -> Self:
        self._guard.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._guard.__exit__(kind, error, trace)

    @property
    def findings(self) -> list[Finding]:
        """What was found so far, in order; of each step the earliest origin first. Empty for a healthy training."""
        watch = self._guard.watch
        return [] if watch is None else list(watch.proceedings.tracing.findings)


def trace_nonfinite(
    model: nn.Module, optimizer: Optimizer | Iterable[Optimizer] | None = None, **settings: Any
) -> NonfiniteTracer:
    """Return a `NonfiniteTracer`, to be entered: ``with bw.trace_nonfinite(model) as trace:``."""
    return NonfiniteTracer(model, optimizer, **settings)
