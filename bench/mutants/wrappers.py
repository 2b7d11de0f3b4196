"""Generic faults: what goes wrong around a right function, in its result or in its gradients."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from typing import Any

import torch

from . import Mutant
from .draws import Draw, Draws
from .numerics import widened
from .operators import CASES, Case

Tensor = torch.Tensor
Function = Callable[..., Tensor]
Gradients = list[Tensor | None]
Change = Callable[[Gradients, list[Tensor], Tensor], Gradients]
DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
STALE = 1.37  # inputs of another step are these, and in another order


class _Faulty(torch.autograd.Function):
    """One function ahead, the gradients of another one behind, and a change of these."""

    @staticmethod
    def forward(ctx: Any, ahead: Function, behind: Function, change: Change | None, *inputs: Tensor) -> Tensor:
        ctx.behind, ctx.change = behind, change
        ctx.save_for_backward(*inputs)
        out = ahead(*(x.detach() for x in inputs))
        if not out.is_floating_point():
            ctx.mark_non_differentiable(out)
        return out

    @staticmethod
    def backward(ctx: Any, *outer: Any) -> Any:
        grad: Tensor = outer[0]
        needs = ctx.needs_input_grad[3:]
        leaves = [x.detach().requires_grad_(need) for x, need in zip(ctx.saved_tensors, needs, strict=True)]
        with torch.enable_grad():
            taken = [leaf for leaf in leaves if leaf.requires_grad]
            found = iter(torch.autograd.grad(ctx.behind(*leaves), taken, grad, allow_unused=True))
        grads: Gradients = [next(found) if leaf.requires_grad else None for leaf in leaves]
        if ctx.change is not None:
            grads = ctx.change(grads, [leaf.detach() for leaf in leaves], grad)
        return (None, None, None, *grads)


faulty: Function = _Faulty.apply


def replaced(right: Function, ahead: Function) -> Function:
    """Compute the result wrongly, the gradients right."""
    return lambda *inputs: faulty(ahead, right, None, *inputs)


def stored(right: Function, change: Callable[[Tensor], Tensor]) -> Function:
    """Change the result on its way to memory; gradients are right."""
    return replaced(right, lambda *inputs: change(right(*inputs)))


def rounded(right: Function, how: Callable[[Tensor, torch.dtype], Tensor]) -> Function:
    """Compute in a wider dtype and round the result in another way than to nearest even."""

    def ahead(*inputs: Tensor) -> Tensor:
        dtype = next(x.dtype for x in inputs if x.is_floating_point())
        return how(right(*widened(inputs)), dtype)

    return replaced(right, ahead)


def fused(function: Function) -> Function:
    """Compute in float32 and round once to the inputs' dtype, as a fused kernel does."""

    def wrong(*inputs: Tensor) -> Tensor:
        dtype = next(x.dtype for x in inputs if x.is_floating_point())
        out = function(*widened(inputs, torch.float32))
        return out.to(dtype) if out.is_floating_point() else out

    return wrong


def taken(right: Function, change: Callable[[Tensor], Tensor], which: tuple[int, ...] | None = None) -> Function:
    """Change inputs as the kernel loads them, all floating ones or some; gradients see the changed ones."""

    def load(place: int, x: Tensor) -> Tensor:
        if not x.is_floating_point() or (which is not None and place not in which):
            return x
        return x + (
            change(x.detach()) - x.detach()
        )  # the difference is exact: what is added back gives the changed one

    return lambda *inputs: right(*(load(place, x) for place, x in enumerate(inputs)))


def backward_of(right: Function, change: Change) -> Function:
    """Compute the result right, and change the gradients."""
    return lambda *inputs: faulty(right, right, change, *inputs)


def backward_through(right: Function, behind: Function) -> Function:
    """Compute the result right, the gradients those of another function."""
    return lambda *inputs: faulty(right, behind, None, *inputs)


def each(change: Callable[[Tensor], Tensor], which: tuple[int, ...] | None = None) -> Change:
    """Change each gradient, or those of some inputs."""

    def changed(grads: Gradients, _inputs: list[Tensor], _grad: Tensor) -> Gradients:
        return [g if g is None or (which and place not in which) else change(g) for place, g in enumerate(grads)]

    return changed


def by(formula: Callable[..., tuple[Tensor | None, ...]]) -> Change:
    """Take gradients from a formula of the output's gradient and the inputs, computed in float32; None leaves the right one."""

    def changed(grads: Gradients, inputs: list[Tensor], grad: Tensor) -> Gradients:
        with torch.no_grad():
            own = formula(grad.float(), *widened(tuple(inputs), torch.float32))
        pairs = zip(grads, own, strict=False)
        return [old if new is None or old is None else new.to(old.dtype) for old, new in pairs] + grads[len(own) :]

    return changed


def another_step(right: Function, which: tuple[int, ...]) -> Function:
    """Compute gradients from what another step has saved of some inputs."""

    def behind(*inputs: Tensor) -> Tensor:
        held = [x + (x.roll(1, 0) * STALE - x).detach() if n in which else x for n, x in enumerate(inputs)]
        return right(*held)

    return backward_through(right, behind)


def chosen(words: str) -> Iterator[tuple[Case, str]]:
    """Yield cases and the short names of dtypes: ``"add mul:bf16,f16"``; float32 where none is told."""
    for word in words.split():
        name, _, kinds = word.partition(":")
        for kind in (kinds or "f32").split(","):
            yield CASES[name], kind


def mutant(
    case: Case,
    kind: str,
    fault: str,
    detail: str,
    wrong: Function,
    *,
    right: Function | None = None,
    draws: Draws | None = None,
) -> Mutant:
    """Return a mutant of a case, with the case's own function and inputs where no others are given."""
    name = f"{case.name}/{detail}/{str(DTYPES[kind]).removeprefix('torch.')}"
    seed, draw = zlib.crc32(name.encode()), draws or case.draws
    return Mutant(name, case.operator, fault, right or case.right, wrong, lambda: draw(Draw(DTYPES[kind], seed)))
