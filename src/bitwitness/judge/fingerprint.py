"""What is compared between two executions of a step: bits first, sizes where bits may innocently differ."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from bitwitness.judge.decide import Match
from bitwitness.replay.run import Execution
from bitwitness.stats import Features

NEAR = {"full": 1e-5, "low": 2e-3}
"""Largest |ln l2 - ln l2'| over the parameters that still counts as rounding, by the precision the model computes in.

A reordered float32 sum changes a gradient's L2 norm by about sqrt(K) * 2^-24, some 1e-6; a bfloat16 model whose
activations round the other way, by about 2^-8 / sqrt(elements), some 1e-3 for its smallest parameters.
"""


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """One execution's local gradients, on the host.

    ``digest`` int64 [P], ``l2`` and ``absmax`` float64 [P], and the outputs' bit hashes, int64 [K].
    """

    digest: torch.Tensor
    l2: torch.Tensor
    absmax: torch.Tensor
    outputs: torch.Tensor

    @classmethod
    def of(cls, execution: Execution) -> Fingerprint:
        """Bring an execution's description to the host, in one transfer."""
        return cls.from_features(execution.features, execution.outputs)

    @classmethod
    def from_features(cls, features: Features, outputs: torch.Tensor) -> Fingerprint:
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
        return cls(digest, _float64(l2), _float64(absmax), rest)

    def tensors(self) -> list[torch.Tensor]:
        """Return the parts, to be sent."""
        return [self.digest, self.l2, self.absmax, self.outputs]

    def compare(self, other: Fingerprint, tolerance: float) -> Match:
        """Compare two executions of the same capsule by their gradients."""
        if torch.equal(self.digest, other.digest):
            return Match.EQUAL
        return Match.NEAR if self.distance(other) <= tolerance else Match.FAR

    def distance(self, other: Fingerprint) -> float:
        """Return the largest |ln l2 - ln l2'| over the parameters; infinite where one is finite and the other not."""
        both_zero = (self.l2 == 0) & (other.l2 == 0)
        gap = (self.l2.log() - other.l2.log()).abs()
        gap = torch.where(both_zero | (self.digest == other.digest), torch.zeros_like(gap), gap)
        return float(gap.nan_to_num(nan=float("inf")).max()) if gap.numel() else 0.0

    def worst(self, other: Fingerprint) -> int:
        """Return the index of the parameter at which two executions differ most."""
        gap = (self.l2.log() - other.l2.log()).abs().nan_to_num(nan=float("inf"))
        gap = torch.where(self.digest == other.digest, torch.full_like(gap, -1.0), gap)
        return int(gap.argmax())


def _float64(bits: torch.Tensor) -> torch.Tensor:
    """Return float32 numbers, given by their bits as int64, in float64."""
    return bits.to(torch.int32).view(torch.float32).double()
