"""``bw.trace_nonfinite``, ``bw.NonfiniteTracer``: who made the first NaN, for users without the guard.

with bw.trace_nonfinite(model, optimizer) as trace:
    train()
print(trace.findings)
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from typing import Any

from torch import nn
from torch.optim.optimizer import Optimizer

from bitwitness.config import TRACER_SETTINGS, Config
from bitwitness.finding import Event, Finding
from bitwitness.guard.coverage import nonfinite_table
from bitwitness.guard.face import Face
from bitwitness.guard.tracerwatch import TracerWatch
from bitwitness.ranks import Ranks
from bitwitness.session.reporter import Reporter
from bitwitness.session.session import Session


class NonfiniteTracer(Face):
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

    what = "tracer"

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | Iterable[Optimizer] | None = None,
        *,
        out: str | os.PathLike[str] | None = None,
        mode: str | None = None,
        show_all: bool | None = None,
        config: Config | str | os.PathLike[str] | None = None,
        on_event: Callable[[Event], None] | None = None,
        **overrides: Any,
    ) -> None:
        given = {"nonfinite.mode": mode, "nonfinite.show_all": show_all}
        settings = {
            **TRACER_SETTINGS,
            **{name: value for name, value in given.items() if value is not None},
            **overrides,
        }
        super().__init__(model, optimizer, out=out, config=config, on_event=on_event, overrides=settings)
        self.watch: TracerWatch | None = None

    def _make_watch(self, session: Session, ranks: Ranks, reporter: Reporter) -> TracerWatch:
        return TracerWatch(session, ranks, reporter, self.config, optimizers=self.optimizers or None)

    def _finish(self, *, broken_off: bool) -> None:
        if self.watch is not None:
            self.watch.finish(broken_off=broken_off)

    def coverage(self) -> dict[str, Any]:
        """Return how many steps were looked at, how many were not finite, and what is not covered and why."""
        return {} if self.watch is None else nonfinite_table(self.watch)

    @property
    def findings(self) -> list[Finding]:
        """What was found so far, in order; of each step the earliest origin first. Empty for a healthy training."""
        return [] if self.watch is None else list(self.watch.tracing.findings)


def trace_nonfinite(
    model: nn.Module, optimizer: Optimizer | Iterable[Optimizer] | None = None, **settings: Any
) -> NonfiniteTracer:
    """Return a `NonfiniteTracer`, to be entered: ``with bw.trace_nonfinite(model) as trace:``."""
    return NonfiniteTracer(model, optimizer, **settings)
