"""The strike rule, and the lines and fields that watchers of the reference systems look for."""

from __future__ import annotations

import io
import math
import re
from datetime import UTC, datetime

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bitwitness.config import StrikesConfig
from bitwitness.judge.strikes import Strikes
from bitwitness.respond.reference_log import ReferenceLog, alert_fields, strike_record


class Clock:
    """A clock that stands until it is moved; in minutes."""

    def __init__(self) -> None:
        self.minutes = 0.0

    def __call__(self) -> float:
        return self.minutes * 60.0


def make(**config: float) -> tuple[Strikes, Clock]:
    clock = Clock()
    return Strikes(StrikesConfig(**config), clock), clock


def test_three_anomalies_far_enough_apart_strike_out():
    rule, clock = make()
    for minute in (0, 5, 10):
        assert not rule.struck_out
        clock.minutes = minute
        assert rule.anomaly()
    assert rule.struck_out


def test_anomalies_inside_the_cooldown_are_not_counted():
    rule, clock = make()
    counted = []
    for minute in range(15):
        clock.minutes = minute
        counted.append(rule.anomaly())
    assert [m for m, c in enumerate(counted) if c] == [0, 5, 10]


def test_strikes_older_than_the_window_are_dropped():
    rule, clock = make()
    for minute in (0, 10, 481):
        clock.minutes = minute
        rule.anomaly()
    assert (rule.count, rule.struck_out) == (2, False)
    clock.minutes = 490
    rule.anomaly()
    assert (rule.count, rule.struck_out) == (3, True)


def test_one_strike_is_enough_where_the_second_seed_says_so():
    rule, _ = make(cooldown=1, strikes_num=1)
    rule.anomaly()
    assert rule.struck_out


def test_a_window_lasts_for_the_cooldown_and_counts_nothing():
    rule, clock = make(cooldown=2, strikes_num=1)
    rule.anomaly()
    rule.open_window()
    assert (rule.checksum_on, rule.window_ended, rule.struck_out) == (True, False, False)
    clock.minutes = 1.9
    assert not rule.anomaly()
    assert not rule.window_ended
    clock.minutes = 2
    assert rule.window_ended


def test_a_rank_whose_checksum_fired_is_the_faulty_one_and_all_know_of_it():
    faulty, _ = make()
    healthy, _ = make()
    for rule in (faulty, healthy):
        rule.open_window()
    faulty.checksum_failed()
    together = faulty.fired or healthy.fired
    assert faulty.close_window(together) == (True, True)
    assert healthy.close_window(together) == (False, True)


def test_after_a_window_everything_starts_anew_but_rests():
    rule, clock = make(strikes_num=1, cooldown=1, checksum_cooldown=30)
    rule.anomaly()
    rule.open_window()
    rule.checksum_failed()
    clock.minutes = 1
    rule.close_window(rule.fired)
    assert (rule.count, rule.fired, rule.checksum_on, rule.window_ended) == (0, False, False, False)
    clock.minutes = 5
    assert rule.anomaly()  # counted, but the checksum rests
    assert not rule.struck_out
    clock.minutes = 31
    assert rule.struck_out
    rule.open_window()
    assert not rule.fired


def test_a_rank_that_others_pulled_into_a_window_loses_its_strikes_too():
    rule, clock = make()
    rule.anomaly()
    rule.open_window()
    clock.minutes = 5
    rule.close_window(global_result=False)
    assert rule.count == 0


def test_a_checksum_that_fails_outside_a_window_is_not_taken():
    rule, _ = make()
    rule.checksum_failed()
    rule.open_window()
    assert not rule.fired


@settings(max_examples=80, deadline=None)
@given(
    steps=st.lists(st.tuples(st.integers(0, 12), st.booleans(), st.booleans()), max_size=80),
    cooldown=st.integers(1, 6),
    number=st.integers(1, 4),
    window=st.integers(1, 60),
    rest=st.integers(1, 60),
)
def test_no_history_breaks_the_rule(steps, cooldown, number, window, rest):
    rule, clock = make(cooldown=cooldown, strikes_num=number, strikes_window=window, checksum_cooldown=rest)
    counted: list[float] = []  # since the last window
    last_counted = closed = opened = -math.inf
    for wait, anomaly, fails in steps:
        clock.minutes += wait
        if anomaly and rule.anomaly():
            assert clock.minutes - last_counted >= cooldown
            assert not rule.checksum_on
            last_counted = clock.minutes
            counted.append(last_counted)
        inside = [minute for minute in counted if clock.minutes - minute <= window]
        assert rule.count == len(inside)
        if rule.struck_out:
            assert len(inside) >= number
            assert clock.minutes - closed >= rest
            rule.open_window()
            opened = clock.minutes
        if fails:
            rule.checksum_failed()
        if rule.window_ended:
            assert clock.minutes - opened >= cooldown
            rule.close_window(rule.fired)
            closed, counted = clock.minutes, []
            assert rule.count == 0


# -- lines


SEED = {
    "name": "fc1.weight",
    "value": math.inf,
    "avg": 6.44326e12,
    "pre_value": 6.441e14,
    "count": 6,
    "none_zero_count": 6,
}
SEED_RECORD = (
    "StrikeRecord{timestamp: 1756176386, name: fc1.weight, value: inf, "
    "stat: StatData{avg: 6.44326e+12, pre_value: 6.441e+14, count: 6, none_zero_count: 6}}"
)


def test_a_strike_is_printed_as_in_the_second_seed():
    assert strike_record(SEED, 1756176386) == SEED_RECORD
    stream = io.StringIO()
    when = datetime.fromtimestamp(1756176386.665782, UTC)
    ReferenceLog(3, stream).strike(SEED, when)
    shape = r"\[WARNING\] BITWITNESS\(\d+,rank 3\):2025-08-26-02:46:26\.665\.782 \[feature\] "
    assert re.fullmatch(shape + "Silent detect strike detected: " + re.escape(SEED_RECORD) + "\n", stream.getvalue())


@pytest.mark.parametrize(
    ("method", "arguments", "loudness", "keyword"),
    [
        (
            "abnormal",
            ({"value": 2e6, "upper_thresh": [1000000, 10000]},),
            "ERROR",
            "accuracy sensitivity feature abnormal",
        ),
        ("strikes_out_here", (3,), "WARNING", "Feature value detection strikes out on rank 2"),
        ("strikes_out", (), "WARNING", "Feature value detection strikes out!"),
        ("checksum_start", (), "WARNING", "CheckSum start…"),
        ("matmul_error", (), "WARNING", "CheckSum detects MatMul error on rank 2"),
    ],
)
def test_every_keyword_of_the_reference_is_there_at_its_level(capsys, method, arguments, loudness, keyword):
    getattr(ReferenceLog(2), method)(*arguments)
    said = capsys.readouterr().err
    assert said.startswith(f"[{loudness}] BITWITNESS(")
    assert keyword in said


@pytest.mark.parametrize(("found", "keywords"), [(False, 1), (True, 2)])
def test_the_global_result_is_0_or_1(found, keywords):
    lines = ReferenceLog(0, io.StringIO()).global_result(found)
    assert len(lines) == keywords
    assert lines[0].endswith(f"Global CheckSum result is {int(found)}")
    assert ("SilentCheck detects SDC error" in lines[-1]) == found


def test_a_closed_stream_does_not_end_a_training():
    stream = io.StringIO()
    stream.close()
    ReferenceLog(0, stream).strikes_out()


def test_the_alert_has_the_reference_fields():
    assert alert_fields() == {
        "health_status": "Warning",
        "error_code": "80818C00",
        "node_type": "SoC",
        "sensor_type": "Check Sensor",
        "event_state": "check fail",
        "event_type": "fault",
        "fault_level": "minor",
    }
    assert alert_fields(SEED)["evidence"] == SEED
