"""A call on trial: a function with its arguments, run with gradients as often as it takes, on copies that keep their layout."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor

from bitwitness.numerics import is_inexact
from bitwitness.stats import same_bits
from bitwitness.tap.compat import tree_flatten, tree_map

Copier = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Results:
    """What a call left.

    Attributes
    ----------
    outputs
        The tensors that it returned, flat, in order.
    gradients
        Those of the inputs that want one, in order; None: it got none.
    changed
        Tensors among the arguments that it wrote into, by their number, as they are afterwards.
    kept
        Of a float64 run, in which dtype the device would keep each output, by its name.
    tracked
        Names of the outputs that gradients flow through.

    """

    outputs: tuple[Tensor, ...]
    gradients: tuple[Tensor | None, ...] = ()
    changed: Mapping[int, Tensor] = field(default_factory=dict)
    kept: Mapping[str, torch.dtype] = field(default_factory=dict)
    tracked: frozenset[str] = frozenset()

    def slots(self) -> dict[str, Tensor]:
        """Return all of them by their names: ``out0``, …, ``grad0``, …, ``in0``; without those that are None."""
        named: dict[str, Tensor | None] = {f"out{i}": t for i, t in enumerate(self.outputs)}
        named |= {f"grad{i}": t for i, t in enumerate(self.gradients)}
        named |= {f"in{i}": t for i, t in self.changed.items()}
        return {name: tensor for name, tensor in named.items() if tensor is not None}

    def differs_at(self, other: Results) -> str:
        """Return the name of the first result whose bits are others in another run; empty where none are."""
        mine, theirs = self.slots(), other.slots()
        for slot in {**mine, **theirs}:
            if slot not in mine or slot not in theirs or mine[slot].shape != theirs[slot].shape:
                return slot
            if not same_bits(mine[slot].detach(), theirs[slot].detach()):
                return slot
        return ""


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
    def tensors_once(self) -> list[Tensor]:
        """The same, each one once."""
        return list({id(t): t for t in self.tensors}.values())

    def on(self, copier: Copier) -> Copied:
        """Return the call with what ``copier`` makes of each tensor among its arguments."""
        copies: dict[int, Tensor] = {}

        def copied(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            if id(value) not in copies:  # the same tensor twice is the same leaf twice
                copies[id(value)] = copier(value).requires_grad_(self.gradients and value.requires_grad)
            return copies[id(value)]

        args, kwargs = tree_map(copied, (self.args, dict(self.kwargs)))
        return Copied(self, args, kwargs, list(copies.values()))

    def on_cpu(self) -> Copied:
        """Return the call with copies on the CPU that lie in memory as its arguments do."""
        return self.on(lambda t: as_laid_out(t.detach().cpu()))

    def run(self) -> Results:
        """Run it once on copies of its arguments that lie in memory as they do; raises whatever the function raises."""
        copied = self.on(as_laid_out)
        return replace(copied.run(self.fn), changed=copied.written())


@dataclass(frozen=True, slots=True)
class Copied:
    """A call whose arguments are copies, for one run."""

    call: Call
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    copies: Sequence[Tensor]

    def run(self, fn: Callable[..., Any], given: Sequence[Tensor | None] = ()) -> Results:
        """Run a function; ``given``: output gradients, drawn where there are none, unused where they do not fit."""
        leaves = [copy for copy in self.copies if copy.requires_grad]
        with torch.set_grad_enabled(bool(leaves)):
            outputs = returned(fn(*self.args, **self.kwargs))
        found: Sequence[Tensor | None] = ()
        if leaves:
            found = self._gradients(leaves, outputs, given or output_gradients(outputs, self.call.seed))
        tracked = frozenset(f"out{i}" for i, t in enumerate(outputs) if t.requires_grad)
        return Results(tuple(outputs), tuple(found), tracked=tracked)

    def written(self) -> dict[int, Tensor]:
        """Return the copies that hold other numbers than they did, by their number; through ``.data``, too."""
        given = self.call.tensors_once
        return {
            i: copy for i, (copy, before) in enumerate(zip(self.copies, given, strict=True)) if _differ(copy, before)
        }

    def _gradients(
        self, leaves: Sequence[Tensor], outputs: Sequence[Tensor], drawn: Sequence[Tensor | None]
    ) -> Sequence[Tensor | None]:
        fits = len(drawn) == len(outputs) and all(
            g is None or g.shape == t.shape for g, t in zip(drawn, outputs, strict=True)
        )
        asked = [
            (t, g) for t, g in zip(outputs, drawn, strict=False) if t.requires_grad and is_inexact(t) and g is not None
        ]
        if not fits or not asked:
            return [None] * len(leaves)
        return torch.autograd.grad([t for t, _ in asked], leaves, [g for _, g in asked], allow_unused=True)


def _differ(copy: Tensor, given: Tensor) -> bool:
    """Whether a copy holds other numbers than what it was made of."""
    if copy.layout is not torch.strided or copy.is_complex():
        return False
    plain = given.detach().to(copy.device, copy.dtype)
    same = copy.detach() == plain
    return not bool((same | plain.isnan() if plain.is_floating_point() else same).all())


def output_gradients(outputs: Sequence[Tensor], seed: int) -> list[Tensor | None]:
    """Return normal output gradients for what has a history: the same numbers for the same shapes, dtypes and seed.

    Where nothing has one, for all: another function may give one to the same results.
    """
    generator = torch.Generator().manual_seed(seed)
    untracked = not any(t.requires_grad for t in outputs)
    return [
        torch.randn(t.shape, generator=generator, dtype=torch.float64).to(t.device, t.dtype)
        if (t.requires_grad or untracked) and is_inexact(t)
        else None
        for t in outputs
    ]


def tensors_of(value: Any) -> list[Tensor]:
    """Return the tensors in nested containers, dataclasses and model outputs, too, flat, in order."""
    found: list[Tensor] = []
    for leaf in tree_flatten(value)[0]:
        if isinstance(leaf, Tensor):
            found.append(leaf)
        elif is_dataclass(leaf) and not isinstance(leaf, type):
            found += tensors_of([getattr(leaf, one.name) for one in fields(leaf)])
    return found


def returned(value: Any) -> list[Tensor]:
    """Return the tensors that a function returned: as `tensors_of`, a dict's by its keys, in whichever order it has them."""
    if type(value) is dict:
        return [t for key in sorted(value, key=str) for t in returned(value[key])]
    if type(value) in (list, tuple):
        return [t for one in value for t in returned(one)]
    return tensors_of(value)


def as_laid_out(tensor: Tensor) -> Tensor:
    """Return a detached copy with the same strides and the same offset in its storage."""
    if tensor.layout is not torch.strided or tensor.is_conj() or tensor.is_neg():
        return tensor.detach().clone()
    storage = tensor.detach().untyped_storage().clone()
    copy = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return copy.set_(storage, tensor.storage_offset(), tensor.size(), tensor.stride())
