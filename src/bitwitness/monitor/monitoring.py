"""The monitor of one model as an instrument of its session: what is looked at at which moment of a step."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import islice

import torch
from torch.amp import GradScaler
from torch.optim.optimizer import Optimizer

from bitwitness.config.monitoring import MonitorConfig
from bitwitness.finding import Finding, Severity
from bitwitness.monitor.activations import Activations
from bitwitness.monitor.communication import Communication
from bitwitness.monitor.exchange import Exchange
from bitwitness.monitor.gradients import LocalGradients, present
from bitwitness.monitor.metrics import metrics_of
from bitwitness.monitor.outlet import Outlet, Sink
from bitwitness.monitor.sheet import Sheet
from bitwitness.monitor.state import State
from bitwitness.ranks import Ranks
from bitwitness.session.instrument import Forward, Instrument, Kind
from bitwitness.session.problems import Problems
from bitwitness.session.session import Session
from bitwitness.stats import bit_hash, norms_of
from bitwitness.store import RunWriter
from bitwitness.tap.compiled import is_compiled
from bitwitness.tap.modules import ROOT
from bitwitness.tap.moments import BackwardCall
from bitwitness.tap.slots import arguments_of

_NAMED = 4  # modules, where none is as it was asked for
_HASHED = 1 << 24  # elements of an input that is hashed


class ModelMonitoring(Instrument):
    """Hands each moment of a step to the part that looks: modules, local gradients, state.

    Parameters
    ----------
    session
        Whose steps these are.
    config
        What to look at.
    run
        The run folder's writer.
    ranks
        Who train together.
    sinks
        Where each step's numbers go, too.

    """

    def __init__(
        self, session: Session, config: MonitorConfig, run: RunWriter, ranks: Ranks, sinks: Sequence[Sink] = ()
    ) -> None:
        self.session, self.config = session, config
        self._problems = Problems(
            run, run.rank, lambda: session.step, source="monitor", failing="the monitor of {} failed", repeats=False
        )
        fail, self._safely = self._problems.fail, self._problems.safely
        root = session.root
        parameters = {name: p for name, p in root.named_parameters() if config.wants_parameter(name)}
        self._parameters = parameters
        self._whole = len(parameters) == sum(1 for _ in root.parameters())
        self._activations = Activations(root, config, metrics_of(config), fail)
        self._local = LocalGradients(session.model, parameters, zeros=config.zeros, fail=fail)
        self._state = State(parameters, config)
        self._communication = Communication(wanted=config.looks_at("comm"), fail=fail)
        names = list(parameters) if config.looks_at("grad", "param") else []
        asked = not {"rank_apart", "replicas"}.isdisjoint(config.rules)
        compares = config.watch and config.exchange and asked and config.ranks is None
        self._exchange = Exchange(ranks, names, fail) if compares and ranks.size > 1 else None
        self._outlet = Outlet(run, config, sinks, self._problems.note, self._exchange)
        self._sheet: Sheet | None = None
        self._losses: list[torch.Tensor] = []
        self._looked = 0
        self._ready = self._just_read = self._evaluated = False
        if config.targets and not (
            parameters or any(config.wants_module(name or ROOT) for name, _ in root.named_modules())
        ):
            known = ", ".join(name for name, _ in islice(root.named_modules(), 1, 1 + _NAMED)) or "none"
            self._problems.note(
                f"targets {', '.join(map(repr, config.targets))} match no module and no parameter of "
                f"{type(root).__name__} (its modules: {known}, …; bw.Monitor(print_struct=True) shows all)"
            )
        if any(is_compiled(module) for module in (session.model, *root.modules())) and config.looks_at("activation"):
            self._problems.note(
                "modules inside compiled code are not looked at: hooks there would be traced", severity=Severity.INFO
            )

    @property
    def steps_looked_at(self) -> int:
        """How many steps were looked at."""
        return self._looked

    @property
    def series_steps(self) -> int:
        """How many numbers of series were held against the rules so far."""
        return self._outlet.looked_at

    def findings(self) -> list[Finding]:
        """Return what the rules have said, once all that was seen is looked at."""
        self._outlet.flush()
        return list(self._outlet.findings)

    # -- being on ------------------------------------------------------------------------------------------------

    def paused(self) -> None:
        """Write what there is."""
        self.close_step()
        if sys.exc_info()[0] is None:
            self._outlet.flush()

    def flush(self) -> None:
        """Write what was seen of whole steps; return when it is on disk."""
        self._outlet.flush()

    def finish(self) -> None:
        """Write what was seen of whole steps, and take nothing more, while the training may still go on."""
        self._outlet.close()

    def removed(self) -> None:
        """Write what there is, and end."""
        self.close_step()
        self._outlet.close()

    def drop(self) -> None:
        """End, and leave nothing."""
        self._sheet = None
        self.session.remove(self)
        self._outlet.delete()

    def forked(self) -> None:
        """Let the parent write."""
        self._activations.detach()
        self._communication.detach()
        self._local.detach()
        self._sheet = None

    # -- moments -------------------------------------------------------------------------------------------------

    def step_begins(self, step: int) -> None:
        """Write the step before; look at this one, if it is asked for."""
        self.close_step()
        wanted = self.config.wants_step(step) and not self._outlet.broken
        if not wanted or (self.config.times and self._looked >= self.config.times):
            return
        self._looked += 1
        self._sheet = Sheet(step, zeros=self.config.zeros)
        self._losses = []
        self._ready = self._evaluated = False
        with self._safely("steps"):
            self._activations.attach(self._sheet)
            self._communication.attach(self._sheet)
            if self.config.looks_at("grad"):
                self._local.attach()

    @contextmanager
    def around_forward(self, forward: Forward) -> Iterator[None]:
        """Look at a call of the model, but for evaluations."""
        sheet = self._sheet if forward.kind in (Kind.TRAINING, Kind.INFERENCE) else None
        self._activations.evaluating = sheet is None
        if sheet is not None:
            sheet.micro = self.session.clock.micro
            with self._safely("inputs"):
                self._hash_inputs(sheet, forward)
            if forward.part is None:
                self._activations.root_called(forward.args, forward.kwargs)
        yield
        if sheet is not None and forward.part is None and not forward.raised:
            self._activations.root_returned(forward.args, forward.kwargs, forward.result)
        self._activations.evaluating = False

    def _hash_inputs(self, sheet: Sheet, forward: Forward) -> None:
        inputs = [tensor for _, tensor in arguments_of(forward.args, forward.kwargs)]
        sheet.hashed([bit_hash(tensor) for tensor in inputs if not tensor.is_meta and tensor.numel() <= _HASHED])

    @contextmanager
    def around_backward(self, call: BackwardCall) -> Iterator[None]:
        """Note the loss; have local gradients read before they are reduced."""
        sheet = self._sheet
        if sheet is None or self.session.backward_depth > 1 or self.session.evaluated:
            yield
            return
        if self.session.clock.begun and call.accumulates:  # else another model's, after this one's step
            with self._safely("loss"):
                roots = () if self._evaluated else call.roots  # a closure's later evaluations are no micro-batches
                self._losses += [t.detach() for t in roots if isinstance(t, torch.Tensor) and t.numel() == 1]
            if self.config.looks_at("grad"):
                with self._safely("local gradients"):
                    self._local.backward_begins(call.roots)
        try:
            yield
        finally:
            self._local.backward_ended()

    def gradients_ready(self, *, scaler: GradScaler | None = None, optimizer: Optimizer | None = None) -> None:
        """Look at the complete gradients, and at what an optimizer is about to read."""
        sheet = self._sheet
        if sheet is None or (optimizer is not None and not self.session.owns(optimizer)):
            return
        with self._safely("gradients"):
            if scaler is not None:
                sheet.scaled, sheet.scale = True, float(scaler.get_scale())
            if not self._ready:
                self._ready = True
                self._complete(sheet, before_optimizer=optimizer is not None and scaler is None)
            if optimizer is not None and scaler is None:
                self._state.before_optimizer(sheet, optimizer, looked_at=self._just_read)
            self._just_read = False

    def _complete(self, sheet: Sheet, *, before_optimizer: bool) -> None:
        """Look at the gradients as they are when they are complete, raw."""
        if self._exchange is not None and (found := self._exchange.meet()) is not None:
            self._outlet.compared(*found)
        reduced = self._local.take(sheet) or self._local.mode != "hold"
        grads = present(self._parameters)
        if not reduced and self.config.looks_at("grad") and grads:
            sheet.measure_all("grad", list(grads), list(grads.values()))
            self._just_read = before_optimizer  # nothing lies between: the optimizer reads the same
        if not self.config.looks_at("training"):
            return
        # rows of all gradients tell the norm, where nothing is done to these before they are looked at again
        if not self._whole or not grads:
            sheet.norm_of = None
        elif not reduced and self.config.looks_at("grad"):
            sheet.norm_of = "grad"
        elif before_optimizer and self.config.looks_at("grad_reduced"):
            sheet.norm_of = "grad_reduced"
        if sheet.norm_of is None and (every := [p.grad for p in self.session.root.parameters() if p.grad is not None]):
            norm = norms_of(every, every[0].device).double().square().sum().sqrt() / sheet.scale
            sheet.value("training", ".", "grad_norm", norm)

    def closure_ended(self, optimizer: Optimizer) -> None:
        """Look at the gradients that its first evaluation completed: those of the weights before the step."""
        if not self._evaluated:
            self.gradients_ready(optimizer=optimizer)
        self._evaluated |= self.session.owns(optimizer)

    def optimizer_stepped(self, optimizer: Optimizer) -> None:
        """Look at what an optimizer made of the parameters."""
        sheet = self._sheet
        if sheet is not None and self.session.owns(optimizer):
            with self._safely("optimizer"):
                self._state.after_optimizer(sheet, optimizer)

    def close_step(self) -> None:
        """Hand over what was seen of the step."""
        sheet, self._sheet = self._sheet, None
        self._activations.detach()
        self._communication.detach()
        self._local.detach()
        if sheet is None:
            return
        with self._safely("rows"):
            if self._ready:
                self._state.end_step(sheet)
            if self.config.looks_at("training"):
                self._training(sheet)
            if self._exchange is not None:
                self._exchange.expect()
            self._outlet.step(sheet.take())

    def _training(self, sheet: Sheet) -> None:
        if self._losses:
            losses = [x.reshape(1).to(torch.float32 if x.device.type == "mps" else torch.float64) for x in self._losses]
            # of micro-batches the sum: that is what the gradients are of, and each is divided by their number as a rule
            sheet.value("training", ".", "loss", torch.cat([x.to(losses[0].device) for x in losses]).sum())
        if sheet.scaled:
            sheet.value("training", ".", "loss_scale", sheet.scale)
        self._losses = []

    # -- failing open --------------------------------------------------------------------------------------------

    @property
    def problem(self) -> str | None:
        """What kept something from being looked at, the first of it."""
        return self._problems.first

    def failed(self, moment: str, error: Exception) -> None:
        """Say what ended the monitor."""
        self._problems.fail(moment, error)
