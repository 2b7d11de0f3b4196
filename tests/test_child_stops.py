"""A stop in a child is its parent's, too, and the other way round: nobody waits for ever for who was stopped."""

from __future__ import annotations

import pickle
import subprocess
from pathlib import Path

import pytest
from ranks import script

import bitwitness as bw

JOB = str(Path(__file__).parent / "jobs" / "family.py")
CODE = 16
pytestmark = pytest.mark.ranks


def run(where: Path, case: str, method: str = "fork") -> subprocess.CompletedProcess[str]:
    return script(["-m", "bitwitness", "run", "--act", "stop", JOB, case, method], where)


@pytest.mark.parametrize(
    ("case", "method", "printed"),
    [
        ("waits_for_an_answer", "fork", "cleaned up"),
        ("waits_for_a_pool", "fork", ""),
        ("a_child_of_a_child", "fork", "cleaned up"),
    ],
)
def test_who_waits_for_a_stopped_child_is_interrupted(case: str, method: str, printed: str, tmp_path: Path) -> None:
    done = run(tmp_path, case, method)
    assert done.returncode == CODE, done.stderr
    assert printed in done.stdout
    assert "the main thread is interrupted" in done.stderr
    assert "KeyboardInterrupt" not in done.stderr
    assert "step 3: stopped at an anomaly, unproven" in done.stderr


def test_who_notices_by_itself_is_not_interrupted(tmp_path: Path) -> None:
    done = run(tmp_path, "notices")
    assert done.returncode == CODE, done.stderr
    assert done.stdout == f"child {CODE}\n"
    assert "the training was stopped in process ForkProcess-1, and so it is here" in done.stderr
    assert "interrupted" not in done.stderr


def test_an_error_that_comes_of_it_is_the_scripts_own_and_the_code_the_stops(tmp_path: Path) -> None:
    done = run(tmp_path, "waits_for_an_executor", "spawn")
    assert done.returncode == CODE, done.stderr
    assert "step 3: stopped at an anomaly" in done.stderr


def test_who_goes_on_all_the_same_is_ended(tmp_path: Path) -> None:
    done = run(tmp_path, "stays")
    assert done.returncode == CODE, done.stderr
    assert "stays" in done.stdout
    assert "the main thread goes on; this process ends now, with exit code 16" in done.stderr


@pytest.mark.parametrize("case", ["is_stopped_beside_a_child", "one_of_two"])
def test_other_children_are_ended(case: str, tmp_path: Path) -> None:
    done = run(tmp_path, case)
    assert done.returncode == CODE, done.stderr
    assert "the training was stopped; its process idler went on, and was ended" in done.stderr


def test_no_thread_of_ours_is_there_while_a_script_forks(tmp_path: Path) -> None:
    done = run(tmp_path, "forks_quietly")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "forked 3\n"
    assert "Warning" not in done.stderr


def test_a_child_that_outlives_the_script_is_waited_for(tmp_path: Path) -> None:
    done = run(tmp_path, "all_is_well")
    assert done.returncode == 0, done.stderr
    assert "stopped" not in done.stderr


def test_a_stop_travels_between_processes() -> None:
    stop = pickle.loads(pickle.dumps(bw.TrainingStopped(17, "a device computes wrongly")))
    assert (stop.code, stop.reason) == (17, "a device computes wrongly")
