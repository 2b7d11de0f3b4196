"""The moments of a training step at which the guard may look or act, each from one choke point inside torch.

======================  =============================================================================================
backward                ``torch.autograd._engine_run_backward``: every ``backward()`` and ``autograd.grad`` goes through it
before clipping         ``torch.nn.utils.clip_grad._group_tensors_by_device_and_dtype``: every clipping function calls it,
                        also one that a script imported by name before we came
before unscaling        ``torch.amp.GradScaler.unscale_``: ``scaler.step`` calls it too, even if it then skips the optimizer
before / after a step   torch's global optimizer hooks, by one entry (`tap/optimizerhooks.py`)
gradients zeroed        ``Optimizer.zero_grad`` and ``nn.Module.zero_grad``
end under a scaler      ``torch.amp.GradScaler.update``: ends a step whose optimizer was skipped
======================  =============================================================================================
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Self

import torch
from torch import nn
from torch.amp import GradScaler
from torch.optim.optimizer import Optimizer

from bitwitness.tap.compat import BACKWARD, CLIPPING, MAKE_GRADS
from bitwitness.tap.optimizerhooks import told_of_steps, with_closure
from bitwitness.tap.patching import replaced

RunBackward = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class BackwardCall:
    """One backward: where it starts (tensors or gradient edges, and their gradients), and what for.

    ``grads``: None for a gradient that the script did not give; torch makes it, as it does for a replay.
    ``retains``: the graph is kept, perhaps for another backward. ``accumulates``: into ``p.grad`` (``backward()``), rather
    than returning gradients (``torch.autograd.grad``). ``inputs``: the only leaves that get a gradient; empty for all.
    """

    roots: tuple[Any, ...]
    grads: tuple[Any, ...] = ()
    retains: bool = False
    create_graph: bool = False
    accumulates: bool = True
    inputs: tuple[Any, ...] = ()

    def for_some(self, parameters: Iterable[torch.Tensor]) -> BackwardCall:
        """Return the call as it concerns some parameters: where it leaves them all out, it does not accumulate."""
        given = {id(leaf) for leaf in self.inputs}
        left_out = bool(given) and not any(id(p) in given for p in parameters)
        return replace(self, accumulates=False) if left_out else self


class StepListener:
    """Who is told of the moments, to be derived from; each moment that is left as it is does nothing."""

    def around_backward(self, call: BackwardCall) -> AbstractContextManager[None]:
        """Return what a backward is run inside."""
        del call
        return nullcontext()

    def clipping(self, gradients: list[torch.Tensor]) -> None:
        """Some gradients are about to be clipped, or to have their norm taken."""

    def gradients_ready(self, *, scaler: GradScaler | None = None, optimizer: Optimizer | None = None) -> None:
        """Gradients are complete, raw, and about to be unscaled, clipped or used, whichever comes first."""

    def closure_begins(self, optimizer: Optimizer) -> None:
        """An optimizer's step begins with a closure, which has yet to complete the gradients."""

    def closure_ended(self, optimizer: Optimizer) -> None:
        """The closure has completed them, and the optimizer goes on."""

    def zeroing(self, owner: Optimizer | nn.Module) -> None:
        """The gradients of an optimizer or a module are about to be zeroed or let go."""

    def zeroed(self, owner: Optimizer | nn.Module) -> None:
        """The gradients of all parameters of an optimizer or a module were zeroed or let go."""

    def optimizer_stepped(self, optimizer: Optimizer) -> None:
        """Parameters changed."""

    def scaler_updated(self, scaler: GradScaler) -> None:
        """A scaler ended the step of the optimizers that it serves; they may have been skipped."""


class StepMoments:
    """Tells a listener of the moments while entered; leaves torch as it found it.

    Several may be on at once (one a session), and leave in any order; each wraps what it finds.

    Parameters
    ----------
    listener
        Is told.
    backwards
        Tell of backwards, too; without them, of what ends a step alone.

    """

    def __init__(self, listener: StepListener, *, backwards: bool = True) -> None:
        self._listener = listener
        self.backwards = backwards
        self._stack = ExitStack()
        self._on = False
        self._made = threading.local()

    def __enter__(self) -> Self:
        self._on = True
        if self.backwards:
            self._patch(*BACKWARD, self._wrap_backward)
            self._patch(*MAKE_GRADS, self._wrap_making)
        self._patch(*CLIPPING, self._wrap_grouping)
        self._patch(GradScaler, "unscale_", self._wrap_unscale)
        self._patch(Optimizer, "zero_grad", self._wrap_zeroing)
        self._patch(nn.Module, "zero_grad", self._wrap_zeroing)
        self._patch(GradScaler, "update", self._wrap_update)
        self._stack.callback(told_of_steps(self._after_step, self._before_step))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._on = False
        self._stack.close()

    def _patch(self, owner: Any, name: str, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        self._stack.enter_context(replaced(owner, name, wrap))

    def _wrap_making(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def make_grads(outputs: Any, grads: Any, *args: Any, **kwargs: Any) -> Any:
            made = original(outputs, grads, *args, **kwargs)
            self._made.grads = {id(grad) for grad, given in zip(made, grads, strict=False) if given is None}
            return made

        return make_grads

    def _given_of(self, grads: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return a backward's gradients, None for those that torch has just made."""
        made: set[int] = getattr(self._made, "grads", set())
        self._made.grads = set()
        return tuple(None if id(grad) in made else grad for grad in grads)

    def _wrap_backward(self, original: RunBackward) -> RunBackward:
        @functools.wraps(original)
        def run_backward(t_outputs: Any, *args: Any, **kwargs: Any) -> Any:
            if not self._on:
                return original(t_outputs, *args, **kwargs)
            call = BackwardCall(
                tuple(t_outputs),
                self._given_of(tuple(args[0])),
                retains=bool(args[1]),
                create_graph=bool(args[2]),
                accumulates=bool(kwargs.get("accumulate_grad")),
                inputs=tuple(args[3]) if len(args) > 3 else (),
            )
            with self._listener.around_backward(call):
                return original(t_outputs, *args, **kwargs)

        return run_backward

    def _wrap_grouping(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def group(*args: Any, **kwargs: Any) -> Any:
            if self._on and args:
                self._listener.clipping([tensor for listed in args[0] for tensor in listed if tensor is not None])
            return original(*args, **kwargs)

        return group

    def _wrap_unscale(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def unscale(scaler: GradScaler, optimizer: Optimizer) -> Any:
            if self._on and scaler.is_enabled():
                self._listener.gradients_ready(scaler=scaler, optimizer=optimizer)
            return original(scaler, optimizer)

        return unscale

    def _wrap_update(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def update(scaler: GradScaler, *args: Any, **kwargs: Any) -> Any:
            result = original(scaler, *args, **kwargs)
            if self._on and scaler.is_enabled():
                self._listener.scaler_updated(scaler)
            return result

        return update

    def _wrap_zeroing(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def zero_grad(owner: Optimizer | nn.Module, *args: Any, **kwargs: Any) -> Any:
            if self._on:
                self._listener.zeroing(owner)
            result = original(owner, *args, **kwargs)
            if self._on:
                self._listener.zeroed(owner)
            return result

        return zero_grad

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        changed = with_closure(args, kwargs, functools.partial(self._wrap_closure, optimizer))
        if changed is None:
            self._listener.gradients_ready(optimizer=optimizer)
        return changed

    def _wrap_closure(self, optimizer: Optimizer, original: Callable[..., Any]) -> Callable[..., Any]:
        self._listener.closure_begins(optimizer)

        @functools.wraps(original)
        def closure(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            if self._on:
                self._listener.closure_ended(optimizer)
            return result

        return closure

    def _after_step(self, optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        self._listener.optimizer_stepped(optimizer)
