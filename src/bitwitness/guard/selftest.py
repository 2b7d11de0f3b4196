"""Each sensor proves that it sees: a fault made for the purpose, on numbers made for the purpose.

Nothing of the training is touched: own numbers, own generators, no global random state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.amp import GradScaler
from torch.optim.optimizer import Optimizer

from bitwitness.capture.light import LightStep, Looks
from bitwitness.config import FeatureConfig
from bitwitness.finding import Finding
from bitwitness.sense.activations import ActivationsSensor
from bitwitness.sense.checksum import ChecksumSensor
from bitwitness.sense.feature import FeatureSensor
from bitwitness.sense.nonfinite import NonfiniteSensor
from bitwitness.sense.peers import PeersSensor
from bitwitness.sense.trend import TrendSensor
from bitwitness.sense.weights import WeightsSensor
from bitwitness.tap.modules import ModuleTracker
from bitwitness.tap.moments import BackwardCall, StepListener, StepMoments
from bitwitness.tap.operators import OperatorTap

_NAMES = tuple(f"p{i}" for i in range(12))


def prove(*, step: bool = False) -> dict[str, str]:
    """Let everything that the guard relies on prove that it sees; return what failed, by name, with the reason.

    With ``step`` the moments are proven on a whole training step of one number. It runs a real optimizer, which other
    global hooks of the process would hear of, so it is left out where a training is about to begin.
    """
    proofs: dict[str, Callable[[], str]] = {
        "trend": _trend,
        "peers": _peers,
        "activations": _activations,
        "weights": _weights,
        "nonfinite": _nonfinite,
        "feature": _feature,
        "checksum": _checksum,
        "moments": partial(_moments, step=step),
    }
    failed = {}
    for name, proof in proofs.items():
        try:
            reason = proof()
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
        if reason:
            failed[name] = reason
    return failed


def _light(step: int, rank: int = 0, *, spoiled: float = 1.0) -> LightStep:
    noise = np.random.default_rng((step, rank)).normal(0.0, 0.1, len(_NAMES))
    l2 = np.exp(noise)
    l2[3] *= spoiled
    return LightStep(step, rank, _NAMES, l2, 0.1 * l2)


def _seen(clean: list[Finding], faulty: list[Finding]) -> str:
    if clean:
        return f"false alarm on clean numbers: {clean[0].message}"
    return "" if faulty else "did not see the fault that was made for it"


def _trend() -> str:
    sensor = TrendSensor(len(_NAMES), warmup=20, z=9.0)
    for step in range(30):
        sensor.learn(_light(step))
    return _seen(sensor.look(_light(30)), sensor.look(_light(30, spoiled=1e3)))


def _peers() -> str:
    sensor = PeersSensor(len(_NAMES), z=9.0)
    clean = [_light(0, rank) for rank in range(4)]
    faulty = [*clean[:-1], _light(0, 3, spoiled=1e3)]
    return _seen(
        sensor.look(clean[3], np.sum([sensor.row(light) for light in clean], axis=0)),
        sensor.look(faulty[3], np.sum([sensor.row(light) for light in faulty], axis=0)),
    )


def _activations() -> str:
    def light(step: int, spoiled: float = 1.0) -> LightStep:
        figures = np.exp(np.random.default_rng(step).normal(0.0, 0.02, (2, 4, len(_NAMES))))
        figures[:, 3] = 0.0
        figures[0, 0, 3] *= spoiled
        return LightStep(step, 0, _NAMES, np.ones(1), np.ones(1), looks=Looks(_NAMES, figures))

    sensor = ActivationsSensor(len(_NAMES), z=9.0)
    for step in range(30):
        sensor.learn(light(step))
    return _seen(sensor.look(light(30)), sensor.look(light(30, spoiled=1e3)))


def _weights() -> str:
    def light(step: int, spoiled: float = 1.0) -> LightStep:
        weights = np.full((2, len(_NAMES)), 1.0 + 1e-3 * step)
        weights[1, 3] *= spoiled
        return LightStep(step, 0, _NAMES, np.ones(1), np.ones(1), weights=weights)

    sensor = WeightsSensor(len(_NAMES), z=9.0)
    for step in range(30):
        sensor.learn(light(step))
    return _seen(sensor.look(light(30)), sensor.look(light(30, spoiled=1e3)))


def _nonfinite() -> str:
    sensor = NonfiniteSensor()
    return _seen(sensor.look(_light(0)), sensor.look(_light(1, spoiled=float("nan"))))


def _feature() -> str:
    sensor = FeatureSensor(FeatureConfig(schemes=("v2", "v3", "combined"), grad_sample_interval=1), _NAMES)
    clean = [finding for step in range(20) for finding in sensor.look(_light(step))]
    seen = {finding.sensor for finding in sensor.look(_light(20, spoiled=float("inf")))}
    return _seen(clean, []) if clean else ("" if {"feature.v3", "feature.combined"} <= seen else f"only {seen} fired")


def _checksum() -> str:
    generator = torch.Generator().manual_seed(1)
    found: list[list[Finding]] = []
    for spoil in (False, True):
        sensor = ChecksumSensor()

        def check(call: Any, sensor: ChecksumSensor = sensor, spoil: bool = spoil) -> None:
            if spoil:
                call.result[3, 5] *= -64.0
            sensor(call)

        a, b = torch.randn(64, 96, generator=generator), torch.randn(96, 48, generator=generator)
        with torch.no_grad(), OperatorTap(ModuleTracker(), check, sensor.select):
            torch.mm(a, b)
        found.append(sensor.drain(0, 0))
    return _seen(*found)


class _Listener(StepListener):
    """Notes which moments it was told of."""

    def __init__(self) -> None:
        self.told: list[str] = []

    @contextmanager
    def around_backward(self, call: BackwardCall) -> Iterator[None]:
        del call
        self.told.append("backward")
        yield

    def clipping(self, gradients: list[torch.Tensor]) -> None:
        del gradients
        self.told.append("clip")

    def gradients_ready(self, *, scaler: GradScaler | None = None, optimizer: Optimizer | None = None) -> None:
        del optimizer
        self.told.append("unscale" if scaler else "step")

    def closure_ended(self, optimizer: Optimizer) -> None:
        self.gradients_ready(optimizer=optimizer)

    def zeroed(self, owner: Optimizer | torch.nn.Module) -> None:
        del owner
        self.told.append("zeroed")

    def optimizer_stepped(self, optimizer: Optimizer) -> None:
        del optimizer
        self.told.append("stepped")

    def scaler_updated(self, scaler: GradScaler) -> None:
        del scaler
        self.told.append("update")


def _moments(*, step: bool) -> str:
    """See that every moment is told."""
    listener = _Listener()
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    scaler = GradScaler("cpu", init_scale=2.0)
    with torch.enable_grad(), StepMoments(listener):
        scaler.scale((parameter * parameter).sum()).backward()
        if step:
            scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_([parameter], 1.0)
        torch.nn.utils.clip_grad_value_([parameter], 1.0)
        if step:
            scaler.step(optimizer)
            scaler.update()
    wanted = {"backward", "clip"} | ({"unscale", "step", "stepped", "update"} if step else set())
    missing = wanted - set(listener.told)
    return f"torch {torch.__version__} no longer tells of: {', '.join(sorted(missing))}" if missing else ""
