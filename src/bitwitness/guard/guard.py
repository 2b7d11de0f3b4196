"""``bw.Guard``: put a training under watch.

with bw.Guard(model, optimizer, out="run/"):
    train()
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from typing import Any

from torch import nn
from torch.optim.optimizer import Optimizer

from bitwitness.config import Config
from bitwitness.errors import UsageError
from bitwitness.finding import Event, Finding, Verdict
from bitwitness.guard.alerting import Alerting
from bitwitness.guard.checkpoints import GuardedCheckpoints
from bitwitness.guard.coverage import coverage_table
from bitwitness.guard.face import Face
from bitwitness.guard.guardwatch import GuardWatch
from bitwitness.guard.memory import learned, relearn
from bitwitness.guard.roots import watched_roots
from bitwitness.guard.selftest import failed, prove
from bitwitness.ranks import Ranks
from bitwitness.respond.alerts.metrics import check
from bitwitness.respond.alerts.outlet import on
from bitwitness.session.reporter import Reporter
from bitwitness.session.session import Session
from bitwitness.tap.modules import unwrap


class Guard(Face):
    """Watches a training: senses wrong numbers, proves them by re-execution, and acts as configured.

    Parameters
    ----------
    model
        What the training calls: an `nn.Module`, or the `DistributedDataParallel` around it. Build the guard after the
        wrapper, on every rank.
    optimizer
        One optimizer or several; without any, every optimizer that steps one of the model's parameters counts.
    out
        Folder for what is recorded; none by default.
    config
        A `Config`, or a path to a TOML file; environment variables and keywords override it.
    on_event
        Called with each `Finding`, `Verdict` and `Note` on the rank that records it, in the training's thread. After an
        error in it, which is said, it is not called again.
    clock
        Returns seconds; times the reference schemes' strikes and checksum windows.
    **overrides
        Single settings, for example ``act="protect"``.

    Raises
    ------
    UsageError
        If the model has no parameters, is guarded already, or the optimizer holds none of its parameters.
    ConfigError
        If a setting is not understood.

    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | Iterable[Optimizer] | None = None,
        *,
        out: str | os.PathLike[str] | None = None,
        config: Config | str | os.PathLike[str] | None = None,
        on_event: Callable[[Event], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
        **overrides: Any,
    ) -> None:
        super().__init__(model, optimizer, out=out, config=config, on_event=on_event, overrides=overrides)
        check(self.config.alerts)
        self._clock = clock
        self.watch: GuardWatch | None = None
        self._alerting: Alerting | None = None

    def _refuse(self) -> None:
        super()._refuse()
        root = unwrap(self.model)
        if any(root is other for other in watched_roots(GuardWatch)):
            raise UsageError(
                f"this {type(root).__name__} is guarded already; one guard watches one model: close() the earlier one first"
            )

    def _begin(self, session: Session) -> None:
        super()._begin(session)
        self._seal_checkpoints(session)
        self._begin_alerting(session)

    def _seal_checkpoints(self, session: Session) -> None:
        if self.reporter is not None and self.watch is not None:
            self._stack.enter_context(
                GuardedCheckpoints(
                    self.config,
                    self.reporter,
                    self.watch.ranks.in_job,
                    step=lambda: session.step,
                    ended=session.run.ended_by,
                )
            )

    def _make_watch(self, session: Session, ranks: Ranks, reporter: Reporter) -> GuardWatch:
        optimizers = self.optimizers or None
        watch = GuardWatch(session, ranks, reporter, self.config, optimizers=optimizers, clock=self._clock)
        watch.self_tests = prove(watch.sensors.on) if self.config.self_test else {}
        for name, reason in failed(watch.self_tests).items():
            reporter.failure(f"self-test of {name}", RuntimeError(reason), 0)
        return watch

    def _begin_alerting(self, session: Session) -> None:
        if not on(self.config.alerts) or self.reporter is None:
            return
        try:
            self._alerting = alerting = Alerting(
                self.config.alerts, self._on(), None if self._writer is None else self._writer.path
            )
            self._stack.callback(alerting.close)
        except Exception as error:
            self.reporter.failure("alerts", error, session.step)

    def _last_words(self) -> None:
        super()._last_words()
        if self._alerting is not None:
            self._alerting.close()

    def _finish(self, *, broken_off: bool) -> None:
        if self.watch is not None:
            self.watch.finish(broken_off=broken_off)

    def _describe(self) -> dict[str, Any]:
        return {"devices": [str(device) for device in self._on().investigation.devices]}

    def coverage(self) -> dict[str, Any]:
        """Return what was seen so far of what there was: parameters, steps, operators, and what is not covered and why."""
        return {} if self.watch is None else coverage_table(self.watch)

    def state_dict(self) -> dict[str, Any]:
        """Return what was learned of this training, tensors and numbers, to be saved beside a checkpoint of this rank.

        Raises
        ------
        UsageError
            If the guard is not on.

        """
        return learned(self._on())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with what `state_dict` gave, after a restart; the model must have the same parameters.

        Raises
        ------
        UsageError
            If the guard is not on, or the state is of another model.

        """
        relearn(self._on(), state)

    def _on(self) -> GuardWatch:
        if self.watch is None:
            raise UsageError("this Guard is not on yet: enter it (with Guard(...) as guard, or guard.start()) first")
        return self.watch

    @property
    def findings(self) -> list[Finding]:
        """Suspicions of this rank so far, in order, the newest 10,000; healthy trainings have a few, which accuse nobody."""
        return [] if self.reporter is None else list(self.reporter.findings)

    @property
    def verdicts(self) -> list[Verdict]:
        """What was concluded so far, in order, the same on all ranks; empty for a healthy training."""
        return [] if self.reporter is None else list(self.reporter.verdicts)
