"""The root module's forwards and backwards, recorded so that the step can be run again.

Hooks go on the user's own module (inside DistributedDataParallel), so that a rank can replay it alone; where it is compiled,
around the compiled region (`tap.compiled`). What the model returns is handed on as it is: the script may change it in
place, and gets the objects that the model made. Gradients are noticed by themselves, however the model was called.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from bitwitness.stats import marks_of, total_of
from bitwitness.tap import reasons
from bitwitness.tap.capture import ForwardRecord, StepRecord
from bitwitness.tap.capturing import Capturer, forward_of
from bitwitness.tap.clock import StepClock, Timer, TrainingForwards, stopwatch
from bitwitness.tap.company import wrapped_later
from bitwitness.tap.compat import in_transform, queue_after_backward
from bitwitness.tap.compiled import CompiledRegions, broadcasts, distributed, find_entry
from bitwitness.tap.forwardhooks import ForwardHooks
from bitwitness.tap.gradhooks import GradientHooks
from bitwitness.tap.graphwalk import sketch
from bitwitness.tap.holdpoints import BackwardCall
from bitwitness.tap.ledger import Change, GradientLedger
from bitwitness.tap.modes import scripts_modes_off
from bitwitness.tap.modules import own_work, unwrap
from bitwitness.tap.sharded import reduces, sharding_of
from bitwitness.tap.structure import nbytes
from bitwitness.tap.threads import TrainingThread
from bitwitness.tap.traffic import groups_between, read_traffic, without
from bitwitness.tap.trainable import Trainable
from bitwitness.tap.window import Dropped, LossWindow


class RootTap:
    """Records the training forwards of one root.

    Parameters
    ----------
    model
        The module that the training calls; a DistributedDataParallel wrapper or the module itself.
    clock
        Numbers the steps.
    capture_limit
        Bytes that one step's inputs, buffers and output gradients may take; beyond it the step is not replayable.
    around_forward
        Returns a context in which a forward is run (a deep step's operator tap), or None.
    local_gradients
        Called once in each synchronising backward, after all local gradients are there and before they are reduced.
    fail
        Told of an error inside the guard; recording then stops for the step.
    taped
        Note what the script calls between the root's forward and the backward, too.
    hashed
        Hash the outputs, so that replays can be compared with them.
    dropped
        Told of a loss that is not finite and was not backpropagated before the next forward.
    alone
        No other rank can be asked: keep the parameters' hashes, so that a change behind torch's back is no evidence.
    retrained
        Called when other parameters than before ask for gradients, before the first forward of a step.

    """

    def __init__(
        self,
        model: nn.Module,
        clock: StepClock,
        *,
        capture_limit: int,
        around_forward: Callable[[], AbstractContextManager[Any] | None] = lambda: None,
        local_gradients: Callable[[], None] | None = None,
        fail: Callable[[str, BaseException], None],
        taped: bool = False,
        hashed: bool = True,
        dropped: Dropped | None = None,
        alone: bool = False,
        retrained: Callable[[], None] = lambda: None,
    ) -> None:
        self._alone = alone and hashed
        self._retrained = retrained
        self.wrapper = model
        self.root = unwrap(model)
        self.sharding = sharding_of(model)
        self._trainable = Trainable(self.root, fixed=self.sharding.fsdp2)
        self.parameters: dict[str, nn.Parameter] = {}
        self.ledger = GradientLedger([])
        self._positions: dict[int, int] = {}
        self.watch_trainable()
        self.record = StepRecord(clock.step)
        self.backwards = self.forwards_seen = self.outputs_seen = 0
        self.unseen_backwards = 0
        """Backwards that reached the parameters without a recorded forward."""
        self.paused = self.away = self.reducing = self.first = self._reached = False
        self._forwards = TrainingForwards(self.root)
        self._clock = clock
        self._around = around_forward
        self._local_gradients = local_gradients
        self._fail = fail
        self._entered: list[AbstractContextManager[Any]] = []
        self._open: list[ForwardRecord | None] = []
        self._depth = 0
        self.thread = TrainingThread()
        self._call = BackwardCall(())
        self._queued: Any = None
        self._traffic = read_traffic()
        first = next(iter(self.parameters.values()), None)
        self.device = torch.device("cpu") if first is None else first.device
        self.now = stopwatch(self.device)
        self._timed = Timer(self.now)
        self.entry = find_entry(model, self.root)
        self.regions = CompiledRegions(model)
        self.window = LossWindow(
            self.device,
            taped=taped,
            allowed=lambda: not self.paused and self.regions.inside_only(),
            dropped=dropped,
            find=lambda tensor: self.capturer.find_held(self.record, tensor),
            is_inside=lambda tensor: forward_of(self.record, tensor) is not None,
        )
        self.capturer = Capturer(
            self.root, self.device, capture_limit, self.window, hashed=hashed, private=self.sharding.spread
        )
        self._hooks = ForwardHooks(self.entry, self.root, self._before, self._after)
        self.join = self._hooks.join
        self._gradient_hooks = GradientHooks(lambda: self.record, lambda: bool(self._open) or self.paused)

    def close(self) -> None:
        """Remove the hooks; let go of what leads back here through autograd's graph, where no collector finds it."""
        self.window.forget()
        self.record = StepRecord(self._clock.step)
        self._hooks.close()
        self._gradient_hooks.close()

    def watch_trainable(self) -> bool:
        """Watch the parameters that ask for a gradient now; return whether these are others than before."""
        named = self._trainable.read()
        if [id(p) for p in named.values()] == [id(p) for p in self.parameters.values()]:
            return False
        if self.parameters and distributed(self.wrapper) is not None and (new := named.keys() - self.parameters.keys()):
            self.sharding = replace(self.sharding, problem=reasons.UNFROZEN.format(min(new)))
        self.parameters = named
        self.ledger = GradientLedger(list(named.values()))
        self._positions = {id(p): i for i, p in enumerate(named.values())}
        return True

    @property
    def own_seconds(self) -> float:
        """Seconds that recording took so far, by `stopwatch`."""
        return self._timed.seconds + self.window.own_seconds

    # -- forward -------------------------------------------------------------------------------------------------

    def _before(self, part: nn.Module | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._entered.append(nullcontext())
        self._open.append(None)
        if len(self._open) == 1 and not self._depth:
            self.window.forward_begins()
        replaying = self.paused and not self.away
        if replaying or self._depth or in_transform() or not torch.is_grad_enabled() or not self._in_training():
            return  # in a backward: a checkpoint around the whole root runs it again
        if self.away:
            self._clock.begin_forward()
            return
        try:
            self.window.mind_dropped_loss(self.record)
            with own_work(), self._timed():
                self._open[-1] = self._begin(part, args, kwargs) if self._trainable.any() else None
            context = self._around()
            if context is not None:
                context.__enter__()
                self._entered[-1] = context
        except Exception as error:
            self._fail("capture", error)

    def _in_training(self) -> bool:
        """Tell a training forward from an evaluation's; a model that is only ever in evaluation mode is trained in it."""
        evaluates = self._forwards.evaluates()
        if not evaluates and not self.root.training:
            self.record.let_go_of_evaluations()
        return not evaluates

    def _begin_step_if_due(self) -> None:
        if self._clock.begin_forward() or self.record.step != self._clock.step:
            self.record = StepRecord(self._clock.step, began=self.now())
            self.window.new_step()

    def _begin(self, part: nn.Module | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ForwardRecord:
        self.forwards_seen += 1
        self.thread.is_here()
        self.regions.forward_begins()
        self._begin_step_if_due()
        if self.record.backpropagated:
            self._check_gradients_since()
        elif self.record.forwards and self._trainable.grown():
            # what ran before, and may never train, was frozen
            self.record = StepRecord(self._clock.step, began=self.now())
        if not self.record.forwards:
            self._begin_step()
        self._clock.micro = len(self.record.forwards)
        if self._alone and wrapped_later(self.wrapper):
            self.record.give_up(reasons.WRAPPED_LATER)
        through = not self.entry.bypasses(self.wrapper)
        begun = {"sync": self._reduces() and through, "broadcast": through and broadcasts(self.wrapper)}
        return self.capturer.begin(self.record, part, args, kwargs, number=self.forwards_seen, **begun)

    def _reduces(self) -> bool:
        if self.sharding.fsdp2:
            return reduces(self.root)
        return bool(getattr(self.wrapper, "require_backward_grad_sync", True))

    def _check_gradients_since(self) -> None:
        """Look at what happened to the gradients since an earlier backward of this step."""
        change = self.ledger.change()
        if change is Change.CLEARED:
            self.gradients_cleared()
        elif change is Change.EDITED:
            self.record.give_up("gradients were changed between two backwards of the step")

    def _begin_step(self) -> None:
        record = self.record
        if self._trainable.outdated() and self.watch_trainable():
            self._retrained()
        if self.sharding.problem is not None:
            record.give_up(self.sharding.problem)
        parameters = list(self.parameters.values())
        record.versions = [p._version for p in parameters]
        record.training = [module.training for module in self.root.modules()]
        if self._alone and not self.sharding.spread:
            record.parameters = marks_of([p.detach() for p in parameters], self.device)

    def _note_start(self) -> None:
        """See what lies in the gradients before the step's first backward adds to it."""
        record, present = self.record, [p.grad for p in self.parameters.values() if p.grad is not None]
        record.start_norm = total_of(present, self.device) if present else None
        # zero_grad(set_to_none=False): -0.0 + 0.0 is +0.0, so a replay must start from zeros, too
        record.zero_start = record.start_norm is not None

    def _after(self, result: Any) -> None:
        record = self._open.pop() if self._open else None
        context = self._entered.pop() if self._entered else nullcontext()
        try:
            context.__exit__(None, None, None)
            if record is None or (result is None and sys.exc_info()[0] is not None):
                return
            self.regions.forward_ended()
            with own_work(), self._timed():
                self.capturer.end(self.record, record, result, self._output_grad)
            self.outputs_seen += len(record.output_digests)
        except Exception as error:
            self._fail("capture", error)
        finally:
            if not self._open and not self._depth:
                self.window.forward_ended(recorded=record is not None)

    # -- backward ------------------------------------------------------------------------------------------------

    def begin_backward(self, call: BackwardCall) -> None:
        """Say that a backward begins (any backward of the process; it may not reach this root)."""
        self._depth += 1
        if self._depth > 1:
            return  # one inside another: activation checkpointing of the reentrant kind
        self.backwards += 1
        self._call = call = call.for_some(self.parameters.values())
        self._reached = self.first = False
        self._traffic = read_traffic()
        if self.record.forwards and groups_between(self.capturer.traffic, self._traffic):
            self.window.give_up(reasons.IN_LOSS_CODE)
        self.window.backward_begins(call, self.record, self.backwards)
        if not call.accumulates:
            return
        if (problem := call.unrepeatable(self._trainable.asked(), self.device)) is not None:
            self.record.give_up(problem)
        if not self.record.backpropagated:
            self._note_start()
        elif self.ledger.change() is Change.CLEARED:
            self.gradients_cleared()
        self.first = not self.record.backpropagated
        self.ledger.open()
        try:
            with self._timed():
                self.record.roots[self.backwards] = [weakref.ref(t) for t in call.roots if isinstance(t, torch.Tensor)]
                self._gradient_hooks.note(list(self.parameters.values()))
                self._walk(call)
                self._queue(call)
        except Exception as error:
            self._fail("walk over the graph", error)

    def _walk(self, call: BackwardCall) -> None:
        """Find what this backward reaches, before it frees its graph."""
        spans = [forward.span for forward in self.record.forwards if forward.span is not None]
        if not spans:
            return
        found = sketch(call.roots, spans, self._positions)
        if found.outputs or found.inside or found.parameters or not found.complete:
            self.record.sketches[self.backwards] = found
        for forward in self.record.forwards:
            if forward.number in found.forwards:
                forward.backwards.append(self.backwards)

    def _queue(self, call: BackwardCall) -> None:
        """Have the local gradients read in this backward, before DistributedDataParallel reduces them.

        The hook on the first root runs first of all, so our callback is queued before the reducer's own.
        """
        root = next((root for root in call.roots if isinstance(root, torch.Tensor) and root.requires_grad), None)
        syncs = [forward.sync for forward in self.record.forwards if self.backwards in forward.backwards]
        self.reducing = self._reduces() and (any(syncs) or not syncs)
        if self._local_gradients is not None and root is not None and self.reducing:
            self._queued = root.register_hook(lambda _: queue_after_backward(self._run_local_gradients))

    def end_backward(self) -> bool:
        """Say that it ended; return whether it was the outermost one, and reached this root."""
        self._depth -= 1
        if self._depth:
            return False
        if self._queued is not None:
            self._queued.remove()
            self._queued = None
        recorded = any(self.backwards in forward.backwards for forward in self.record.forwards)
        if self._alone and groups_between(self._traffic, read_traffic()):
            self.record.give_up(reasons.EXCHANGED_IN_BACKWARD)
        self._reached = self._call.accumulates and (recorded or self.ledger.moved())
        if self._reached:
            if not recorded:
                self._without_forward()
            self.ledger.note()
        else:  # what another model's backward reduces is none of this one's
            self.capturer.traffic = without(self._traffic, read_traffic(), self.capturer.traffic)
        self.window.backward_ended(reached=self._reached)
        self._call = BackwardCall(())
        return self._reached

    def _without_forward(self) -> None:
        """Take gradients that no recorded forward led to."""
        self._begin_step_if_due()
        self.unseen_backwards += 1
        if not self.regions.known:
            self._hooks.hook_parts()
        if not self.record.forwards:
            self.record.give_up(reasons.CLEARED if self.record.cleared else reasons.NO_FORWARD)
        elif self.backwards not in self.record.sketches:
            self.record.give_up("a backward reached the parameters by a way that was not recorded")

    def gradients_cleared(self) -> None:
        """Say that all gradients were zeroed or let go: what was backpropagated before counts for nothing.

        What was run forward, and not backward yet, still counts.
        """
        record = self.record
        kept = [forward for forward in record.forwards if not forward.backpropagated]
        if len(kept) < len(record.forwards) or not kept:
            reason, lost = (record.unreplayable if kept else None), len(kept) < len(record.forwards)
            self.record = replace(
                record, forwards=kept, unreplayable=reason, unhealable=None, cleared=record.cleared or lost
            )
        self.ledger.forget()

    def _output_grad(self, record: ForwardRecord, index: int, grad: torch.Tensor) -> None:
        try:
            with scripts_modes_off():
                self._keep_output_grad(record, index, grad)
        except Exception as error:
            self._fail("capture", error)

    def _keep_output_grad(self, record: ForwardRecord, index: int, grad: torch.Tensor) -> None:
        if self._call.create_graph:
            self.record.give_up(reasons.CREATE_GRAPH)
        if not self._call.accumulates or self.paused:
            return
        if self.backwards not in record.backwards:  # the walk did not come to its end
            record.backwards.append(self.backwards)
        if grad.requires_grad:
            self.record.give_up(reasons.CREATE_GRAPH)
            return
        self.capturer.account(self.record, nbytes([grad]) if grad.numel() > 1 else 0, "an output gradient is")
        if self.record.unreplayable is None:
            record.output_grads[index] = grad.detach()

    def _run_local_gradients(self) -> None:
        try:
            if self._local_gradients is not None and self.ledger.moved():
                with own_work(), torch.no_grad():
                    self._local_gradients()
        except Exception as error:
            self._fail("local gradients", error)

    @property
    def in_backward(self) -> bool:
        """Whether a backward is running now."""
        return self._depth > 0
