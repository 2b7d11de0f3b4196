"""The settings of the exact sensors: those that need no history."""

from __future__ import annotations

from dataclasses import dataclass

from bitwitness.config.validated import Validated, number


@dataclass(frozen=True)
class ReplicasConfig(Validated):
    """Replicated parameters, buffers and optimizer state, bit by bit over the ranks.

    ``every``: steps between two looks; None looks on every deep step, at the latest each hundredth.
    """

    enabled: bool = True
    every: int | None = number(None, minimum=1)


@dataclass(frozen=True)
class SealConfig(Validated):
    """Parameters and optimizer state between the end of a step and the next use of gradients; checkpoints on disk.

    ``every``: of the former, as for replicas. ``checkpoints``: seal those that the script writes (a hidden file
    ``.….seal.json`` beside each), verify those that it reads.
    """

    enabled: bool = True
    every: int | None = number(None, minimum=1)
    checkpoints: bool = True


@dataclass(frozen=True)
class UpdateConfig(Validated):
    """An optimizer's step recomputed for a share of the parameters, by turns; ``every`` as for replicas."""

    enabled: bool = True
    every: int | None = number(None, minimum=1)


@dataclass(frozen=True)
class CollectiveConfig(Validated):
    """The comparison of what collectives gave with what the ranks put in, on deep steps."""

    enabled: bool = True


@dataclass(frozen=True)
class RecomputeConfig(Validated):
    """The comparison of activations that checkpointing recomputes with the first ones, on deep steps."""

    enabled: bool = True


@dataclass(frozen=True)
class TwiceConfig(Validated):
    """Operators without an identity that are computed again from the same inputs, on deep steps.

    ``one_in``: of the large ones one in so many, by turns.
    """

    enabled: bool = True
    one_in: int = number(8, minimum=1)
