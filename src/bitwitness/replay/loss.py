"""The script's own loss code in a replay: taped calls run again on the replayed outputs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from bitwitness.tap.capture import ForwardRecord
from bitwitness.tap.lossgraph import LossGraph, Output

Roots = list[tuple[torch.Tensor, torch.Tensor | None]]


@dataclass(slots=True)
class ThroughLoss:
    """Runs the loss code of one replay's passes, where there is a tape of it.

    ``graphs``: by the backward's number. ``losses``: what the replay went back from; ``outputs``: the
    root's outputs, where it went back from these. ``problem``: why some loss code
    could not be run again, so that the replay started from captured gradients instead.
    """

    graphs: Mapping[int, LossGraph] = field(default_factory=dict)
    losses: list[torch.Tensor] = field(default_factory=list)
    outputs: list[torch.Tensor] = field(default_factory=list)
    problem: str | None = None

    def run(
        self, group: list[ForwardRecord], outputs: Mapping[Output, torch.Tensor], leaves: Mapping[int, torch.Tensor]
    ) -> Roots | None:
        """Return the backward's roots with their gradients, or None to start from the outputs' captured gradients."""
        graph = self.graphs.get(group[0].backward or 0)
        if graph is None:
            return None
        if graph.problem is not None:
            self.problem = graph.problem
            return None
        try:
            roots = graph.run(outputs, leaves)
        except (LookupError, RuntimeError, TypeError, ValueError) as error:
            self.problem = f"the loss code cannot be run again: {type(error).__name__}: {error}"
            return None
        self.losses += [root.detach() for root, _ in roots]
        return roots
