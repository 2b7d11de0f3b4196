"""What a session tells whoever watches a training: the moments of a step, each of which may be left as it is."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from bitwitness.tap.moments import StepListener
from bitwitness.tap.slots import results_of

if TYPE_CHECKING:
    from bitwitness.session.session import Session


class Kind(StrEnum):
    """What a forward of the model is for."""

    TRAINING = "training"
    EVALUATION = "evaluation"
    """Without gradients, or in evaluation mode, of a model that is trained."""
    INFERENCE = "inference"
    """Without gradients, of a model of which nothing says that it is trained: each is a step."""
    TRANSFORMED = "transformed"
    """Inside a transform of ``torch.func``: no step's forward."""


@dataclass(slots=True, eq=False)
class Forward:
    """A call of the model.

    Attributes
    ----------
    part
        The part of the model that was called, where the script does not call the model itself.
    args, kwargs
        What it was called with.
    kind
        What it is for.
    result
        What it returned, once it has; None where it raised.
    raised
        Whether it ended by an error.

    """

    part: nn.Module | None
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    kind: Kind
    result: Any = None
    raised: bool = False

    @property
    def is_detached(self) -> bool:
        """Whether no gradient comes back to it, once it has returned: none is asked for, or the model is frozen."""
        returned = [tensor.requires_grad for _, tensor in results_of(self.result)]
        return not torch.is_grad_enabled() or (bool(returned) and not any(returned))


class Instrument(StepListener):
    """Watches a training in a `Session`; to be derived from, for those moments that matter.

    Moments come in the order in which instruments were added. Nothing comes while the instrument is paused, while bitwitness
    itself is at work (a step that is run again, say), and from evaluations of the model inside a backward.

    An error in a moment is said once, and the instrument is taken off; the training goes on.
    """

    session: Session
    """The session that it was added to."""

    resting = False
    """Whether it is paused."""

    def added(self) -> None:
        """It was added to `session`, and is told of the moments from now on."""

    def removed(self) -> None:
        """It is told of nothing any more."""

    def paused(self) -> None:
        """It is told of nothing until `resumed`; steps are counted meanwhile."""

    def resumed(self) -> None:
        """It is told of the moments again."""

    def step_begins(self, step: int) -> None:
        """The first forward of a step is about to begin."""

    def around_forward(self, forward: Forward) -> AbstractContextManager[None]:
        """Return what a call of the model is run inside."""
        del forward
        return nullcontext()

    def forked(self) -> None:
        """It is in a forked child now, and told of nothing: its files and connections are the parent's."""

    def failed(self, moment: str, error: Exception) -> None:
        """An error of its own ended it; to be told to the user."""
        self.session.say(f"{type(self).__name__} failed in {moment} and is off; the training is untouched: {error!r}")
