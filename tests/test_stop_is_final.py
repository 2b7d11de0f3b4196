"""After a stop the process ends with the stop's code and takes no further step, whatever its script does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from extent import chosen
from ranks import forked, script

JOB = str(Path(__file__).parent / "jobs" / "stops.py")
CODE = 16
STEPS = "steps 3"  # those before the stop


def run(where: Path, *arguments: str, auto: bool = False, fresh: bool = False) -> subprocess.CompletedProcess:
    """Run the job; ``fresh``: in an interpreter that has not imported the guard before."""
    line = ["-m", "bitwitness", "run", "--act", "stop", JOB] if auto else [JOB]
    if not fresh:
        return script([*line, *arguments], where)
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *line, *arguments]
    return subprocess.run(command, cwd=where, env=env, capture_output=True, text=True, check=False, timeout=600)


@pytest.mark.parametrize("how", ["guard", "start", "auto"])
@pytest.mark.parametrize("case", ["retries_inside", "retries_outside", "goes_on_unguarded"])
def test_who_comes_back_is_ended_at_the_third_time(case: str, how: str, tmp_path: Path) -> None:
    done = run(tmp_path, case, how, auto=how == "auto")
    assert done.returncode == CODE, done.stdout + done.stderr
    assert "the script keeps training; this process ends now, with exit code 16" in done.stderr
    assert done.stdout.count("caught") in (0, 3)


def test_each_part_of_a_step_is_refused(tmp_path: Path) -> None:
    done = run(tmp_path, "parts_are_refused", "guard", "forward", "backward")
    assert done.returncode == CODE, done.stderr
    assert "refused forward 16\nrefused backward 16\n" in done.stdout
    done = run(tmp_path, "parts_are_refused", "guard", "step", "guard")
    assert done.returncode == CODE, done.stderr
    assert "refused step 16\nrefused guard 16\n" in done.stdout
    assert STEPS in done.stdout


@pytest.mark.parametrize("how", chosen(["guard", "auto"], ["auto"]))
def test_an_exit_of_the_scripts_own_changes_nothing_and_cuts_nothing_off(how: str, tmp_path: Path) -> None:
    done = run(tmp_path, "caught_and_over", how, auto=how == "auto", fresh=True)
    assert done.returncode == CODE, done.stderr
    last = ["registered by the script", STEPS, "registered before the guard was imported"]
    assert done.stdout.splitlines()[-3:] == last
    assert (tmp_path / "open.txt").read_text() == "python closes it last"


@pytest.mark.parametrize("how", ["guard", "auto"])
def test_an_error_of_the_scripts_own_is_shown(how: str, tmp_path: Path) -> None:
    done = run(tmp_path, "another_error", how, auto=how == "auto")
    assert done.returncode == CODE
    assert "ValueError: no luck" in done.stderr


def test_the_main_thread_may_clean_up_for_long(tmp_path: Path) -> None:
    done = run(tmp_path, "saves_for_long")
    assert done.returncode == CODE, done.stderr
    assert "saved" in done.stdout


@pytest.mark.parametrize(
    ("case", "said"),
    [
        ("thread", ""),
        ("thread_and_main_waits_elsewhere", "cleaned up"),
        ("thread_and_main_catches", "interrupted"),
        ("thread_saves_and_main_catches", "the thread saved"),
    ],
)
@pytest.mark.parametrize("how", ["guard", "auto"])
def test_a_stop_in_a_thread_interrupts_the_main_thread(case: str, said: str, how: str, tmp_path: Path) -> None:
    done = run(tmp_path, case, how, auto=how == "auto")
    assert done.returncode == CODE, done.stdout + done.stderr
    assert said in done.stdout
    assert "went on" not in done.stdout
    assert "KeyboardInterrupt" not in done.stderr
    assert "the main thread is interrupted" in done.stderr
    assert STEPS in done.stdout


def test_a_main_thread_that_goes_on_is_ended_after_the_grace(tmp_path: Path) -> None:
    done = run(tmp_path, "thread_and_main_stays")
    assert done.returncode == CODE, done.stderr
    assert "stopped 1 s ago, and the main thread goes on; this process ends now, with exit code 16" in done.stderr


def test_a_thread_that_comes_back_ends_the_process(tmp_path: Path) -> None:
    done = run(tmp_path, "thread_that_catches")
    assert done.returncode == CODE, done.stderr
    assert "keeps training" in done.stderr


def test_a_stop_of_one_model_stops_the_other(tmp_path: Path) -> None:
    done = run(tmp_path, "two_models")
    assert done.returncode == CODE, done.stderr
    assert "[0, 1, 2]" in done.stdout
    assert "[0, 1, 2, 3]" not in done.stdout


@pytest.mark.parametrize("case", ["spawn", "fork"])
def test_a_child_ends_with_the_code(case: str, tmp_path: Path) -> None:
    done = run(tmp_path, case)
    assert done.returncode == 0, done.stderr
    assert f"{case} {CODE}" in done.stdout


def test_a_prompt_is_refused_and_not_ended(tmp_path: Path) -> None:
    done = run(tmp_path, "at_a_prompt")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("caught TrainingStopped") == 1000
    assert "still here" in done.stdout
    assert STEPS in done.stdout


@pytest.mark.ranks
def test_every_rank_ends_with_the_code(tmp_path: Path) -> None:
    launched = forked(2, [JOB, "ranks"], tmp_path)
    assert launched.code == 1
    told = "\n".join(log.read_text() for log in launched.logs)
    assert told.count("caught") == 2


def test_a_conviction_is_final(tmp_path: Path) -> None:
    training = tmp_path / "train.py"
    training.write_text(
        textwrap.dedent("""
        import sys, torch
        from torch import nn
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        try:
            for step in range(40):
                model(torch.randn(16, 8)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        except BaseException as error:
            print("caught", error, flush=True)
        sys.exit(0)
        """)
    )
    faults = tmp_path / "faults.toml"
    faults.write_text(
        '[[fault]]\nsite = "2/mm:backward"\nfrom_step = 20\nkind = "multiply"\nfactor = 1e6\npattern = "row"\nelement = 0\n'
    )
    arguments = ["-m", "bitwitness", "run", "--act", "protect", str(training)]
    done = script(arguments, tmp_path, environment={"BITWITNESS_INJECT": str(faults)})
    assert done.returncode == 17, done.stderr
    assert "caught" in done.stdout


def test_a_run_that_was_stopped_without_proof_is_not_healthy(tmp_path: Path) -> None:
    done = script(["-m", "bitwitness", "run", "--act", "stop", "--out", "r", JOB, "caught_and_over", "auto"], tmp_path)
    assert "NOT healthy: step 3: stopped at an anomaly, unproven (act = stop): not finite" in done.stderr
    assert " healthy:" not in done.stderr.replace("NOT healthy:", "")
    told = script(["-m", "bitwitness", "status", "r", "--json"], tmp_path)
    assert told.returncode == 1, told.stdout + told.stderr
    answer = json.loads(told.stdout)
    assert (answer["status"], answer["state"]) == ("findings", "stopped")
    assert "proves a suspicion before it stops" in answer["to_do"]
