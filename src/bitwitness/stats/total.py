"""One number that tells whether many tensors are finite: the sum of their norms."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from bitwitness.stats.local import local_values


@torch.no_grad()
def total_of(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """Return the sum of the tensors' L2 norms, 0-d float32 on ``device``, in fused calls and without waiting for it.

    Not finite if any value is not; it may be infinite although all values are finite (beyond 1e19), so look again
    before believing that. Of a DTensor the local shard counts.
    """
    values = [local_values(tensor) for tensor in tensors]
    # torch._foreach_norm raises for empty tensors (FSDP2 has empty shards) and for integers
    usable = [value.float() if value.dtype.itemsize == 1 else value for value in values if value.numel()]
    usable = [value for value in usable if value.is_floating_point() or value.is_complex()]
    if not usable:
        return torch.zeros((), device=device)
    double = any(value.dtype in (torch.float64, torch.complex128) for value in usable)
    # A float16 norm would overflow where no value does.
    norms = torch._foreach_norm(usable, 2) if double else torch._foreach_norm(usable, 2, dtype=torch.float32)
    return torch.stack([norm.to(device, torch.float32) for norm in norms]).sum()
