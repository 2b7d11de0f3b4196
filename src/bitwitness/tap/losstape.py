"""The code between a model's outputs and the backward, usually the loss, taped so that a replay can run it again.

A script's loss is not inside any module that we own. While a `LossTape` is on (from the end of the root's forward to the
backward), a function mode notes each torch function that the script calls: what was called, on which earlier results,
on which model outputs, on which other tensors, and the script's line. Nothing is computed, copied or waited for. Before a
replay uses the tape, only the calls that the loss depends on are kept; afterwards it is checked that the replayed loss has
the original's bits, so that a tape that missed something is never believed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack, _pop_mode, _push_mode
from torch.utils.weak import WeakIdKeyDictionary

from bitwitness.tap.autocast import Autocast
from bitwitness.tap.frames import Line, current_line, replayed_line
from bitwitness.tap.modules import in_own_work
from bitwitness.tap.structure import map_tensors, tensors_of

_LONGEST = 20_000  # calls; a second network's forward fits, a whole evaluation does not
_BACKWARDS = ("backward", "grad")
_PLAIN = ("__get__", "__set__", "__repr__", "__len__", "item", "tolist", "numpy", "__float__", "__int__", "__bool__")

_UPDATES = ("batch_norm", "instance_norm")  # they change running statistics without a word to the version counter


@dataclass(frozen=True, slots=True)
class Output:
    """A differentiable output of the root: which of the step's forwards, and which of its outputs."""

    forward: int
    index: int


@dataclass(frozen=True, slots=True)
class Result:
    """A tensor that an earlier taped call returned."""

    call: int
    index: int


@dataclass(frozen=True, slots=True)
class Outside:
    """Any other tensor, labels for example, with the version that it had."""

    tensor: torch.Tensor
    version: int


Source = Output | Result | Outside


@dataclass(slots=True)
class Call:
    """One taped call. ``args`` and ``kwargs`` hold `Source` in the tensors' places."""

    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    grad: bool
    autocast: Autocast
    line: Line
    changes_outside: bool = False
    scalar: bool = False


@dataclass(slots=True)
class LossGraph:
    """What one backward started from: the calls it depends on (by number, in order), its roots and their gradients."""

    calls: dict[int, Call]
    roots: list[Source]
    grads: list[torch.Tensor | None]
    problem: str | None = None

    @property
    def trivial(self) -> bool:
        """Whether the backward started at outputs of the root, with nothing in between."""
        return not self.calls and all(isinstance(root, Output) for root in self.roots)

    @property
    def factor(self) -> float:
        """The number by which the script multiplied its loss last, a loss scale perhaps; 1 if it did not."""
        factor, source = 1.0, self.roots[0] if self.roots else None
        while isinstance(source, Result) and getattr(self.calls[source.call].func, "__name__", "") == "mul":
            args = self.calls[source.call].args
            numbers = [float(item) for item in args if isinstance(item, int | float)]
            factor *= numbers[0] if numbers else 1.0
            source = next((item for item in args if isinstance(item, Result)), None)
        return factor

    def run(
        self, outputs: Mapping[Output, torch.Tensor], leaves: Mapping[int, torch.Tensor]
    ) -> list[tuple[torch.Tensor, torch.Tensor | None]]:
        """Execute the calls again; return the roots, each with the gradient to start from.

        Parameters
        ----------
        outputs
            The replayed root's differentiable outputs.
        leaves
            What takes the place of other tensors, by their ``id``.

        Raises
        ------
        LookupError
            If an output is not there, or another tensor was changed since.

        """
        results: dict[Result, torch.Tensor] = {}

        def value(source: Any) -> Any:
            if isinstance(source, Output):
                return outputs[source]
            if isinstance(source, Result):
                return results[source]
            if isinstance(source, Outside):
                if _version(source.tensor) != source.version:
                    raise LookupError("a tensor that the loss code used was changed since")
                return leaves.get(id(source.tensor), _without_history(source.tensor))
            return _mapped(source, value)

        for number, call in self.calls.items():
            token = replayed_line.set(call.line)
            try:
                with torch.set_grad_enabled(call.grad), call.autocast.context():
                    made = call.func(*value(call.args), **value(call.kwargs))
            finally:
                replayed_line.reset(token)
            for index, tensor in enumerate(tensors_of(made)):
                results[Result(number, index)] = tensor
        return [(value(root), grad) for root, grad in zip(self.roots, self.grads, strict=True)]


def _mapped(container: Any, change: Callable[[Any], Any]) -> Any:
    if isinstance(container, tuple):
        items = [change(item) for item in container]
        return type(container)(*items) if hasattr(container, "_fields") else tuple(items)
    if isinstance(container, list):
        return [change(item) for item in container]
    if isinstance(container, dict):
        return {key: change(item) for key, item in container.items()}
    return container


@dataclass(slots=True)
class _Tape:
    """The calls of one step so far, and where each tensor that they made comes from."""

    calls: list[Call] = field(default_factory=list)
    sources: WeakIdKeyDictionary = field(default_factory=WeakIdKeyDictionary)
    problem: str | None = None
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    def source(self, tensor: torch.Tensor) -> Source:
        known: Source | None = self.sources.get(tensor)
        return Outside(tensor, _version(tensor)) if known is None else known

    def note(self, func: Callable[..., Any], args: Any, kwargs: Any, run: Callable[[], Any]) -> Any:
        placed = map_tensors(args, self.source), map_tensors(kwargs, self.source)
        call = Call(func, *placed, torch.is_grad_enabled(), Autocast.read(self.device), current_line())
        result = run()
        made = tensors_of(result)
        name = getattr(func, "__name__", "")
        if name == "__setitem__":
            made = [args[0]]
            call.func = _set_item
        if made:
            others = [source for source in _sources(placed) if isinstance(source, Outside)]
            call.changes_outside = any(_version(source.tensor) != source.version for source in others)
            call.changes_outside |= any(part in name for part in _UPDATES) and len(others) > 1
            call.scalar = made[0].numel() == 1 and made[0].is_floating_point()
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
                waiting += _sources((call.args, call.kwargs))
        calls = {number: needed[number] for number in sorted(needed)}
        kept = [grad.detach() if isinstance(grad, torch.Tensor) else None for grad in given]
        kept += [None] * (len(starts) - len(kept))
        problem = self.problem
        if any(call.changes_outside for call in calls.values()):
            problem = problem or "the loss code changes a tensor in place that it did not make"
        return LossGraph(calls, starts, kept, problem)


def _version(tensor: torch.Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


def _without_history(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor whose own past, that the first backward has let go, is not walked again."""
    return tensor if tensor.is_leaf else tensor.detach().requires_grad_(tensor.requires_grad)


def _sources(value: Any) -> list[Source]:
    """Return the sources inside placed arguments."""
    if isinstance(value, Output | Result | Outside):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, tuple | list):
        return [source for item in value for source in _sources(item)]
    return []


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
        self._applied: AbstractContextManager[None] | None = None
        self._set_aside = False  # by torch, while the mode itself runs a function
        self._inside = False

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
        return self._applied is not None

    def begin(self) -> None:
        """Note what is called from now on."""
        if self._applied is not None:
            return
        self._applied = function_applied(self)
        self._applied.__enter__()
        if not self._set_aside and self._mode not in _get_current_function_mode_stack():
            _push_mode(self._mode)

    def end(self) -> None:
        """Note nothing more, for now."""
        if self._applied is not None:
            self._applied.__exit__(None, None, None)
            self._applied = None
        if self._set_aside:
            return
        above = []
        while self._mode in _get_current_function_mode_stack():
            top = _pop_mode()
            if top is not self._mode:
                above.append(top)
        for mode in reversed(above):
            _push_mode(mode)

    def give_up(self, problem: str) -> None:
        """Say why the step's loss cannot be run again; the first reason stands."""
        self._tape.problem = self._tape.problem or problem

    def graph(self, roots: tuple[Any, ...], grads: Any) -> LossGraph:
        """Return what a backward that begins now depends on."""
        return self._tape.graph(roots, grads)

    def latest_scalar(self) -> LossGraph | None:
        """Return what the last scalar that the script computed depends on; None if there is none."""
        return self._tape.latest_scalar()

    # -- what the script calls -----------------------------------------------------------------------------------

    def called(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run a torch function for the script, and note it."""
        name = getattr(func, "__name__", "")
        if name in _BACKWARDS:
            return self._apart(func, args, kwargs)
        quiet = self._applied is None or self._inside or self._tape.problem is not None
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


@contextmanager
def function_applied(tape: LossTape) -> Iterator[None]:
    """Tell a tape of custom autograd functions; a function mode hears only of what they call inside."""
    owner: Any = torch.autograd.Function
    original = owner.__dict__["apply"]

    def apply(kind: type[Any], *args: Any, **kwargs: Any) -> Any:
        run = original.__get__(None, kind)
        if in_own_work():
            return run(*args, **kwargs)
        return tape.applied(run, kind, args, kwargs)

    ours = classmethod(apply)
    owner.apply = ours
    try:
        yield
    finally:
        if owner.__dict__["apply"] is ours:
            owner.apply = original
