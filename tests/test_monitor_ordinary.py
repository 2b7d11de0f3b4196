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


def moving(kind: str, names: list[str], speed: float) -> Change:
    """From step 140 on, by so much a step."""

    def change(step: int, rows: Rows) -> None:
        for name in names:
            scaled(kind, name, lambda s: float(np.exp(speed * max(0, s - 140))))(step, rows)

    return change


def drifts(kind: str, names: list[str], speed: float = 0.03) -> list[Finding]:
    return [one for one in watched(steps(260, moving(kind, names, speed)))[0] if one.sensor == "monitor.drift"]


UPS = [f"layers.{i}.up.weight" for i in range(5)]  # of six brothers


def test_layers_that_go_the_same_way_are_in_company() -> None:
    assert drifts("grad", [NAME])
    assert not drifts("grad", UPS)


def test_a_drifting_gradient_is_noted_and_no_alert() -> None:
    """Gradients grow and shrink as a training goes on, one layer's before another's."""
    assert {one.severity for one in drifts("grad", [NAME])} == {Severity.INFO}
    assert {one.severity for one in drifts("param", [NAME], 0.05)} == {Severity.WARNING}


def test_weights_that_shrink_to_a_third_are_told_of_whichever_they_are() -> None:
    """Three per cent a step is too slow for a jump, and a whole target network decays together."""
    for names in ([NAME], UPS):
        (first, *_) = drifts("param", names, -0.03)
        assert first.severity is Severity.WARNING
        assert "stays below its usual size" in first.message
    assert not drifts("param", UPS, 0.03)  # biases grow from zero


def losses(of: list[float], norms: list[float] | None = None) -> Change:
    def change(step: int, rows: Rows) -> None:
        rows[Key("training", ".", None, "loss", -1)] = [of[step]]
        if norms is not None:
            rows[Key("training", ".", None, "grad_norm", -1)] = [norms[step]]

    return change


def test_a_loss_as_high_as_some_lately_is_no_spike() -> None:
    noisy = [0.1 + 0.02 * np.sin(7.0 * step) for step in range(160)]
    noisy[8], noisy[60] = 0.7, 0.68  # as high fifty steps before
    assert not [one for one in alerts(steps(160, losses(noisy))) if one.sensor == "monitor.spike"]
    noisy[8], noisy[60], noisy[110] = 0.1, 0.1, 3.0
    assert [one.step for one in alerts(steps(160, losses(noisy))) if one.sensor == "monitor.spike"] == [110]


def test_a_training_that_diverges_slowly_is_told_of_once() -> None:
    """Gradients that a script forgot to zero grow by a little each step, and the loss with them."""
    up = [max(0, step - 160) / 16 for step in range(240)]
    norms, rising = [float(np.exp(one)) for one in up], [0.5 * (1 + 0.2 * one) for one in up]
    (one,) = [one for one in alerts(steps(240, losses(rising, norms))) if one.sensor == "monitor.diverging"]
    assert "the training diverges: the norm of all gradients is " in one.message
    assert "and the loss rose from 0.5 to " in one.message
    falling = [0.5] * 240
    for loss, norm in ((falling, norms), (rising, [1.0] * 240)):  # either alone is ordinary
        assert not any(one.sensor == "monitor.diverging" for one in alerts(steps(240, losses(loss, norm))))


def test_a_kinds_common_movement_does_not_come_and_go_with_one_of_its_series() -> None:
    """Of eight series one, a bias of one element, has no size where it is zero; the rest move together then."""
    draw, kept = np.random.default_rng(5), PARAMETERS[:8]

    def change(step: int, rows: Rows) -> None:
        for name in PARAMETERS:
            if name not in kept:
                rows.pop(key_of("grad", name), None)
                continue
            own = draw.normal(0, 1.2) if name != kept[0] else 0.0
            scaled("grad", name, lambda _, own=own: float(np.exp(own + 2.4 * (step == 140))))(step, rows)
        if step == 140:
            rows[key_of("grad", kept[-1])][3:] = [0.0] * 4

    assert not [one for one in alerts(steps(160, change)) if one.sensor == "monitor.exploding"]


def of_moment(factor: float, gradient: float) -> Change:
    def change(step: int, rows: Rows) -> None:
        if step >= 100:
            scaled("moment2", NAME, lambda _: factor)(step, rows)
            scaled("grad", NAME, lambda _: gradient)(step, rows)

    return change


def test_a_second_moment_that_goes_with_its_gradient_is_no_explosion_of_its_own() -> None:
    def exploded(change: Change) -> set[str]:
        return {str(one.site) for one in alerts(steps(120, change)) if one.sensor == "monitor.exploding"}

    assert any("moment2" in site for site in exploded(of_moment(90.0, 1.0)))
    assert not any("moment2" in site for site in exploded(of_moment(90.0, 4.0)))


def test_rates_leap_from_one_step_to_the_next_or_are_gone() -> None:
    (one,) = alerts(rates([0.01 * (0.1 + 0.9 * (i < 80)) for i in range(100)] + [0.06] * 30))
    assert (one.sensor, one.step) == ("monitor.learning_rate", 100)
    assert "leaps to 0.06, 6 times the largest before" in one.message
    (one,) = alerts(rates([0.01] * 100 + [0.0] * 30))
    assert (one.sensor, one.step) == ("monitor.learning_rate", 107)
    assert "the learning rate has been 0 for 8 steps: nothing is learned any more" in one.message
    assert not alerts(rates([0.01] * 100 + [0.0] * 4 + [0.01] * 30))


def test_what_stands_still_because_it_is_given_the_same_is_not_frozen() -> None:
    """A table of positions whose weights a script has frozen."""

    def change(constant: bool) -> Change:
        def edit(step: int, rows: Rows) -> None:
            given = 31.0 if constant else 31.0 + step
            rows[Key("activation", "layers.2.up", "in0", None, 0)] = [0, 0, 0, 0, given, given, given]
            out = key_of("activation", "layers.2.up")
            rows[out] = [0, 0, -1, -1.0, 1.0, 0.5, 5.0] if step > 120 else rows[out]

        return edit

    assert [one.sensor for one in alerts(steps(180, change(constant=False)))] == ["monitor.frozen"]
    assert not alerts(steps(180, change(constant=True)))


def test_nan_is_named_where_it_is_made_of_finite_values() -> None:
    """A module that is called twice has one place in a step's order, its first call's."""

    def edit(step: int, rows: Rows) -> None:
        for number, (name, slot) in enumerate(
            (("b.drop", "in0"), ("b.drop", "out0"), ("b.fc", "in0"), ("b.fc", "out0"))
        ):
            bad = step >= 60 and (name, slot) != ("b.fc", "in0")
            rows[Key("activation", name, slot, None, 0)] = [
                float(bad),
                0,
                -1,
                -1.0,
                1.0,
                0.5,
                5.0 + 0.01 * ((step + number) % 7),
            ]

    (one,) = [one for one in alerts(steps(80, edit)) if one.sensor == "monitor.nonfinite"]
    assert one.message.startswith("activation of b.fc (out0): 1 NaN")


def test_a_spike_says_what_was_told_of_before_it() -> None:
    def edit(step: int, rows: Rows) -> None:
        if 100 <= step < 120:
            rows[Key("update", NAME, None, "update_ratio", -1)][0] *= 20.0
        if step == 110:
            rows[Key("training", ".", None, "loss", -1)] = [30.0]

    (cause,) = [one for one in alerts(steps(140, edit)) if one.sensor == "monitor.post_mortem"]
    assert f"what was told of step 100: update of {NAME} is " in cause.message


def test_the_headline_is_what_is_sure_and_not_what_chance_said_long_before() -> None:
    chance, sure = finding("exploding", 22, 0, "optim", "moment2"), finding("nonfinite", 160, 0, "forward", "out0")
    assert Watched((), alerts=[chance, sure]).first is sure
    two = [finding("nonfinite", 160, 0, "grad", "reduced"), finding("nonfinite", 160, 1, "forward", "in0")]
    assert Watched((), alerts=two).nonfinite is two[1]
    led = finding("exploding", 150, 0, "forward", "out0")
    assert Watched((), alerts=[chance, led, sure]).first is led
    inner = [
        replace(finding(rule, 160, 0, "forward", slot), evidence={"turn": [0.0, place]})
        for rule, slot, place in (("vanished", "in0", 9), ("exploding", "out0", 3))
    ]
    assert Watched((), alerts=inner).first is inner[1]


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
