"""What a loss was computed from: taped calls that a replay can run again on the replayed outputs."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from bitwitness.capture.autocast import Autocast
from bitwitness.capture.randomness import RandomState
from bitwitness.tap.frames import Line

_COPIED = 1 << 20  # bytes of a tensor from elsewhere that is copied: labels and masks are; a table of embeddings is not


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


TensorSource = Output | Result | Outside | Held
_KINDS = (Output, Result, Outside, Held)


@dataclass(slots=True)
class TapedCall:
    """One taped call. ``args`` and ``kwargs`` hold `TensorSource` in the tensors' places.

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

    def sources(self) -> list[TensorSource]:
        """Return what it reads."""
        return sources_in((self.args, self.kwargs))


@dataclass(frozen=True, slots=True)
class Chain:
    """What a forward was given that comes from an earlier one, with or without a history of autograd's.

    ``position``: the taped call before which it ran; ``inputs``: for each input tensor a source, or None.
    """

    position: int
    inputs: tuple[TensorSource | None, ...]


@dataclass(slots=True)
class LossGraph:
    """What one backward started from: the calls it depends on (by number, in order), its roots and their gradients.

    ``chains`` tells, for each forward that was given what an earlier forward or call had made, before which call it ran and
    what stood for its inputs, in order (None where an input comes from elsewhere).
    """

    calls: dict[int, TapedCall]
    roots: list[TensorSource]
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

    def sources(self) -> list[TensorSource]:
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


def map_items(container: Any, change: Callable[[Any], Any]) -> Any:
    """Return a container with each of its items replaced; anything else as it is."""
    if isinstance(container, tuple):
        items = [change(item) for item in container]
        return type(container)(*items) if hasattr(container, "_fields") else tuple(items)
    if isinstance(container, list):
        return [change(item) for item in container]
    if isinstance(container, dict):
        return {key: change(item) for key, item in container.items()}
    return container


def map_sources(value: Any, change: Callable[[TensorSource], TensorSource]) -> Any:
    """Return placed arguments with each source replaced."""
    return (
        change(value) if isinstance(value, _KINDS) else map_items(value, functools.partial(map_sources, change=change))
    )


def sources_in(value: Any) -> list[TensorSource]:
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
