"""Values that the user's own code hands to the recordings that are on."""

from __future__ import annotations

from typing import Any, Protocol
from weakref import WeakSet

import torch

from bitwitness.site import Site


class TakesValues(Protocol):
    """A recorder, as far as it concerns values of the user's own."""

    @property
    def records(self) -> bool:
        """Whether the step that runs is recorded."""

    def save(self, value: Any, name: str) -> None:
        """Record a value, and its gradient."""

    def record_gradient(self, site: Site, grad: torch.Tensor) -> None:
        """Record the gradient of one."""


recording: WeakSet[Any] = WeakSet()
"""The recorders that are on; each enters and leaves by itself."""


def save(value: Any, name: str) -> None:
    """Record a value of your own, and its gradient if it has one, in every recording that is on.

    Parameters
    ----------
    value
        A tensor, or a list, tuple or dictionary of them.
    name
        What it is called: the operator part of its site.

    """
    for recorder in list(recording):
        recorder.save(value, name)


class SavedGradient:
    """The hook of a saved value."""

    def __init__(self, recorder: TakesValues, site: Site) -> None:
        self._recorder = recorder
        self._site = site

    def __call__(self, grad: torch.Tensor) -> None:
        """Record the gradient as it passes."""
        if self._recorder.records:
            self._recorder.record_gradient(self._site, grad)


def as_operator(name: str) -> str:
    """Return a name that can stand as the operator part of a site."""
    return "".join("_" if c in "/#:@" else c for c in name) or "_"
