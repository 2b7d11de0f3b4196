"""Collectives: what arrives wrongly is seen on the step, and the rank that received it named; innocent ones are left alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import forked

from bitwitness.sense.conserved import Projector, may_overflow, piece_length, tolerance
from bitwitness.sense.exchanged import odd_ones

JOB = Path(__file__).parent / "jobs" / "exchanges.py"


def told(part: str, logs: Path, ranks: int = 3) -> dict[str, list[dict[str, Any]]]:
    launched = forked(ranks, [str(JOB), part], logs)
    text = "\n".join(log.read_text() for log in launched.logs)
    assert launched.code == 0, text[-4000:]
    lines = [json.loads(line) for line in text.splitlines() if line.startswith('{"name"')]
    return {line["name"]: line["ranks"] for line in lines}


@pytest.mark.ranks
def test_each_kind_of_collective_that_arrives_wrongly_is_seen(tmp_path: Path) -> None:
    wanted = {
        "one received a wrong bucket": ("[1] healed", "rank 1 received something else than was put in; element 3 is"),
        "all received a wrong bucket": ("[] healed", "3 ranks received something else than was put in; element 3 is"),
        "all_gather": ("[2] skipped", "rank 2 received other bits than the others"),
        "all_gather_into_tensor": ("[2] skipped", "rank 2 received other bits than the others"),
        "reduce_scatter": ("[] skipped", "rank 1 received something else than was put in"),
        "all_to_all": ("[] skipped", "rank 2 received something else than was put in"),
        "broadcast": ("[2] skipped", "rank 2 received other bits than the others"),
    }
    found = told("faults", tmp_path)
    assert set(found) == set(wanted)
    for name, ranks in found.items():
        action, words = wanted[name]
        assert sum(one["struck"] for one in ranks) > 0, name
        for one in ranks:
            assert one["verdicts"] == [f"step 4: transient_hardware {action}"], (name, one)
            assert words in one["messages"][0]
            assert one["failures"] == {}
            assert one["same"] or action.endswith("skipped"), name


@pytest.mark.ranks
def test_innocent_collectives_are_compared_and_accuse_nobody(tmp_path: Path) -> None:
    found = told("innocent", tmp_path)
    assert len(found) == 13
    for name, ranks in found.items():
        for one in ranks:
            assert one["same"], name
            assert one["verdicts"] == [], (name, one)
            assert one["findings"] == [], (name, one)
            assert one["failures"] == {}, (name, one)
    assert found["reduced"][0]["collectives"]["compared"] == {"all_reduce": 7}
    assert found["fp16"][0]["gaps"] == [
        "collective: 7 calls were not compared (not waited for in Python, or changed at once)"
    ]
    assert found["statistics"][0]["collectives"]["compared"]["broadcast"] == 7
    assert found["exchanges"][0]["collectives"]["compared"] == found["exchanges"][0]["collectives"]["seen"]


@pytest.mark.ranks
def test_of_two_ranks_the_one_is_named_that_holds_other_buffers_than_were_broadcast(tmp_path: Path) -> None:
    found = told("buffers", tmp_path, ranks=2)
    wanted = {"0": "rank 0 received something else than was put in", "1": "rank 1 received other bits than the others"}
    assert set(found) == set(wanted)
    for rank, ranks in found.items():
        assert sum(one["struck"] for one in ranks) == 1
        for one in ranks:
            assert one["verdicts"] == [f"step 4: corrupt_state [{rank}] reported"]
            assert (
                f"1.running_mean; no majority tells which rank holds other bits than the rest; rank {rank} does: "
                in (one["messages"][0])
            )
            assert wanted[rank] in one["messages"][0]
            assert one["failures"] == {}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [2, 8])
def test_sums_are_conserved_within_rounding_and_no_further(dtype: torch.dtype, size: int) -> None:
    generator = torch.Generator().manual_seed(size)
    projector, count = Projector(), 50_000
    length = piece_length(count)
    largest = 0.0
    for _ in range(10):
        given = [torch.randn(count, generator=generator).to(dtype) for _ in range(size)]
        result = given[0].clone()
        for other in given[1:]:
            result += other
        pairs = [projector.project_and_square(one, length) for one in given]
        exact, squares = sum(one for one, _ in pairs), sum(one for _, one in pairs)
        allowed = tolerance(squares, size, length, dtype)
        largest = max(largest, float(((projector.project(result, length) - exact).abs() / allowed).max()))
        result[7] += 0.5 if dtype is torch.float32 else 512.0
        assert float((projector.project(result, length) - exact).abs()[0]) > float(allowed[0])
        assert not bool(may_overflow(squares, size, dtype).any()) or dtype is torch.float16
    assert largest < 0.5


def test_who_is_odd() -> None:
    assert odd_ones({0: (2, 5), 1: (0, 7)}) == (0,)  # its result contradicts what was put in
    assert odd_ones({0: (1, 5), 1: (1, 7)}) == ()  # of two that differ neither is the odd one
    assert odd_ones({0: (1, 5), 1: (1, 7), 4: (1, 7)}) == (0,)
    assert odd_ones({0: (1, 5), 1: (1, 7)}, sender=0) == (1,)  # it has seen that it holds what it sent
    assert odd_ones({0: (2, 5), 1: (2, 5)}) == ()  # all received the same wrong sum
