"""What the guard and the non-finite tracer have in common for their users: a config, a run folder, what is said at the end."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Iterable, Sequence
from types import TracebackType
from typing import Any

from torch import nn
from torch.optim.optimizer import Optimizer

from bitwitness.config import Config, load_config, to_dict
from bitwitness.errors import UsageError
from bitwitness.finding import Event, Note, Severity
from bitwitness.guard.watch import Watch
from bitwitness.nonfinite.saturation import overflow_mode
from bitwitness.ranks import Ranks
from bitwitness.ranks.process_groups import wrappers_noticed
from bitwitness.respond.final import PROCESS
from bitwitness.session.entered import Entered
from bitwitness.session.reporter import Reporter
from bitwitness.session.session import Session
from bitwitness.store import RunWriter
from bitwitness.store.health import health_of
from bitwitness.store.life import Life
from bitwitness.tap.modules import unwrap


class Face(Entered):
    """Puts a training under watch while entered; parameters and errors as `Guard`."""

    what = "guard"
    """Its name in messages and in run folders."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | Iterable[Optimizer] | None,
        *,
        out: str | os.PathLike[str] | None,
        config: Config | str | os.PathLike[str] | None,
        on_event: Callable[[Event], None] | None,
        overrides: dict[str, Any],
    ) -> None:
        super().__init__(model)
        if out is not None:
            overrides["out"] = os.fspath(out)
        loaded = load_config(config, overrides)
        self.config, self._warnings = loaded.config, loaded.warnings
        self.optimizers = _as_list(optimizer)
        self._on_event = on_event
        _check(type(self).__name__, model, self.optimizers)
        self._writer: RunWriter | None = None
        self._ended = False
        self.watch: Watch | None = None
        self.reporter: Reporter | None = None
        self.beside: list[str] = []
        """What the process trains beside, and the run folder is to name."""

    # -- what differs --------------------------------------------------------------------------------------------

    def _make_watch(self, session: Session, ranks: Ranks, reporter: Reporter) -> Watch:
        raise NotImplementedError

    def _describe(self) -> dict[str, Any]:
        """Return what ``run.json`` says of it."""
        return {}

    def _finish(self, *, broken_off: bool) -> None:
        """Look at what the training left open; ``broken_off``: it ends by an error."""

    def coverage(self) -> dict[str, Any]:
        """Return what was seen so far of what there was, and what is not covered and why; empty before it is entered."""
        raise NotImplementedError

    # -- entering and leaving ------------------------------------------------------------------------------------

    def _refuse(self) -> None:
        PROCESS.refuse()

    def _begin(self, session: Session) -> None:
        self._stack.enter_context(wrappers_noticed())
        ranks = session.run.ranks(self.config.ranks.deadline_s)
        if self.config.out is not None:
            self._writer = session.run.folder(self.config.out, self.what, self.config.ranks.deadline_s)
            self._stack.callback(session.run.leave, self._writer, self.what)
        self.reporter = reporter = Reporter(
            self._writer, ranks.in_job, quiet=self.config.quiet, on_event=self._on_event
        )
        for warning in self._warnings:
            reporter.once(warning)
        self._say_overflow_mode(reporter)
        self.watch = watch = self._make_watch(session, ranks, reporter)
        self._stack.callback(watch.reader.leave, watch)
        self._stack.enter_context(PROCESS.over(session.entry, self.close))
        self._join(session, watch)
        if self._writer is not None:
            self._writer.describe(
                config=to_dict(self.config),
                world_size=self._writer.world_size,
                parameters=len(watch.reader.root.parameters),
                **self._describe(),
            )
            watch.description.started(session.root)

    def _say_overflow_mode(self, reporter: Reporter) -> None:
        """Say it where a device saturates, so that an overflow gives no infinity to be seen."""
        device = next(unwrap(self.model).parameters()).device.type
        mode = overflow_mode(os.environ, device) if self.config.nonfinite.enabled else None
        if mode is None:
            return
        text, wrong = mode
        reporter.once(text, severity=Severity.WARNING if wrong else Severity.INFO)
        if not wrong:
            reporter.say(text)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._ended or (self.watch is not None and self.watch.inherited):
            return
        self._ended = True
        self._note_ending(error)
        try:
            if self.watch is not None:
                self._finish(broken_off=kind is not None and kind is not KeyboardInterrupt)
            self._report()
        except Exception as failure:
            if self.reporter is not None:
                self.reporter.failure("closing report", failure, self.session.step)
        finally:
            self._stack.close()

    def _last_words(self) -> None:
        super()._last_words()
        if self.watch is not None and not self.watch.inherited:
            self._report()

    def let_go(self) -> bool:
        """Leave the model to another watch, with nothing collective; return whether steps were judged until now."""
        watch = self.watch
        if watch is not None and (watch.steps_judged or watch.reader.optimizer_steps):
            self.close()
            return True
        if self._session is not None and self._writer is not None:
            self._session.run.leave(self._writer, self.what, unused=True)
        self._stack.close()
        return False

    @property
    def folder(self) -> str | None:
        """The run folder; None where nothing is recorded."""
        return None if self._writer is None else str(self._writer.path)

    @property
    def own_seconds(self) -> float:
        """Seconds that it attributes to itself so far (on a CPU: of process time)."""
        return 0.0 if self.watch is None else self.watch.own_seconds

    def _report(self) -> None:
        watch, reporter = self.watch, self.reporter
        if watch is None or reporter is None:
            return
        table = self.coverage()
        if self.beside:
            table["not_covered"] = [*table["not_covered"], *self.beside]
        reporter.event(Note("coverage", self.session.step, watch.ranks.in_job, evidence=table))
        if watch.ranks.rank == 0:
            ending = self.session.run.ending
            health = health_of([table], reporter.verdicts, Life(ending.state, ending.by))
            folder = None if self._writer is None else shlex.quote(str(self._writer.path))
            silent = self.config.quiet and health.status == "fine"
            for line in (
                () if silent else health.lines(f"bitwitness status -v {folder}" if folder else "--out DIR keeps them")
            ):
                reporter.say(line)
        if watch.reader.root.forwards_seen and not watch.reader.optimizer_steps and not watch.steps_judged:
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
    return [optimizer] if isinstance(optimizer, Optimizer) or not isinstance(optimizer, Iterable) else list(optimizer)


def _check(name: str, model: nn.Module, optimizers: list[Optimizer]) -> None:
    root = unwrap(model)
    if not any(p.requires_grad for p in root.parameters()):
        raise UsageError(
            f"{type(root).__name__} has no parameters that require a gradient; there is nothing to guard. Pass the model "
            "that is trained, after its parameters are made"
        )
    ours = {id(p) for p in root.parameters()}
    for optimizer in optimizers:
        if not isinstance(optimizer, Optimizer):
            raise UsageError(f"{name} expects torch optimizers, not {type(optimizer).__name__}")
        if not any(id(p) in ours for group in optimizer.param_groups for p in group["params"]):
            raise UsageError(
                f"the {type(optimizer).__name__} given holds none of the parameters of {type(root).__name__}; was it made "
                "before the model was replaced or moved?"
            )


def note_models(faces: Sequence[Face], out: str | None) -> None:
    """Have the first model's run folder, ``out``, tell how many models of this process have one: what is gone is missed."""
    writers = {face.folder: face._writer for face in faces if face._writer is not None}
    first = None if out is None else writers.get(os.path.abspath(out))
    if first is not None and len(writers) > 1:
        first.describe(models=len(writers))
