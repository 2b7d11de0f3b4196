"""The light sensors on series of gradients' sizes: what they see, and what they keep quiet about."""

from __future__ import annotations

import numpy as np
import pytest

from bitwitness.finding import Severity
from bitwitness.sense.light import LightStep
from bitwitness.sense.nonfinite import NonfiniteSensor
from bitwitness.sense.peers import PeersSensor
from bitwitness.sense.trend import TrendSensor

NAMES = tuple(f"layers.{i}.weight" for i in range(16))


def light(step: int, rank: int = 0, *, common: float = 1.0, spoil: dict[int, float] | None = None, **more) -> LightStep:
    """Return sizes that vary by some 15 % from step to step and rank to rank."""
    noise = np.random.default_rng((step, rank)).normal(0.0, 0.15, (2, len(NAMES)))
    l2 = common * np.exp(noise[0])
    absmax = 0.1 * l2 * np.exp(0.5 * noise[1])
    for index, factor in (spoil or {}).items():
        l2[index] *= factor
        absmax[index] *= factor
    return LightStep(step, rank, NAMES, l2, absmax, **more)


def warm(z: float = 12.0) -> TrendSensor:
    sensor = TrendSensor(len(NAMES), warmup=20, z=z)
    for step in range(60):
        assert not sensor.look(light(step))
        sensor.learn(light(step))
    return sensor


def test_trend_names_the_parameter_that_left_its_history() -> None:
    found = warm().look(light(60, spoil={5: 50.0}))
    assert "layers.5.weight" in found[0].message
    assert found[0].evidence["z"] > found[0].evidence["threshold"]
    assert str(found[0].site) == "layers.5/weight#0:grad.local@r0.s60.m0"


def test_trend_sees_a_gradient_that_collapses() -> None:
    assert warm().look(light(60, spoil={5: 1e-4}))


@pytest.mark.parametrize("factor", [0.01, 100.0])
def test_trend_does_not_mind_what_all_parameters_do_together(factor: float) -> None:
    assert not warm().look(light(60, common=factor))


def test_a_fault_does_not_poison_the_history() -> None:
    sensor = warm()
    for step in range(60, 70):
        sensor.learn(light(step, spoil={5: 1e6}))
    assert sensor.look(light(70, spoil={5: 1e6}))


def test_trend_waits_for_parameters_without_a_gradient() -> None:
    sensor = TrendSensor(len(NAMES), warmup=5, z=12.0)
    for step in range(40):
        sensor.learn(light(step, spoil={3: 0.0}))
    assert not sensor.look(light(40))  # layer 3 gets its first gradient now


def test_peers_suspects_the_odd_rank_only_and_from_the_first_step() -> None:
    steps = [light(0, rank, spoil={7: 40.0} if rank == 2 else None) for rank in range(4)]
    sensors = [PeersSensor(len(NAMES), z=12.0) for _ in steps]
    total = np.sum([s.row(x) for s, x in zip(sensors, steps, strict=True)], axis=0)
    found = [s.look(x, total) for s, x in zip(sensors, steps, strict=True)]
    assert [bool(f) for f in found] == [False, False, True, False]
    assert "layers.7.weight on rank 2" in found[2][0].message


def test_peers_is_quiet_on_healthy_ranks() -> None:
    sensors = [PeersSensor(len(NAMES), z=12.0) for _ in range(4)]
    for step in range(300):
        steps = [light(step, rank, common=1.0 + step % 7) for rank in range(4)]
        total = np.sum([s.row(x) for s, x in zip(sensors, steps, strict=True)], axis=0)
        assert not any(s.look(x, total) for s, x in zip(sensors, steps, strict=True))


def test_peers_passes_over_what_is_zero_or_not_finite() -> None:
    steps = [light(0, rank, spoil={1: 0.0, 2: float("nan")} if rank else None) for rank in range(4)]
    sensors = [PeersSensor(len(NAMES), z=12.0) for _ in steps]
    total = np.sum([s.row(x) for s, x in zip(sensors, steps, strict=True)], axis=0)
    assert np.isfinite(total).all()
    assert not any(s.look(x, total) for s, x in zip(sensors, steps, strict=True))


def test_nonfinite_names_gradients_and_losses() -> None:
    found = NonfiniteSensor().look(light(3, spoil={0: float("inf"), 9: float("nan")}, losses=(float("nan"),)))
    assert found[0].severity is Severity.ERROR
    assert "layers.0.weight" in found[0].message
    assert "loss" in found[0].message


def test_under_a_scaler_an_overflow_is_ordinary_until_it_lasts() -> None:
    sensor = NonfiniteSensor(patience=4)
    loud = [sensor.look(light(s, spoil={0: float("inf")}, scaled=True))[0].severity for s in range(5)]
    assert loud == [Severity.INFO] * 3 + [Severity.ERROR] * 2
    assert not sensor.look(light(9, scaled=True))
