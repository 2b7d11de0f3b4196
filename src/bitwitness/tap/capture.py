"""What is kept of a step so that it can be run again: inputs, random state, autocast, buffers, output gradients.

The output gradient is taken at *aliases* of the root's outputs (``t.view_as(t)``), so that only what arrives from outside
the root is kept: where a model computes its loss inside, that is the gradient of the loss (1, or the loss scale), and
replaying from it runs the whole model again.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from bitwitness.tap.autocast import Autocast
from bitwitness.tap.lossgraph import LossGraph
from bitwitness.tap.randomness import RandomState


@dataclass(slots=True)
class ForwardRecord:
    """One training forward of the root and, once its backward ran, the gradient that reached its outputs.

    ``args`` and ``kwargs`` hold clones of the input tensors. ``output_digests`` is one int64 0-d tensor per output that
    takes part in the backward; ``output_grads`` stands parallel to it (None where no gradient arrived).
    ``backward`` is the number of the backward call that consumed this forward, ``number`` counts the step's forwards.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    random: RandomState
    autocast: Autocast
    buffers: list[torch.Tensor]
    sync: bool
    output_digests: list[torch.Tensor] = field(default_factory=list)
    output_grads: list[torch.Tensor | None] = field(default_factory=list)
    backward: int | None = None
    number: int = 0


@dataclass(slots=True)
class StepRecord:
    """All that is kept of one step.

    ``unreplayable`` names the reason where the step cannot be run again, ``unhealable`` why its gradients cannot be put
    right; ``began`` is when, by `tap.clock.stopwatch`. ``graphs`` tell, for each backward by its number, what the script
    computed between the root's outputs and where it started.
    """

    step: int
    began: float = 0.0
    forwards: list[ForwardRecord] = field(default_factory=list)
    zero_start: bool = False
    start_norm: torch.Tensor | None = None
    versions: list[int] = field(default_factory=list)
    training: list[bool] = field(default_factory=list)
    unreplayable: str | None = None
    unhealable: str | None = None
    graphs: dict[int, LossGraph] = field(default_factory=dict)

    def give_up(self, reason: str) -> None:
        """Say why this step cannot be run again; the first reason stands."""
        if self.unreplayable is None:
            self.unreplayable = reason

    @property
    def backpropagated(self) -> bool:
        """Whether any of its forwards was."""
        return any(forward.backward is not None for forward in self.forwards)

    def passes(self) -> list[list[ForwardRecord]]:
        """Group the forwards by the backward call that consumed them, in order; unused forwards are left out."""
        groups: dict[int, list[ForwardRecord]] = {}
        for record in self.forwards:
            if record.backward is not None:
                groups.setdefault(record.backward, []).append(record)
        return [groups[number] for number in sorted(groups)]

    def value_dependent(self) -> list[bool]:
        """Tell, for each output hash of the passes in order, whether the gradient it got depends on its value.

        The gradient of a scalar (a loss) is a constant; that of anything else was computed from it outside the root.
        """
        return [
            grad is not None and grad.numel() > 1
            for group in self.passes()
            for record in group
            for grad in record.output_grads
        ]
