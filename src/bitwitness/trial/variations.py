"""The same call in other ways: in another layout, in parts of its batch, on numbers that are small, large, exact or special.

A kernel that is right on well-behaved numbers in contiguous memory may be wrong elsewhere. Each function returns further calls
to be tried, with what they are called; a variation that does not apply to a call returns none.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from bitwitness.numerics import FLOAT8, is_inexact, smallest_number
from bitwitness.oracle.noise import is_mask
from bitwitness.tap.compat import tree_map
from bitwitness.trial.call import Call

_SMALL = {torch.float16: 2.0**-6}
_LARGE = {torch.float16: 2.0**3}
_INTEGERS = 4
"""Largest magnitude of the integers whose sums are exact: of 2^20 products of two they stay below 2^24, which float32 holds."""
_TWINS = 4
"""In how many places a number stands, at the most, that may become a special one."""
_APART = 7
"""Special values are that many elements apart, at least: others between them stay ordinary."""


def with_tensors(call: Call, change: Callable[[Tensor], Tensor]) -> Call:
    """Return the call with each tensor among its arguments changed; one that is given twice stays one."""
    seen: dict[int, Tensor] = {}

    def changed(value: object) -> object:
        if not isinstance(value, Tensor):
            return value
        if id(value) not in seen:
            seen[id(value)] = change(value).requires_grad_(value.requires_grad)
        return seen[id(value)]

    args, kwargs = tree_map(changed, (call.args, dict(call.kwargs)))
    return replace(call, args=args, kwargs=kwargs)


def layouts(call: Call) -> Iterator[tuple[str, Call]]:
    """Yield the call with the same numbers in memory of another order: its truth is the same."""
    tensors = [t for t in call.tensors if t.layout is torch.strided and t.numel() > 1 and t.dim()]
    if any(t.dim() > 1 for t in tensors):
        yield "inputs lie transposed in memory", with_tensors(call, _transposed)
    if tensors:
        yield "inputs are every other element of their memory", with_tensors(call, _strided)


def _transposed(tensor: Tensor) -> Tensor:
    if tensor.layout is not torch.strided or tensor.dim() < 2 or not is_inexact(tensor):
        return tensor.detach()
    return tensor.detach().transpose(-1, -2).contiguous().transpose(-1, -2)


def _strided(tensor: Tensor) -> Tensor:
    if tensor.layout is not torch.strided or not tensor.dim() or not tensor.numel() or not is_inexact(tensor):
        return tensor.detach()
    memory = torch.full((*tensor.shape, 2), math.nan, dtype=tensor.dtype, device=tensor.device)
    memory[..., 0] = tensor.detach()
    return memory[..., 0]


def _has_arithmetic(tensor: Tensor) -> bool:
    """Whether numbers may be exchanged for others: what is stored in float8 is a code, and zeros with ones are a mask."""
    return is_inexact(tensor) and tensor.dtype not in FLOAT8 and not _selects(tensor)


def _selects(tensor: Tensor) -> bool:
    """Whether a tensor is a mask that tells some of its numbers from others: a norm's first weights are all ones."""
    return tensor.layout is torch.strided and is_mask(tensor) and bool((tensor != tensor.reshape(-1)[:1]).any())


def scales(call: Call) -> Iterator[tuple[str, Call]]:
    """Yield the call with all its floating numbers smaller, and larger, by a power of two."""
    for name, powers, usual in (("small numbers", _SMALL, 2.0**-12), ("large numbers", _LARGE, 2.0**6)):

        def scaled(tensor: Tensor, powers: dict[torch.dtype, float] = powers, usual: float = usual) -> Tensor:
            return tensor.detach() * powers.get(tensor.dtype, usual) if _has_arithmetic(tensor) else tensor.detach()

        yield name, with_tensors(call, scaled)


def integers(call: Call) -> Call:
    """Return the call with small integers for its floating numbers: sums of their products are exact, in any order."""
    generator = torch.Generator().manual_seed(call.seed)

    def whole(tensor: Tensor) -> Tensor:
        if not _has_arithmetic(tensor):
            return tensor.detach()
        which, count = _numbers(tensor)
        drawn = torch.randint(-_INTEGERS, _INTEGERS + 1, (count,), generator=generator)
        return drawn.to(tensor.device, tensor.dtype)[which].reshape(tensor.shape)

    return with_tensors(call, whole)


def specials(call: Call) -> Iterator[tuple[str, Call]]:
    """Yield the call with special values among its numbers: zeros and the smallest; infinities; NaN; the largest."""
    dtypes = [t.dtype for t in call.tensors if t.is_floating_point() and _has_arithmetic(t)]
    if not dtypes:
        return
    least = [0.0, -0.0, *(s * v for v in _smallest(dtypes) for s in (1.0, -1.0))]
    yield "zeros and subnormal numbers", with_tensors(call, lambda t: _planted(t, least))
    yield "infinities", with_tensors(call, lambda t: _planted(t, [math.inf, -math.inf], apart=31))
    yield "NaN", with_tensors(call, lambda t: _planted(t, [math.nan], apart=61))
    most = [s * torch.finfo(dtypes[0]).max for s in (1.0, -1.0)]
    yield "the largest numbers", with_tensors(call, lambda t: _planted(t, most, apart=31))


def _smallest(dtypes: Sequence[torch.dtype]) -> list[float]:
    normal = torch.finfo(dtypes[0]).smallest_normal
    return [normal, normal / 2, smallest_number(dtypes[0])]


def _planted(tensor: Tensor, values: Sequence[float], apart: int = _APART) -> Tensor:
    """Return a copy with some of its numbers, spread over it, replaced one after the other, and each in all its places."""
    if not tensor.is_floating_point() or not _has_arithmetic(tensor) or tensor.layout is not torch.strided:
        return tensor.detach()
    copy = tensor.detach().clone(memory_format=torch.contiguous_format)
    flat = copy.reshape(-1)
    which, count = _numbers(flat)
    seldom = (torch.bincount(which, minlength=count)[which] <= _TWINS).nonzero().reshape(-1)
    if 2 * len(seldom) < flat.numel():  # most stand in many places: each place is one of its own
        which, count = _each(flat)
        seldom = which
    # a stride that no dimension divides: special values come to stand in every row and column
    places = seldom[3 % max(len(seldom), 1) :: max(apart, flat.numel() // 64 + 1)]
    found = torch.tensor(list(values), dtype=torch.float64).to(tensor.device, tensor.dtype)
    special = torch.full((count,), -1, device=flat.device)
    special[which[places]] = torch.arange(len(places), device=flat.device) % len(values)
    special = special[which]
    flat[special >= 0] = found[special[special >= 0]]
    return copy


def _numbers(tensor: Tensor) -> tuple[Tensor, int]:
    """Return for each element, flat, which of how many numbers it is: what a script holds twice stays twice the same.

    Tables of sines are, with both halves alike.
    """
    if tensor.is_complex():
        return _each(tensor)
    numbers, which = tensor.detach().reshape(-1).unique(return_inverse=True)
    return which, len(numbers)


def _each(tensor: Tensor) -> tuple[Tensor, int]:
    """Return the same where each element is one of its own."""
    return torch.arange(tensor.numel(), device=tensor.device), tensor.numel()


def batch_parts(call: Call, outputs: Sequence[Tensor]) -> Iterator[list[tuple[slice, Call]]]:
    """Yield the call on parts of its batch, with the rows that they are of; nothing where there is no batch.

    A batch is a first dimension that at least one tensor and all outputs share, and that is larger than one. All tensors that
    have it may be of the batch, or only some: a square matrix of weights has it, too. So there are several, likeliest first.
    """
    sizes = {t.shape[0] if t.dim() else 0 for t in outputs}
    if any(t.layout is not torch.strided for t in call.tensors):
        return
    if len(sizes) != 1 or (batch := sizes.pop()) < 2:
        return
    sharing = [id(t) for t in call.tensors_once if t.dim() and t.shape[0] == batch]
    rows = [slice(0, 1), slice(1, max(2, batch // 2 + 1))]

    def part(which: slice, whose: Sequence[int]) -> Call:
        sliced = with_tensors(call, lambda t: t.detach()[which] if id(t) in whose else t.detach())
        return replace(sliced, gradients=False)

    for whose in [sharing, *([one] for one in sharing if len(sharing) > 1)]:
        if whose:
            yield [(which, part(which, whose)) for which in rows]
