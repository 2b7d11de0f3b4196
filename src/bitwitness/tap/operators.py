"""Every operator that torch dispatches, with its site: one dispatch mode, used by all who look at operators.

An `OperatorTap` is entered only around a call that the guard owns (a root's forward, a backward). Entered while another
tap is on, the newer one sees an operator first and runs it through the older one; the fault injector is entered
before anything else, so that it stands for the device on which all the rest runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import torch

from bitwitness.site import Site
from bitwitness.tap.compat import (
    OpOverload,
    TorchDispatchMode,
    dispatch_modes,
    is_traceable_wrapper_subclass_type,
    plain_tensors,
)
from bitwitness.tap.modes import others_above_aside
from bitwitness.tap.modules import ModuleTracker
from bitwitness.tap.ownwork import in_own_work, own_work


@dataclass(slots=True)
class OpCall:
    """One operator call: what ran, where, on what, and what came out.

    ``own``: bitwitness ran it, not the training. ``checked``: a handler has held it against what it must give. ``at``: the
    operator's name in its site, where the call is shown as another's.
    """

    func: OpOverload
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Any
    op: str
    module: str
    phase: str
    call: int
    own: bool = False
    checked: bool = False
    at: str = ""

    def site(self, slot: str = "out0") -> Site:
        """Return the site of one of the call's values."""
        return Site(self.module, self.at or self.op, self.call, self.phase, slot)

    @property
    def outputs(self) -> tuple[torch.Tensor, ...]:
        """The tensors among the results, flat, in order: slots ``out0``, ``out1`` and so on."""
        return tensors_in(self.result)


def tensors_in(value: Any) -> tuple[torch.Tensor, ...]:
    """Return the tensors in an operator's result: a tensor, or a sequence of tensors and other values."""
    if isinstance(value, torch.Tensor):
        return (value,)
    if isinstance(value, Sequence) and not isinstance(value, str):
        return tuple(tensor for item in value for tensor in tensors_in(item))
    return ()


def _is_fake(kind: type) -> bool:
    return kind.__module__ == "torch._subclasses.fake_tensor"


_UNASKED: Any = object()

Handler = Callable[[OpCall], Any]
"""Sees a call after it ran; what it returns, unless None, takes the result's place."""

Selector = Callable[[OpOverload], bool]


class OperatorTap(TorchDispatchMode):
    """Show operator calls to a handler.

    Parameters
    ----------
    tracker
        Knows the running module; entered and left with the tap.
    handler
        Called after each selected operator with the `OpCall`. The tap is off while it runs.
    select
        Which operators the handler wants; asked once per overload. All by default.
    before
        Called with the same `OpCall` (its result still None) before the operator runs; it may change its
        arguments.
    own_work
        Show bitwitness's own operators, too: those of another tap's handler, say.
    census
        Called with the overload and the result of every operator that the training runs, selected or not.

    """

    def __init__(
        self,
        tracker: ModuleTracker,
        handler: Handler,
        select: Selector | None = None,
        before: Callable[[OpCall], None] | None = None,
        *,
        own_work: bool = False,
        census: Callable[[OpOverload, Any], None] | None = None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._census = census
        self._own_work = own_work
        self._before = before
        self._tracker = tracker
        self._handler = handler
        self._select = select
        self._wanted: dict[OpOverload, str | None] = {}
        self._asleep = False

    def sleep(self) -> None:
        """Show nothing, though it stays on another thread's stack of modes: from here it cannot be taken out of that."""
        self._asleep = True
        self._tracker.__exit__(None, None, None)

    def wake(self) -> None:
        """Show operators again."""
        self._asleep = False
        self._tracker.__enter__()

    @property
    def is_asleep(self) -> bool:
        """Whether it shows nothing, though it may stand on a stack of modes."""
        return self._asleep

    @property
    def is_on_here(self) -> bool:
        """Whether it stands on this thread's stack of modes."""
        return self in dispatch_modes()

    def __enter__(self) -> Self:
        self._asleep = False
        self._tracker.__enter__()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # Another tap may have been entered since, and stay on: one of a recording does, until the backward has ended.
        if self.is_on_here:
            with others_above_aside(self):
                super().__exit__(kind, error, trace)  # type: ignore[no-untyped-call]
        self._tracker.__exit__(kind, error, trace)

    def _name(self, func: OpOverload) -> str | None:
        """Return the operator's name, or None where the handler does not want it."""
        wanted = self._select is None or self._select(func)
        name = func.overloadpacket.__name__ if wanted else None
        self._wanted[func] = name
        return name

    supports_higher_order_operators = True

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if self._asleep or not isinstance(func, OpOverload):
            return func(*args, **kwargs)  # flex_attention and the like: what runs inside them is not looked at
        if types and any(map(is_traceable_wrapper_subclass_type, types)):
            return NotImplemented  # a DTensor dispatches again, with the local tensors of this device
        if types and any(map(_is_fake, types)):
            return func(*args, **kwargs)  # shapes alone are worked out, for a DTensor say: nothing is computed
        name = self._wanted.get(func, _UNASKED)
        if name is _UNASKED:
            name = self._name(func)
        if name is None or ((own := in_own_work()) and not self._own_work):
            return self._counted(func, func(*args, **kwargs))
        module, phase, call = self._tracker.locate(name)
        seen = OpCall(func, args, kwargs, None, name, module, phase, call, own)
        if self._before is not None:
            with own_work():
                self._before(seen)
        with nullcontext() if types else plain_tensors():  # as autograd calls it, whatever the script's tensors look at
            seen.result = func(*seen.args, **seen.kwargs)
        self._counted(func, seen.result)
        with own_work():
            changed = self._handler(seen)
        return seen.result if changed is None else changed

    def _counted(self, func: OpOverload, result: Any) -> Any:
        if self._census is not None and not in_own_work():
            self._census(func, result)
        return result
