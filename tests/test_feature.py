"""The reference schemes against their formulas, written out one value at a time, and against the seeds."""

from __future__ import annotations

import math
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bitwitness import Site
from bitwitness.capture.light import LightStep
from bitwitness.config import FeatureConfig
from bitwitness.finding import Severity
from bitwitness.sense.feature import FeatureSensor
from bitwitness.sense.feature_rules import Averages, judge_combined, judge_v3, squares

TAP = Site("layers.0.norm", "norm", 0, "backward", "grad_in0")


def step(number: int, absmax: list[float], l2: list[float] | None = None, *, scaled: bool = False) -> LightStep:
    names = tuple(f"layers.{i}.weight" for i in range(len(absmax)))
    return LightStep(number, 0, names, np.array(l2 or absmax, float), np.array(absmax, float), (), scaled)


def v1_levels(values: list[float], **config: object) -> list[int]:
    sensor = FeatureSensor(FeatureConfig(schemes=("v1",), **config), ["w"])  # type: ignore[arg-type]
    levels = []
    for number, value in enumerate(values):
        findings = sensor.look(step(number, [1.0]), [TAP], np.array([value]))
        levels.append(findings[0].evidence["level"] if findings else 0)
    return levels


# -- V1 and V2


def test_v1_holds_the_bounds_of_both_levels_from_the_first_step_on():
    assert v1_levels([1.0, 1e4, 1.0001e4, 1e6, 1.0001e6, math.nan, math.inf, 1.0]) == [0, 0, 2, 2, 1, 1, 1, 0]


def test_v1_a_jump_counts_after_seven_values():
    calm = [1.0, 1.001] * 4
    assert v1_levels([*calm[:7], 1.0 + 0.001 * 5001]) == [0] * 7 + [2]
    assert v1_levels([*calm[:7], 1.0 + 0.001 * 100001]) == [0] * 7 + [1]
    assert v1_levels([*calm[:6], 1.0 + 0.001 * 100001]) == [0] * 7
    assert v1_levels([*calm[:7], 1.5]) == [0] * 8


def test_v1_a_history_without_spread_knows_no_jump():
    assert v1_levels([1.0] * 10 + [2.0]) == [0] * 11


def test_v1_a_nan_does_not_make_it_blind():
    calm = [1.0, 1.001] * 4
    assert v1_levels([*calm, math.nan, math.inf, 1.0 + 0.001 * 100002])[-3:] == [1, 1, 1]


def test_v1_a_site_that_comes_twice_in_a_step_is_judged_twice():
    sensor = FeatureSensor(FeatureConfig(schemes=("v1",)), ["w"])
    findings = sensor.look(step(0, [1.0]), [TAP, TAP], np.array([5.0, 2e6]))
    assert [f.evidence["count"] for f in findings] == [1]
    assert findings[0].evidence["pre_value"] == 5.0


def test_v1_a_finding_carries_what_a_reader_needs():
    sensor = FeatureSensor(FeatureConfig(schemes=("v1",)), ["w"])
    (found,) = sensor.look(step(4, [1.0]), [TAP], np.array([2e6]))
    assert (found.sensor, found.severity, found.step) == ("feature.v1", Severity.ERROR, 4)
    assert str(found.site) == "layers.0.norm/norm#0:backward.grad_in0@r0.s4.m0"
    assert found.message == "L2 norm of the gradient of layers.0.norm is 2e+06"
    assert found.evidence["upper_thresh"] == [1_000_000, 10_000]
    assert found.to_event()["evidence"]["level"] == 1


def test_v2_looks_at_the_first_weight_and_at_what_is_communicated():
    sensor = FeatureSensor(FeatureConfig(schemes=("v2",)), ["a", "b"], communicates=True)
    (found,) = sensor.look(step(0, [1.0, 1.0], [3.0, 2e6]))
    assert found.site.short == "./all_reduce#0:comm.in0"
    alone = FeatureSensor(FeatureConfig(schemes=("v2",)), ["a", "b"])
    assert alone.look(step(0, [1.0, 1.0], [3.0, 2e6])) == []
    (first,) = alone.look(step(1, [1.0, 1.0], [2e6, 1.0]))
    assert first.evidence["name"] == "layers.0.weight"


def test_v2_a_jump_counts_after_a_hundred_values():
    for calm, hits in ((99, 0), (100, 1)):
        sensor = FeatureSensor(FeatureConfig(schemes=("v2",)), ["a"])
        for number in range(calm):
            sensor.look(step(number, [1.0], [1.0 + 0.001 * (number % 2)]))
        assert len(sensor.look(step(calm, [1.0], [500.0]))) == hits


# -- the combined scheme


def combined_by_hand(values: list[float], u1: float, u2: float) -> tuple[list[bool], float, int]:
    """The page's rules, one value after the other."""
    avg, n, pre = 0.0, 0, 0.0
    strikes = []
    for value in values:
        strike = False
        if value != 0 and not math.isfinite(value):
            strike = True
        elif value != 0:
            if n >= 10 and avg != 0:
                f = 1 - 0.99**n
                t1, t2 = avg * u1 / f, avg * u2 / f
            else:
                t1 = t2 = value
            if value > t1 and abs(value - pre) > t1:
                strike = True
            elif value <= t2:
                n += 1
                avg = 0.99 * avg + 0.01 * value
        pre = value
        strikes.append(strike)
    return strikes, avg, n


squared = st.one_of(
    st.floats(0, 1e38), st.floats(0.5, 2.0), st.sampled_from([0.0, math.nan, math.inf, 1e-40, 1e5, 3e8])
)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(squared, squared, squared), min_size=1, max_size=60), st.sampled_from([3, 100, 10**6]))
def test_combined_is_the_formula_on_every_parameter(rows, u1):
    state, strikes = Averages.none(3), []
    for row in rows:
        hit, _, state = judge_combined(np.array(row), state, u1, 100)
        strikes.append(hit.tolist())
    for column in range(3):
        by_hand, avg, n = combined_by_hand([row[column] for row in rows], u1, 100)
        assert [row[column] for row in strikes] == by_hand
        assert state.average[column] == pytest.approx(avg, rel=1e-12)
        assert state.learned[column] == n
        assert state.count[column] == len(rows)


def test_combined_reproduces_the_second_seed():
    """fc1.weight strikes at count 6, in warm-up, with value inf: a gradient whose square leaves float32."""
    sensor = FeatureSensor(FeatureConfig(schemes=("combined",), grad_sample_interval=1), ["fc1.weight"])
    for number in range(6):
        assert sensor.look(step(number, [2.53791e7])) == []
    (found,) = sensor.look(step(6, [1e30]))
    assert (found.sensor, found.severity) == ("feature.combined", Severity.WARNING)
    evidence = found.evidence
    assert (evidence["value"], evidence["absmax"]) == (math.inf, 1e30)
    assert (evidence["count"], evidence["none_zero_count"]) == (6, 6)
    assert evidence["pre_value"] == pytest.approx(6.441e14, rel=1e-4)


def test_combined_warm_up_lets_finite_values_pass_and_a_strike_is_not_learned():
    sensor = FeatureSensor(FeatureConfig(schemes=("combined",), grad_sample_interval=1), ["w"])
    assert all(not sensor.look(step(i, [10.0**i])) for i in range(5))
    for number in range(30):
        assert sensor.look(step(number, [1.0])) == []
    first, second = sensor.look(step(40, [1e8])), sensor.look(step(41, [1.0]))
    assert len(first) == 1
    assert second == []


def test_combined_looks_at_every_kth_parameter():
    struck = np.full(7, np.inf)
    for interval, expected in ((1, [0, 1, 2, 3, 4, 5, 6]), (3, [0, 3, 6]), (10, [0])):
        config = FeatureConfig(schemes=("combined",), grad_sample_interval=interval)
        findings = FeatureSensor(config, [f"layers.{i}.weight" for i in range(7)]).look(step(0, struck.tolist()))
        assert [f.site.module for f in findings] == [f"layers.{i}" for i in expected]


def test_a_step_that_is_wrong_everywhere_gives_a_few_findings_that_tell_how_many():
    config = FeatureConfig(schemes=("combined",), grad_sample_interval=1)
    findings = FeatureSensor(config, [str(i) for i in range(500)]).look(step(0, [math.nan] * 500))
    assert len(findings) == 8
    assert findings[0].evidence["parameters_struck"] == 500


def test_under_a_gradient_scaler_an_overflow_is_told_quietly():
    config = FeatureConfig(schemes=("v3", "combined"), grad_sample_interval=1)
    findings = FeatureSensor(config, ["w"]).look(step(0, [math.inf], scaled=True))
    assert {f.severity for f in findings} == {Severity.INFO}


# -- V3


def v3_by_hand(values: list[float]) -> list[int]:
    avg, k = 0.0, 0
    levels = []
    for value in values:
        if not math.isfinite(value):
            levels.append(1)
            continue
        if avg == 0:
            avg, k = value, 0
        reference = avg / (1 - 0.99**k) if k else avg
        levels.append(1 if value > reference * 1e6 else 2 if value > reference * 1e4 else 0)
        if avg != 0:
            avg = 0.99 * avg + 0.01 * value
            k += 1
    return levels


@settings(max_examples=60, deadline=None)
@given(st.lists(squared, min_size=1, max_size=60))
def test_v3_is_the_formula(values):
    state, levels = Averages.none(1), []
    for value in values:
        level, _, state = judge_v3(np.array([value]), state)
        levels.append(int(level[0]))
    assert levels == v3_by_hand(values)


def test_v3_finds_a_large_square_and_starts_from_the_first_one_that_is_not_zero():
    sensor = FeatureSensor(FeatureConfig(schemes=("v3",)), ["w"])
    for number in range(200):
        assert sensor.look(step(number, [0.0 if number < 3 else 1.0])) == []
    (warning,) = sensor.look(step(200, [200.0]))
    (error,) = sensor.look(step(201, [1e5]))
    assert (warning.severity, error.severity) == (Severity.WARNING, Severity.ERROR)


def test_squares_are_those_of_float32():
    assert squares(np.array([3.0, 1e20, math.nan, 1e300, 1e-30])).tolist()[0] == 9.0
    assert squares(np.array([1e20, math.inf, 1e300])).tolist() == [math.inf] * 3
    assert math.isnan(squares(np.array([math.nan]))[0])


def test_a_light_step_of_ten_thousand_parameters_takes_less_than_two_milliseconds():
    config = FeatureConfig(schemes=("v2", "v3", "combined"), grad_sample_interval=1)
    sensor = FeatureSensor(config, [str(i) for i in range(10_000)])
    light = LightStep(0, 0, tuple(map(str, range(10_000))), np.ones(10_000), np.ones(10_000))
    for _ in range(3):
        sensor.look(light)
    best = math.inf
    for _ in range(20):
        started = time.process_time()
        sensor.look(light)
        best = min(best, time.process_time() - started)
    assert best < 2e-3
