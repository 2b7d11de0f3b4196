"""The root module's forwards and backwards, recorded so that the step can be run again.

Hooks go on the user's own module (inside DistributedDataParallel), so that a rank can replay it alone; where it is compiled,
around the compiled region (`tap.compiled`). They are
`ModuleHook` objects: a copy or a pickle of the module carries an inert one, so that ``copy.deepcopy(model)`` (an EMA, say)
and ``torch.save(model)`` work as without the guard.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from bitwitness.stats import bit_hash
from bitwitness.stats.local import local_values
from bitwitness.tap.autocast import Autocast
from bitwitness.tap.capture import ForwardRecord, StepRecord
from bitwitness.tap.clock import StepClock, stopwatch
from bitwitness.tap.compiled import CompiledRegions, HookedCall, find_entry
from bitwitness.tap.gradients import queue_after_backward
from bitwitness.tap.holdpoints import BackwardCall
from bitwitness.tap.ledger import Change, GradientLedger
from bitwitness.tap.modules import own_work, unwrap
from bitwitness.tap.randomness import RandomState
from bitwitness.tap.sharded import reduces, sharding_of
from bitwitness.tap.structure import fresh, map_tensors, nbytes, tensors_of
from bitwitness.tap.window import Dropped, LossWindow

_PENDING_KEPT = 8  # forwards in evaluation mode that wait for a backward
TWICE = "one forward was backpropagated more than once"
CREATE_GRAPH = "backward ran with create_graph: second derivatives are not replayed"


class ModuleHook:
    """A module hook that does nothing once copied, pickled or let go."""

    def __init__(self, call: Callable[..., Any] | None = None) -> None:
        self._call = call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Pass the call on while the hook is in force; what dynamo traces is not the training itself."""
        if torch.compiler.is_compiling() or self._call is None:
            return None
        return self._call(*args, **kwargs)

    def __deepcopy__(self, _memo: dict[int, Any]) -> ModuleHook:
        return ModuleHook()

    def __reduce__(self) -> tuple[type[ModuleHook], tuple[()]]:
        return ModuleHook, ()

    def let_go(self) -> None:
        """Become inert, also in modules that were copied by reference."""
        self._call = None

    @property
    def inert(self) -> bool:
        """Whether it does nothing."""
        return self._call is None


class RootTap:
    """Records the training forwards of one root.

    Parameters
    ----------
    model
        The module that the training calls; a DistributedDataParallel wrapper or the module itself.
    clock
        Numbers the steps.
    capture_limit
        Bytes that one step's inputs and output gradients may take; beyond it the step is not replayable.
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
    ) -> None:
        self._hashed = hashed
        self.wrapper = model
        self.root = unwrap(model)
        self.parameters = {name: p for name, p in self.root.named_parameters() if p.requires_grad}
        self.record = StepRecord(clock.step)
        self.backwards = 0
        self.forwards_seen = 0
        self.outputs_seen = 0
        self.paused = False
        self.own_seconds = 0.0
        """Seconds that recording took so far, by `stopwatch`."""
        self._clock = clock
        self._limit = capture_limit
        self._around = around_forward
        self._local_gradients = local_gradients
        self._fail = fail
        self._entered: list[AbstractContextManager[Any]] = []
        self._open: list[ForwardRecord | None] = []
        self.sharding = sharding_of(model)
        self._depth = 0
        self._trained = False
        self._accumulates = True
        self._create_graph = False
        self._queued = False
        self.ledger = GradientLedger(list(self.parameters.values()))
        first = next(iter(self.parameters.values()), None)
        self.device = torch.device("cpu") if first is None else first.device
        self.now = stopwatch(self.device)
        self.entry = find_entry(model, self.root)
        self.regions = CompiledRegions(model)
        self.window = LossWindow(
            self.device,
            taped=taped,
            allowed=lambda: not self.paused and self.regions.inside_only(),
            dropped=dropped,
        )
        self._hooks = [ModuleHook(self._before), ModuleHook(self._after)]
        self._handles: list[torch.utils.hooks.RemovableHandle | HookedCall] = []
        if self.entry.in_place:
            self._handles.append(HookedCall(self.entry.module, *self._hooks))
        else:
            self._handles += [
                self.entry.module.register_forward_pre_hook(self._hooks[0], with_kwargs=True),
                self.entry.module.register_forward_hook(self._hooks[1], with_kwargs=True, always_call=True),
            ]

    def close(self) -> None:
        """Remove the hooks."""
        self.window.close()
        for hook in self._hooks:
            hook.let_go()
        for handle in self._handles:
            handle.remove()

    # -- forward -------------------------------------------------------------------------------------------------

    def join(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Record a call of ``module`` that has just begun, whose pre-hooks torch had already listed when ours was made."""
        if module is self.entry.module and not self.entry.in_place:
            self._before(module, args, kwargs)

    def _before(self, _entry: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._entered.append(nullcontext())
        self._open.append(None)
        if len(self._open) == 1 and not self._depth:
            self.window.forward_begins()
        if self.paused or self._depth or not torch.is_grad_enabled() or not self._in_training():
            return  # in a backward: a checkpoint around the whole root runs it again
        try:
            self.window.mind_dropped_loss(self.record)
            with own_work(), self._timed():
                self._open[-1] = self._begin(self.root, args, kwargs)
            context = self._around()
            if context is not None:
                context.__enter__()
                self._entered[-1] = context
        except Exception as error:
            self._fail("capture", error)

    def _in_training(self) -> bool:
        """Tell a training forward from an evaluation's; a model that is only ever in evaluation mode is trained in it."""
        if self.root.training:
            self._trained = True
        elif not self._trained:
            pending = [forward for forward in self.record.forwards if forward.backward is None]
            if len(pending) > _PENDING_KEPT:  # an evaluation that keeps gradients, by mistake
                self.record.forwards = [forward for forward in self.record.forwards if forward is not pending[0]]
        return self.root.training or not self._trained

    @contextmanager
    def _timed(self) -> Iterator[None]:
        started = self.now()
        try:
            yield
        finally:
            self.own_seconds += self.now() - started

    def _begin(self, root: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ForwardRecord:
        self.forwards_seen += 1
        self.regions.forward_begins()
        if self._clock.begin_forward() or self.record.step != self._clock.step:
            self.record = StepRecord(self._clock.step, began=self.now())
            self.window.new_step()
        elif self.record.backpropagated:
            self._check_gradients_since()
        if not self.record.forwards:
            self._begin_step(root)
        self._clock.micro = len(self.record.forwards)
        if nbytes(tensors_of((args, kwargs))) > self._limit:
            self.record.give_up(f"the batch is larger than the capture limit of {self._limit >> 20} MiB")
            args, kwargs = (), {}
        if len(tensors_of((args, kwargs))) == 0:
            self.record.give_up("the model is called without tensors; its inputs cannot be captured")
        record = ForwardRecord(
            args=map_tensors(args, fresh),
            kwargs=map_tensors(kwargs, fresh),
            random=RandomState.read(self.device),
            autocast=Autocast.read(self.device),
            buffers=[buffer.detach().clone() for buffer in root.buffers()],
            sync=self._reduces(),
            number=self.forwards_seen,
        )
        self.record.forwards.append(record)
        return record

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

    def _begin_step(self, root: nn.Module) -> None:
        record = self.record
        if self.sharding.problem is not None:
            record.give_up(self.sharding.problem)
        parameters = list(self.parameters.values())
        record.versions = [p._version for p in parameters]
        record.training = [module.training for module in root.modules()]

    def _note_start(self) -> None:
        """See what lies in the gradients before the step's first backward adds to it."""
        record, parameters = self.record, list(self.parameters.values())
        record.zero_start, record.start_norm = False, None
        present = [p.grad for p in parameters if p.grad is not None]
        if present:
            # zero_grad(set_to_none=False): -0.0 + 0.0 is +0.0, so a replay must start from zeros, too
            record.zero_start = True
            record.start_norm = torch.stack(
                [
                    norm.to(self.device, torch.float32)
                    for norm in torch._foreach_norm([local_values(g) for g in present])
                ]
            ).sum()

    def _after(self, _entry: nn.Module, _args: Any, _kwargs: Any, result: Any) -> Any:
        record = self._open.pop() if self._open else None
        context = self._entered.pop() if self._entered else nullcontext()
        try:
            context.__exit__(None, None, None)
            if record is None or result is None:
                return None
            self.regions.forward_ended()
            with own_work(), self._timed():
                return self._alias(record, result)
        except Exception as error:
            self._fail("capture", error)
            return None
        finally:
            if not self._open and not self._depth:
                self.window.forward_ended(recorded=record is not None)

    def _alias(self, record: ForwardRecord, result: Any) -> Any:
        def alias(tensor: torch.Tensor) -> torch.Tensor:
            if not tensor.requires_grad:
                return tensor
            index = len(record.output_digests)
            digest = bit_hash(tensor.detach()) if self._hashed else torch.zeros((), dtype=torch.int64)
            record.output_digests.append(digest)
            record.output_grads.append(None)
            twin = tensor.view_as(tensor)
            twin.register_hook(lambda grad: self._output_grad(record, index, grad))
            self.window.add_output(twin, record.number, index)
            return twin

        aliased = map_tensors(result, alias)
        self.outputs_seen += len(record.output_digests)
        return aliased

    # -- backward ------------------------------------------------------------------------------------------------

    def begin_backward(self, call: BackwardCall) -> None:
        """Say that a backward begins (any backward of the process; it may not reach this root)."""
        self._depth += 1
        if self._depth > 1:
            return  # a backward inside a backward: activation checkpointing of the reentrant kind
        self.backwards += 1
        self._queued = False
        self._accumulates = call.accumulates
        self._create_graph = call.create_graph
        self.window.backward_begins(call, self.record, self.backwards)
        if not call.accumulates:
            return
        if not self.record.backpropagated:
            self._note_start()
        elif self.ledger.change() is Change.CLEARED:
            self.gradients_cleared()

    def end_backward(self) -> bool:
        """Say that it ended; return whether it was the outermost one, and reached this root."""
        self._depth -= 1
        if self._depth:
            return False
        if self.reached:
            self.ledger.note()
        self.window.backward_ended(reached=self.reached)
        return self.reached

    def gradients_cleared(self) -> None:
        """Say that all gradients were zeroed or let go: what was backpropagated before counts for nothing.

        What was run forward, and not backward yet, still counts.
        """
        record = self.record
        kept = [forward for forward in record.forwards if forward.backward is None]
        if len(kept) < len(record.forwards):
            self.record = replace(
                record, forwards=kept, unreplayable=record.unreplayable if kept else None, unhealable=None
            )
        self.ledger.forget()

    def _output_grad(self, record: ForwardRecord, index: int, grad: torch.Tensor) -> None:
        try:
            self._keep_output_grad(record, index, grad)
        except Exception as error:
            self._fail("capture", error)

    def _keep_output_grad(self, record: ForwardRecord, index: int, grad: torch.Tensor) -> None:
        if self._create_graph:
            self.record.give_up(CREATE_GRAPH)
        if not self._accumulates:
            return
        if record.backward is None:
            record.backward = self.backwards
        elif record.backward != self.backwards:
            self.record.give_up(TWICE)
            return
        if nbytes([grad]) > self._limit:
            self.record.give_up(f"an output gradient is larger than the capture limit of {self._limit >> 20} MiB")
        elif grad.requires_grad:
            self.record.give_up(CREATE_GRAPH)
        else:
            record.output_grads[index] = grad.detach()
        if record.sync and self._local_gradients is not None and not self._queued:
            # Queued before DistributedDataParallel queues its own, so it runs when all local gradients are there
            # and none has been replaced by the reduced one.
            self._queued = True
            queue_after_backward(self._run_local_gradients)

    def _run_local_gradients(self) -> None:
        try:
            if self._local_gradients is not None:
                with torch.no_grad(), own_work():
                    self._local_gradients()
        except Exception as error:
            self._fail("local gradients", error)

    @property
    def in_backward(self) -> bool:
        """Whether a backward is running now."""
        return self._depth > 0

    @property
    def loss_inside(self) -> bool:
        """Whether the loss is computed inside the root: only scalars of it were backpropagated in this step."""
        return self.outputs_seen > 0 and not any(self.record.value_dependent())

    @property
    def reached(self) -> bool:
        """Whether the latest backward reached this root, to add to its gradients."""
        return self._accumulates and any(record.backward == self.backwards for record in self.record.forwards)
