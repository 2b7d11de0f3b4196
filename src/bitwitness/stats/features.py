"""What the cheap sensors need of every local gradient: L2 norm, largest magnitude, hash of the bits."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from bitwitness.numerics import summing_dtype
from bitwitness.stats.digest import flat_bits, hashes_of, joined
from bitwitness.stats.fold import Fold, fold, is_large
from bitwitness.stats.local import local_parts
from bitwitness.stats.sizes import sizes_of

_SMALL = 4096  # elements; below it one call for each tensor costs more than copying the tensors together
_BLOCK = 1 << 20  # elements: bounds what a converted half type takes, and the growth of float32 rounding errors


@dataclass(frozen=True, slots=True)
class Features:
    """The features of P gradients, in the order in which they were given, on one device.

    Attributes
    ----------
    l2
        float32 [P], right to 1e-3 (a million equal values are off by 5e-4 on a CPU, random ones by 2e-5).
        Infinite if the squares overflow float32 although all values are finite (`exact_l2` then tells); NaN if
        a value is NaN.
    absmax
        float32 [P]: largest magnitude. NaN if any value is NaN, else infinite if any is. A float64 magnitude
        beyond float32 becomes infinite. Of a complex gradient the larger one of a real and an imaginary part.
    digest
        int64 [P]: `bit_hash` of each; empty where hashes were not asked for.
    high
        float32 [P]: largest value, with its sign, which changes where signs do; empty where it was not measured.

    """

    l2: Tensor
    absmax: Tensor
    digest: Tensor
    high: Tensor = field(default_factory=partial(torch.empty, 0))


@torch.no_grad()
def features_of(grads: Sequence[Tensor], *, hashed: bool = True) -> Features:
    """Compute the features of all local gradients of this rank; nothing waits for a device.

    Parameters
    ----------
    grads
        Gradients of any floating dtypes, on any devices. Of a DTensor the local shard is read, of a sparse
        gradient the values as stored; an empty one has norm and magnitude 0.
    hashed
        Hash the bits, too; otherwise ``digest`` is empty.

    Returns
    -------
    Features
        On the first accelerator that holds a gradient, else on the CPU.

    Raises
    ------
    UsageError
        For a meta or quantized tensor.

    """
    parts = [local_parts(grad) for grad in grads]
    for group in parts:
        group[0] = group[0].reshape(-1)  # the one copy of a gradient that is not contiguous
    values = [_plain(group[0]) for group in parts]
    home = next((value.device for value in values if value.device.type != "cpu"), torch.device("cpu"))
    bits = [[flat_bits(part) for part in group] for group in parts] if hashed else []
    folds: dict[int, Fold] = {}

    def in_cache(index: int) -> None:
        if is_large(bits[index][0]):
            folds[index] = fold(bits[index][0])

    magnitudes = _magnitudes(values, home, in_cache if hashed else None)
    digest = _digests(bits, folds, home)
    l2, absmax, high = (magnitudes[:, column].contiguous() for column in range(3))
    return Features(l2, absmax, digest, high)


def _digests(bits: list[list[Tensor]], folds: dict[int, Fold], home: torch.device) -> Tensor:
    first = [group[0] for group in bits]
    others = [part for group in bits for part in group[1:]]
    hashes = [value.to(home) for value in hashes_of([*first, *others], folds)]
    rest = iter(hashes[len(first) :])
    whole = [
        joined([value, *(next(rest) for _ in group[1:])])
        for value, group in zip(hashes[: len(first)], bits, strict=True)
    ]
    return torch.stack(whole) if whole else torch.empty(0, dtype=torch.int64)


def _plain(value: Tensor) -> Tensor:
    """Return a flat tensor of a dtype that has norms; a view wherever that is possible."""
    if value.is_complex():
        value = torch.view_as_real(value)
    elif not value.is_floating_point() or value.dtype.itemsize == 1:
        value = value.float()
    return value.reshape(-1)


def _magnitudes(values: list[Tensor], home: torch.device, in_cache: Callable[[int], None] | None) -> Tensor:
    """Return L2, largest magnitude and largest value, float32 [P, 3] on ``home``, with as few calls as the devices allow.

    ``in_cache`` is called with the position of each large gradient on a CPU just after it was read.
    """
    known = sizes_of(values, in_cache)
    if known and len(known) == len(values):
        return torch.tensor([known[index] for index in range(len(values))], dtype=torch.float32, device=home)
    batches = defaultdict(list)
    rows: list[Tensor] = [torch.empty(0)] * len(values)
    for index, value in enumerate(values):
        if index in known:
            rows[index] = torch.tensor(known[index], dtype=torch.float32, device=home)
        else:
            batches[value.device, value.dtype, _common_length(value)].append(index)
    for (device, _, length), members in batches.items():
        tensors = [values[index] for index in members]
        if length == 0:
            batch = torch.zeros(len(members), 3, device=device)
        elif length > 0:
            batch = _of_equal_length(torch.stack(tensors))
        elif device.type == "cpu":
            batch = _one_by_one(tensors, members, in_cache)
        else:
            batch = _fused(tensors)
        for index, row in zip(members, batch.to(home, torch.float32).unbind(), strict=True):
            rows[index] = row
    return torch.stack(rows) if rows else torch.empty(0, 3)


def _common_length(value: Tensor) -> int:
    """Return the length that the members of a batch must share, or -1 if they need not."""
    length = value.numel()
    return length if length == 0 or (length < _SMALL and value.device.type == "cpu") else -1


def _of_equal_length(stacked: Tensor) -> Tensor:
    low, high = stacked.aminmax(dim=1)
    dtype = summing_dtype(stacked.dtype)
    return torch.stack([_norm(stacked, 1), torch.maximum(high, -low).to(dtype), high.to(dtype)], 1)


def _one_by_one(tensors: list[Tensor], members: list[int], in_cache: Callable[[int], None] | None) -> Tensor:
    norms, lows, highs = [], [], []
    for index, tensor in zip(members, tensors, strict=True):
        norms.append(_norm(tensor) if tensor.numel() <= _BLOCK else _norm_by_blocks(tensor))
        low, high = tensor.aminmax()
        lows.append(low)
        highs.append(high)
        if in_cache is not None:
            in_cache(index)
    dtype, high = summing_dtype(tensors[0].dtype), torch.stack(highs)
    absmax = torch.maximum(high, -torch.stack(lows))
    return torch.stack([torch.stack(norms), absmax.to(dtype), high.to(dtype)], 1)


def _fused(tensors: list[Tensor]) -> Tensor:
    dtype = summing_dtype(tensors[0].dtype)
    norms = [torch.stack(torch._foreach_norm(tensors, order, dtype=dtype)) for order in (2, torch.inf)]
    return torch.stack([*norms, torch.stack(torch._foreach_max(tensors)).to(dtype)], 1)


def _norm_by_blocks(x: Tensor) -> Tensor:
    return _norm(torch.stack([_norm(block) for block in torch.split(x, _BLOCK)]))


def _norm(x: Tensor, dim: int | None = None) -> Tensor:
    # On a CPU, converting first is several times faster than asking the norm of a half type for float32.
    norm: Tensor = torch.linalg.vector_norm(x.to(summing_dtype(x.dtype)), dim=dim)
    return norm
