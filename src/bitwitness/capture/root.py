"""The root module's backwards, recorded with its forwards so that the step can be run again.

Gradients are noticed by themselves, however the model was called.
"""

from __future__ import annotations

import weakref
from dataclasses import replace

import torch

from bitwitness.capture import reasons
from bitwitness.capture.backward import unrepeatable
from bitwitness.capture.forwards import ForwardTap
from bitwitness.capture.graphwalk import sketch
from bitwitness.capture.ledger import Change
from bitwitness.capture.step import ForwardRecord
from bitwitness.capture.structure import nbytes
from bitwitness.stats import norms_of
from bitwitness.tap.compiled import distributed
from bitwitness.tap.modes import scripts_modes_off
from bitwitness.tap.moments import BackwardCall
from bitwitness.tap.ownwork import own_work
from bitwitness.tap.traffic import groups_between, read_traffic, without


class RootTap(ForwardTap):
    """Records the steps of one root: its training forwards, and the backwards that reach them; parameters as `ForwardTap`."""

    def begin_backward(self, call: BackwardCall) -> None:
        """Say that a backward begins (any backward of the process; it may not reach this root)."""
        self.backwards += 1
        self._call = call = call.for_some(self.parameters.values())
        self.first = False
        self._traffic = read_traffic()
        if self.record.forwards and groups_between(self.capturer.traffic, self._traffic):
            self.window.give_up(reasons.IN_LOSS_CODE)
        self.window.backward_begins(call, self.record, self.backwards)
        if not call.accumulates:
            return
        if (problem := unrepeatable(call, self._trainable.asked(), self.device)) is not None:
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
                with own_work(), torch.no_grad():
                    self.capturer.held.backward_begins()
        except Exception as error:
            self._fail("walk over the graph", error)

    def _note_start(self) -> None:
        """See what lies in the gradients before the step's first backward adds to it."""
        present = {i: p.grad for i, p in enumerate(self.parameters.values()) if p.grad is not None}
        norms = norms_of(list(present.values()), self.device) if present else ()
        self.record.start_norms = dict(zip(present, norms, strict=True))
        self.ledger.begin()

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
        """Have the local gradients read in this backward, before DistributedDataParallel reduces them."""
        syncs = [forward.sync for forward in self.record.forwards if self.backwards in forward.backwards]
        self.reducing = self._reduces() and (any(syncs) or not syncs)
        if self.reducing:
            self._first.queue(call.roots)

    def end_backward(self) -> bool:
        """Say that it ended; return whether it reached this root."""
        self._first.done()
        self._learn_of_backward()
        recorded = any(self.backwards in forward.backwards for forward in self.record.forwards)
        if self._alone and groups_between(self._traffic, read_traffic()):
            self.record.give_up(reasons.EXCHANGED_IN_BACKWARD)
        reached = self._call.accumulates and (recorded or self.ledger.moved())
        if reached:
            if not recorded:
                self._without_forward()
            self.ledger.note()
            self.record.left = self.ledger.left
        else:  # what another model's backward reduces is none of this one's
            self.capturer.traffic = without(self._traffic, read_traffic(), self.capturer.traffic)
        self.window.backward_ended(reached=reached)
        self._call = BackwardCall(())
        return reached

    def _note_reduction(self) -> None:
        if self.record.reduced and not self._no_other_rank and distributed(self.wrapper) is not None:
            self.record.give_up(reasons.REDUCED_TWICE)
        self.record.reduced = True

    def _learn_of_backward(self) -> None:
        try:
            with self._timed(), own_work(), torch.no_grad():
                self.capturer.held.backward_ended()
        except Exception as error:
            self._fail("held state", error)

    def _without_forward(self) -> None:
        """Take gradients that no recorded forward led to."""
        evaluated = self._training.evaluated
        if evaluated:
            self._training.begin_step()
        self._renew_if_due()
        self.unseen_backwards += 1
        if not self.regions.known and not evaluated:
            self._training.hook_parts()
        if not self.record.forwards:
            unseen = reasons.EVALUATED if evaluated else reasons.NO_FORWARD
            self.record.give_up(reasons.CLEARED if self.record.cleared else unseen)
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
                record,
                forwards=kept,
                unreplayable=reason,
                unhealable=None,
                cleared=record.cleared or lost,
                reduced=False,
            )
        self.ledger.forget()

    def _output_grad(self, record: ForwardRecord, index: int, grad: torch.Tensor | None) -> None:
        if grad is None:  # a compiled region gives all its outputs, of which the script used others
            return
        try:
            with scripts_modes_off():
                self._keep_output_grad(record, index, grad)
        except Exception as error:
            self._fail("capture", error)

    def _keep_output_grad(self, record: ForwardRecord, index: int, grad: torch.Tensor) -> None:
        if self._call.create_graph:
            self.record.give_up(reasons.CREATE_GRAPH)
        if not self._call.accumulates or self.off:
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
            if self.ledger.moved():
                self._note_reduction()
                self.ledger.see()
                with own_work(), torch.no_grad():
                    self._local_gradients()
        except Exception as error:
            self._fail("local gradients", error)
