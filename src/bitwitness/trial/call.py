"""A call on trial: a function with its arguments, run with gradients as often as it takes, on copies that keep their layout."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from bitwitness.tap.compat import tree_flatten, tree_map

Copier = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Results:
    """The tensors that a call returned, flat, in order; and the gradients of the inputs that want one (None: it got none)."""

    outputs: tuple[Tensor, ...]
    gradients: tuple[Tensor | None, ...] = ()

    def slots(self) -> list[tuple[str, Tensor]]:
        """Return all of them with their names: ``out0``, …, ``grad0``, …; without those that are None."""
        named: list[tuple[str, Tensor | None]] = [(f"out{i}", t) for i, t in enumerate(self.outputs)]
        named += [(f"grad{i}", t) for i, t in enumerate(self.gradients)]
        return [(name, tensor) for name, tensor in named if tensor is not None]


@dataclass(frozen=True, slots=True)
class Call:
    """A function and its arguments, which are never changed: each run gets copies.

    Gradients are taken with respect to each floating tensor among the arguments that requires one, of all outputs that have a
    history, with output gradients that `output_gradients` draws.
    """

    fn: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    gradients: bool = True
    seed: int = 0

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors among the arguments, flat, in order."""
        return tensors_of((self.args, dict(self.kwargs)))

    @property
    def wants_gradients(self) -> bool:
        """Whether any argument requires a gradient."""
        return self.gradients and any(t.requires_grad for t in self.tensors)

    def on(self, copier: Copier) -> Prepared:
        """Return the call with what ``copier`` makes of each tensor among its arguments."""
        copies: dict[int, Tensor] = {}

        def copied(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            if id(value) not in copies:  # the same tensor twice is the same leaf twice
                copies[id(value)] = copier(value).requires_grad_(self.gradients and value.requires_grad)
            return copies[id(value)]

        args, kwargs = tree_map(copied, (self.args, dict(self.kwargs)))
        leaves = [copy for copy in copies.values() if copy.requires_grad]
        return Prepared(self, args, kwargs, leaves)

    def run(self) -> Results:
        """Run it once on copies of its arguments that lie in memory as they do; raises whatever the function raises."""
        return self.on(as_laid_out).run(self.fn)


@dataclass(frozen=True, slots=True)
class Prepared:
    """A call whose arguments are copies, for one run."""

    call: Call
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    leaves: Sequence[Tensor]

    def run(self, fn: Callable[..., Any], given: Sequence[Tensor | None] = ()) -> Results:
        """Run a function; ``given``: output gradients, drawn where there are none."""
        with torch.set_grad_enabled(bool(self.leaves)):
            outputs = tensors_of(fn(*self.args, **self.kwargs))
        if not self.leaves:
            return Results(tuple(outputs))
        differentiable = [(i, t) for i, t in enumerate(outputs) if t.requires_grad and is_inexact(t)]
        found: Sequence[Tensor | None] = [None] * len(self.leaves)
        if differentiable:
            drawn = given or output_gradients(outputs, self.call.seed)
            sources, grads = [t for _, t in differentiable], [drawn[i] for i, _ in differentiable]
            found = torch.autograd.grad(sources, self.leaves, grads, allow_unused=True)
        return Results(tuple(outputs), tuple(found))


def output_gradients(outputs: Sequence[Tensor], seed: int) -> list[Tensor | None]:
    """Return normal output gradients for what has a history: the same numbers for the same shapes, dtypes and seed."""
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(t.shape, generator=generator, dtype=torch.float64).to(t.device, t.dtype)
        if t.requires_grad and is_inexact(t)
        else None
        for t in outputs
    ]


def tensors_of(value: Any) -> list[Tensor]:
    """Return the tensors in nested containers (dataclasses and model outputs that torch knows, too), flat, in order."""
    return [leaf for leaf in tree_flatten(value)[0] if isinstance(leaf, Tensor)]


def is_inexact(tensor: Tensor) -> bool:
    """Whether a tensor holds floating or complex numbers."""
    return tensor.is_floating_point() or tensor.is_complex()


def as_laid_out(tensor: Tensor) -> Tensor:
    """Return a detached copy with the same strides and the same offset in its storage."""
    if tensor.layout is not torch.strided or tensor.is_conj() or tensor.is_neg():
        return tensor.detach().clone()
    storage = tensor.detach().untyped_storage().clone()
    copy = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return copy.set_(storage, tensor.storage_offset(), tensor.size(), tensor.stride())
