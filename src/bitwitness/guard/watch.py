"""One training step under guard: what is looked at, when, and what follows from it.

`Watch` hears of the moments of a step (`tap.holdpoints`), reads the light features at the hold point, asks the sensors,
exchanges one number with the other ranks, and hands a suspicious step to the judge and its verdict to the responder.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.amp import GradScaler
from torch.optim.optimizer import Optimizer

from bitwitness.config import Config
from bitwitness.errors import EXIT_RANK_LOST, SideChannelError, TrainingStopped
from bitwitness.guard.deepsteps import DeepSteps
from bitwitness.guard.description import Description
from bitwitness.guard.edits import Edits
from bitwitness.guard.heldstep import HeldStep
from bitwitness.guard.lightreader import LightReader
from bitwitness.guard.limits import BY_HAND, IN_BACKWARD, UNSEEN
from bitwitness.guard.proceedings import Proceedings
from bitwitness.guard.sensors import Sensors
from bitwitness.guard.uneven import UnevenSteps
from bitwitness.ranks import Ranks
from bitwitness.respond.reporter import Reporter
from bitwitness.sense.light import LightStep
from bitwitness.stats import Features
from bitwitness.tap.capture import StepRecord
from bitwitness.tap.clock import StepClock, Timer
from bitwitness.tap.gradients import LocalGradients
from bitwitness.tap.holdpoints import BackwardCall, StepListener
from bitwitness.tap.lossgraph import LossGraph
from bitwitness.tap.modes import scripts_modes_off
from bitwitness.tap.owners import Owners
from bitwitness.tap.root import RootTap
from bitwitness.tap.traffic import strangers

_RANGES_EVERY = 4  # deep steps
_STEPS_UNSEEN = 3  # a script's model may be found in its first forward, which goes by


class Watch(StepListener):
    """Listens to one root's training steps.

    Parameters
    ----------
    model
        What the training calls; DistributedDataParallel or the module itself.
    optimizers
        Those whose steps count; None takes every optimizer that holds one of the root's parameters.
    config, ranks, reporter
        How to guard, the other ranks, and where findings go.

    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: list[Optimizer] | None,
        config: Config,
        ranks: Ranks,
        reporter: Reporter,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config = config
        self.clock = StepClock()
        self.reporter = reporter
        self.ranks = ranks
        self.steps_held = 0
        self.deep = DeepSteps(config)
        self.optimizer_steps = 0
        self.root = RootTap(
            model,
            self.clock,
            capture_limit=config.replay.capture_limit_mib << 20,
            around_forward=self._deep_tap,
            local_gradients=self._collect,
            fail=self._fail,
            taped=config.nonfinite.enabled or config.replay.enabled,
            hashed=not config.nonfinite.only,
            dropped=self._trace_open_loss if config.nonfinite.only else None,
            alone=ranks.size == 1,
            retrained=self._parameters_changed,
        )
        self._timed = Timer(self.root.now)
        self._optimizers, self._seconds = optimizers, clock
        self._owners = Owners(self.root.parameters.values(), optimizers)
        self.gradients = self._local_gradients()
        self.sensors = Sensors(config, self.root, ranks, reporter, clock)
        self.proceedings = Proceedings(config, self.root, self.gradients, ranks, reporter)
        parameters = list(self.root.parameters.values())
        self.uneven = UnevenSteps(model, parameters, ranks, reporter, self.sensors, self.clock, self.deep)
        self.proceedings.interpret = self.uneven.interpret
        self.description = Description(reporter)
        self._reader = LightReader(self.root, self.gradients, ranks.rank)
        self.edits = Edits(self.root, self.gradients)
        self._held = self._held_step()
        self._losses: list[torch.Tensor] = []
        self._armed = False
        self._busy = False
        self._stepped_early = False
        self._forwards_looked_at = 0
        self.limits: Counter[str] = Counter()
        """Why steps could not be run again, or not be healed, and how many."""
        self.unrepeated_losses: Counter[str] = Counter()
        """Why loss code outside the model could not be run again, and in how many steps."""
        self._own_before = 0.0
        self._look_again_at = -1

    def _local_gradients(self) -> LocalGradients:
        parameters = list(self.root.parameters.values())
        return LocalGradients(self.root.wrapper, parameters, self.root.device, norms_only=self.config.nonfinite.only)

    def _held_step(self) -> HeldStep:
        parts = (self.gradients, self.sensors, self.proceedings, self.deep, self.ranks, self.edits)
        return HeldStep(self.root, *parts)

    def _parameters_changed(self) -> None:
        """Watch other parameters from now on: the script has frozen or unfrozen some. All ranks do so at the same step."""
        self.sensors.close()
        self.gradients.close()
        self._owners = Owners(self.root.parameters.values(), self._optimizers)
        self.gradients = self._local_gradients()
        self.sensors = Sensors(self.config, self.root, self.ranks, self.reporter, self._seconds)
        self.proceedings = self.proceedings.renewed(self.gradients)
        self._reader = LightReader(self.root, self.gradients, self.ranks.rank)
        self.edits = Edits(self.root, self.gradients)
        self._held = self._held_step()
        self.uneven.sensors = self.sensors

    def close(self) -> None:
        """Remove every hook."""
        self.uneven.close()
        self.sensors.close()
        self.gradients.close()
        self.root.close()

    # -- moments -------------------------------------------------------------------------------------------------

    @contextmanager
    def around_backward(self, call: BackwardCall) -> Iterator[None]:
        """Record a backward; on a deep step, look at its operators."""
        if self._busy or self.root.thread.is_another():
            yield
            return
        tap: AbstractContextManager[Any] = nullcontext()
        try:
            with scripts_modes_off():
                self.root.begin_backward(call)
                self.gradients.begin_backward(reducing=self.root.reducing, first=self.root.first)
                tap = self._deep_tap()
        except Exception as error:
            self._fail("backward", error)
        try:
            with tap:
                yield
        finally:
            with scripts_modes_off():
                self._backward_ended(call)

    def _backward_ended(self, call: BackwardCall) -> None:
        if not self.root.end_backward():
            return
        self._armed = True
        self._losses += [t.detach() for t in call.roots if isinstance(t, torch.Tensor) and t.numel() == 1]
        self._compare_edits()
        if self._stepped_early:
            self._look(None)

    def _compare_edits(self) -> None:
        try:
            with self._timed():
                self.edits.backward_ended()
        except Exception as error:
            self._fail("local gradients", error)

    def hold(self, *, scaler: GradScaler | None = None, optimizer: Optimizer | None = None) -> None:
        """Look at the step's gradients, and act on what they show."""
        if self._busy:
            return
        if self._armed:
            self.root.window.close()
        if optimizer is not None and not self._owners.ours(optimizer):
            return
        if optimizer is None and (self.gradients.unreduced or self.root.in_backward):
            return  # gradients are clipped that one rank alone may have made, to look at them
        if optimizer is not None and self.root.in_backward:
            self._stepping_early(optimizer)
            return
        if optimizer is not None and not self._armed and self._gradients_by_hand():
            self.root.record.give_up(BY_HAND)
            self._armed = True
        self._look(scaler)

    def closure_ended(self, optimizer: Optimizer) -> None:
        """Look at the gradients that a closure has completed; each call of it is a hold point of its own."""
        self.hold(optimizer=optimizer)

    def _gradients_by_hand(self) -> bool:
        """Tell whether the model was run since the last look, and has gradients that no backward put there."""
        ran = self.root.forwards_seen > self._forwards_looked_at
        return (ran or not self.root.forwards_seen) and any(p.grad is not None for p in self.root.parameters.values())

    def _stepping_early(self, optimizer: Optimizer) -> None:
        """Describe what an optimizer that runs inside the backward is about to use."""
        self._stepped_early = True
        self.root.record.give_up(IN_BACKWARD)
        try:
            self.gradients.collect_early(p for group in optimizer.param_groups for p in group["params"])
        except Exception as error:
            self._fail("local gradients", error)

    def _look(self, scaler: GradScaler | None) -> None:
        """Look at the step, once after each of its backwards; it ends here."""
        if self._armed:
            self._armed = False
            self._forwards_looked_at = self.root.forwards_seen
            self._busy = True
            ordinary = False
            try:
                with self._timed(), scripts_modes_off():
                    ordinary = self._hold(scaler)
            except SideChannelError as error:
                self._lost(error)
            except Exception as error:
                self._fail("hold point", error)
            finally:
                self._busy = False
                self._stepped_early = False
                self.edits.step_ended()
                self.clock.end_step()
                self.root.ledger.forget()
                self.root.window.forget()
            self._note_times(ordinary=ordinary)

    def finish(self, *, broken_off: bool) -> None:
        """Look at what the training left open where only NaN and Inf are looked for.

        ``broken_off``: it ends by an error, as scripts do that stop at a loss of NaN, before its backward perhaps. Gradients
        are looked at only alone: other ranks may have ended otherwise, and would not answer.
        """
        graph = self.root.window.open_loss(self.root.record)
        if not self.config.nonfinite.only or self._busy or self.root.in_backward:
            return
        if self.ranks.size == 1:
            self._look(None)
        if broken_off and graph is not None:
            self._trace_open_loss(graph)

    def _trace_open_loss(self, graph: LossGraph) -> None:
        """Trace a step whose loss is not finite and was never backpropagated: scripts skip such steps, or stop at them."""
        if not self._busy and not self.proceedings.replayer.lockstep:
            self._busy = self.root.paused = True
            try:
                self.proceedings.tracing.follow_broken_off(self.root.record, graph, self.ranks.rank)
            finally:
                self._busy = self.root.paused = False

    def zeroing(self, owner: Optimizer | nn.Module) -> None:
        """Look at gradients that are about to be zeroed unused, as scripts do that skip a bad step by themselves.

        Only where nothing but NaN and Inf is looked for, and alone: other ranks may not skip.
        """
        alone = self.config.nonfinite.only and self.ranks.size == 1
        if alone and self._armed and not self._busy and not self.root.in_backward and self._owners.covers(owner):
            self._look(None)

    def zeroed(self, owner: Optimizer | nn.Module) -> None:
        """Forget what was backpropagated into gradients that are zero now."""
        if self._busy or self.root.in_backward or not self._owners.covers(owner):
            return
        self._armed, self._losses = False, []
        self.edits.cleared()
        self.root.gradients_cleared()

    def optimizer_stepped(self, optimizer: Optimizer) -> None:
        """Note that parameters changed."""
        if not self._busy and self._owners.ours(optimizer):
            self._armed, self._losses = False, []  # of a closure that had begun before this guard was made
            self.proceedings.tracing.stepped(optimizer)
            self.description.stepped(optimizer)
            self.optimizer_steps += 1
            self.clock.end_step()
            if self.optimizer_steps == _STEPS_UNSEEN and self.unseen:
                self.reporter.once(UNSEEN)

    @property
    def unseen(self) -> bool:
        """Whether optimizers step, and nothing was seen of how their gradients came about."""
        return bool(self.optimizer_steps) and not self.root.forwards_seen and not self.root.unseen_backwards

    def scaler_updated(self) -> None:
        """Note that a scaler ended the step."""
        if not self._busy:
            self.clock.end_step()

    # -- the step ------------------------------------------------------------------------------------------------

    def _deep_tap(self) -> AbstractContextManager[Any]:
        """Return the tap of a deep step; compiled code is looked at in a replay instead (`Sensors.look_again`)."""
        if self._busy or not self.is_deep(self.clock.step):
            return nullcontext()
        if self.root.regions.present():
            self._look_again_at = self.clock.step
            return nullcontext()
        # Ranges change slowly, and few trainings have narrow dtypes that overflow: they are measured on some deep steps.
        tap = self.sensors.operator_tap(ranges=self.config.nonfinite.only or self.deep.taken % _RANGES_EVERY == 0)
        return nullcontext() if tap is None else tap

    def is_deep(self, step: int) -> bool:
        """Tell whether a step's operators are looked at: the same steps on all ranks."""
        return self.deep.is_deep(step) or (self.config.checksum.enabled and self.sensors.reference.checksum_on)

    @property
    def own_seconds(self) -> float:
        """Seconds that the guard attributes to itself so far, by `tap.clock.stopwatch`."""
        return self._timed.seconds + self.root.own_seconds

    def _note_times(self, *, ordinary: bool) -> None:
        own, self._own_before = self.own_seconds - self._own_before, self.own_seconds
        step, checking = self.root.record.step, self.sensors.take_checking_seconds()
        self.deep.done(
            step,
            deep=self.is_deep(step),
            ordinary=ordinary,
            began=self.root.record.began,
            now=self.root.now(),
            own=own,
            checking=checking,
        )

    def _collect(self) -> None:
        if self.gradients.mode in ("hold", "reduce"):
            return  # they are still there at the hold point, and are read once
        with self._timed():
            self.gradients.collect()

    def _hold(self, scaler: GradScaler | None) -> bool:
        """Look at the step; return whether it was ordinary: nothing of it was run again."""
        record = self.root.record
        features = self.gradients.take_early() or self.gradients.take(hashed=False)
        if not self._stepped_early:
            self.edits.look(record)
        if (problem := strangers(record.partners, self.ranks.members)) is not None:
            record.give_up(problem)
        try:
            return self._look_at(record, features, scaler)
        finally:
            self.limits.update(reason for reason in (record.unreplayable or record.unhealable,) if reason)

    def _look_at(self, record: StepRecord, features: Features | None, scaler: GradScaler | None) -> bool:
        self.unrepeated_losses.update({p.graph.problem for p in record.passes() if p.graph and p.graph.problem})
        losses, self._losses = self._losses, []
        if features is None:
            self.reporter.once(
                "no synchronising backward was seen before the optimizer's step; the step is not covered"
            )
            return False
        light = self._read(features, losses, scaler)
        deep = self.is_deep(light.step)
        self.steps_held += 1
        self.description.held(record)
        if self.uneven.now:
            return self.uneven.look(light, self.limits, deep=deep)
        if self._look_again_at == record.step:
            self._held.look_again(record)
        findings = self.sensors.look(light, deep=deep, scale=light.scale)
        if deep and not self.uneven.before:
            findings += self.proceedings.compare_replicas(record, light)
        return self._held.follow(record, features, light, findings, deep=deep, stepped_early=self._stepped_early)

    def _read(self, features: Features, losses: list[torch.Tensor], scaler: GradScaler | None) -> LightStep:
        """Bring the step's sizes to the host."""
        scale = 1.0 if scaler is None else float(scaler.get_scale())
        light = self._reader.read(features, losses, scale, scaled=scaler is not None)
        if self.gradients.brief and not np.isfinite(light.absmax).all():  # a norm may overflow where no value does
            light = self._reader.read(self.gradients.describe(), losses, scale, scaled=scaler is not None)
        return light

    # -- trouble -------------------------------------------------------------------------------------------------

    def _fail(self, part: str, error: BaseException) -> None:
        """An error of our own: said once, the step is given up, the training goes on."""
        self.root.record.give_up(f"the guard's {part} failed: {type(error).__name__}")
        self.reporter.failure(part, error, self.clock.step)

    def _lost(self, error: SideChannelError) -> None:
        missing = self.reporter.rank_lost(error, self.ranks, self.clock.step)
        raise TrainingStopped(EXIT_RANK_LOST, missing)
