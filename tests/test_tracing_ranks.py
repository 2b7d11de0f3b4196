"""Who made the first NaN, where several ranks train together: the culprit names itself, the others say that they got it."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path

import pytest
from ranks import forked

JOB = Path(__file__).parent / "jobs" / "nonfinite.py"
WRAPPERS = ("ddp", "fsdp")
CASES = [f"{wrapper}-{what}" for wrapper in WRAPPERS for what in ("none", "log", "parameter", "reduction")] + [
    "ddp-term",
    "fsdp-cast",
]
pytestmark = pytest.mark.ranks


@pytest.fixture(scope="module")
def findings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[list[dict]]]:
    """Run all cases on two ranks; return each rank's findings, by case."""
    launched = forked(2, [str(JOB), *CASES], tmp_path_factory.mktemp("logs"))
    assert launched.code == 0
    rows = [json.loads(line) for log in launched.logs for line in log.read_text().splitlines() if line.startswith("{")]
    told: dict[str, list[list[dict]]] = defaultdict(lambda: [[], []])
    for row in rows:
        told[row["case"]][row["rank"]] = row["findings"]
    return told


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_the_rank_that_made_it_names_the_operator_and_the_other_the_rank(findings, wrapper: str) -> None:
    receiver, culprit = findings[f"{wrapper}-log"]
    assert [(f["step"], f["site"], f["kind"]) for f in culprit] == [(1, "inner/log#0:forward.out0", "operator")]
    assert "nonfinite.py:" in culprit[0]["message"]
    assert [(f["step"], f["kind"]) for f in receiver] == [(1, "received")]
    assert "received: rank 1 fed NaN or Inf into what all ranks share; there, log made 32 Inf" in receiver[0]["message"]


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_parameter_of_one_rank_is_named_there(findings, wrapper: str) -> None:
    receiver, culprit = findings[f"{wrapper}-parameter"]
    assert [(f["site"], f["kind"]) for f in culprit] == [("inner.fc/weight#0:param.value", "parameter")]
    assert "since the update of step 0" in culprit[0]["message"]
    assert [f["kind"] for f in receiver] == ["received"]
    assert "rank 1" in receiver[0]["message"]


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_an_overflow_in_the_reduction_is_nobodys_operator(findings, wrapper: str) -> None:
    for told in findings[f"{wrapper}-reduction"]:
        found = [f for f in told if f["kind"] not in ("approach", "extreme")]  # float16 coming to its end is told, too
        assert [f["kind"] for f in found] == ["collective"]
        assert "the reduction across ranks made" in found[0]["message"]
        assert "while this rank's own are finite" in found[0]["message"]


def test_an_overflow_in_the_cast_for_the_reduction_is_told_of_the_cast_or_the_reduction(findings) -> None:
    for told in findings["fsdp-cast"]:
        found = [f for f in told if f["kind"] not in ("approach", "extreme")]
        assert found
        if found[0]["kind"] == "collective":  # until torch 2.14 one operator of FSDP2's casts and puts together
            assert "the reduction across ranks made" in found[0]["message"]
            continue
        assert {f["site"].split("/")[1].split("#")[0] for f in found} == {"_to_copy"}
        assert all("(float16) from finite inputs" in f["message"] for f in found)


def test_a_rank_that_cannot_say_who_made_it_is_named_all_the_same_and_not_the_reduction(findings) -> None:
    receiver, culprit = findings["ddp-term"]
    assert [f["kind"] for f in culprit] == ["term"]
    assert [f["kind"] for f in receiver] == ["received"]
    assert "received: rank 1 fed NaN or Inf into what all ranks share; there, not finite: " in receiver[0]["message"]


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_nothing_is_said_of_healthy_ranks(findings, wrapper: str) -> None:
    assert findings[f"{wrapper}-none"] == [[], []]


def test_the_whole_guard_says_that_it_is_the_softwares_fault_and_whose(findings) -> None:
    for told in findings["guard"]:
        (verdict,) = told
        assert verdict.startswith("software: step 1: on rank 1, in every execution, log made 32 Inf")
        assert "nonfinite.py:" in verdict
