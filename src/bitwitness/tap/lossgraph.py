"""What a loss was computed from: taped calls that a replay can run again on the replayed outputs."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from bitwitness.tap.autocast import Autocast
from bitwitness.tap.frames import Line, replayed_line
from bitwitness.tap.modes import scripts_modes_back
from bitwitness.tap.randomness import RandomState
from bitwitness.tap.structure import tensors_of

_COPIED = 1 << 20  # bytes of a tensor from elsewhere that is copied


@dataclass(frozen=True, slots=True)
class Output:
    """An output of the root: which of the step's forwards, and which of its differentiable outputs.

    Below zero, `index` tells of one without a history: -1 is the first tensor that the forward returned, -2 the second.
    """

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


@dataclass(frozen=True, slots=True)
class Held:
    """A tensor with a history that the root's forward left in an attribute: an auxiliary loss, say.

    ``path``: the module's position among the root's modules, then attribute and keys; ``forward``: the forward that made it.
    """

    path: tuple[Any, ...]
    forward: int


Source = Output | Result | Outside | Held
_KINDS = (Output, Result, Outside, Held)


@dataclass(slots=True)
class Call:
    """One taped call. ``args`` and ``kwargs`` hold `Source` in the tensors' places.

    ``mutates``: it changes its first argument in place; ``storages``: where what it made or changed lies.
    ``random``: the random state before it, where it draws;
    ``generators``: generators among its arguments, with their states; ``derived``: an output of the root is behind it;
    ``tainted``: it, or something behind it, changes what was not made here.
    """

    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    grad: bool
    autocast: Autocast
    line: Line
    changes_outside: bool = False
    scalar: bool = False
    mutates: bool = False
    storages: frozenset[Any] = frozenset()
    random: RandomState | None = None
    generators: tuple[tuple[torch.Generator, torch.Tensor], ...] = ()
    derived: bool = False
    tainted: bool = False

    @property
    def name(self) -> str:
        """The function's name; empty if it has none."""
        return str(getattr(self.func, "__name__", ""))

    def sources(self) -> list[Source]:
        """Return what it reads."""
        return sources_in((self.args, self.kwargs))


@dataclass(frozen=True, slots=True)
class Chain:
    """What a forward was given that comes from an earlier one, with or without a history of autograd's.

    ``position``: the taped call before which it ran; ``inputs``: for each input tensor a source, or None.
    """

    position: int
    inputs: tuple[Source | None, ...]


@dataclass(slots=True)
class LossGraph:
    """What one backward started from: the calls it depends on (by number, in order), its roots and their gradients.

    ``chains`` tells, for each forward that was given what an earlier forward or call had made, before which call it ran and
    what stood for its inputs, in order (None where an input comes from elsewhere).
    """

    calls: dict[int, Call]
    roots: list[Source]
    grads: list[torch.Tensor | None]
    problem: str | None = None
    chains: dict[int, Chain] = field(default_factory=dict)
    made: list[tuple[weakref.ref[torch.Tensor], int, Result]] = field(default_factory=list)
    """What its calls made, as long as the script holds it, with its version when the backward began."""
    read: Line | None = None
    """The first line that took a number out of what the model's outputs led to, before the backward began."""
    kept: dict[int, torch.Tensor] = field(default_factory=dict)
    """Copies of small tensors from elsewhere, by their ``id``: a script may overwrite its batch through ``.data`` or numpy."""

    def keep_outside(self) -> None:
        """Copy what is read from elsewhere, as far as that is cheap; parameters are minded by others."""
        for source in self.outside():
            tensor = source.tensor
            plain = type(tensor) is torch.Tensor and tensor.layout is torch.strided and tensor.grad_fn is None
            if plain and not tensor.is_meta and tensor.nbytes <= _COPIED and version_of(tensor) == source.version:
                self.kept[id(tensor)] = tensor.detach().clone().requires_grad_(tensor.requires_grad)

    def value_of(self, source: Outside) -> torch.Tensor:
        """Return what a tensor from elsewhere held."""
        return self.kept.get(id(source.tensor), source.tensor)

    @property
    def forwards(self) -> set[int]:
        """The numbers of the root's forwards whose results it reads."""
        return {source.forward for source in self.sources() if isinstance(source, Output | Held)}

    @property
    def factor(self) -> float:
        """The number by which the script multiplied its loss last, a loss scale perhaps; 1 if it did not."""
        factor, source = 1.0, self.roots[0] if self.roots else None
        while isinstance(source, Result) and self.calls[source.call].name == "mul":
            args = self.calls[source.call].args
            numbers = [float(item) for item in args if isinstance(item, int | float)]
            factor *= numbers[0] if numbers else 1.0
            source = next((item for item in args if isinstance(item, Result)), None)
        return factor

    def sources(self) -> list[Source]:
        """Return all that its calls and its backward read, in order."""
        given = [source for chain in self.chains.values() for source in chain.inputs if source is not None]
        return [*given, *(source for call in self.calls.values() for source in call.sources()), *self.roots]

    def outside(self) -> list[Outside]:
        """Return the tensors from elsewhere that it reads, each once, in order."""
        found: dict[int, Outside] = {}
        for source in self.sources():
            if isinstance(source, Outside):
                found.setdefault(id(source.tensor), source)
        return list(found.values())

    def unrepeated(self) -> list[tuple[str, Line]]:
        """Return the terms with a history of their own that no taped call made: what made them, and the line that used them."""
        return [
            (source.tensor.grad_fn.name(), call.line)
            for call in self.calls.values()
            for source in call.sources()
            if isinstance(source, Outside) and source.tensor.grad_fn is not None
        ]


class LossRun:
    """One more execution of a step's taped calls, on the outputs of a replay.

    Parameters
    ----------
    graph
        The calls.
    outputs
        The replayed root's differentiable outputs; they may come while the run goes on.
    leaves
        What takes the place of other tensors, by their ``id``.
    held
        Returns what the replayed forward left in an attribute.
    copies
        Read the copies of what came from elsewhere; a search for a NaN wants the tensors themselves, which it may know.

    """

    def __init__(
        self,
        graph: LossGraph,
        outputs: Mapping[Output, torch.Tensor],
        leaves: Mapping[int, torch.Tensor],
        held: Callable[[Held], torch.Tensor],
        *,
        copies: bool = True,
    ) -> None:
        self._graph = graph
        self._outputs = outputs
        self._leaves = leaves
        self._held = held
        self._results: dict[Result, torch.Tensor] = {}
        self._copies = copies
        self._own = {_address(self._from_elsewhere(source)) for source in graph.outside()}
        self._waiting = list(graph.calls)

    def advance(self, number: int) -> None:
        """Execute the calls before the one with a number.

        Raises
        ------
        LookupError
            If an output is not there, another tensor was changed since, or would be changed now.

        """
        while self._waiting and self._waiting[0] < number:
            this = self._waiting.pop(0)
            call = self._graph.calls[this]
            args, kwargs = self.value(call.args), self.value(call.kwargs)
            if call.mutates and _address(args[0]) in self._own:
                raise LookupError("the loss code changes a tensor in place that it did not make")
            for index, tensor in enumerate(tensors_of(_again(call, args, kwargs))):
                self._results[Result(this, index)] = tensor

    def finish(self) -> list[tuple[torch.Tensor, torch.Tensor | None]]:
        """Execute the rest; return the roots, each with the gradient to start from."""
        self.advance(self._waiting[-1] + 1 if self._waiting else 0)
        return [(self.value(root), grad) for root, grad in zip(self._graph.roots, self._graph.grads, strict=True)]

    def still_held(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return what the training's own calls made and the script holds unchanged, each with what was made now."""
        held = ((ref(), version, self._results.get(result)) for ref, version, result in self._graph.made)
        return [
            (tensor, value.detach())
            for tensor, version, value in held
            if tensor is not None
            and value is not None
            and version_of(tensor) == version
            and tensor.shape == value.shape
        ]

    def value(self, source: Any) -> Any:
        """Return what stands for a source now, also inside placed arguments."""
        if isinstance(source, Output):
            if source not in self._outputs:
                raise LookupError("the loss reads what a forward gave that is not run again with it")
            return self._outputs[source]
        if isinstance(source, Result):
            return self._results[source]
        if isinstance(source, Held):
            return self._held(source)
        if isinstance(source, Outside):
            tensor = self._from_elsewhere(source)
            if tensor is source.tensor and version_of(tensor) != source.version:
                raise LookupError("a tensor that the loss code used was changed since")
            return self._leaves.get(id(source.tensor), _without_history(tensor))
        return _mapped(source, self.value)

    def _from_elsewhere(self, source: Outside) -> torch.Tensor:
        return self._graph.value_of(source) if self._copies else source.tensor


def _again(call: Call, args: Any, kwargs: Any) -> Any:
    token = replayed_line.set(call.line)
    now = [(generator, generator.get_state()) for generator, _ in call.generators]
    try:
        if call.random is not None:
            call.random.restore(torch.device(call.random.device_type))
        for generator, state in call.generators:
            generator.set_state(state)
        with torch.set_grad_enabled(call.grad), call.autocast.context(), scripts_modes_back():
            return call.func(*args, **kwargs)
    finally:
        replayed_line.reset(token)
        for generator, state in now:
            generator.set_state(state)


def _address(tensor: Any) -> int | None:
    """Return where a tensor's storage lies; None for what has none."""
    try:
        return int(tensor.untyped_storage().data_ptr()) or None
    except (AttributeError, NotImplementedError, RuntimeError):
        return None


def _mapped(container: Any, change: Callable[[Any], Any]) -> Any:
    if isinstance(container, tuple):
        items = [change(item) for item in container]
        return type(container)(*items) if hasattr(container, "_fields") else tuple(items)
    if isinstance(container, list):
        return [change(item) for item in container]
    if isinstance(container, dict):
        return {key: change(item) for key, item in container.items()}
    return container


def map_sources(value: Any, change: Callable[[Source], Source]) -> Any:
    """Return placed arguments with each source replaced."""
    return change(value) if isinstance(value, _KINDS) else _mapped(value, functools.partial(map_sources, change=change))


def sources_in(value: Any) -> list[Source]:
    """Return the sources inside placed arguments."""
    if isinstance(value, _KINDS):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, tuple | list):
        return [source for item in value for source in sources_in(item)]
    return []


def version_of(tensor: torch.Tensor) -> int:
    """Return a tensor's version; -1 for one made in inference mode, which has none."""
    return -1 if tensor.is_inference() else tensor._version


def _without_history(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor whose own past, that the first backward has let go, is not walked again."""
    return tensor if tensor.is_leaf else tensor.detach().requires_grad_(tensor.requires_grad)
