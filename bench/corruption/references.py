"""The reference schemes beside a training: the same numbers, their default thresholds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import numpy as np
import torch
from detection.collect import PRODUCTS
from detection.evaluate import REFERENCES
from torch import nn

from bitwitness.capture.light import LightStep
from bitwitness.capture.norms import NormTap
from bitwitness.finding import Severity
from bitwitness.sense.checksum import ChecksumSensor
from bitwitness.sense.feature import FeatureSensor
from bitwitness.stats import features_of
from bitwitness.tap.collector import GradientCollector
from bitwitness.tap.modules import ModuleTracker
from bitwitness.tap.operators import OperatorTap
from bitwitness.testing import FaultyDevice
from corruption.strikes import COMPUTED

CHECKSUM = "their checksum"


class References:
    """Asks every scheme once a step; each learns as it is asked."""

    def __init__(self, model: nn.Module, *, communicates: bool = False) -> None:
        self.names = tuple(name for name, _ in model.named_parameters())
        self._collector = GradientCollector()
        self._taps = NormTap(model, self._collector)
        self._sensors = {
            name: FeatureSensor(config, list(self.names), communicates=communicates)
            for name, config in REFERENCES.items()
        }

    def __enter__(self) -> Self:
        self._taps.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._taps.__exit__(*error)

    def forget(self) -> None:
        """Drop what the taps saw of a step that was only tried."""
        self._collector.drain()

    def ask(self, step: int, gradients: Sequence[torch.Tensor], loss: float) -> list[str]:
        """Return the names of the schemes that call this step's local gradients abnormal."""
        sites, values = self._collector.drain()
        features = features_of(list(gradients), hashed=False)
        l2, absmax = features.l2.numpy().astype(np.float64), features.absmax.numpy().astype(np.float64)
        l2 = np.where(np.isinf(l2) & np.isfinite(absmax), absmax, l2)
        light = LightStep(step, 0, self.names, l2, absmax, (loss,))
        told = []
        for name, sensor in self._sensors.items():
            known = sites if sensor.taps else []
            taps: Any = values.double().numpy() if known else None
            if sensor.look(light, known, taps):
                told.append(name)
        return told


def is_product(trial: dict[str, Any]) -> bool:
    """Tell whether an operator is struck at whose result their checksum looks."""
    return trial["place"] in COMPUTED and any(name in trial["where"] for name in PRODUCTS)


def their_checksum(model: nn.Module, loss: Any, fault: Any, seed: int) -> bool:
    """Tell whether the reference systems' checksum sees an operator's fault, where it looks at every product."""
    sensor = ChecksumSensor("reference")
    with FaultyDevice([fault], seed=seed, model=model), OperatorTap(ModuleTracker(), sensor, sensor.select):
        loss().backward()
    return any(finding.severity is Severity.ERROR for finding in sensor.drain(0, 0))
