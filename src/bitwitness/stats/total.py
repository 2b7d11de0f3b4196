"""What tells of many tensors, in a few calls: whether they are finite, whether they are what they were."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from bitwitness.stats.local import as_reals, local_values
from bitwitness.stats.sizes import sizes_of


@torch.no_grad()
def norms_of(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """Return the tensors' L2 norms, float32 [P] (float64 if one is float64), in fused calls and without waiting for a device.

    Not finite where a value is not; it may be infinite although all values are finite (beyond 1e19), so look again before
    believing that. Of a DTensor the local shard counts; an empty or integer tensor has norm 0.
    """
    values = [as_reals(v) for v in map(local_values, tensors)]
    # torch._foreach_norm raises for empty tensors (FSDP2 has empty shards) and for integers
    usable = [i for i, v in enumerate(values) if v.numel() and v.is_floating_point()]
    chosen = [values[i].float() if values[i].dtype.itemsize == 1 else values[i] for i in usable]
    wide = any(value.dtype == torch.float64 for value in chosen)
    norms = [torch.zeros((), dtype=torch.float64 if wide else torch.float32, device=device)] * len(values)
    if chosen:
        # A float16 norm would overflow where no value does.
        found = torch._foreach_norm(chosen, 2) if wide else torch._foreach_norm(chosen, 2, dtype=torch.float32)
        for index, norm in zip(usable, found, strict=True):
            norms[index] = norm.to(device, norms[index].dtype)
    return torch.stack(norms) if norms else torch.zeros(0, device=device)


@torch.no_grad()
def total_of(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """Return the sum of `norms_of`, 0-d float32 on ``device``."""
    return norms_of(tensors, device).sum().float()


@torch.no_grad()
def marks_of(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """Return each tensor's L2 norm and its largest value, float [2, P]: by these an edit is noticed, without waiting.

    A hash would see more (an exchange of two values, say) at ten times the price; what scripts do to parameters and gradients
    (scaling, clamping, negating, noise, rows of zeros) moves one of the two.
    """
    values = [as_reals(v) for v in map(local_values, tensors)]
    known = sizes_of(values)  # by itself each: what is not finite among them changes no other's mark
    if not known:
        return _marks(values, device)
    marks = torch.zeros(2, len(values), device=device)
    marks[:, list(known)] = torch.tensor([(one.l2, one.high) for one in known.values()], device=device).t()
    if rest := [i for i in range(len(values)) if i not in known]:
        marks[:, rest] = _marks([values[i] for i in rest], device)
    return marks


def _marks(values: list[Tensor], device: torch.device) -> Tensor:
    usable = [i for i, v in enumerate(values) if v.numel() and v.is_floating_point() and v.dtype.itemsize > 1]
    largest = torch.zeros(len(values), device=device)
    if usable:
        found = [value.to(device, torch.float32) for value in torch._foreach_max([values[i] for i in usable])]
        if len(usable) == len(values):
            largest = torch.stack(found)
        else:
            largest[torch.tensor(usable, device=device)] = torch.stack(found)
    return torch.stack([norms_of(values, device).float(), largest])


@torch.no_grad()
def copy_all(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy tensors into others of the same shapes, in fused calls."""
    if targets:
        torch._foreach_copy_(list(targets), list(sources))


@torch.no_grad()
def change_sizes(before: Sequence[Tensor], now: Sequence[Tensor], device: torch.device) -> Tensor:
    """Return how large each tensor's change is against the tensor as it was, [P]; what is in ``before`` is used up.

    1 where a tensor was zero and is not any more.
    """
    sizes = norms_of(before, device)
    torch._foreach_sub_(list(before), list(now))
    changes = norms_of(before, device)
    return torch.where(sizes == 0, (changes > 0).to(changes.dtype), changes / sizes)
