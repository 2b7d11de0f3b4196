"""``bw.Guard``: put a training under watch.

with bw.Guard(model, optimizer, out="run/"):
    train()
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from types import TracebackType
from typing import Any, Self

from torch import nn
from torch.optim.optimizer import Optimizer

from bitwitness.config import Config, load_config, to_dict
from bitwitness.errors import UsageError
from bitwitness.finding import Event, Finding, Note, Severity, Verdict
from bitwitness.guard.coverage import coverage_lines, coverage_table, nonfinite_lines
from bitwitness.guard.forked import inert_in_children
from bitwitness.guard.limits import PAUSED
from bitwitness.guard.memory import learned, relearn
from bitwitness.guard.roots import add_root, discard_root, guarded_roots
from bitwitness.guard.selftest import prove
from bitwitness.guard.watch import Watch
from bitwitness.nonfinite.saturation import overflow_mode
from bitwitness.ranks import Ranks
from bitwitness.respond.final import PROCESS
from bitwitness.respond.reporter import Reporter
from bitwitness.respond.skip import SkipPoints
from bitwitness.store import RunWriter, claim_folder, release_folder
from bitwitness.tap.company import join_ranks, wrappers_noticed
from bitwitness.tap.holdpoints import HoldPoints
from bitwitness.tap.modules import unwrap
from bitwitness.tap.owners import Owners
from bitwitness.tap.stepcount import StepCounter


class Guard:
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
        if out is not None:
            overrides["out"] = os.fspath(out)
        loaded = load_config(config, overrides)
        self.config, self._warnings = loaded.config, loaded.warnings
        self.model = model
        self._clock = clock
        self._on_event = on_event
        self.optimizers = _as_list(optimizer)
        _check(model, self.optimizers)
        self._stack = ExitStack()
        self._used = False
        self._points: HoldPoints | None = None
        self._inherited = False
        self._writer: RunWriter | None = None
        self.watch: Watch | None = None
        self.reporter: Reporter | None = None

    def __enter__(self) -> Self:
        PROCESS.refuse()
        root = unwrap(self.model)
        if self._used:
            raise UsageError("this Guard was used before; make a new one for another training")
        if root in guarded_roots():
            raise UsageError(
                f"this {type(root).__name__} is guarded already; one guard watches one model: close() the earlier one first"
            )
        self._used = True
        try:
            self._begin(root)
        except BaseException:
            self._stack.close()
            raise
        return self

    def _begin(self, root: nn.Module) -> None:
        inert_in_children(self)
        self._stack.enter_context(wrappers_noticed())
        ranks = join_ranks(self.model, self.config.ranks.deadline_s)
        self._stack.callback(ranks.close)
        self._writer = writer = self._open_writer(ranks)
        self.reporter = Reporter(writer, ranks.in_job, on_event=self._on_event)
        if writer is not None:
            self._stack.callback(writer.close)
        for warning in self._warnings:
            self.reporter.once(warning)
        mode = overflow_mode(os.environ, next(root.parameters()).device.type) if self.config.nonfinite.enabled else None
        if mode is not None:
            self.reporter.once(mode[0], severity=Severity.WARNING if mode[1] else Severity.INFO)
            if not mode[1]:
                self.reporter.say(mode[0])
        for name, reason in (prove() if self.config.self_test else {}).items():
            self.reporter.failure(f"self-test of {name}", RuntimeError(reason), 0)
        self.watch = Watch(self.model, self.optimizers or None, self.config, ranks, self.reporter, self._clock)
        add_root(root)
        self._stack.callback(discard_root, root)
        self._stack.callback(self.watch.close)
        clock, skip = self.watch.clock, self.watch.proceedings.skip
        points = SkipPoints(self.watch, skip, lambda: clock.step)
        listener = PROCESS.over(self.watch.root.entry, points, self.close)
        self._looking = HoldPoints(self._stack.enter_context(listener))
        self._passed = StepCounter(clock, Owners(root.parameters(), self.optimizers or None).ours)
        self._counting = HoldPoints(self._passed, counting=True)
        self._stack.callback(self._leave)
        self._enter(self._looking, away=False)
        if writer is not None:
            writer.describe(
                config=to_dict(self.config),
                world_size=ranks.size,
                devices=[str(device) for device in self.watch.proceedings.devices],
                parameters=len(self.watch.root.parameters),
            )
            self.watch.description.started(root)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._inherited:
            return
        try:
            if self.watch is not None:
                self.watch.finish(broken_off=kind is not None and kind is not KeyboardInterrupt)
            self._report()
        except Exception as failure:
            if self.reporter is not None and self.watch is not None:
                self.reporter.failure("closing report", failure, self.watch.clock.step)
        finally:
            self._stack.close()

    def _open_writer(self, ranks: Ranks) -> RunWriter | None:
        if self.config.out is None:
            return None
        folder = ranks.tell(str(claim_folder(self.config.out)) if ranks.rank == 0 else "", 0)
        return RunWriter(folder, ranks.rank, ranks.size)

    def start(self) -> Self:
        """Enter the guard without a ``with``, as in a notebook; `close` leaves it."""
        return self.__enter__()

    def close(self) -> None:
        """Leave the guard, as at the end of a ``with``."""
        self.__exit__(None, None, None)

    def let_go(self) -> bool:
        """Leave the model to another guard, with nothing collective; return whether steps were looked at until now.

        Where none was, as in a dry run, nothing is said and the run folder is given back.
        """
        watch = self.watch
        if watch is not None and (watch.steps_held or watch.optimizer_steps):
            self.close()
            return True
        self._stack.close()
        if self._writer is not None:
            release_folder(self._writer.path, self._writer.rank)
        return False

    def after_fork(self, *, worker: bool) -> None:
        """Become inert in a forked child: hooks and patches go; the ranks and the run folder are the parent's."""
        del worker
        if self._inherited:
            return
        self._inherited = True
        self._leave()
        if self.watch is not None:
            self.watch.close()
        discard_root(unwrap(self.model))

    def pause(self) -> None:
        """Look away: nothing is checked until `resume`; steps are counted meanwhile, and no more."""
        if self._points is not None:
            self._enter(self._counting, away=True)

    def resume(self) -> None:
        """Look again, from the next forward on."""
        if self._points is not None:
            self._enter(self._looking, away=False)

    def _enter(self, points: HoldPoints, *, away: bool) -> None:
        if points is not self._points:
            self._leave()
            watch = self._on()
            watch.root.paused = watch.root.away = away
            if watch.clock.begun:
                watch.root.record.give_up(PAUSED)
            self._points = points.__enter__()

    def _leave(self) -> None:
        """Hear of nothing any more."""
        if self._points is not None:
            self._on().root.paused, self._on().root.away = True, False
            self._points.__exit__(None, None, None)
            self._points = None

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

    def _on(self) -> Watch:
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

    @property
    def own_seconds(self) -> float:
        """Seconds that the guard attributes to itself so far (on a CPU: of process time)."""
        return 0.0 if self.watch is None else self.watch.own_seconds

    def coverage(self) -> dict[str, Any]:
        """Return what was seen so far of what there was: parameters, steps, operators, and what is not covered and why."""
        if self.watch is None or self.reporter is None:
            return {}
        return coverage_table(self.watch, self.reporter, paused=self._passed.steps)

    def _report(self) -> None:
        watch, reporter = self.watch, self.reporter
        if watch is None or reporter is None:
            return
        table = self.coverage()
        reporter.event(Note("coverage", watch.clock.step, watch.ranks.in_job, evidence=table))
        if watch.ranks.rank == 0:
            for line in coverage_lines(table) if not self.config.nonfinite.only else nonfinite_lines(watch, table):
                reporter.say(line)
        if watch.root.forwards_seen and not watch.optimizer_steps and not watch.steps_held:
            reporter.note(
                Note(
                    "no optimizer step was seen: the guard could check nothing. Does another optimizer own the parameters, "
                    "or does the training loop run outside the guard?",
                    severity=Severity.WARNING,
                    rank=watch.ranks.in_job,
                ),
                speak=True,
            )


def _as_list(optimizer: Optimizer | Iterable[Optimizer] | None) -> list[Optimizer]:
    if optimizer is None:
        return []
    return [optimizer] if isinstance(optimizer, Optimizer) else list(optimizer)


def _check(model: Any, optimizers: list[Optimizer]) -> None:
    if not isinstance(model, nn.Module):
        raise UsageError(f"Guard expects a torch.nn.Module as its first argument, not {type(model).__name__}")
    root = unwrap(model)
    if not any(p.requires_grad for p in root.parameters()):
        raise UsageError(
            f"{type(root).__name__} has no parameters that require a gradient; there is nothing to guard. Pass the model "
            "that is trained, after its parameters are made"
        )
    ours = {id(p) for p in root.parameters()}
    for optimizer in optimizers:
        if not isinstance(optimizer, Optimizer):
            raise UsageError(f"Guard expects torch optimizers, not {type(optimizer).__name__}")
        if not any(id(p) in ours for group in optimizer.param_groups for p in group["params"]):
            raise UsageError(
                f"the {type(optimizer).__name__} given holds none of the parameters of {type(root).__name__}; was it made "
                "before the model was replaced or moved?"
            )
