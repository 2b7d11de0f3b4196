"""The plain tensors that this rank really holds behind whatever kind of tensor it was given."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from bitwitness.errors import UsageError

_TORCHS_OWN = (Tensor, torch.nn.Parameter)
_COMPRESSED_BY_ROW = (torch.sparse_csr, torch.sparse_bsr)
_COMPRESSED = (*_COMPRESSED_BY_ROW, torch.sparse_csc, torch.sparse_bsc)


def is_torchs_own(tensor: Tensor) -> bool:
    """Tell whether a tensor is of no class beside torch's own."""
    return type(tensor) in _TORCHS_OWN


def is_plain(x: Tensor) -> bool:
    """Tell whether a tensor is torch's own, strided, and holds numbers: not sparse, nested, quantized, or without any."""
    return is_torchs_own(x) and not x.is_nested and x.layout is torch.strided and not (x.is_quantized or x.is_meta)


def is_wrapper(tensor: Tensor) -> bool:
    """Tell whether a tensor is of a class that holds others and is neither distributed nor jagged: a quantized weight, say."""
    if is_torchs_own(tensor):
        return False
    known = hasattr(type(tensor), "to_local") or tensor.layout == torch.jagged
    return hasattr(type(tensor), "__tensor_flatten__") and not known


def is_in_shared_memory(tensor: Tensor) -> bool:
    """Tell whether a tensor of torch's own lies in memory that other processes may write (``model.share_memory()``)."""
    # on an accelerator torch calls all memory shared; what is not strided has no memory of its own
    strided = is_torchs_own(tensor) and tensor.layout is torch.strided
    return strided and tensor.is_cpu and tensor.is_shared()


def local_values(tensor: Tensor) -> Tensor:
    """Return the strided tensor of the values that ``tensor`` stores on this rank.

    A DTensor gives its local shard (unreduced, if it is a partial one), a sparse or jagged tensor its stored
    values, a class that wraps others the first of these. Nothing is copied, except for lazily conjugated or negated views.

    Raises
    ------
    UsageError
        For a tensor without values (on the meta device) or a quantized one.

    """
    return local_parts(tensor)[0]


def as_bytes(values: Tensor) -> Tensor:
    """Return a contiguous tensor's memory as bytes, one dimension; nothing is copied.

    torch calls a single element contiguous whatever its stride is (a column of one row), and refuses to view it as bytes.
    """
    flat = values.detach().reshape(-1)
    return flat.as_strided((flat.numel(),), (1,), flat.storage_offset()).view(torch.uint8)


def as_reals(values: Tensor) -> Tensor:
    """Return real numbers as they are, and complex ones as pairs of them, along a last dimension of their own."""
    return torch.view_as_real(values) if values.is_complex() else values


def local_parts(tensor: Tensor) -> list[Tensor]:
    """Return `local_values`, then the index tensors that say where the values stand (if it is not dense)."""
    if is_torchs_own(tensor) and _is_plain(tensor):
        return [tensor]
    # A DTensor is known by its method: not every build of torch has the class.
    if hasattr(type(tensor), "to_local"):
        tensor = tensor.to_local()  # type: ignore[attr-defined]
    if is_wrapper(tensor):
        return [part for inner in _wrapped(tensor) for part in local_parts(inner)]
    return [tensor] if _is_plain(tensor) else _stored(tensor)


def _wrapped(tensor: Any) -> list[Tensor]:
    return [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]


def _is_plain(tensor: Tensor) -> bool:
    odd = tensor.is_meta or tensor.is_quantized or tensor.is_complex() or tensor.is_neg()
    return tensor.layout == torch.strided and not odd


def _stored(tensor: Tensor) -> list[Tensor]:
    if tensor.is_meta:
        raise UsageError(
            f"a tensor of shape {list(tensor.shape)} is on the meta device and holds no numbers; materialise it first"
        )
    if tensor.is_quantized:
        raise UsageError(
            f"a tensor of shape {list(tensor.shape)} is quantized ({tensor.dtype}); "
            "pass its dequantize() for the numbers or its int_repr() for the bits"
        )
    if tensor.layout == torch.strided:
        return [tensor.resolve_conj().resolve_neg()]
    if tensor.layout == torch.sparse_coo:
        return [tensor._values(), tensor._indices()]
    if tensor.layout in _COMPRESSED_BY_ROW:
        return [tensor.values(), tensor.crow_indices(), tensor.col_indices()]
    if tensor.layout in _COMPRESSED:
        return [tensor.values(), tensor.ccol_indices(), tensor.row_indices()]
    if tensor.layout == torch.jagged:
        return [tensor.values(), tensor.offsets()]  # type: ignore[attr-defined]
    raise UsageError(f"a tensor of layout {tensor.layout} cannot be read; pass its to_dense()")
