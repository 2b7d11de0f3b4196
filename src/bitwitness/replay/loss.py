"""A step's taped loss code run again on what a replay's forwards returned."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from bitwitness.capture.lossgraph import Held, LossGraph, Output, Outside, Result, TapedCall, map_items, version_of
from bitwitness.capture.structure import tensors_of
from bitwitness.tap.frames import replayed_line
from bitwitness.tap.modes import scripts_modes_back


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
        return map_items(source, self.value)

    def _from_elsewhere(self, source: Outside) -> torch.Tensor:
        return self._graph.value_of(source) if self._copies else source.tensor


def _again(call: TapedCall, args: Any, kwargs: Any) -> Any:
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


def _without_history(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor whose own past, that the first backward has let go, is not walked again."""
    return tensor if tensor.is_leaf else tensor.detach().requires_grad_(tensor.requires_grad)
