"""What the experiments on one step brought to light on one rank."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from bitwitness.capture.step import Pass
from bitwitness.judge.agreement import Agreement, Match
from bitwitness.judge.decide import Judgement
from bitwitness.judge.fingerprint import Fingerprint
from bitwitness.replay.run import Execution


@dataclass(slots=True)
class Experiments:
    """What the experiments on one step brought to light on this rank.

    ``executions`` are fingerprints in the order of `agreement.NAMES` (None where one was not made); ``good`` is the second
    local replay with its gradients; ``received`` are other ranks' payloads that ran here, by rank.
    """

    executions: list[Fingerprint | None]
    judgement: Judgement
    rows: list[Agreement]
    good: Execution | None = None
    received: dict[int, list[Pass]] = field(default_factory=dict)
    problem: str | None = None
    unrepeated: str | None = None
    """Why the script's loss code was not run again here, if so."""
    spreads: torch.Tensor | None = None

    def agree(self, a: Fingerprint, b: Fingerprint) -> bool:
        """Return whether two executions gave the same, up to what healthy ones differ by."""
        return a.compare(b, 0.0, self.spreads) is Match.EQUAL
