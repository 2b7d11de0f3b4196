"""What one more execution of a step gave."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import torch

from bitwitness.capture.contents import Snapshot
from bitwitness.capture.memory import Memory
from bitwitness.replay.start import Starts
from bitwitness.stats import Features

Around = Callable[[], AbstractContextManager[object]]
"""Returns a context for each forward and each backward of a replay: an operator tap, say."""


@dataclass(slots=True)
class Execution:
    """What one execution of a step's local work produced.

    ``features`` describe the local gradients (before reduction) of the parameters in order, those without a gradient
    as zeros; ``outputs`` is the int64 vector of the outputs' bit hashes, all forwards in order. ``grads`` are the
    gradients themselves where they were asked for. ``losses`` are what a replay through the script's loss code started
    back from, with the reason in ``no_loss`` where that code could not be run again; ``starts`` are the root's outputs, where
    it started from their captured gradients.
    """

    features: Features
    outputs: torch.Tensor
    grads: list[torch.Tensor | None] | None = None
    buffers: list[torch.Tensor] | None = None
    state: Snapshot | None = None
    """What else the forwards change, as they left it, where that was asked for."""
    results: list[tuple[Memory, torch.Tensor]] = field(default_factory=list)
    """What the forwards returned where the script still uses the memory of the training's own, where that was asked for."""
    made: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    """What the script made of that and still holds, each with what was made now."""
    losses: list[torch.Tensor] = field(default_factory=list)
    no_loss: str | None = None
    starts: list[torch.Tensor] = field(default_factory=list)
    other_way: bool = False
    """Whether the forwards went another way through the script than the training's own, by the nodes that they made."""
    unproven: str | None = None
    """What led to the training's gradients and was not repeated."""

    def note(self, found: Starts) -> None:
        """Note what a pass went back from."""
        roots = [root.detach() for root in found.roots]
        self.made += found.made
        if found.through:
            self.losses += roots
        else:
            self.starts += roots
            self.no_loss = self.no_loss or found.problem
        if not found.proven:
            self.unproven = self.unproven or found.problem

    @property
    def whole(self) -> bool:
        """Whether all that the training computed was computed again, its loss code included."""
        return self.no_loss is None and self.unproven is None
