"""What is compared between two executions of a step: bits first, sizes where bits may rightly differ."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from bitwitness.judge.agreement import Match
from bitwitness.replay.run import Execution
from bitwitness.stats import Features

NEAR = {"full": 1e-2, "low": 5e-2}
"""Largest gap over the parameters that still counts as rounding, by the precision the model computes in.

Not what reordering one sum leaves (1e-6 in float32), but ten times what kernels that are all within their dtype's allowance may
differ by: a device that multiplies in TF32 (2^-11), or adds in another order in bfloat16 (2^-9), is healthy.
"""
_FLOOR = 1e-2
"""Share of the model's usual gradient, element by element, below which a parameter's gradient counts as nothing.

The bias of an attention key has a gradient of zero, of which rounding alone is left: 1e-6 of the others', and never the same.
"""
MARGIN = 10
"""Times the largest gap that healthy executions of a parameter showed, up to which a gap proves nothing.

A few calibrations see a few draws of what varies, so the widest gap to come is larger than the widest seen.
"""
_SINGLE = 0.1
"""What a change of the largest element weighs beside one of the whole norm: a norm of many hides it, but it is the
less steady. More would take a kernel's rounding for a fault, less would lose a single wrong element."""


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """One execution's local gradients, on the host.

    ``digest`` int64 [P], ``l2`` and ``absmax`` float64 [P], and the outputs' bit hashes, int64 [K]. ``whole``: the
    script's loss code was executed, too. ``other_way``: its forwards did not do what the training's did (`Execution`).
    """

    digest: torch.Tensor
    l2: torch.Tensor
    absmax: torch.Tensor
    outputs: torch.Tensor
    whole: bool = True
    other_way: bool = False

    @classmethod
    def of(cls, execution: Execution) -> Fingerprint:
        """Bring an execution's description to the host, in one transfer."""
        found = cls.from_features(execution.features, execution.outputs, whole=execution.whole)
        return replace(found, other_way=execution.other_way)

    @classmethod
    def from_features(cls, features: Features, outputs: torch.Tensor, *, whole: bool = True) -> Fingerprint:
        """Bring features and output hashes to the host, in one transfer."""
        words = torch.cat(
            [
                features.digest,
                features.l2.view(torch.int32).long(),  # as bits: not every accelerator has float64
                features.absmax.view(torch.int32).long(),
                outputs.to(features.digest.device),
            ]
        ).cpu()
        count = features.digest.numel()
        digest, l2, absmax, rest = words.split([count, count, count, words.numel() - 3 * count])
        return cls(digest, _float64(l2), _float64(absmax), rest, whole)

    def tensors(self) -> list[torch.Tensor]:
        """Return the parts, to be sent."""
        return [self.digest, self.l2, self.absmax, self.outputs, torch.tensor(self.whole)]

    @classmethod
    def received(cls, parts: list[torch.Tensor]) -> Fingerprint:
        """Return what `tensors` was sent for."""
        digest, l2, absmax, outputs, whole = parts
        return cls(digest, l2, absmax, outputs, bool(whole))

    def compare(self, other: Fingerprint, tolerance: float, spread: torch.Tensor | None = None) -> Match:
        """Compare two executions of the same step by their gradients.

        ``spread`` float64 [P]: how far each parameter's gradients of healthy executions are apart.
        """
        if torch.equal(self.digest, other.digest):
            return Match.EQUAL  # the same bits, whatever they are: two NaNs, too
        gaps = self.gaps(other)
        # Within what healthy executions of this model showed already, each parameter by itself.
        if spread is not None and bool((gaps <= MARGIN * spread).all()):
            return Match.EQUAL
        allowed = torch.full_like(gaps, tolerance) if spread is None else torch.clamp(MARGIN * spread, min=tolerance)
        return Match.NEAR if bool((gaps <= allowed).all()) else Match.FAR

    def gaps(self, other: Fingerprint) -> torch.Tensor:
        """Return how far the parameters' L2 norms are apart, relative to the larger one or to what is usual: float64 [P].

        Infinite where one is finite and the other not; 0 where the bits are equal.
        """
        both = torch.stack([self.absmax, other.absmax])
        peak, largest = both.amax(0), torch.maximum(self.l2, other.l2)
        known = both[both.isfinite() & (both > 0)]
        floor = _FLOOR * (known.median() if known.numel() else torch.zeros((), dtype=torch.float64))
        spread_out = (largest / peak).nan_to_num(nan=1.0, posinf=1.0).clamp(min=1.0)  # root of the elements that count
        whole = (self.l2 - other.l2).abs() / torch.maximum(largest, floor * spread_out)
        single = (self.absmax - other.absmax).abs() / torch.maximum(peak, floor)
        gap = torch.maximum(whole.nan_to_num(nan=torch.inf), _SINGLE * single.nan_to_num(nan=torch.inf))
        same = (self.digest == other.digest) | ((self.l2 == 0) & (other.l2 == 0))
        return torch.where(same, torch.zeros_like(gap), gap)

    def distance(self, other: Fingerprint) -> float:
        """Return the largest of `gaps`."""
        gaps = self.gaps(other)
        return float(gaps.max()) if gaps.numel() else 0.0

    def worst(self, other: Fingerprint) -> int:
        """Return the index of the parameter at which two executions differ most."""
        gap = self.gaps(other)
        gap = torch.where(self.digest == other.digest, torch.full_like(gap, -1.0), gap)
        return int(gap.argmax())


def _float64(bits: torch.Tensor) -> torch.Tensor:
    """Return float32 numbers, given by their bits as int64, in float64."""
    return bits.to(torch.int32).view(torch.float32).double()
