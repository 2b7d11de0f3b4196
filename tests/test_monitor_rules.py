"""The monitor's rules on series made by hand: what each alerts, whom it names, and how seldom it does in vain."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from monitor_series import MODULES, PARAMETERS, Change, key_of, scaled, steps, watched

from bitwitness import ConfigError, Finding
from bitwitness.config.monitoring import MonitorConfig
from bitwitness.finding import Severity
from bitwitness.monitor.rules.rank_apart import RankApart
from bitwitness.monitor.rules.replicas import Replicas
from bitwitness.monitor.rules.rule import Peers
from bitwitness.monitor.series import SeriesKey, Universe
from bitwitness.monitor.sheet import Key
from bitwitness.monitor.watch import RULES, compared, row_of

AT, NAME, MODULE = 60, PARAMETERS[5], MODULES[5]
UPDATE = Key("update", NAME, None, "update_ratio", -1)


def found(change: Change, count: int = 100) -> list[Finding]:
    return watched(steps(count, change))[0]


def one(findings: list[Finding], rule: str) -> Finding:
    right = [finding for finding in findings if finding.sensor == f"monitor.{rule}"]
    assert right, [(finding.sensor, finding.message) for finding in findings]
    return right[0]


def test_clean_series_are_quiet() -> None:
    alerts, looked = 0, 0
    for seed in range(6):
        findings, watch = watched(steps(300, seed=seed))
        alerts, looked = alerts + len(findings), looked + watch.looked_at
    assert looked > 100_000
    assert alerts <= looked / 10_000


@pytest.mark.parametrize(("place", "what"), [(0, "1 NaN and 0 Inf"), (1, "0 NaN and 1 Inf")])
def test_one_value_that_is_not_finite_is_alerted_once_and_the_series_goes_on(place: int, what: str) -> None:
    def change(step: int, rows: dict[Key, list[float]]) -> None:
        if step == AT:
            rows[key_of("grad", NAME)][place] = 1

    findings = found(change)
    assert len(findings) == 1
    assert (findings[0].step, findings[0].site.module) == (AT, NAME.removesuffix(".weight"))
    assert what in findings[0].message
    both = found(
        lambda step, rows: (change(step, rows), scaled("grad", NAME, lambda s: 50.0 if s > 80 else 1.0)(step, rows))[0]
    )
    assert one(both, "exploding").step == 81  # the series was not blinded


def test_the_first_in_the_order_of_execution_is_named() -> None:
    def change(step: int, rows: dict[Key, list[float]]) -> None:
        if step >= AT:
            for kind, name in (
                ("grad", PARAMETERS[0]),
                ("activation", MODULES[7]),
                ("activation", MODULE),
                ("param", NAME),
            ):
                rows[key_of(kind, name)][0] = 3

    findings = found(change)
    assert [finding.step for finding in findings] == [AT]
    assert findings[0].site.module == MODULE
    assert findings[0].evidence["also_count"] == 3


def test_a_mask_of_infinities_is_none() -> None:
    def change(_step: int, rows: dict[Key, list[float]]) -> None:
        rows[key_of("activation", MODULE)][1] = 50

    assert not found(change)


@pytest.mark.parametrize("factor", [0.0, 1e-4])
@pytest.mark.parametrize(("kind", "name"), [("grad", NAME), ("activation", MODULE)])
def test_a_series_that_drops(kind: str, name: str, factor: float) -> None:
    finding = one(found(scaled(kind, name, lambda step: factor if step >= AT else 1.0)), "vanished")
    assert (finding.step, finding.evidence["series"].split("/")[1]) == (AT, name)


def test_experts_that_now_and_then_get_no_token_are_ordinary() -> None:
    def change(step: int, rows: dict[Key, list[float]]) -> None:
        for number, name in enumerate(PARAMETERS):
            if (step * 7 + number * 5) % 13 == 0:
                scaled("grad", name, lambda _: 0.0)(step, rows)

    assert not [finding for finding in found(change, 200) if finding.sensor == "monitor.vanished"]


@pytest.mark.parametrize(("kind", "name"), [("param", NAME), ("activation", MODULE)])
def test_what_rests_while_others_move(kind: str, name: str) -> None:
    kept: list[list[float]] = []

    def change(step: int, rows: dict[Key, list[float]]) -> None:
        if step == AT:
            kept.append(list(rows[key_of(kind, name)]))
        elif step > AT:
            rows[key_of(kind, name)] = list(kept[0])

    finding = one(found(change), "frozen")
    assert AT + 3 <= finding.step <= AT + 12
    assert finding.evidence["series"].split("/")[1] == name


def test_weights_that_the_optimizer_forgot() -> None:
    kept: list[list[float]] = []

    def change(step: int, rows: dict[Key, list[float]]) -> None:
        for name in PARAMETERS:
            if step < AT or name != NAME:
                rows[key_of("grad_reduced", name)] = list(rows[key_of("grad", name)])
        kept.append(list(rows[key_of("param", NAME)]))
        if step >= AT:
            rows[key_of("param", NAME)] = list(kept[AT - 1])

    assert one(found(change), "frozen").evidence["series"] == f"param/{NAME}"


@pytest.mark.parametrize("held", [False, True])
def test_weights_that_no_optimizer_was_given_from_the_start(held: bool) -> None:
    def change(_step: int, rows: dict[Key, list[float]]) -> None:
        rows[key_of("param", NAME)] = [0, 0, -1, -1, 1, 0.5, 2]
        if not held:
            del rows[UPDATE], rows[key_of("moment2", NAME)]

    finding = one(found(change), "frozen")
    assert finding.step == 32
    assert finding.severity is (Severity.INFO if held else Severity.WARNING)
    why = "its updates are lost in rounding, or zero" if held else "no optimizer holds it"
    assert finding.message == (
        f"weights of {NAME}: unchanged since the first step, 32 steps ago, though a gradient reaches it: {why}"
    )


def test_weights_that_have_no_gradient_are_not_frozen() -> None:
    def change(step: int, rows: dict[Key, list[float]]) -> None:
        if step > AT:
            rows[key_of("param", PARAMETERS[2])] = [0, 0, -1, -1, 1, 0.5, 2]
            del rows[key_of("grad", PARAMETERS[2])]

    assert not [finding for finding in found(change) if finding.sensor == "monitor.frozen"]


def test_a_layer_that_explodes() -> None:
    finding = one(found(scaled("activation", MODULE, lambda step: 20.0 if step >= AT else 1.0)), "exploding")
    assert (finding.step, finding.site.module) == (AT, MODULE)
    assert 10 < finding.evidence["factor"] < 40


def test_a_slow_drift() -> None:
    begins = 140  # in the first 128 steps a warm-up moves some sizes by factors
    finding = one(found(scaled("grad", NAME, lambda step: 1.02 ** max(0, step - begins)), begins + 100), "drift")
    assert begins < finding.step <= begins + 80
    assert finding.site.module == NAME.removesuffix(".weight")


def test_what_all_do_together_is_no_layers_doing() -> None:
    def change(step: int, rows: dict[Key, list[float]]) -> None:
        if step >= AT:
            for name in PARAMETERS:
                scaled("grad", name, lambda _: 6.0)(step, rows)

    assert not found(change)


@pytest.mark.parametrize(("metric", "factor"), [("loss", 3.0), ("grad_norm", 20.0)])
def test_a_spike_is_the_datas_where_nothing_came_before_it(metric: str, factor: float) -> None:
    def change(step: int, rows: dict[Key, list[float]]) -> None:
        if step == AT:
            rows[Key("training", ".", None, metric, -1)][0] *= factor

    findings = found(change)
    assert one(findings, "spike").step == AT
    assert one(findings, "post_mortem").evidence["cause"] == "data"
    assert len(findings) == 2


def test_a_spike_after_a_moment_broke_is_the_optimizers() -> None:
    def change(step: int, rows: dict[Key, list[float]]) -> None:
        if step == AT:
            scaled("moment2", NAME, lambda _: 1e3)(step, rows)
            rows[Key("update", NAME, None, "update_ratio", -1)][0] *= 500
        if step == AT + 1:
            rows[Key("training", ".", None, "loss", -1)][0] *= 3

    findings = found(change)
    assert one(findings, "exploding").evidence["series"] == f"moment2/{NAME}"
    told = one(findings, "post_mortem")
    assert told.evidence["cause"] == "optimizer_state"
    assert NAME in told.message


def test_a_spike_that_begins_in_one_layer_is_that_layers() -> None:
    def change(step: int, rows: dict[Key, list[float]]) -> None:
        if step == AT:
            for module in (MODULE, MODULES[6]):
                scaled("activation", module, lambda _: 30.0)(step, rows)
            rows[Key("training", ".", None, "loss", -1)][0] *= 3

    told = one(found(change), "post_mortem")
    assert (told.evidence["cause"], told.site.module) == ("one_layer", MODULE)


def ranks_apart(
    world: int, odd: int, factor: float, *, slow: bool = False, count: int = 140
) -> dict[int, list[tuple[int, str]]]:
    """Return what each of some ranks says of itself; one of them is odd from a step on."""
    universes = [Universe(rank) for rank in range(world)]
    rules = [RankApart(MonitorConfig()) for _ in range(world)]
    every = []
    for rank in range(world):
        if rank != odd:
            change = scaled("grad", NAME, lambda _: 1.0)
        elif slow:
            change = scaled("grad", NAME, lambda s: factor ** max(0, s - AT))
        else:
            change = scaled("grad", NAME, lambda s: factor if s >= AT else 1.0)
        every.append(steps(count, change, rank=rank))
    said: dict[int, list[tuple[int, str]]] = {rank: [] for rank in range(world)}
    for step in range(count):
        rows = [
            row_of(universe.numbers(mine[step]), PARAMETERS) for universe, mine in zip(universes, every, strict=True)
        ]
        total = np.sum([row for _, row in rows], axis=0)
        for rank, (keys, row) in enumerate(rows):
            said[rank] += [(step, alert.key.name) for alert in rules[rank].compare(compared(keys, row, total, world))]
    return said


@pytest.mark.parametrize(("factor", "slow"), [(5.0, False), (1.03, True)])
def test_one_rank_that_goes_another_way_says_so_itself(factor: float, slow: bool) -> None:
    said = ranks_apart(4, 2, factor, slow=slow)
    assert {rank for rank, alerts in said.items() if alerts} == {2}
    assert said[2][0][1] == NAME
    assert AT <= said[2][0][0] <= AT + 50


def test_ranks_that_are_well_say_nothing() -> None:
    assert not any(ranks_apart(4, 0, 1.0, count=300).values())


def test_every_rule_declares_the_rate_that_it_is_set_for_and_shows_it() -> None:
    assert [rule.name for rule in RULES] == list(MonitorConfig().rules)
    assert all(0 <= rule.rate <= 3e-4 for rule in RULES)
    finding = one(found(scaled("grad", NAME, lambda step: 0.0 if step >= AT else 1.0)), "vanished")
    assert finding.evidence["false_alarm_rate"] == 1e-7


@given(
    st.lists(st.sampled_from([0.0, 1.0, np.nan, np.inf, -np.inf, 1e300, 1e-300]), min_size=3, max_size=3),
    st.integers(0, 40),
)
@settings(max_examples=25, deadline=None)
def test_whatever_a_step_holds_the_rules_go_on(numbers: list[float], at: int) -> None:
    def change(step: int, rows: dict[Key, list[float]]) -> None:
        if step == at:
            rows[key_of("grad", NAME)][3:6] = numbers
            rows[key_of("grad", NAME)][6] = abs(numbers[0])
            rows[Key("training", ".", None, "loss", -1)][0] = numbers[1]
            rows[Key("training", ".", None, "grad_norm", -1)][0] = numbers[2]

    with np.errstate(all="raise", under="ignore"):
        findings, watch = watched(steps(45, change))
    assert watch.looked_at > 45 * 40
    assert all(finding.step >= at for finding in findings)


def test_new_series_may_come_at_any_step() -> None:
    def change(step: int, rows: dict[Key, list[float]]) -> None:
        if step < 30:
            for name in PARAMETERS[6:]:
                del rows[key_of("grad", name)]
        if step >= 90:
            scaled("grad", PARAMETERS[8], lambda _: 60.0)(step, rows)

    finding = one(found(change, 120), "exploding")
    assert (finding.step, finding.evidence["series"]) == (90, f"grad/{PARAMETERS[8]}")


def test_a_rule_that_is_left_out_says_nothing() -> None:
    rows = steps(80, scaled("grad", NAME, lambda step: 0.0 if step >= AT else 1.0))
    assert not watched(rows, rules=("spike", "drift"))[0]
    with pytest.raises(ConfigError, match="rules = 'vanish': expected some of .*; the nearest known key is 'vanished'"):
        MonitorConfig(rules=("vanish",))


@pytest.mark.parametrize(("apart", "step"), [(1e-3, 20), (1e-7, 22)])
def test_a_replica_that_leaves_the_other_by_next_to_nothing_is_told(apart: float, step: int) -> None:
    rule, key = Replicas(MonitorConfig()), SeriesKey("param", NAME)
    told = [
        number
        for number in range(30)
        if rule.compare(Peers([key], np.array([apart if number >= 20 else 0.0]), np.zeros(1), 2))
    ]
    assert told == [step]


def test_a_loss_that_the_model_returns_itself_is_no_layer() -> None:
    loss = Key("activation", ".", "out.loss", None, 0)

    def change(step: int, rows: dict[Key, list[float]]) -> None:
        value = rows[Key("training", ".", None, "loss", -1)]
        value[0] *= 4.0 if step == AT else 1.0
        rows[loss] = [0, 0, -1, value[0], value[0], value[0], value[0]]

    rows = steps(100, change)
    for one_ in rows:
        one_.counts[one_.keys.index(loss)] = 1
    findings = watched(rows)[0]
    assert [finding.sensor for finding in findings] == ["monitor.spike", "monitor.post_mortem"]
    assert one(findings, "post_mortem").evidence["cause"] == "data"


def test_nan_that_a_scaler_let_through_is_told_of_the_gradient() -> None:
    def change(step: int, rows: dict[Key, list[float]]) -> None:
        for name in PARAMETERS:
            rows[key_of("grad_reduced", name)] = list(rows[key_of("grad", name)])
        if step == AT:
            rows[key_of("grad_reduced", NAME)][0] = 3

    rows = [replace(row, scaled=True) for row in steps(100, change)]
    finding = one(watched(rows)[0], "nonfinite")
    assert finding.message == f"gradient of {NAME}: 3 NaN and 0 Inf of 100 values"
    skipped = [replace(row, scaled=True) for row in steps(100, lambda s, r: (change(s, r), _no_step(s, r))[0])]
    assert not watched(skipped)[0]


def _no_step(step: int, rows: dict[Key, list[float]]) -> None:
    """Leave out what an optimizer makes, where a scaler keeps it from stepping."""
    for key in [key for key in rows if step == AT and key.kind in ("update", "moment2")]:
        del rows[key]


def test_peers_of_no_parameters() -> None:
    keys = [SeriesKey("training", ".", None, "loss")]
    empty = Peers(keys[:0], np.zeros(0), np.zeros(0), 2)
    assert RankApart(MonitorConfig()).compare(empty) == []


def test_gradients_that_are_the_rounding_of_others_are_not_judged() -> None:
    """Of a bias before a normalisation: 1e-9 beside 1, at times zero, at times ten times as large."""
    draw = np.random.default_rng(0)

    def change(step: int, rows: dict[Key, list[float]]) -> None:
        noise = 1e-9 * float(np.exp(2.0 * draw.standard_normal())) * (step % 40 != 39)
        scaled("grad", NAME, lambda _: noise)(step, rows)
        rows[UPDATE][0] *= noise

    assert not found(change, 200)


def test_a_weight_that_its_script_has_edited_is_no_data() -> None:
    def change(step: int, rows: dict[Key, list[float]]) -> None:
        if step >= AT:
            scaled("param", NAME, lambda _: 40.0)(step, rows)
        if step == AT:
            rows[Key("training", ".", None, "loss", -1)][0] *= 5.0

    findings = found(change)
    assert one(findings, "post_mortem").evidence["cause"] == "edited_weights"
    said = one(findings, "post_mortem").message
    assert f"weights of {NAME} were changed between steps {AT - 1} and {AT}, not by the optimizer: from " in said


def test_a_weight_that_grows_slowly_and_alone() -> None:
    begins = 140
    grown = scaled("param", NAME, lambda step: 1.03 ** max(0, step - begins))
    finding = one(found(grown, begins + 70), "drift")
    assert begins < finding.step <= begins + 50
    assert f"weights of {NAME} stays above its usual size (" in finding.message


def test_weights_that_all_grow_do_what_weights_do() -> None:
    def change(step: int, rows: dict[Key, list[float]]) -> None:
        for name in PARAMETERS:
            scaled("param", name, lambda s: 1.03 ** max(0, s - 140))(step, rows)

    assert not [finding for finding in found(change, 210) if finding.sensor == "monitor.drift"]


def test_zeros_that_clipping_by_an_infinite_norm_leaves_are_no_alert_of_their_own() -> None:
    def change(step: int, rows: dict[Key, list[float]]) -> None:
        if step == AT:
            for name in PARAMETERS:
                scaled("grad", name, lambda _: 0.0)(step, rows)
            rows[key_of("grad", NAME)][1] = 1

    assert [finding.sensor for finding in found(change)] == ["monitor.nonfinite"]


def test_updates_at_the_end_of_a_schedule_do_not_vanish() -> None:
    def change(step: int, rows: dict[Key, list[float]]) -> None:
        rows[Key("training", "0", None, "lr", -1)] = [1e-7 if step >= AT else 1e-2]
        rows[UPDATE][0] *= step < AT

    assert not [finding for finding in found(change) if finding.sensor == "monitor.vanished"]
