"""The code between a model's outputs and the backward, usually the loss, taped so that a replay can run it again.

A script's loss is not inside any module that we own. While a `LossTape` is on (from the end of the root's forward to the
backward), a function mode notes each torch function that the script calls: what was called, on which earlier results,
on which model outputs, on which other tensors, and the script's line. Nothing is computed, copied or waited for. Before a
replay uses the tape, only the calls that the loss depends on are kept; afterwards it is checked that the replayed loss has
the original's bits, so that a tape that missed something is never believed.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack, _pop_mode, _push_mode
from torch.utils.weak import WeakIdKeyDictionary

from bitwitness.tap.autocast import Autocast
from bitwitness.tap.frames import current_line
from bitwitness.tap.lossgraph import Call, LossGraph, Output, Outside, Result, Source, sources_in, version_of
from bitwitness.tap.modules import in_own_work
from bitwitness.tap.patching import replaced
from bitwitness.tap.structure import map_tensors, tensors_of

_LONGEST = 20_000  # calls; a second network's forward fits, a whole evaluation does not
_BACKWARDS = ("backward", "grad")
_PLAIN = ("__get__", "__set__", "__repr__", "__len__", "item", "tolist", "numpy", "__float__", "__int__", "__bool__")

_UPDATES = ("batch_norm", "instance_norm")  # they change running statistics without a word to the version counter


@dataclass(slots=True)
class _Tape:
    """The calls of one step so far, and where each tensor that they made comes from."""

    calls: list[Call] = field(default_factory=list)
    sources: WeakIdKeyDictionary = field(default_factory=WeakIdKeyDictionary)
    problem: str | None = None
    last_scalar: torch.Tensor | None = None
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    def source(self, tensor: torch.Tensor) -> Source:
        known: Source | None = self.sources.get(tensor)
        return Outside(tensor, version_of(tensor)) if known is None else known

    def note(self, func: Callable[..., Any], args: Any, kwargs: Any, run: Callable[[], Any]) -> Any:
        placed = map_tensors(args, self.source), map_tensors(kwargs, self.source)
        call = Call(func, *placed, torch.is_grad_enabled(), Autocast.read(self.device), current_line())
        result = run()
        made = tensors_of(result)
        name = getattr(func, "__name__", "")
        if name == "__setitem__":
            made = [args[0]]
            call.func = _set_item
        others = [source for source in sources_in(placed) if isinstance(source, Outside)]
        # What is changed in place and was not made here (an optimizer's parameters) stays outside, as it is then.
        known = {id(source.tensor) for source in others}
        made = [tensor for tensor in made if id(tensor) not in known]
        if made:
            call.changes_outside = any(version_of(source.tensor) != source.version for source in others)
            call.changes_outside |= any(part in name for part in _UPDATES) and len(others) > 1
            call.scalar = made[0].numel() == 1 and made[0].is_floating_point()
            if call.scalar:
                self.last_scalar = made[0].detach()
            self.calls.append(call)
            number = len(self.calls) - 1
            for index, tensor in enumerate(made):
                self.sources[tensor] = Result(number, index)
        return result

    def graph(self, roots: tuple[Any, ...], grads: Any) -> LossGraph:
        """Keep what a backward from ``roots`` depends on."""
        if not all(isinstance(root, torch.Tensor) for root in roots):
            return LossGraph({}, [], [], "the backward starts at graph edges")
        given = grads if isinstance(grads, tuple | list) else (grads,)
        return self.behind([self.source(root) for root in roots], given)

    def latest_scalar(self) -> LossGraph | None:
        """Return what the last scalar that the script computed depends on: a loss whose backward was never run."""
        numbers = [number for number, call in enumerate(self.calls) if call.scalar]
        return self.behind([Result(numbers[-1], 0)], ()) if numbers else None

    def behind(self, starts: list[Source], given: Sequence[Any]) -> LossGraph:
        """Return all that some values depend on."""
        needed: dict[int, Call] = {}
        waiting: list[Source] = list(starts)
        while waiting:
            source = waiting.pop()
            if isinstance(source, Result) and source.call not in needed:
                needed[source.call] = call = self.calls[source.call]
                waiting += sources_in((call.args, call.kwargs))
        calls = {number: needed[number] for number in sorted(needed)}
        kept = [grad.detach() if isinstance(grad, torch.Tensor) else None for grad in given]
        kept += [None] * (len(starts) - len(kept))
        problem = self.problem
        if any(call.changes_outside for call in calls.values()):
            problem = problem or "the loss code changes a tensor in place that it did not make"
        return LossGraph(calls, starts, kept, problem)


def _set_item(target: torch.Tensor, index: Any, value: Any) -> torch.Tensor:
    target[index] = value
    return target


class _Mode(TorchFunctionMode):
    """Hands torch functions to the tape."""

    def __init__(self, tape: LossTape) -> None:
        super().__init__()
        self._tape = tape

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        return self._tape.called(func, args, kwargs)


class LossTape:
    """Records one root's steps; see the module's text.

    `begin` and `end` stand at the root's hooks and at the backward, so the mode is not entered and left in one place; it is
    taken out of torch's stack wherever it stands there then, and nothing is left behind by a loop that breaks off.
    """

    def __init__(self, device: torch.device) -> None:
        self._mode = _Mode(self)
        self._device = device
        self._tape = _Tape(device=device)
        self._patches: ExitStack | None = None
        self._set_aside = False  # by torch, while the mode itself runs a function
        self._inside = False
        self._barred = False

    # -- the root's hooks ----------------------------------------------------------------------------------------

    def new_step(self) -> None:
        """Forget the step before."""
        self._tape = _Tape(device=self._device)

    def add_output(self, tensor: torch.Tensor, forward: int, index: int) -> None:
        """Say that a tensor is a differentiable output of the root."""
        self._tape.sources[tensor] = Output(forward, index)

    @property
    def on(self) -> bool:
        """Whether calls are noted now."""
        return self._patches is not None

    def begin(self) -> None:
        """Note what is called from now on."""
        if self._patches is not None or self._barred:
            return
        self._patches = ExitStack()
        self._patches.enter_context(function_applied(self))
        self._patches.enter_context(_backward_wrapped(self._off_stack))
        self._patches.enter_context(_compilation_told(self._compiling))
        if not self._set_aside and self._mode not in _get_current_function_mode_stack():
            _push_mode(self._mode)

    def end(self) -> None:
        """Note nothing more, for now."""
        if self._patches is not None:
            self._patches.close()
            self._patches = None
        if not self._set_aside:
            self._leave_stack()

    def _leave_stack(self) -> None:
        above = []
        while self._mode in _get_current_function_mode_stack():
            top = _pop_mode()
            if top is not self._mode:
                above.append(top)
        for mode in reversed(above):
            _push_mode(mode)

    @contextmanager
    def _off_stack(self) -> Iterator[None]:
        """Keep torch from setting the mode aside for a backward: it would put it back after it, whatever we do meanwhile."""
        self._leave_stack()
        yield
        if self.on and self._mode not in _get_current_function_mode_stack():
            _push_mode(self._mode)

    def _compiling(self) -> None:
        """Get out of a compilation's way: it would take the mode for a part of the script."""
        self.give_up("compiled code runs between forward and backward")
        self.end()
        self._barred = True

    def give_up(self, problem: str) -> None:
        """Say why the step's loss cannot be run again; the first reason stands."""
        self._tape.problem = self._tape.problem or problem

    def graph(self, roots: tuple[Any, ...], grads: Any) -> LossGraph:
        """Return what a backward that begins now depends on."""
        return self._tape.graph(roots, grads)

    def holds_bad_scalar(self) -> bool:
        """Tell whether the last scalar that the script computed is not finite; waits for its device."""
        last = self._tape.last_scalar
        return last is not None and not bool(last.isfinite().all())

    def latest_scalar(self) -> LossGraph | None:
        """Return what the last scalar that the script computed depends on; None if there is none."""
        return self._tape.latest_scalar()

    # -- what the script calls -----------------------------------------------------------------------------------

    def called(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run a torch function for the script, and note it."""
        name = getattr(func, "__name__", "")
        if name in _BACKWARDS:
            return self._apart(func, args, kwargs)
        quiet = not self.on or self._inside or self._tape.problem is not None
        if quiet or name in _PLAIN or in_own_work():
            return func(*args, **kwargs)
        if len(self._tape.calls) >= _LONGEST:
            self.give_up(f"more than {_LONGEST} torch functions were called between forward and backward")
        elif "c10d" in str(getattr(func, "namespace", "")) or "c10d" in str(getattr(func, "__module__", "")):
            self.give_up("ranks exchange something in the loss code")
        return self._tape.note(func, args, kwargs, lambda: func(*args, **kwargs))

    def _apart(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run a backward; the mode, which torch has set aside for it, is back on the stack after it."""
        before, self._set_aside = self._set_aside, True
        try:
            return func(*args, **kwargs)
        finally:
            self._set_aside = before

    def applied(self, original: Callable[..., Any], kind: type[Any], args: Any, kwargs: Any) -> Any:
        """Run a custom autograd function for the script, and note it as one call."""
        if kind.__name__ == "_DDPSink":  # DistributedDataParallel's own, around the outputs
            result = original(*args, **kwargs)
            given = [self._tape.sources.get(tensor) for tensor in tensors_of(args)]
            for tensor, source in zip(tensors_of(result), given, strict=False):
                if source is not None:
                    self._tape.sources[tensor] = source
            return result
        if kind.__module__.startswith("torch.distributed"):
            self.give_up("ranks exchange something in the loss code")
        if self._tape.problem or self._inside:
            return original(*args, **kwargs)
        self._inside = True
        try:
            return self._tape.note(original, args, kwargs, lambda: original(*args, **kwargs))
        finally:
            self._inside = False


def function_applied(tape: LossTape) -> AbstractContextManager[None]:
    """Tell a tape of custom autograd functions; a function mode hears only of what they call inside."""

    def wrap(original: Any) -> Any:
        def apply(kind: type[Any], *args: Any, **kwargs: Any) -> Any:
            run = original.__get__(None, kind)
            if in_own_work() or not tape.on:
                return run(*args, **kwargs)
            return tape.applied(run, kind, args, kwargs)

        return classmethod(apply)

    return replaced(torch.autograd.Function, "apply", wrap)


def _backward_wrapped(around: Callable[[], AbstractContextManager[None]]) -> AbstractContextManager[None]:
    """Run ``Tensor.backward`` inside a context."""

    def wrap(original: Any) -> Any:
        @functools.wraps(original)
        def backward(*args: Any, **kwargs: Any) -> Any:
            with around():
                return original(*args, **kwargs)

        return backward

    return replaced(torch.Tensor, "backward", wrap)


@contextmanager
def _compilation_told(tell: Callable[[], None]) -> Iterator[None]:
    """Have ``tell`` called when dynamo begins to compile something."""
    module = sys.modules.get("torch._dynamo.callback")
    if module is None:
        yield
        return
    handler: Any = module.callback_handler
    told = handler.register_start_callback(lambda _args: tell())
    try:
        yield
    finally:
        if told in handler.start_callbacks:
            handler.remove_start_callback(told)
