"""What a loss was computed from: taped calls that a replay can run again on the replayed outputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from bitwitness.tap.autocast import Autocast
from bitwitness.tap.frames import Line, replayed_line
from bitwitness.tap.structure import tensors_of


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
    def forwards(self) -> set[int]:
        """The numbers of the root's forwards whose outputs it reads."""
        sources = [
            *self.roots,
            *(source for call in self.calls.values() for source in sources_in((call.args, call.kwargs))),
        ]
        return {source.forward for source in sources if isinstance(source, Output)}

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
                if version_of(source.tensor) != source.version:
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


def sources_in(value: Any) -> list[Source]:
    """Return the sources inside placed arguments."""
    if isinstance(value, Output | Result | Outside):
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
