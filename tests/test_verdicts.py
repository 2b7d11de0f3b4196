"""Devices that compute wrongly, on real ranks: the right rank, the right cause, the right thing done."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from extent import chosen
from ranks import forked

JOBS = Path(__file__).parent / "jobs"
RANKS = chosen(4, 3)
TRANSIENT = [("transient backward flip", 1, 4), ("transient forward tile", 2, 3)]
PERSISTENT = [
    ("persistent forward column", 2, "layers.1.mlp.up/addmm#0:forward.out0"),
    *chosen([("persistent backward row", 0, "layers.0.mlp.down/mm#0:backward.out0")], []),
    ("persistent layer norm", 1, "norm/native_layer_norm#0:forward.out0"),
]
CORRUPT = ["weight", *chosen(["optimizer state"], []), "collective"]
pytestmark = pytest.mark.ranks


def run(ranks: int, logs: Path, *names: str) -> dict[str, dict]:
    """Run cases of the job (all by default); return what was concluded, by name."""
    launched = forked(ranks, [str(JOBS / "verdicts.py"), *names], logs)
    text = "\n".join(log.read_text() for log in launched.logs)
    cases = [json.loads(line) for line in text.splitlines() if line.startswith('{"case"')]
    assert launched.code == 0, text[-4000:]
    return {case["case"]: case for case in cases}


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict]:
    struck = [name for name, *_ in (*TRANSIENT, *PERSISTENT)]
    return run(RANKS, tmp_path_factory.mktemp("verdicts"), *struck, "intermittent", *CORRUPT)


def only_verdict(case: dict) -> list:
    assert case["failures"] == {}
    assert case["agree"], "the ranks disagree about the verdict"
    assert len(case["verdicts"]) == 1, case
    return case["verdicts"][0]


@pytest.mark.parametrize(("name", "rank", "when"), TRANSIENT)
def test_a_transient_is_healed_to_the_very_bits(told, name, rank, when) -> None:
    case = told[name]
    step, cause, ranks, action, *_ = only_verdict(case)
    assert (step, cause, ranks, action) == (when, "transient_hardware", [rank], "healed")
    assert case["stopped"] == [None] * RANKS
    assert case["weights_as_clean"]


@pytest.mark.parametrize(("name", "rank", "site"), PERSISTENT)
def test_a_persistent_fault_is_named_down_to_the_line_and_stops_every_rank(told, name, rank, site) -> None:
    case = told[name]
    step, cause, ranks, action, where, message = only_verdict(case)
    assert (step, cause, ranks, action) == (4, "persistent_hardware", [rank], "stopped")
    assert where == site
    assert "every time" in message
    assert "model.py:" in message
    assert case["stopped"] == [17] * RANKS


def test_an_intermittent_fault_that_strikes_replays_too_is_persistent(told) -> None:
    _, cause, ranks, action, _, message = only_verdict(told["intermittent"])
    assert (cause, ranks, action) == ("persistent_hardware", [1], "stopped")
    assert "intermittently" in message


@pytest.mark.parametrize("name", CORRUPT)
def test_corrupt_state_is_its_own_cause(told, name) -> None:
    _, cause, ranks, action, where, message = only_verdict(told[name])
    assert (cause, ranks, action) == ("corrupt_state", [1], "stopped")
    assert ":param" in where
    assert "rank 1 holds other bits than the rest" in message


@pytest.mark.parametrize("ranks", chosen([2, 8], [2]))
def test_two_and_eight_ranks_come_to_the_same_verdicts(ranks: int, tmp_path: Path) -> None:
    names = ("transient backward flip", "persistent layer norm")
    cases = run(ranks, tmp_path, *names)
    transient, persistent = (only_verdict(cases[name]) for name in names)
    assert transient[:4] == [4, "transient_hardware", [1], "healed"]
    assert cases[names[0]]["weights_as_clean"]
    assert persistent[:5] == [4, "persistent_hardware", [1], "stopped", "norm/native_layer_norm#0:forward.out0"]
    assert cases[names[1]]["stopped"] == [17] * ranks
