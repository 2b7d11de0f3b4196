"""Which of a model's parameters ask for a gradient; scripts freeze and unfreeze them as they train."""

from __future__ import annotations

from torch import nn


class Trainable:
    """Notices at each forward, for a look at each parameter's flag, that a script has frozen or unfrozen some.

    Parameters
    ----------
    root
        The model.
    fixed
        Its parameters are those of now: a module of FSDP2's holds others, whole ones, while it runs.

    """

    def __init__(self, root: nn.Module, *, fixed: bool) -> None:
        self._root = root
        self._fixed = fixed
        self._every = dict(root.named_parameters())
        self._watched: list[bool] = []
        self._seen: list[bool] = []

    def read(self) -> dict[str, nn.Parameter]:
        """Return the parameters that ask for a gradient now, by name: these are watched from now on."""
        self._watched = self._seen = self._now()
        every = self._every if self._fixed else dict(self._root.named_parameters())
        return {name: parameter for name, parameter in every.items() if parameter.requires_grad}

    def asked(self) -> list[nn.Parameter]:
        """Return the parameters that asked for a gradient in a forward of this step."""
        return [parameter for parameter, seen in zip(self._every.values(), self._seen, strict=True) if seen]

    def any(self) -> bool:
        """Tell whether any asks for one: a model that is frozen as a whole is not trained by what runs through it."""
        return any(parameter.requires_grad for parameter in self._every.values())

    def grown(self) -> bool:
        """Tell, at a forward, whether any asks for a gradient that is not watched."""
        now = self._now()
        self._seen = [a or b for a, b in zip(self._seen, now, strict=True)]
        return any(asks and not watched for asks, watched in zip(now, self._watched, strict=True))

    def outdated(self) -> bool:
        """Tell, at the first forward of a step, whether others are to be watched.

        One that asks no more is watched for as long as it did in some forward of the step before: scripts freeze a part, or
        all, for one of a step's forwards, and what is watched anew has no history.
        """
        grown, before = self.grown(), self._seen
        self._seen = self._now()
        return grown or any(watched and not seen for watched, seen in zip(self._watched, before, strict=True))

    def _now(self) -> list[bool]:
        return [parameter.requires_grad for parameter in self._every.values()]
