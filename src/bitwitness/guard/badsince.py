"""Since when a parameter or a buffer is not finite, and whether an optimizer's update explains it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from torch import nn
from torch.optim.optimizer import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from bitwitness.nonfinite.kinds import READ_IN_PART
from bitwitness.nonfinite.origin import Kind, Origin
from bitwitness.nonfinite.settings import SettingsLog
from bitwitness.nonfinite.update import blame_update


class BadSince:
    """Remembers of one root when its steps were finite last, and who has changed its parameters since.

    Attributes
    ----------
    last_clean
        The last step that was looked at and was finite; None before the first.

    """

    def __init__(self) -> None:
        self.last_clean: int | None = None
        self._optimizers = WeakIdKeyDictionary()
        self._settings = SettingsLog()
        self._bad_buffers: dict[str, int] = {}

    def clean(self, step: int) -> None:
        """Note that a step was looked at and was finite."""
        self.last_clean = step
        self._settings.clear()

    def stepped(self, optimizer: Optimizer) -> None:
        """Note who changes parameters, and with which settings: a schedule may change them before the damage is seen."""
        self._settings.note(optimizer)
        self._optimizers.setdefault(optimizer, None)

    def bad_buffers(self, names: Iterable[str], step: int) -> None:
        """Note which buffers were not finite at a step."""
        self._bad_buffers |= dict.fromkeys(names, step)

    def explained(self, origin: Origin, parameters: Mapping[str, nn.Parameter]) -> Origin:
        """Say since when a parameter is bad, and whether an optimizer's update explains it."""
        if origin.kind is Kind.BUFFER:
            return self._since_when(origin)
        if origin.kind is not Kind.PARAMETER:
            return origin
        if self.last_clean is None:
            return replace(origin, detail=f"{origin.detail}; it was so before the first step that was watched")
        name = f"{origin.site.module}.{origin.site.op}".removeprefix("..").removeprefix(".")
        parameter = parameters.get(name)
        since = f"since the update of step {self.last_clean}, whose loss and gradients were finite"
        if origin.detail.startswith(READ_IN_PART):
            since = f"the loss and gradients of step {self.last_clean} were finite; it went bad later, or was not read there"
        update = None if parameter is None else blame_update(parameter, list(self._optimizers), self._settings)
        if update is None:
            other = "no optimizer's state or settings at that time explain it: other code may have changed it"
            return replace(origin, detail=f"{origin.detail}; {since} ({other})")
        return replace(
            origin,
            kind=Kind.OPTIMIZER,
            site=replace(origin.site, phase="optim"),
            detail=f"{origin.detail}; {since}: {update}",
        )

    def _since_when(self, origin: Origin) -> Origin:
        """Say what is known of when a buffer went bad."""
        name = f"{origin.site.module}.{origin.site.op}".removeprefix("..").removeprefix(".")
        if name in self._bad_buffers:
            return replace(origin, detail=f"{origin.detail}; it was so at step {self._bad_buffers[name]} already")
        if self.last_clean is None:
            return origin
        return replace(origin, detail=f"{origin.detail}; step {self.last_clean} was finite")
