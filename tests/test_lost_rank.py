"""A rank that dies or hangs while the ranks question one another ends the others, clearly and in time."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest
from extent import chosen
from ranks import forked, script, without_torchrun

from bitwitness.demo.launch import torchrun
from bitwitness.errors import EXIT_RANK_LOST

JOB = str(Path(__file__).parent / "jobs" / "killed.py")
LATE = str(Path(__file__).parent / "jobs" / "late.py")
CAMPAIGN = str(Path(__file__).parents[1] / "bench" / "lost.py")
pytestmark = pytest.mark.ranks


@pytest.mark.parametrize(("victim", "how"), [(1, "kill"), (0, "kill"), (2, "stop")])
def test_without_torchrun(victim: int, how: str, tmp_path: Path) -> None:
    told = without_torchrun(3, [JOB, str(victim), how], tmp_path, missing=victim)
    assert set(told) == {0, 1, 2} - {victim}
    for code, text in told.values():
        assert code == EXIT_RANK_LOST, text[-3000:]
        assert "side channel broke" in text
        assert "deadline 8 s" in text
        assert f"(rank {victim} does not answer)" in text
        assert "this rank ends instead of waiting" in text


def test_under_torchrun(tmp_path: Path) -> None:
    started = time.monotonic()
    # an agent that looks soon would end the others, on a busy machine, before they can say anything
    launched = torchrun(2, ["--monitor-interval", "20", JOB, "1", "kill"], tmp_path, echo=False)
    assert launched.code == 1
    assert time.monotonic() - started < 240  # the exchange itself would be waited for half an hour
    told = "\n".join(log.read_text() for log in launched.logs)
    assert "side channel broke" in told
    assert "trained to the end" not in told


def test_a_rank_that_pauses_between_steps_is_not_lost(tmp_path: Path) -> None:
    launched = forked(2, [LATE], tmp_path)
    told = "\n".join(log.read_text() for log in launched.logs)
    assert launched.code == 0, told
    assert told.count("trained to the end") == 2
    assert "side channel broke" not in told


def test_random_moments_of_the_experiments(tmp_path: Path) -> None:
    # Of the campaign: stalled in naming the operator; stopped and killed in healing.
    moments = ("3", *chosen(("22", "13"), ()))
    done = script([CAMPAIGN, "--only", *moments, "--out", str(tmp_path)], tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    told = chosen("3 trials, 3 struck (1 kill, 1 stall, 1 stop), 0 wrong", "1 trials, 1 struck (1 stall), 0 wrong")
    assert told in done.stdout


def test_the_campaign_knows_all_its_stages() -> None:
    sys.path.insert(0, str(Path(CAMPAIGN).parent))
    from lost import STAGES
    from lost_job import STAGES as MOMENTS

    assert set(MOMENTS) == set(STAGES)
    for owner, name, _ in MOMENTS.values():
        assert callable(getattr(owner, name))
