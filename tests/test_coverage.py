"""Coverage: what is told was counted, and what is expected follows from what was measured."""

from __future__ import annotations

import json
import math
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small_training import Training
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import bitwitness as bw
from bitwitness.guard.budget import Budget
from bitwitness.guard.selftest import UNPROVEN, failed, prove
from bitwitness.report import build_report
from bitwitness.report.markdown import to_markdown
from bitwitness.sense.selftest import SELF_TESTS, SelfTest, self_test
from bitwitness.store.answer import answers
from bitwitness.store.covered import WIDTH, coverage, expected_steps, lines_of, not_protected, tables_of
from bitwitness.store.expected import FAULTS, Look, Plan, all_expected, expected, measured_recall

BENCH = Path(__file__).parents[1] / "bench"


class Count(TorchDispatchMode):
    """Counts calls by operator, as anybody would."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[str, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        self.calls[name] = self.calls.get(name, 0) + 1
        return func(*args, **(kwargs or {}))


def forward_and_backward(training: Training) -> dict[str, int]:
    """Return the operators of one step, in the model's forward and in the backward."""
    count = Count()
    x = torch.randn(4, 6)
    with count:
        out = training.net(x)
    loss = out.square().mean()
    with count:
        loss.backward()
    training.optimizer.zero_grad()
    return count.calls


def test_the_table_says_what_an_own_count_says() -> None:
    training = Training()
    once = forward_and_backward(training)
    with bw.Guard(training.net, training.optimizer, deep_every=2, quiet=True) as guard:
        for _ in range(4):  # in the first of them a compiler that was imported just now may have been looked for
            training.step()
        before = guard.coverage()
        for _ in range(6):
            training.step()
        training.evaluate(grad=False)
        table = guard.coverage()
    deep = table["steps"]["deep"] - before["steps"]["deep"]
    assert deep == 3
    called = _called(table)
    called.subtract(_called(before))
    assert called == Counter({op: deep * once.get(op, 0) for op in called})
    assert {"addmm", "mm", "tanh", "native_batch_norm", "bernoulli_", "sum"} <= {op for op, n in called.items() if n}
    assert not called.keys() & {"t", "detach", "view", "empty_like"}
    census = table["operators"]["census"]
    assert census["calls"] == _called(table).total()
    checked = [one["operators"]["census"]["kinds"]["matrix products"]["checked"] for one in (before, table)]
    assert checked[1] - checked[0] == deep * (once["addmm"] + once["mm"])
    element_wise = census["kinds"]["element-wise operators"]
    assert "tanh" not in element_wise["never"]
    assert 0 < element_wise["again"] <= element_wise["calls"] - element_wise["checked"]
    assert table["steps"]["evaluation_forwards"] == 1
    assert table["replay"]["of"] == 10
    assert table["replay"]["can"] == 10


def _called(table: dict[str, Any]) -> Counter[str]:
    kinds = table["operators"]["census"]["kinds"].values()
    return Counter({op: count for row in kinds for op, count in row["ops"].items()})


def test_the_census_of_a_share_of_the_products_counts_those_that_were_checked() -> None:
    training = Training()
    with bw.Guard(training.net, training.optimizer, deep_every=1, quiet=True) as guard:
        assert guard.watch is not None
        guard.watch.operators.look_at_one_product_in = lambda _count: None  # type: ignore[method-assign]
        assert guard.watch.operators.checksum is not None
        guard.watch.operators.checksum.one_in = 2
        for _ in range(4):
            training.step()
        row = guard.coverage()["operators"]["census"]["kinds"]["matrix products"]
    assert abs(row["checked"] - row["calls"] / 2) <= 2
    assert row["operations_checked"] < row["operations"]


def test_steps_that_cannot_be_run_again_are_counted_with_the_reason() -> None:
    training = Training()
    with bw.Guard(training.net, training.optimizer, quiet=True, **{"replay.capture_limit_mib": 0}) as guard:
        for _ in range(5):
            training.step()
        table = guard.coverage()
    assert table["replay"]["can"] == 0
    assert sum(table["replay"]["why_not"].values()) == 5
    assert "proof for 5 of 5 steps, which cannot be run again" in not_protected(table)


# -- self-tests ------------------------------------------------------------------------------------------------------


def test_every_sensor_that_is_on_proves_that_it_sees() -> None:
    training = Training()
    with bw.Guard(training.net, training.optimizer, quiet=True, **{"feature.schemes": ["v3"]}) as guard:
        tests = guard.coverage()["sensors"]["self_tests"]
        assert guard.watch is not None
        assert set(tests) == {*guard.watch.sensors.on, "moments"}
    assert set(tests.values()) == {"seen"}
    assert {"replicas", "peers"} <= SELF_TESTS.keys()


def test_a_sensor_that_joins_is_proven_and_one_that_is_blind_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SELF_TESTS, "mine", SelfTest("mine", "what nobody else sees", lambda: "did not see it"))
    results = prove(["mine", "trend", "stranger"])
    assert results["mine"] == "did not see it"
    assert results["stranger"] == UNPROVEN
    assert failed(results) == {"mine": "did not see it"}
    table = {"parameters": {"watched": 1, "of": 1}, "sensors": {"on": [], "self_tests": results}}
    assert "what mine is to see (its self-test: did not see it)" in not_protected(table)
    with pytest.raises(ValueError, match=r"sensor 'trend' has a self-test already, in bitwitness\.sense\.trend"):
        self_test("trend", "the same")(lambda: "")


# -- expected steps --------------------------------------------------------------------------------------------------


def test_expected_steps_by_hand() -> None:
    seen = expected(0.5, [Look("checksum", 9, 1.0)])
    assert seen.steps == 0.5 * 1 + 0.5 * 5  # of nine places in the period, the fifth on average
    assert seen.once == pytest.approx(1 - 0.5 * 8 / 9)
    assert expected(0.0, [Look("seal", 10, stays=True)]).once == 1.0
    assert expected(0.9, []).steps == math.inf
    assert expected(1.0, []).steps == 1.0
    assert expected(0.0, [Look("checksum", 4, 0.5)]).steps == 2.5 + 4


SHARES = st.floats(0, 1)


@given(SHARES, SHARES, st.integers(1, 400), st.integers(1, 400))
def test_who_looks_more_often_sees_no_later(light: float, recall: float, period: int, other: int) -> None:
    often, seldom = (expected(light, [Look("x", at, recall)]) for at in sorted((period, other)))
    assert often.steps <= seldom.steps
    assert often.once >= seldom.once - 1e-12
    assert 0 <= often.once <= 1
    assert often.steps >= 1 or light in (0, 1)


@settings(max_examples=50)
@given(st.floats(0.005, 0.5), st.floats(0.005, 0.5), st.floats(0.01, 3.0), st.floats(0.0, 1.0))
def test_a_higher_price_sees_no_later(price: float, other: float, deep: float, checks: float) -> None:
    plans = []
    for paid in sorted((price, other)):
        budget = Budget(paid)
        for _ in range(8):
            budget.note_light(0.8, 0.004, 1.0)
        for _ in range(3):
            budget.note_deep(0.8 + deep, checks * deep, 1)
        found = budget.propose()
        plans.append(Plan(found.every, found.one_in, on=frozenset({"trend", "checksum", "replicas"})))
    less, more = map(all_expected, plans)
    for fault in FAULTS:
        for sort in ("flip", "pattern"):
            assert more[fault.name][sort].steps <= less[fault.name][sort].steps, fault
            assert more[fault.name][sort].once >= less[fault.name][sort].once - 1e-12, fault


def test_each_sensor_brings_its_own_period() -> None:
    plan = Plan(50, on=frozenset({"trend", "checksum", "seal"}), periods={"seal": 7})
    weight, data = all_expected(plan)["weight"]["pattern"], all_expected(plan)["data"]["flip"]
    assert weight.by == ("light", "seal")
    assert weight.steps == pytest.approx(0.849 + 0.151 * 4)
    assert weight.once == 1.0
    assert (data.by, data.once, data.steps) == ((), 0.0, math.inf)
    none = all_expected(Plan(0, on=frozenset({"checksum"})))["product, forward"]["flip"]
    assert (none.by, none.steps) == ((), math.inf)


def test_the_recall_is_that_of_the_detection_trial() -> None:
    sys.path.insert(0, str(BENCH))
    try:
        from detection.recall import PAGE, recall_of
    finally:
        sys.path.remove(str(BENCH))
    measured = recall_of(PAGE.read_text())
    assert measured == measured_recall(), "write it again: python bench/detection/recall.py"
    assert set(measured["light"]["one process"]["flip"]) == {place for fault in FAULTS for place in fault.places}


# -- what is shown ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("coverage") / "run"
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv1d(2, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(24, 2))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    with bw.Guard(net, optimizer, out=where, quiet=True, deep_every=4):
        for _ in range(8):
            net(torch.randn(4, 2, 8)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return where


def test_terminal_json_and_report_show_one_table(run: Path) -> None:
    answer = answers(str(run))[0]
    table = answer.tables[0]
    story = "\n".join(answer.story())
    found = coverage(table)
    assert found is not None
    assert found.rows[1] == ["steps", "8: 6 light, 2 deep", ""]
    shown = lines_of(tables_of(table))
    assert "\n".join(shown) in story
    assert max(map(len, shown)) <= WIDTH
    told = answer.to_dict()
    assert told["coverage"][0]["operators"]["census"]["kinds"]["convolutions"]["checked"] == 4
    assert told["coverage"][0]["operators"]["census"]["kinds"]["element-wise operators"]["again"] == 6
    assert any(row[1] == "6 of 12 calls, 6 computed twice" for row in found.rows)
    assert told["expected_steps"]["product, forward"]["flip"]["steps"] == pytest.approx(1.2, abs=0.01)
    assert told["expected_steps"]["any other operator"]["flip"]["steps"] is None
    assert told["not_protected"].startswith("not protected: reductions, against a fault that repeats itself (")
    json.dumps(told, allow_nan=False)
    report = build_report([run])
    blocks = report.story.runs[0].coverage
    assert [block.title for block in blocks] == ["Coverage", "Expected steps until it is seen"]
    assert blocks[0].rows == found.rows
    assert "What was covered" in to_markdown(report)


def test_a_run_of_an_older_release_is_told_without_what_it_did_not_count() -> None:
    old = {
        "parameters": {"watched": 3, "of": 4},
        "steps": {"held": 5, "judged": 5, "deep": 0, "paused": 2},
        "sensors": {"off": {}},
        "price": {"price": 0.01, "measured": None},
        "replay": {"calibrations": 1, "same_bits": True},
    }
    found = coverage(old)
    assert found is not None
    assert found.rows == [
        ["parameters", "3 of 4", "1 ask for no gradient"],
        ["steps", "5: 5 light, 0 deep", "2 while paused"],
    ]
    assert expected_steps(old) is None
    assert "single operators: no step was deep" in not_protected(old)
    assert coverage({"steps": {}}) is None


def test_self_tests_pass_whatever_the_script_has_made_the_default_dtype() -> None:
    before = torch.get_default_dtype()
    try:
        for dtype in (torch.float64, torch.bfloat16, torch.float16):
            torch.set_default_dtype(dtype)
            assert not failed(prove())
    finally:
        torch.set_default_dtype(before)


def test_self_tests_call_no_hook_that_keeps_the_scripts_tensors() -> None:
    """A guard may begin inside of a script's own way to save activations, which counts or compresses them."""
    packed = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        packed.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        assert not failed(prove())
    assert packed == []
    with torch.autograd.graph.disable_saved_tensors_hooks("not here"):
        assert not failed(prove())


def test_periods_that_were_set_are_those_that_are_told() -> None:
    def periods(**settings: Any) -> object:
        model = nn.Linear(4, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with bw.Guard(model, optimizer, self_test=False, **settings) as guard:
            model(torch.randn(2, 4)).sum().backward()
            optimizer.step()
        return guard.coverage()["sensors"]["periods"]

    assert periods() == {}
    assert periods(seal={"every": 7}) == {"seal": 7, "gradients": 7}
    assert periods(deep_every=0, update={"every": 3}) == {
        "optimizer": 3,
        "replicas": 100,
        "seal": 100,
        "gradients": 100,
    }
