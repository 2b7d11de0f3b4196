"""The code between a model's outputs and the backward, usually the loss, taped so that a replay can run it again.

A script's loss is not inside any module that we own. While a `LossTape` is on (from the end of the root's forward to the
backward), a function mode notes each torch function that the script calls: what was called, on which earlier results,
on which model outputs, on which other tensors, and the script's line. Nothing is computed, copied or waited for. Of a
tape only the calls are kept that the loss depends on. A replay through it is believed only if it builds the graph that the
training built (`capture.graphwalk`), so that a tape that missed something never speaks.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from bitwitness.capture.lossgraph import LossGraph, Output
from bitwitness.capture.structure import tensors_of
from bitwitness.capture.tapedcalls import FindHeld, Tape
from bitwitness.tap.compat import (
    TENSOR_PROPERTIES,
    dynamo,
    in_transform,
    unheard,
)
from bitwitness.tap.modes import put_below, take_out
from bitwitness.tap.ownwork import in_own_work
from bitwitness.tap.patching import replaced
from bitwitness.tap.timer import stopwatch

_LONGEST = 20_000  # calls; a second network's forward fits, a whole evaluation does not
_UNKNOWN = "a call of the loss code could not be noted ({}: {})"
_BACKWARDS = ("backward", "grad")
_PLAIN = (
    "__set__",
    "__repr__",
    "__len__",
    "item",
    "tolist",
    "numpy",
    "__float__",
    "__int__",
    "__bool__",
    "size",
    "dim",
)
_READS = frozenset(("item", "tolist", "numpy", "__float__", "__int__", "__index__", "__array__"))
_NOT_TAPED = frozenset(TENSOR_PROPERTIES[name].__get__ for name in ("grad", "grad_fn"))
"""Properties that give what the step itself makes, and not what was computed from a tensor."""


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

    ``find`` returns where, in the root's attributes, a tensor with a history is held; ``is_inside`` tells whether a recorded
    forward made a tensor.

    `begin` and `end` stand at the root's hooks and at the backward, so the mode is not entered and left in one place; it is
    taken out of torch's stack wherever it stands there then, and nothing is left behind by a loop that breaks off. Torch keeps
    a stack for each thread: what is replaced for all threads meanwhile (`_backward_wrapped`, `function_applied`) leaves
    others than the step's own alone.
    """

    def __init__(
        self,
        device: torch.device,
        find: FindHeld = lambda _: None,
        is_inside: Callable[[torch.Tensor], bool] = lambda _: True,
    ) -> None:
        self._mode = _Mode(self)
        self._device = device
        self._find = find
        self._is_inside = is_inside
        self._now = stopwatch(device)
        self.own_seconds = 0.0
        """Seconds that noting took so far."""
        self.new_step()
        self._patches: ExitStack | None = None
        self._thread = threading.get_ident()
        self._set_aside = False  # by torch, while the mode itself runs a function
        self._inside = False
        self._barred = False

    # -- the root's hooks ----------------------------------------------------------------------------------------

    def new_step(self) -> None:
        """Forget the step before."""
        self._tape = Tape(self._device, self._is_inside)

    def add_output(self, tensor: torch.Tensor, forward: int, index: int) -> None:
        """Say that a tensor is an output of the root (`lossgraph.Output`)."""
        self._tape.add_output(tensor, Output(forward, index))

    def note_forward(self, number: int, inputs: Sequence[torch.Tensor]) -> bool:
        """Say what a forward of the root is given; return whether all that comes from earlier ones can be computed again."""
        return self._tape.note_forward(number, inputs)

    @property
    def on(self) -> bool:
        """Whether calls are noted now."""
        return self._patches is not None

    @property
    def on_here(self) -> bool:
        """Whether calls of this thread are noted now: another thread may train another model."""
        return self.on and self._thread == threading.get_ident()

    def begin(self) -> None:
        """Note what this thread calls from now on."""
        if self._patches is not None or self._barred:
            return
        self._thread = threading.get_ident()
        self._patches = ExitStack()
        self._patches.enter_context(function_applied(self))
        self._patches.enter_context(_backward_wrapped(self._off_stack))
        self._patches.enter_context(_compilation_told(self._compiling))
        if not self._set_aside:
            put_below(self._mode)

    def end(self) -> None:
        """Note nothing more, for now."""
        if self._patches is not None:
            self._patches.close()
            self._patches = None
        if not self._set_aside:
            take_out(self._mode)

    @contextmanager
    def _off_stack(self) -> Iterator[None]:
        """Keep torch from setting the mode aside for a backward: it would put it back after it, whatever we do meanwhile."""
        if not self.on_here:
            yield
            return
        take_out(self._mode)
        yield
        if self.on_here:
            put_below(self._mode)

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
        return self._tape.graph(roots, grads, self._find)

    @property
    def last_scalar(self) -> torch.Tensor | None:
        """The last scalar that the script computed, without its graph."""
        return self._tape.last_scalar

    def last_computed(self) -> LossGraph | None:
        """Return what the last scalar (else output) that the script computed depends on; None if there is none."""
        return self._tape.last_computed(self._find)

    def last_outputs(self) -> list[torch.Tensor]:
        """Return what is left of what the root's last forward returned."""
        return [tensor for tensor, _ in self._tape.last_outputs()]

    # -- what the script calls -----------------------------------------------------------------------------------

    def called(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run a torch function for the script, and note it."""
        name = getattr(func, "__name__", "")
        if name in _BACKWARDS:
            return self._apart(func, args, kwargs)
        quiet = not self.on or self._inside or self._tape.problem is not None
        if name in _READS and not (quiet or in_own_work()):
            with unheard():
                self._tape.note_read(args[0])
        if quiet or name in _PLAIN or func in _NOT_TAPED or in_own_work() or in_transform():
            return func(*args, **kwargs)
        if len(self._tape.calls) >= _LONGEST:
            self.give_up(f"more than {_LONGEST} torch functions were called between forward and backward")
        elif "c10d" in str(getattr(func, "namespace", "")) or "c10d" in str(getattr(func, "__module__", "")):
            self.give_up("ranks exchange something in the loss code")
        return self._noted(func, args, kwargs, lambda: func(*args, **kwargs))

    def _noted(self, func: Any, args: Any, kwargs: Any, run: Callable[[], Any]) -> Any:
        """Run a call and note it; an error of the script's goes on to the script, one of ours ends the tape for the step."""
        began = self._now()
        try:
            with unheard():  # by the tapes of other roots, and by tensors
                begun = self._tape.begin(func, args, kwargs)
        except Exception as error:
            self.give_up(_UNKNOWN.format(getattr(func, "__name__", func), error))
            return run()
        called = self._now()
        result = run()
        returned = self._now()
        try:
            with unheard():
                self._tape.note(begun, args, result)
        except Exception as error:
            self.give_up(_UNKNOWN.format(getattr(func, "__name__", func), error))
        self.own_seconds += called - began + self._now() - returned
        return result

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
            return self._noted(original, args, kwargs, lambda: original(*args, **kwargs))
        finally:
            self._inside = False


def function_applied(tape: LossTape) -> AbstractContextManager[None]:
    """Tell a tape of custom autograd functions; a function mode hears only of what they call inside."""

    def wrap(original: Any) -> Any:
        def apply(kind: type[Any], *args: Any, **kwargs: Any) -> Any:
            run = original.__get__(None, kind)
            if in_own_work() or in_transform() or not tape.on_here:
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
    module = dynamo("callback")
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
