"""What is ordinary and was told as a fault: few elements, a scaler's skipped steps, what goes in company; what scripts set."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from monitor_series import PARAMETERS, Change, key_of, scaled, steps, watched

from bitwitness import Finding, Site
from bitwitness.finding import Severity
from bitwitness.monitor.sheet import Key, StepRows
from bitwitness.store.watched import Watched

NAME = PARAMETERS[5]
Rows = dict[Key, list[float]]


def alerts(rows: list[StepRows]) -> list[Finding]:
    return [one for one in watched(rows)[0] if one.severity is not Severity.INFO]


def with_count(rows: list[StepRows], name: str, count: int) -> list[StepRows]:
    """Give a parameter few elements."""
    return [
        replace(one, counts=np.where([k.name == name and k.metric is None for k in one.keys], count, one.counts))
        for one in rows
    ]


@pytest.mark.parametrize(("count", "told"), [(1, False), (7, False), (8, True)])
def test_a_bias_of_few_elements_may_cross_zero(count: int, told: bool) -> None:
    rows = steps(240, scaled("grad", NAME, lambda step: 1e-5 if step == 200 else 1.0))
    assert any(one.sensor == "monitor.vanished" for one in alerts(with_count(rows, NAME, count))) is told
    rows = steps(240, scaled("grad", NAME, lambda step: 8.0 if step > 160 else 1.0))
    assert any(one.sensor == "monitor.exploding" for one in alerts(with_count(rows, NAME, count)))


def of_update(step_: int, rows: Rows) -> None:
    rows[Key("update", NAME, None, "update_ratio", -1)][0] *= 0.0 if step_ == 200 else 1.0


def test_nor_is_its_update_judged() -> None:
    rows = steps(240, of_update)
    assert [one.sensor for one in alerts(rows)] == ["monitor.vanished"]
    assert not alerts(with_count(rows, NAME, 1))


def overflowing(at: range) -> Change:
    def change(step: int, rows: Rows) -> None:
        if step in at:
            rows[key_of("grad", PARAMETERS[0])][1] = 9  # of which the finite rest says nothing
            scaled("grad", NAME, lambda _: 30.0)(step, rows)
            rows[Key("training", ".", None, "grad_norm", -1)] = [np.inf]
        rows[Key("training", ".", None, "loss_scale", -1)] = [65536.0 * 0.5 ** max(0, min(step, at[-1]) - at[0])]

    return change


@pytest.mark.parametrize("is_scaled", [False, True])
def test_a_step_that_a_scaler_skips_is_no_measure(is_scaled: bool) -> None:
    rows = [replace(one, scaled=is_scaled) for one in steps(140, overflowing(range(100, 101)))]
    said = {one.sensor for one in alerts(rows)}
    assert said == (set() if is_scaled else {"monitor.nonfinite", "monitor.exploding"})


def test_a_scaler_that_skips_every_step_is_told_of_once() -> None:
    rows = [replace(one, scaled=True) for one in steps(160, overflowing(range(100, 150)))]
    (one,) = alerts(rows)
    assert (one.sensor, one.step) == ("monitor.loss_scale", 115)
    assert "overflowed in the last 16 steps, all of which the scaler skips" in one.message


def test_a_loss_scale_below_one_is_told_of() -> None:
    def change(step: int, rows: Rows) -> None:
        rows[Key("training", ".", None, "loss_scale", -1)] = [65536.0 if step < 90 else 2.0**-20]

    rows = [replace(one, scaled=True) for one in steps(120, change)]
    (one,) = alerts(rows)
    assert (one.sensor, one.step) == ("monitor.loss_scale", 90)
    assert "is 9.54e-07: below 1 small gradients are zero in float16" in one.message


def rates(of: list[float]) -> list[StepRows]:
    def change(step: int, rows: Rows) -> None:
        rows[Key("training", "0", None, "lr", -1)] = [of[step]]

    return steps(len(of), change)


def test_a_learning_rate_that_leaps_is_told_of_and_schedules_are_not() -> None:
    (one,) = alerts(rates([0.01] * 100 + [0.3] * 40))
    assert (one.sensor, one.step) == ("monitor.learning_rate", 100)
    assert "the learning rate leaps to 0.3, 30 times the largest before" in one.message
    warm = [0.01 * min(1.0, (i + 1) / 50) for i in range(120)]
    restarts = [0.01 * (0.5 + 0.5 * np.cos(np.pi * (i % 40) / 40)) for i in range(120)]
    tenth = [0.001] * 60 + [0.01] * 60  # a warm-up at a tenth, which is noted and no alert
    assert [one.severity for one in watched(rates(tenth))[0]] == [Severity.INFO]
    for schedule in (warm, restarts, tenth, [0.01] * 60 + [0.001] * 30 + [0.01] * 30):
        assert not alerts(rates(schedule))


def test_layers_that_go_the_same_way_are_in_company() -> None:
    def grows(names: list[str]) -> Change:
        def change(step: int, rows: Rows) -> None:
            for name in names:
                scaled("grad", name, lambda s: float(np.exp(0.03 * max(0, s - 140))))(step, rows)

        return change

    def drifts(names: list[str]) -> list[Finding]:
        return [one for one in alerts(steps(260, grows(names))) if one.sensor == "monitor.drift"]

    assert drifts([NAME])
    assert not drifts([f"layers.{i}.up.weight" for i in range(5)])  # of six brothers


def test_one_layers_gradient_is_not_the_datas_doing() -> None:
    def change(step: int, rows: Rows) -> None:
        if step == 100:
            scaled("grad", NAME, lambda _: 1000.0)(step, rows)
            rows[Key("training", ".", None, "grad_norm", -1)][0] *= 300

    (cause,) = [one for one in alerts(steps(140, change)) if one.sensor == "monitor.post_mortem"]
    assert cause.evidence["cause"] == "one_layer"
    assert f"one layer: the local gradient of {NAME} is " in cause.message


def finding(rule: str, step: int, rank: int, phase: str, slot: str) -> Finding:
    site = Site("0", "module", 0, phase, slot).at(rank=rank, step=step)
    return Finding(f"monitor.{rule}", site, Severity.WARNING, rule, {}, step, rank)


def test_the_headline_is_what_a_step_computes_first_on_whichever_rank() -> None:
    reduced = finding("nonfinite", 160, 0, "grad", "reduced")
    local = finding("nonfinite", 160, 1, "grad", "local")
    forward = finding("exploding", 161, 0, "forward", "out0")
    watched_ = Watched((), alerts=[finding("drift", 90, 0, "grad", "local"), reduced, local, forward])
    assert watched_.first is local
    backward = finding("vanished", 161, 0, "backward", "out0")
    assert Watched((), alerts=[backward, forward]).first is forward
    pair = [finding("replicas", 161, rank, "param", "value") for rank in (0, 1)]
    assert Watched((), alerts=[*pair, finding("exploding", 161, 1, "param", "value")]).first is pair[1]
