"""What one step's loss code called, and what of it a backward depends on."""

from __future__ import annotations

import functools
import re
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from bitwitness.capture.autocast import Autocast
from bitwitness.capture.lossgraph import (
    Chain,
    Held,
    LossGraph,
    Output,
    Outside,
    Result,
    TapedCall,
    TensorSource,
    map_sources,
    sources_in,
    version_of,
)
from bitwitness.capture.randomness import RandomState
from bitwitness.capture.structure import map_tensors, tensors_of
from bitwitness.capture.weakmap import WeakTensorMap
from bitwitness.tap.frames import Line, current_line
from bitwitness.tap.modes import scripts_modes_off
from bitwitness.tap.storages import StorageRef

_UPDATES = ("batch_norm", "instance_norm")  # they change running statistics without a word to the version counter
_DRAWS = re.compile(
    r"_?(rand|dropout|bernoulli|multinomial|normal|uniform|exponential|geometric|cauchy|log_normal|poisson|binomial|rrelu|"
    r"gumbel|standard_gamma|sample|trunc_normal|alpha_dropout|feature_|scaled_dot_product|multi_head|lstm|gru|rnn_|fractional)"
)
"""Names of functions that draw, or may draw, random numbers."""

FindHeld = Callable[[torch.Tensor], "Held | None"]


@dataclass(frozen=True, slots=True)
class Begun:
    """A call that is about to be made, with its first argument, if that is a tensor, and the version that it has."""

    call: TapedCall
    first: torch.Tensor | None
    version: int | None


@dataclass(slots=True)
class Tape:
    """The calls of one step so far, and where each tensor that they made comes from."""

    device: torch.device
    is_inside: Callable[[torch.Tensor], bool]
    calls: list[TapedCall] = field(default_factory=list)
    sources: WeakTensorMap[TensorSource] = field(default_factory=WeakTensorMap)
    chains: dict[int, Chain] = field(default_factory=dict)
    places: dict[TensorSource, frozenset[StorageRef]] = field(default_factory=dict)
    written: frozenset[StorageRef] = frozenset()
    """Where tensors from elsewhere lie to which the script has written what it had computed from an output."""
    problem: str | None = None
    last_scalar: torch.Tensor | None = None
    read: Line | None = None
    """The first line that took a number out of what an output led to, or kept it in a tensor of the script's own."""

    def note_read(self, tensor: Any) -> None:
        """Note that a number is taken out of a tensor, which no heal will change."""
        if self.read is None and isinstance(tensor, torch.Tensor) and self._is_derived(self.source(tensor)):
            self.read = current_line()

    def source(self, tensor: torch.Tensor) -> TensorSource:
        """Return where a tensor comes from."""
        known = self.sources.get(tensor)
        return Outside(tensor, version_of(tensor)) if known is None else known

    def add_output(self, tensor: torch.Tensor, output: Output) -> None:
        """Note an output of the root."""
        self.sources[tensor] = output
        self.places[output] = _storages([tensor])

    def note_forward(self, number: int, inputs: Sequence[torch.Tensor]) -> bool:
        """Note what a forward of the root is given, where that comes from an earlier one; return whether all of it is known."""
        placed = tuple(self._given(tensor) for tensor in inputs)
        if any(source is not None for source in placed):
            self.chains[number] = Chain(len(self.calls), placed)
        others = [self.source(tensor) for tensor, source in zip(inputs, placed, strict=True) if source is None]
        return not any(map(self._is_derived, others))

    def _given(self, tensor: torch.Tensor) -> TensorSource | None:
        """Return where an input comes from, if it has a history, or was computed from an output: a hidden state, detached."""
        source = self.source(tensor)
        if tensor.grad_fn is not None or isinstance(source, Output):
            return source
        call = self.calls[source.call] if isinstance(source, Result) else None
        return source if call is not None and call.derived and not call.tainted else None

    def begin(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Begun:
        """Take what a function of the script's is about to be called with."""
        first = args[0] if args and isinstance(args[0], torch.Tensor) else None
        version = None if first is None else version_of(first)
        placed = map_tensors(args, self.source), map_tensors(kwargs, self.source)
        call = TapedCall(func, *placed, torch.is_grad_enabled(), Autocast.read(self.device), current_line())
        self._mind_randomness(call, args, kwargs)
        return Begun(call, first, version)

    def note(self, begun: Begun, args: Any, result: Any) -> None:
        """Note a call that has been made."""
        call, first = begun.call, begun.first
        made = tensors_of(result)
        name = call.name
        if name == "__setitem__":
            made = [args[0]]
            call.func = _set_item
        call.mutates = first is not None and version_of(first) != begun.version
        others = [source for source in sources_in((call.args, call.kwargs)) if isinstance(source, Outside)]
        # What is changed in place and was not made here (an optimizer's parameters) stays outside, as it is then.
        known = {id(source.tensor) for source in others}
        made = [tensor for tensor in made if id(tensor) not in known]
        call.derived = any(map(self._is_derived, call.sources()))
        if call.derived and call.mutates and first is not None:
            self._mind_written(call, first)
        if made:
            call.changes_outside = any(version_of(source.tensor) != source.version for source in others)
            call.changes_outside |= any(part in name for part in _UPDATES) and len(others) > 1
            call.changes_outside |= call.mutates and self._is_part_of_another(first)
            call.scalar = made[0].numel() == 1 and made[0].is_floating_point()
            if call.scalar:
                with scripts_modes_off():
                    self.last_scalar = made[0].detach()
            call.tainted = call.changes_outside or any(map(self._is_tainted, call.sources()))
            call.storages = _storages(made)
            self.calls.append(call)
            number = len(self.calls) - 1
            for index, tensor in enumerate(made):
                self.sources[tensor] = Result(number, index)

    def _mind_written(self, call: TapedCall, into: torch.Tensor) -> None:
        """Note where a call puts what an output led to; what a running mean of the script's keeps of it no heal changes."""
        outside = isinstance(self.source(into), Outside)
        if outside:
            self.written |= _storages([into])
        if self.read is None and not into.requires_grad and (outside or self._is_part_of_another(into)):
            self.read = call.line

    def _mind_randomness(self, call: TapedCall, args: Any, kwargs: Any) -> None:
        if isinstance(getattr(call.func, "__self__", None), type) or _DRAWS.match(call.name):
            call.random = RandomState.read(self.device)
        given = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Generator)]
        call.generators = tuple((generator, generator.get_state()) for generator in given)

    def _is_derived(self, source: TensorSource) -> bool:
        """Tell whether an output of the root is behind a tensor."""
        made = isinstance(source, Result) and self.calls[source.call].derived
        return isinstance(source, Output) or made or self._is_written(source)

    def _is_tainted(self, source: TensorSource) -> bool:
        """Tell whether something behind a tensor changes what was not made here."""
        return (isinstance(source, Result) and self.calls[source.call].tainted) or self._is_written(source)

    def _is_written(self, source: TensorSource) -> bool:
        """Tell whether a tensor from elsewhere holds what was computed from an output."""
        return (
            bool(self.written)
            and isinstance(source, Outside)
            and not self.written.isdisjoint(_storages([source.tensor]))
        )

    def _is_part_of_another(self, tensor: torch.Tensor | None) -> bool:
        """Tell whether a tensor is a view of one that the script, and not the model or the tape, has made."""
        base = None if tensor is None else tensor._base
        return base is not None and isinstance(self.source(base), Outside) and not self.is_inside(base)

    def graph(self, roots: tuple[Any, ...], grads: Any, find: FindHeld) -> LossGraph:
        """Keep what a backward from ``roots`` depends on."""
        if not all(isinstance(root, torch.Tensor) for root in roots):
            return LossGraph({}, [], [], "the backward starts at graph edges")
        given = grads if isinstance(grads, tuple | list) else (grads,)
        return self.behind([self.source(root) for root in roots], given, find)

    def last_computed(self, find: FindHeld) -> LossGraph | None:
        """Return what the last scalar that the script computed depends on: a loss whose backward was never run.

        Where there is none, as where a loss function refuses what it is given, what the last forward returned.
        """
        numbers = [number for number, call in enumerate(self.calls) if call.scalar]
        if numbers:
            return self.behind([Result(numbers[-1], 0)], (), find)
        outputs: list[TensorSource] = [source for _, source in self.last_outputs()]
        return self.behind(outputs, (), find) if outputs else None

    def last_outputs(self) -> list[tuple[torch.Tensor, Output]]:
        """Return what is left of what the root's last forward returned."""
        found = [(tensor, source) for tensor, source in self.sources.items() if isinstance(source, Output)]
        last = max((source.forward for _, source in found), default=0)
        return [(tensor, source) for tensor, source in found if source.forward == last]

    def behind(self, starts: list[TensorSource], given: Sequence[Any], find: FindHeld) -> LossGraph:
        """Return all that some values depend on."""
        needed, through = self._needed(starts)
        calls = {number: _with_held(needed[number], find) for number in sorted(needed)}
        kept = [grad.detach() if isinstance(grad, torch.Tensor) else None for grad in given]
        kept += [None] * (len(starts) - len(kept))
        problem = self.problem
        if any(call.changes_outside for call in calls.values()):
            problem = problem or "the loss code changes a tensor in place that it did not make"
        chains = {number: self.chains[number] for number in sorted(through) if number in self.chains}
        made = [
            (weakref.ref(tensor), version_of(tensor), source)
            for tensor, source in self.sources.items()
            if isinstance(source, Result) and source.call in calls
        ]
        starts = [_held(source, find) for source in starts]
        return LossGraph(calls, starts, kept, problem, chains, made, self.read)

    def _needed(self, starts: list[TensorSource]) -> tuple[dict[int, TapedCall], set[int]]:
        """Return the calls behind some values, and the forwards.

        What is changed in place may be read under another name (a slice): calls that change what lies where a needed value
        lies are needed, too.
        """
        needed: dict[int, TapedCall] = {}
        through: set[int] = set()
        waiting: list[TensorSource] = list(starts)
        places: set[StorageRef] = set()
        changing = [n for n, call in enumerate(self.calls) if call.mutates and not call.changes_outside]
        while waiting:
            source = waiting.pop()
            if isinstance(source, Result) and source.call not in needed:
                needed[source.call] = call = self.calls[source.call]
                waiting += call.sources()
                places |= call.storages
            elif isinstance(source, Output):
                places |= self.places.get(source, frozenset())
                if source.forward not in through:
                    through.add(source.forward)
                    chain = self.chains.get(source.forward)
                    waiting += [given for given in (chain.inputs if chain else ()) if given is not None]
            if not waiting:
                waiting += [Result(n, 0) for n in changing if n not in needed and self.calls[n].storages & places]
        return needed, through


def _storages(tensors: Sequence[torch.Tensor]) -> frozenset[StorageRef]:
    """Return where tensors lie, in names that no later storage at the same address takes over."""
    plain = (t for t in tensors if t.layout is torch.strided and not t.is_meta and type(t) is torch.Tensor)
    return frozenset(StorageRef(tensor.untyped_storage()) for tensor in plain)


def _with_held(call: TapedCall, find: FindHeld) -> TapedCall:
    """Return a call with the places, in the root's attributes, of what forwards left there."""
    if not any(isinstance(source, Outside) and source.tensor.grad_fn is not None for source in call.sources()):
        return call
    change = functools.partial(_held, find=find)
    return replace(call, args=map_sources(call.args, change), kwargs=map_sources(call.kwargs, change))


def _held(source: TensorSource, find: FindHeld) -> TensorSource:
    if isinstance(source, Outside) and source.tensor.grad_fn is not None:
        return find(source.tensor) or source
    return source


def _set_item(target: torch.Tensor, index: Any, value: Any) -> torch.Tensor:
    target[index] = value
    return target
