"""What picks, pads, compares, pools or resizes is computed again, whole, in float64: no element follows from one element.

What only picks has to give the same numbers; what adds weighed numbers up is held to what it gives of their sizes. A device
that computes wrongly in the same way each time does not do so in another type.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from bitwitness.numerics import unit_roundoff
from bitwitness.oracle.limits import ACCUMULATION, ROUNDING, accumulation_roundoff
from bitwitness.sense.invariant import Check, Invariant, Named, Signs, counted, in_range, largest
from bitwitness.tap.operators import OpCall, tensors_in

_DEVICES = ("cpu", "cuda")
"""Those that compute in float64."""
_NAME = "the same in float64"
_NARROW = (torch.float32, torch.float16, torch.bfloat16)
_ROOM = 4.0
_RESIZING = 8.0
"""Units of float32 by which a resized image's weights may be off, for each pixel of its longest side: kernels round places."""
_BETWEEN_PIXELS = 8.0
"""Roundings of a resized image's half types, whose weights and partial sums may be kept in them: 15 of 44 seen."""
_NEAREST = 1
"""Among the modes of ``grid_sample``, as torch numbers them."""
_LARGEST_WEIGHT = 2.0
"""What cubic weights add up to at most, their signs left out."""
_IN_ANY_ORDER = ("index_put", "scatter", "index_copy")
"""Who may be given one place twice: on accelerators the last to come is not known."""


def _wide(call: OpCall, *, sizes: bool = False) -> Tensor | None:
    """Return a call's first result in float64, of the inputs' sizes alone where asked to; None where that cannot be."""
    out = call.outputs[0]
    given = tensors_in((*call.args, *call.kwargs.values()))
    floating = [t for t in given if t.is_floating_point()]
    if (
        out.dtype not in _NARROW
        or out.device.type not in _DEVICES
        or any(t.device != out.device for t in given if t.dim())
    ):
        return None
    if not floating or any(t.dtype is not out.dtype for t in floating):
        return None

    def widened(value: Any) -> Any:
        if isinstance(value, Tensor) and value.is_floating_point():
            return value.double().abs() if sizes else value.double()
        if isinstance(value, list | tuple):
            return type(value)(widened(item) for item in value)
        return value

    found = call.func(*widened(call.args), **{name: widened(value) for name, value in call.kwargs.items()})
    first = tensors_in(found)[0]
    return first if first.shape == out.shape and first.dtype is torch.float64 else None


def _picked(call: OpCall, _named: Named, _signs: Signs) -> list[Invariant] | None:
    out = call.outputs[0]
    if call.op in _IN_ANY_ORDER and not out.is_cpu:
        return None
    wide = _wide(call)
    if wide is None:
        return None
    expected = wide.to(out.dtype)
    wrong = ((out != expected) & ~(out.isnan() & expected.isnan())).flatten(0, -2 if out.dim() > 1 else -1)
    counts = wrong.sum(-1, dtype=torch.float32).reshape(-1)
    return [counted(_NAME, counts)]


def _held(out: Tensor, expected: Tensor, threshold: Tensor, judged: Tensor) -> list[Invariant]:
    """Hold each element against float64's; all tensors of one shape."""
    return [largest(_NAME, *(t.reshape(-1) for t in ((out - expected).abs(), threshold, judged)))]


def _summed(call: OpCall, _named: Named, _signs: Signs) -> list[Invariant] | None:
    out = call.outputs[0]
    expected, size = _wide(call), _wide(call, sizes=True)
    if expected is None or size is None:
        return None
    terms = max(max(t.numel() for t in tensors_in(call.args)) / max(out.numel(), 1), 1)
    room = ROUNDING * unit_roundoff(out.dtype) + ACCUMULATION * accumulation_roundoff(out.dtype) * math.sqrt(terms)
    floor = size.new_tensor(ROUNDING * torch.finfo(out.dtype).smallest_normal)
    if call.op.startswith("upsample"):
        room += _BETWEEN_PIXELS * unit_roundoff(out.dtype)
        floor = floor + terms * _of_places(call.args[0], out)
    return _held(out, expected, size * (_ROOM * room) + floor, in_range(size, out.dtype))


def _added(call: OpCall, named: Named, _signs: Signs) -> list[Invariant] | None:
    """Check what is added up by place, one number after the other as some kernels do."""
    if named.get("accumulate") is False:
        return _picked(call, named, _signs)
    expected, size = _wide(call), _wide(call, sizes=True)
    if expected is None or size is None:
        return None
    out = call.outputs[0]
    kinds = iter((torch.zeros_like, torch.ones_like))  # what there was, and what is added to it
    ones = [next(kinds)(v).double() if isinstance(v, Tensor) and v.is_floating_point() else v for v in call.args]
    counts = call.func(*ones)
    room = (_ROOM * ROUNDING + counts) * unit_roundoff(out.dtype)
    floor = ROUNDING * torch.finfo(out.dtype).smallest_normal
    return _held(out, expected, size * room + floor, in_range(size, out.dtype))


def _reduced(call: OpCall, named: Named, signs: Signs) -> list[Invariant] | None:
    """Check a reduction by place; of means and products, and where NaN may be chosen, nothing is known here."""
    return _picked(call, named, signs) if named["reduce"] in ("amax", "amin") else None


def _nearest(call: OpCall, named: Named, signs: Signs) -> list[Invariant] | None:
    """Check an image whose pixels were taken as they are; which ones is beyond doubt where its sides are halves or doubles."""
    for one, other in zip(call.args[0].shape[2:], call.outputs[0].shape[2:], strict=True):
        small, large = sorted((one, other))
        if not small or large % small or (large // small).bit_count() != 1:
            return None
    return (_summed if call.op.endswith("_backward") else _picked)(call, named, signs)


def _positive(call: OpCall, _named: Named, _signs: Signs) -> list[Invariant] | None:
    """Check what adds up what has one sign, by its own size."""
    out, expected = call.outputs[0], _wide(call)
    if expected is None:
        return None
    terms = max(call.args[0].numel() / max(out.numel(), 1), 1)
    room = 2 * ROUNDING * unit_roundoff(out.dtype) + ACCUMULATION * accumulation_roundoff(out.dtype) * math.sqrt(terms)
    floor, size = ROUNDING * torch.finfo(out.dtype).smallest_normal, expected.abs()
    # differences are squared, or multiplied, in the type itself
    largest_one = torch.stack([t.double().abs().amax() for t in tensors_in(call.args)]).amax()
    judged = in_range(size, out.dtype) & in_range((2 * largest_one).square(), out.dtype)
    return _held(out, expected, size * (_ROOM * room) + floor, judged)


def _resampled(call: OpCall, named: Named, _signs: Signs) -> list[Invariant] | None:
    """Check what weighs pixels, some of them by less than nothing, by the largest pixel of a plane."""
    out = call.outputs[0]
    if "grid" in named and (named["interpolation_mode"] == _NEAREST or out.dtype is not torch.float32):
        return None  # which pixel is nearest depends on rounding, and half types round places by whole pixels
    expected = _wide(call)
    if expected is None:
        return None
    x = call.args[0]
    room = _ROOM * _BETWEEN_PIXELS * unit_roundoff(out.dtype) * x.double().abs().amax([2, 3], keepdim=True)
    threshold = (_LARGEST_WEIGHT * (room + _of_places(x, out))).expand_as(expected)
    floor = ROUNDING * torch.finfo(out.dtype).smallest_normal
    return _held(out, expected, threshold + floor, in_range(threshold, out.dtype))


def _of_places(x: Tensor, out: Tensor) -> Tensor:
    """Return by how much a resized image may be off for its places: a pixel beside it may count for that much of itself."""
    places = list(range(2, x.dim()))
    longest = max(max(t.shape[2:]) for t in (x, out))
    return _RESIZING * unit_roundoff(torch.float32) * longest * x.double().abs().amax(places, keepdim=True)


CHECKS: dict[str, Check] = {
    **dict.fromkeys(("where", "masked_fill", "masked_select", "index", "index_select", "gather", "take"), _picked),
    **dict.fromkeys(("roll", "flip", "repeat", "tril", "triu", "constant_pad_nd"), _picked),
    **dict.fromkeys(("reflection_pad1d", "reflection_pad2d", "replication_pad1d", "replication_pad2d"), _picked),
    **dict.fromkeys(("slice_backward", "select_backward", "slice_scatter", "select_scatter"), _picked),
    **dict.fromkeys(("scatter", "index_copy", "index_fill", "pixel_shuffle", "pixel_unshuffle"), _picked),
    **dict.fromkeys(("index_put", "index_add", "scatter_add"), _added),
    "scatter_reduce": _reduced,
    **dict.fromkeys(("upsample_bicubic2d", "grid_sampler_2d"), _resampled),
    **dict.fromkeys((f"upsample_nearest{kind}" for kind in ("1d", "2d", "3d", "2d_backward", "3d_backward")), _nearest),
    **dict.fromkeys(
        ("maximum", "minimum", "clamp", "clamp_min", "clamp_max", "hardtanh", "hardtanh_backward"), _picked
    ),
    **dict.fromkeys(("max_pool2d_with_indices", "max_pool3d_with_indices", "adaptive_max_pool2d"), _picked),
    **dict.fromkeys(("amax", "amin", "max", "min", "topk", "sort"), _picked),
    **dict.fromkeys(("avg_pool2d", "avg_pool3d", "_adaptive_avg_pool2d", "_adaptive_avg_pool3d"), _summed),
    **dict.fromkeys(("upsample_linear1d", "upsample_bilinear2d", "upsample_trilinear3d"), _summed),
    **dict.fromkeys(("upsample_bilinear2d_backward", "upsample_linear1d_backward"), _summed),
    **dict.fromkeys(("linalg_vector_norm", "mse_loss", "mse_loss_backward", "huber_loss", "smooth_l1_loss"), _positive),
}
"""Who is computed again, by operator."""
