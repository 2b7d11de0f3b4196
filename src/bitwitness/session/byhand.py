"""Steps that no optimizer of torch takes on a model's parameters: written out in the script, or taken on copies of them."""

from __future__ import annotations

from collections import deque
from typing import Any

import torch
from torch import nn

from bitwitness.stats import marks_of
from bitwitness.tap.identity import unseen
from bitwitness.tap.owners import optimizers_of
from bitwitness.tap.ownwork import own_work

_FOLLOWED = 1000
"""Nodes of a graph that are followed to what a weight was computed of: an inner loop's steps have a few each."""


class StepsByHand:
    """Tells by a model's weights whether its script has stepped.

    Asked only until an optimizer is seen to hold the weights: after that, its steps are those that count.

    Parameters
    ----------
    root
        The user's own module.

    Attributes
    ----------
    optimized
        Whether an optimizer holds the weights; then nothing is looked at any more.

    """

    def __init__(self, root: nn.Module) -> None:
        self._root = root
        self.optimized = False
        self._begun: tuple[list[int], torch.Tensor | None] | None = None

    def step_begins(self) -> None:
        """Note the weights as they are."""
        if not self.optimized:
            self._begun = None if self._is_adapted else self._seen()

    @property
    def _is_adapted(self) -> bool:
        """Whether weights stand in for the model's own that were computed of these, to be differentiated: no step is over.

        What a hypernetwork makes is computed of others, and of one long vector what is cut out of it.
        """
        weight = next((weight for weight in self._root.parameters() if not weight.is_leaf), None)
        if weight is None:
            return False
        waiting, seen = deque[Any]([weight.grad_fn]), set[Any]()
        while waiting and len(seen) < _FOLLOWED:
            node = waiting.popleft()  # the nearest first
            variable = getattr(node, "variable", None)  # of what accumulates a gradient
            if variable is not None and variable.shape == weight.shape:
                return True
            seen.add(node)
            waiting += [one for one, _ in getattr(node, "next_functions", ()) if one is not None and one not in seen]
        return False

    @torch.no_grad()
    def stepped(self) -> bool:
        """Return whether the weights have changed since the step began, and no optimizer holds them."""
        if self.optimized or self._begun is None or self._is_adapted:
            return False
        (before, noted), (versions, marks) = self._begun, self._seen()
        if versions == before and (noted is None or marks is None or torch.equal(noted, marks)):
            return False
        self.optimized = bool(optimizers_of(self._root))  # seen before it has ever stepped: gradients are accumulated
        return not self.optimized

    def _seen(self) -> tuple[list[int], torch.Tensor | None]:
        """Return the weights' versions and, since what is done through ``.data`` counts as none, their norms and maxima."""
        weights = [weight for weight in self._root.parameters() if weight.requires_grad and not weight.is_meta]
        if not weights or any(weight.is_inference() for weight in weights):
            return [], None
        try:
            with own_work(), unseen():  # a script's modes, and a compiler that traces, are to hear nothing of it
                return [weight._version for weight in weights], marks_of(weights, weights[0].device)
        except Exception:  # weights of a kind that nobody knows; whoever trains them is not to notice
            self.optimized = True
            return [], None
