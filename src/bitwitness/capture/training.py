"""What a capture needs to know of the training, and of those for whom it captures."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import nn

from bitwitness.tap.compiled import EntryPoint


@dataclass(frozen=True, slots=True)
class Wants:
    """What those who judge steps need of each.

    ``capture_limit``: bytes that one step's inputs, buffers and output gradients may take; beyond it the step cannot be run
    again. ``taped``: note what the script calls between the root's forward and the backward. ``hashed``: hash outputs and
    gradients, so that replays can be compared with them. ``unused``: look at losses and gradients, too, that the script
    computes and does not use. ``looks``: look at what some modules compute, and at the weights that they do it with.
    """

    capture_limit: int
    taped: bool
    hashed: bool
    unused: bool
    looks: bool = False

    def __or__(self, other: Wants) -> Wants:
        return Wants(
            max(self.capture_limit, other.capture_limit),
            taped=self.taped or other.taped,
            hashed=self.hashed or other.hashed,
            unused=self.unused or other.unused,
            looks=self.looks or other.looks,
        )


class Training(Protocol):
    """What a capture asks of the session."""

    model: nn.Module
    root: nn.Module
    entry: EntryPoint
    own_work: bool

    @property
    def step(self) -> int:
        """The number of the step that runs."""

    @property
    def in_forward(self) -> bool:
        """Whether the model runs now."""

    @property
    def evaluated(self) -> bool:
        """Whether, since the last step ended, the model's only forwards with gradients were taken for evaluations."""

    def begin_step(self) -> None:
        """Say that the training computes."""

    def hook_parts(self) -> None:
        """Hear of calls of the model's parts, too."""
