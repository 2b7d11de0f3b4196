"""The checksums of fused attention, whose probabilities P nobody outside the kernel sees.

With O = P V, and dQ, dK, dV from dO, per batch and head, for whatever mask, scale and dropout:

``<dO, O> = <dV, V>``  both are the sum of P' o (dO V^T); P' is P after dropout. The backward computes P again, so this
                       checks the forward's O, too
``<dQ, Q> = <dK, K>``  both are the sum of dS o S, S being the scaled scores
``1^T dK = 0``         each row of dS sums to zero
``1^T dV = 1^T dO``    each row of P sums to one: without dropout, and over the rows that are not masked as a whole

Grouped-query attention sums the left sides over the heads that share a key. Of the forward alone, O lies between the
smallest and the largest V, being their convex combination.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bitwitness.numerics import summing_dtype, unit_roundoff
from bitwitness.oracle.kernels import named_arguments
from bitwitness.sense.invariant import Invariant, Signs, largest
from bitwitness.sense.matrixreading import paired
from bitwitness.stats.products import products
from bitwitness.tap.operators import OpCall

FORWARD = frozenset(
    {
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_fused_attention_overrideable",
    }
)
BACKWARD = frozenset(name + "_backward" for name in FORWARD)

ROUNDING = 8.0
"""Threshold in units of u times the root of the summed squares of what is added up; see bench/checksum_cost.py."""
COMMON = 2.0
"""The same in units of u times the sum itself: where all of P is alike, it is rounded alike, and so the sum is scaled."""
ACCUMULATION = 8.0
"""As `ROUNDING`, in units of float32's u sqrt(L), times the scores' size: exp(S) has |S| times the relative error of S."""


_UNKNOWN = 2.0**24
"""A score that float32 rounds by one: its exponential may overflow on a healthy device."""
_LOG_ROOT = math.log(1e17)
"""Below it, a number's square times the elements of a row stays within float32: 1e34 times some 10,000 of them."""


def check_forward(call: OpCall) -> list[Invariant]:
    """Check that O lies within V's range; without dropout, which scales, and without a mask, which may leave nothing."""
    named = named_arguments(call.func, call.args, call.kwargs)
    out, value = call.outputs[0], named["value"]
    if named.get("dropout_p") or _mask(named) is not None or not (out.numel() and value.numel()):
        return []
    # Over the whole tensor, not per head: coarser, but two passes in all, and what is far too large leaves any range.
    low, high = value.aminmax()
    below, above = out.transpose(1, 2).aminmax()  # as it lies in memory
    excess = torch.maximum(low.double() - below.double(), above.double() - high.double())
    size = torch.maximum(low.abs(), high.abs()).double()
    terms = 2 * math.sqrt(value.shape[-2]) * 2.0**-24  # what summing the probabilities loses
    slack = (ROUNDING * unit_roundoff(out.dtype) + terms) * size + torch.finfo(out.dtype).smallest_normal
    excess = excess.clamp_min(0)
    finite = torch.isfinite(size)
    if not (out.is_cpu and excess <= slack):  # where the host knows that already, the scores need not be read
        finite &= torch.isfinite(_largest_score(named))
    return [largest("min V <= O <= max V", excess, slack, finite)]


def check_backward(call: OpCall, signs: Signs) -> list[Invariant]:
    """Check the four identities of the backward, each where it holds; see the module's text."""
    named = named_arguments(call.func, call.args, call.kwargs)
    gradients = call.result[:3]
    if any(gradient is None or not gradient.numel() for gradient in gradients):
        return []
    return _Backward(named, gradients, signs).invariants()


class _Pair(NamedTuple):
    """The dot products of the rows of two tensors, ``[batch, heads, length]``, and upper bounds of either's norms."""

    dots: Tensor
    norms: tuple[Tensor, Tensor]
    width: int

    @property
    def rounding(self) -> Tensor:
        """The squares of what rounding the products may leave, over u."""
        return self.dots.square() + (self.norms[0] * self.norms[1]).square() / self.width


class _Backward:
    """The sizes that several identities share, ``[batch, heads, length]`` each."""

    def __init__(self, named: dict[str, Any], gradients: tuple[Tensor, ...], signs: Signs) -> None:
        self._q, self._k, self._v, self._out = (named[name] for name in ("query", "key", "value", "out"))
        self._grad = named["grad_out"] if "grad_out" in named else named["grad_out_"]
        self._dq, self._dk, self._dv = gradients
        self._named = named
        self._signs = signs
        self._grad_out, self._dv_v = _paired(self._grad, self._out), _paired(self._dv, self._v)
        self._dq_q, self._dk_k = _paired(self._dq, self._q), _paired(self._dk, self._k)
        self._ng, self._no, self._ndv, self._nv = *self._grad_out.norms, *self._dv_v.norms
        self._nq, self._ndk, self._nk = self._dq_q.norms[1], *self._dk_k.norms
        self._heads = int(self._k.shape[1])
        # |S| is at most |Q||K|: its relative error is multiplied by that when it is exponentiated.
        scores = _scale(named) * self._nq.amax() * self._nk.amax()
        self._u = unit_roundoff(self._dq.dtype)
        length = int(self._k.shape[-2])
        exponents = 1 + scores + math.log(length)  # of P = exp(S - log sum exp S)
        self._relative = ROUNDING * self._u + ACCUMULATION * 2.0**-24 * math.sqrt(length) * exponents
        sizes = [self._shared(n.square()) for n in (self._nq, self._nk, self._nv, self._ng, self._no)]
        self._judged = torch.isfinite(sum(sizes[1:], start=sizes[0])) & (scores < _UNKNOWN)
        # no gradient is larger than this product, so that one whose square overflows float32 is wrong, not large
        factors = [self._ng.amax(), self._nv.amax(), torch.maximum(self._nq.amax(), self._nk.amax()).clamp_min(1.0)]
        bound = torch.stack(factors).log().sum()
        self._tame = bound + math.log(length * max(_scale(named), 1.0)) < _LOG_ROOT

    def invariants(self) -> list[Invariant]:
        checks = [
            self._equal("<dO, O> = <dV, V>", self._grad_out, self._dv_v),
            self._equal("<dQ, Q> = <dK, K>", self._dq_q, self._dk_k),
            self._key_sums(self._grad_out.rounding),
        ]
        if not self._named.get("dropout_p"):
            checks.append(self._value_sums())
        return checks

    def _equal(self, name: str, left: _Pair, right: _Pair) -> Invariant:
        total = self._shared(left.dots)
        square = self._shared(left.rounding) + self._shared(right.rounding)
        return self._largest(name, (total - self._shared(right.dots)).abs(), square, total)

    def _key_sums(self, grad_out_square: Tensor) -> Invariant:
        w = self._weights(self._dk)
        # dS = P o (dP - <dO, O>): what rounding leaves in <dO, O> reaches dK as a multiple of the query's row
        leak = grad_out_square * (_scale(self._named) * self._nq).square()
        square = (self._shared(leak) + self._shared(self._ndk.square())) * self._magnitude(self._dk) ** 2
        total = self._shared(_times(self._dk, w))
        return self._largest("1^T dK = 0", total.abs(), square, torch.zeros_like(total))

    def _value_sums(self) -> Invariant:
        w = self._weights(self._dv)
        rows = _times(self._grad, w)
        mask = _mask(self._named)
        if mask is not None:
            # A row that is masked as a whole has no probabilities that could sum to one.
            alive = mask.any(-1) if mask.dtype is torch.bool else mask.amax(-1) > -math.inf
            rows = torch.where(alive, rows, 0.0)
        total = self._shared(rows)
        square = (self._shared(self._ndv.square()) + self._shared(self._ng.square())) * self._magnitude(self._dv) ** 2
        return self._largest("1^T dV = 1^T dO", (self._shared(_times(self._dv, w)) - total).abs(), square, total)

    def _largest(self, name: str, residual: Tensor, square: Tensor, total: Tensor) -> Invariant:
        lost = (self._q.shape[-2] + self._k.shape[-2]) * torch.finfo(torch.float32).tiny  # squares that underflowed
        threshold = (square + lost).sqrt() * self._relative + COMMON * self._u * total.abs()
        floor = torch.finfo(self._dq.dtype).smallest_normal * self._k.shape[-1]
        # Sizes as small as these cannot make an infinite threshold: some result must be wrong that entered it.
        impossible = torch.isinf(threshold) & self._tame
        return largest(name, residual, (threshold + floor).masked_fill(impossible, 0.0), self._judged)

    def _shared(self, rows: Tensor) -> Tensor:
        """Sum ``[batch, heads, length]`` to ``[batch, key heads]``."""
        sums = rows.sum(-1)
        return sums if sums.shape[1] == self._heads else sums.unflatten(1, (self._heads, -1)).sum(-1)

    def _weights(self, x: Tensor) -> Tensor:
        return self._signs(int(x.shape[-1]), x.device, x.dtype)

    @staticmethod
    def _magnitude(x: Tensor) -> float:
        return Signs.scale(int(x.shape[-1]))


def _paired(x: Tensor, y: Tensor) -> _Pair:
    dots, *norms = paired(x, y)
    return _Pair(dots, (norms[0], norms[1]), int(x.shape[-1]))


def _times(x: Tensor, w: Tensor) -> Tensor:
    """Return ``x @ w``, with the heads' dimension put where memory has it, lest the product copies."""
    turned, wide = x.transpose(1, 2), summing_dtype(x.dtype)
    if turned.stride(0) == turned.shape[1] * turned.stride(1):
        found = products(turned.flatten(0, 1), w.to(wide))
        if found is not None:
            return found[0].view(turned.shape[:-1]).transpose(1, 2)
    if x.dtype is torch.float16:
        turned, x, w = turned.float(), x.float(), w.float()
    rows = (turned @ w).transpose(1, 2) if turned.is_contiguous() else x @ w
    return rows.to(wide)


def _mask(named: dict[str, Any]) -> Tensor | None:
    mask = named.get("attn_mask", named.get("attn_bias"))
    return mask if isinstance(mask, Tensor) and mask.numel() else None


def _scale(named: dict[str, Any]) -> float:
    scale = named.get("scale")
    return 1 / math.sqrt(named["query"].shape[-1]) if scale is None else float(scale)


def _largest_score(named: dict[str, Any]) -> Tensor:
    """Return a bound of ``|Q K^T|``, scaled."""
    wide = summing_dtype(named["query"].dtype)  # in which a score that overflows is infinite here, too
    q, k = (torch.stack(named[name].aminmax()).to(wide).abs().amax() for name in ("query", "key"))
    bound: Tensor = q * k * (named["query"].shape[-1] * _scale(named))
    return bound
