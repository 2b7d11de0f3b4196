"""The gradients of one root's step, described on their device and brought to the host when they are complete."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from torch.amp import GradScaler

from bitwitness.capture.edits import Edits
from bitwitness.capture.gradients import LocalGradients
from bitwitness.capture.light import LightStep
from bitwitness.capture.lightreader import LightReader
from bitwitness.capture.looks import ModuleLooks
from bitwitness.capture.root import RootTap
from bitwitness.stats import Features


class StepGradients:
    """Describes one root's gradients as its steps go by.

    Parameters
    ----------
    root
        Whose gradients these are; of the parameters that it watches now.
    rank
        Whose steps these are.
    looks
        What looks at the root's modules, if anything does.
    norms_only
        No replay is to be compared with them: their norms are enough.

    """

    def __init__(self, root: RootTap, rank: int, *, looks: ModuleLooks | None, norms_only: bool) -> None:
        parameters = list(root.parameters.values())
        ledger = root.ledger  # renewed with the parameters, as this is
        self.local = LocalGradients(
            root.wrapper, parameters, root.device, norms_only=norms_only, left=lambda: ledger.left
        )
        self.edits = Edits(root, self.local)
        self._reader = LightReader(root, self.local, rank, looks)
        self.losses: list[torch.Tensor] = []
        """What the step's backwards began at, where that is one number."""
        self.early = False
        """Whether an optimizer ran inside the step's backward."""

    def collect(self) -> None:
        """Describe the gradients, if they are about to be reduced; else they are still there when they are complete."""
        if self.local.mode not in ("hold", "reduce"):
            self.local.collect()

    def collect_early(self, parameters: Iterable[torch.Tensor]) -> None:
        """Describe what an optimizer that runs inside the backward is about to use."""
        self.early = True
        self.local.collect_early(parameters)

    def take(self) -> Features | None:
        """Return the step's description; None where no backward was seen that synchronises the gradients."""
        return self.local.take_early() or self.local.take(hashed=False)

    def light(self, features: Features, scaler: GradScaler | None) -> LightStep:
        """Bring the step's sizes to the host."""
        scale, scaled = (1.0, False) if scaler is None else (float(scaler.get_scale()), True)
        light = self._reader.read(features, self.losses, scale, scaled=scaled)
        if self.local.brief and not np.isfinite(light.absmax).all():  # a norm may overflow where no value does
            light = self._reader.read(self.local.describe(), self.losses, scale, scaled=scaled)
        return light

    def step_ended(self) -> None:
        """Let what is read from now on belong to the next step."""
        self.losses = []
        self.early = False
        self.edits.step_ended()
