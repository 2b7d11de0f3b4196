"""The light sensors on series of gradients' sizes: what they see, and what they keep quiet about."""

from __future__ import annotations

import numpy as np
import pytest

from bitwitness.capture.light import LightStep
from bitwitness.finding import Severity
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


def warm(z: float = 9.0) -> TrendSensor:
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


@pytest.mark.parametrize("factor", [0.2, 5.0])
def test_trend_does_not_mind_what_all_parameters_do_together(factor: float) -> None:
    assert not warm().look(light(60, common=factor))


def test_trend_calls_a_hundredfold_jump_of_all_gradients_by_its_name() -> None:
    (found,) = warm().look(light(60, common=100.0))
    assert "all gradients together" in found.message


def test_trend_sees_a_loss_that_changes_its_sign() -> None:
    sensor = TrendSensor(len(NAMES), warmup=20, z=9.0)
    for step in range(60):
        sensor.learn(light(step, losses=(4.0 + 0.1 * (step % 5),)))
    assert not sensor.look(light(60, losses=(4.2,)))
    assert "the loss (-4.2)" in sensor.look(light(60, losses=(-4.2,)))[0].message


def test_a_fault_in_the_first_steps_does_not_blind_the_sensor() -> None:
    sensor = TrendSensor(len(NAMES), warmup=20, z=9.0)
    for step in range(40):
        spoiled = {5: 1e6} if step in (0, 3, 12) else None
        sensor.learn(light(step, spoil=spoiled))
    assert not sensor.look(light(40))
    assert "layers.5.weight" in sensor.look(light(40, spoil={5: 10.0}))[0].message


def test_false_alarms_make_the_sensor_cautious_for_a_while() -> None:
    sensor = warm()
    spoiled = light(60, spoil={5: 10.0})
    assert sensor.look(spoiled)
    sensor.learn(spoiled, false_alarm=True)
    cautious = sensor.history.threshold
    assert cautious > 9.0
    for step in range(61, 200):
        sensor.look(light(step))
        sensor.learn(light(step))
    assert 9.0 < sensor.history.threshold < cautious


def test_an_expert_that_rests_is_judged_more_mildly_when_it_returns() -> None:
    def after(rest: int) -> float:
        sensor = warm()
        for step in range(60, 60 + rest):
            sensor.learn(light(step, spoil={3: 0.0}))
        return max(f.evidence["z"] for f in sensor.look(light(60 + rest, spoil={3: 1e3})))

    assert after(40) < 0.5 * after(0)


def test_a_gradient_that_vanishes_for_the_first_time_is_seen() -> None:
    sensor = warm()
    (found,) = sensor.look(light(60, spoil={5: 0.0}))
    assert "layers.5.weight (and 0 more) is zero, for the first time" in found.message
    sensor.learn(light(60, spoil={5: 0.0}))  # so this model has gradients that come and go
    assert not sensor.look(light(61, spoil={7: 0.0}))


def test_a_small_fault_that_persists_is_seen_by_its_persistence() -> None:
    sensor = warm()
    for step in range(60, 80):
        spoiled = light(step, spoil={5: 2.0})
        if found := sensor.look(spoiled):
            break
        sensor.learn(spoiled)
    assert 61 < step < 75
    assert "layers.5.weight" in found[0].message
    assert "stays away from its history" in found[0].message


def test_what_was_learned_survives_a_restart() -> None:
    old, new = warm(), TrendSensor(len(NAMES), warmup=20, z=9.0)
    new.history.load(old.history.state())
    spoiled = light(60, spoil={5: 50.0})
    assert [f.evidence["z"] for f in new.look(spoiled)] == pytest.approx([f.evidence["z"] for f in old.look(spoiled)])
    with pytest.raises(ValueError, match="shape"):
        TrendSensor(3, warmup=20, z=9.0).history.load(old.history.state())


def test_a_fault_does_not_poison_the_history() -> None:
    sensor = warm()
    for step in range(60, 70):
        sensor.learn(light(step, spoil={5: 1e6}))
    assert sensor.look(light(70, spoil={5: 1e6}))


def test_trend_waits_for_parameters_without_a_gradient() -> None:
    sensor = TrendSensor(len(NAMES), warmup=5, z=9.0)
    for step in range(40):
        sensor.learn(light(step, spoil={3: 0.0}))
    assert not sensor.look(light(40))  # layer 3 gets its first gradient now


def test_trend_says_nothing_of_the_few_gradients_that_an_overflow_left() -> None:
    sensor = warm()
    overflow = light(60, common=1e3, spoil={index: float("inf") for index in range(3, len(NAMES))}, losses=(1.0,))
    assert not sensor.look(overflow), "three finite gradients cannot tell what all of them do together"
    sensor.learn(overflow)
    assert not sensor.look(light(61))
    assert sensor.look(light(62, spoil={5: 50.0}))


def test_peers_suspects_the_odd_rank_only_and_from_the_first_step() -> None:
    steps = [light(0, rank, spoil={7: 40.0} if rank == 2 else None) for rank in range(4)]
    sensors = [PeersSensor(len(NAMES), z=9.0) for _ in steps]
    total = np.sum([s.row(x) for s, x in zip(sensors, steps, strict=True)], axis=0)
    found = [s.look(x, total) for s, x in zip(sensors, steps, strict=True)]
    assert [bool(f) for f in found] == [False, False, True, False]
    assert "layers.7.weight on rank 2" in found[2][0].message


def test_peers_is_quiet_on_healthy_ranks() -> None:
    sensors = [PeersSensor(len(NAMES), z=9.0) for _ in range(4)]
    for step in range(300):
        steps = [light(step, rank, common=1.0 + step % 7) for rank in range(4)]
        total = np.sum([s.row(x) for s, x in zip(sensors, steps, strict=True)], axis=0)
        assert not any(s.look(x, total) for s, x in zip(sensors, steps, strict=True))
        for sensor in sensors:
            sensor.learn()


def test_peers_learns_that_a_rank_is_always_a_little_different() -> None:
    sensors = [PeersSensor(len(NAMES), z=9.0) for _ in range(4)]
    for step in range(60):
        steps = [light(step, rank, spoil={7: 6.0} if rank == 2 else None) for rank in range(4)]
        total = np.sum([s.row(x) for s, x in zip(sensors, steps, strict=True)], axis=0)
        found = [s.look(x, total) for s, x in zip(sensors, steps, strict=True)]
        assert not (step > 20 and any(found))
        for sensor in sensors:
            sensor.learn()


def test_peers_passes_over_what_is_zero_or_not_finite() -> None:
    steps = [light(0, rank, spoil={1: 0.0, 2: float("nan")} if rank else None) for rank in range(4)]
    sensors = [PeersSensor(len(NAMES), z=9.0) for _ in steps]
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


@pytest.mark.parametrize("value", ["inf", "nan"])  # of an infinity, times zero further down, comes NaN
@pytest.mark.parametrize("power", [16, 26, 40])
def test_no_first_scale_is_too_high_to_begin_with(power: int, value: str) -> None:
    sensor = NonfiniteSensor(patience=8)
    for number in range(power):
        bad = light(number, spoil={0: float(value)}, scaled=True, scale=2.0 ** (power - number))
        assert sensor.look(bad)[0].severity is Severity.INFO, number
    assert sensor.look(light(99, spoil={0: float(value)}, scaled=True, scale=1.0))[0].severity is Severity.ERROR


def test_a_scaler_that_begins_high_is_searching_as_long_as_there_is_a_scale_to_lower() -> None:
    sensor = NonfiniteSensor(patience=4)
    scales = [2.0**24 / 2**n for n in range(26)]
    said = [
        sensor.look(light(n, spoil={0: float("inf")}, scaled=True, scale=scale))[0].severity
        for n, scale in enumerate(scales)
    ]
    assert said == [Severity.INFO] * 24 + [Severity.ERROR] * 2
    lost = NonfiniteSensor(patience=4)
    bad = [lost.look(light(n, losses=(float("nan"),), scaled=True, scale=2.0**24))[0].severity for n in range(5)]
    assert bad == [Severity.INFO] * 3 + [Severity.ERROR] * 2
