"""Ranks with different numbers of batches, under torch's ``join()``: no hang, the same bits, and in step afterwards."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from extent import chosen
from ranks import forked

JOB = str(Path(__file__).parent / "jobs" / "uneven.py")
pytestmark = pytest.mark.ranks


def run(ranks: int, kind: str, logs: Path) -> list[dict]:
    launched = forked(ranks, [JOB, kind], logs)
    text = "\n".join(log.read_text() for log in launched.logs)
    assert launched.code == 0, text[-4000:]
    (line,) = [line for line in text.splitlines() if line.startswith('{"kind"')]
    told = json.loads(line)["ranks"]
    assert all(mine["same"] for mine in told), told
    return told


@pytest.mark.parametrize(
    ("ranks", "kind"),
    [(2, "sgd"), (3, "zero"), *chosen([(2, "throw"), (3, "sgd"), (3, "throw"), (2, "zero")], [])],
)
def test_uneven_ranks_train_on_to_the_same_bits(ranks: int, kind: str, tmp_path: Path) -> None:
    told = run(ranks, kind, tmp_path)
    for mine in told:
        assert mine["failures"] == {}
        assert mine["verdicts"] == []
        assert mine["held"] == mine["steps"]
        assert not mine["now"]
        assert any("inside join()" in gap for gap in mine["not_covered"])
    assert len({mine["step"] for mine in told}) == 1
    assert told[0]["suspicions"] > 6  # outside, every step is questioned, by all ranks together
    assert len({mine["suspicions"] for mine in told}) == 1


@pytest.mark.parametrize("ranks", chosen([2, 3], [2]))
def test_optimizers_that_part_in_a_join_are_no_devices_fault(ranks: int, tmp_path: Path) -> None:
    for mine in run(ranks, "adamw", tmp_path):
        assert mine["failures"] == {}
        assert [verdict.split(": ")[1] for verdict in mine["verdicts"]] == ["software [] reported"]
        assert any("since join() the ranks hold other weights" in gap for gap in mine["not_covered"])
        assert mine["held"] == mine["steps"]
