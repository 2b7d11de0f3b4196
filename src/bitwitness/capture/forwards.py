"""The root module's forwards, recorded so that the step can be run again.

The session's hooks lie on the user's own module (inside DistributedDataParallel), so that a rank can replay it alone; where it
is compiled, around the compiled region (`tap.compiled`). What the model returns is handed on as it is: the script may change
it in place, and gets the objects that the model made.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from bitwitness.capture import reasons
from bitwitness.capture.backward import LocalGradientsFirst
from bitwitness.capture.capturing import Capturer, forward_of
from bitwitness.capture.gradhooks import GradientHooks
from bitwitness.capture.ledger import Change, GradientLedger
from bitwitness.capture.step import ForwardRecord, StepRecord
from bitwitness.capture.trainable import Trainable
from bitwitness.capture.training import Training, Wants
from bitwitness.capture.window import Dropped, LossWindow
from bitwitness.ranks.process_groups import wrapped_later
from bitwitness.stats import marks_of
from bitwitness.tap.compiled import CompiledRegions, broadcasts, distributed
from bitwitness.tap.moments import BackwardCall
from bitwitness.tap.ownwork import own_work
from bitwitness.tap.sharded import reduces, sharding_of
from bitwitness.tap.timer import Timer, stopwatch
from bitwitness.tap.traffic import read_traffic


class ForwardTap:
    """Records the training forwards of one root; `RootTap` also records its backwards.

    Parameters
    ----------
    training
        The session, which tells of the moments and numbers the steps.
    wants
        What is needed of each step.
    alone
        No other rank can be asked: keep the parameters' hashes, so that a change behind torch's back is no evidence.
    local_gradients
        Called once in each synchronising backward, after all local gradients are there and before they are reduced.
    fail
        Told of an error inside bitwitness; recording then stops for the step.
    dropped
        Told of a loss that is not finite and was not backpropagated before the next forward.
    retrained
        Called when other parameters than before ask for gradients, before the first forward of a step.

    """

    def __init__(
        self,
        training: Training,
        wants: Wants,
        *,
        alone: bool,
        local_gradients: Callable[[], None],
        fail: Callable[[str, Exception], None],
        dropped: Dropped,
        retrained: Callable[[], None] = lambda: None,
    ) -> None:
        self._training = training
        self._no_other_rank = alone
        self._retrained = retrained
        self._fail = fail
        self._dropped = dropped
        self.wrapper, self.root, self.entry = training.model, training.root, training.entry
        self.sharding = sharding_of(self.wrapper)
        self._trainable = Trainable(self.root, fixed=self.sharding.fsdp2)
        self.parameters: dict[str, nn.Parameter] = {}
        self.ledger = GradientLedger([])
        self._positions: dict[int, int] = {}
        self.watch_trainable()
        self.backwards = self.forwards_seen = self.outputs_seen = 0
        self.unseen_backwards = 0
        """Backwards that reached the parameters without a recorded forward."""
        self.paused = self.reducing = self.first = False
        first = next(iter(self.parameters.values()), None)
        self.device = torch.device("cpu") if first is None else first.device
        self.now = stopwatch(self.device)
        self._timed = Timer(self.now)
        self.record = StepRecord(training.step)
        self._call = BackwardCall(())
        self._traffic = read_traffic()
        self._first = LocalGradientsFirst(self._run_local_gradients)
        self._local_gradients = local_gradients
        self.regions = CompiledRegions(self.wrapper)
        self.window = LossWindow(
            self.device,
            allowed=lambda: not self.off and self.regions.inside_only(),
            find=lambda tensor: self.capturer.find_held(self.record, tensor),
            is_inside=lambda tensor: forward_of(self.record, tensor) is not None,
        )
        self.capturer = Capturer(self.root, self.device, self.window, private=self.sharding.spread)
        self._gradient_hooks = GradientHooks(lambda: self.record, lambda: training.in_forward or self.off)
        self.use(wants)

    def use(self, wants: Wants) -> None:
        """Keep what is wanted from the next forward on; what was begun without it cannot be run again."""
        self._alone = self._no_other_rank and wants.hashed
        self._weighed = wants.looks
        self.capturer.use(wants.capture_limit, hashed=wants.hashed)
        self.window.use(taped=wants.taped, dropped=self._dropped if wants.unused else None)

    @property
    def off(self) -> bool:
        """Whether what runs is not to be recorded: nobody looks, or bitwitness itself runs it."""
        return self.paused or self._training.own_work

    def close(self) -> None:
        """Let go of what leads back here through autograd's graph, where no collector finds it."""
        self.window.forget()
        self.record = StepRecord(self._training.step)
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

    def forward_begins(self) -> None:
        """Say that a call of the model begins, whatever it is for: the loss code pauses."""
        self.window.forward_begins()

    def begin(self, part: nn.Module | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ForwardRecord | None:
        """Record a training forward that begins; None where nothing asks for a gradient."""
        if not self.root.training:
            self.record.let_go_of_evaluations()
        self.window.mind_dropped_loss(self.record)
        with own_work(), self._timed():
            return self._begin(part, args, kwargs) if self._trainable.any() else None

    def end(self, record: ForwardRecord, result: Any) -> None:
        """Record what a forward returned."""
        self.regions.forward_ended()
        with own_work(), self._timed():
            self.capturer.end(self.record, record, result, self._output_grad)
        self.outputs_seen += len(record.output_digests)

    def forward_ended(self, *, recorded: bool) -> None:
        """Say that the outermost call of the model has ended: the script's loss code may follow."""
        self.window.forward_ended(recorded=recorded)

    def renew(self) -> None:
        """Begin another record: the step's one has been looked at, or a new step begins."""
        self.record = StepRecord(self._training.step, began=self.now(), number=self.record.number + 1)
        self.window.new_step()

    @property
    def coming(self) -> int:
        """The number of the record (`StepRecord.number`) to which a forward that began now would belong."""
        return self.record.number + self._is_due()

    def _is_due(self) -> bool:
        return self.record.looked_at or self.record.step != self._training.step

    def _renew_if_due(self) -> None:
        if self._is_due():
            self.renew()

    def _begin(self, part: nn.Module | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ForwardRecord:
        self.forwards_seen += 1
        self.regions.forward_begins()
        self._renew_if_due()
        if self.record.backpropagated:
            self._check_gradients_since()
        elif self.record.forwards and self._trainable.grown():
            # what ran before, and may never train, was frozen
            self.record = replace(StepRecord(self._training.step, began=self.now()), number=self.record.number)
        if not self.record.forwards:
            self._begin_step()
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
        if (self._alone or self._weighed) and not self.sharding.spread:
            record.weights = marks_of([p.detach() for p in parameters], self.device)
            record.parameters = record.weights if self._alone else None

    # -- what `RootTap` adds -------------------------------------------------------------------------------------

    def gradients_cleared(self) -> None:
        """Say that all gradients were zeroed or let go: what was backpropagated before counts for nothing."""
        raise NotImplementedError

    def _output_grad(self, record: ForwardRecord, index: int, grad: torch.Tensor | None) -> None:
        raise NotImplementedError

    def _run_local_gradients(self) -> None:
        raise NotImplementedError
