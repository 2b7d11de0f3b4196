"""Processes that a guarded script starts: guarded where they train, silent where not, named where it cannot be."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import traceback
from pathlib import Path

import pytest
import torch
from extent import chosen
from ranks import script
from torch import nn

import bitwitness as bw

JOB = str(Path(__file__).parent / "jobs" / "children.py")
pytestmark = pytest.mark.ranks
NOTHING_HERE = "no model was trained under guard"
TRAINED = "2 of 2 parameters, 4 steps"


def run(tmp_path: Path, *what: str, out: bool = True) -> tuple[str, list[str]]:
    arguments = ["-m", "bitwitness", "run", *(["--out", str(tmp_path / "run")] if out else []), JOB, *what]
    done = script(arguments, tmp_path)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    assert "failed in its" not in done.stderr, done.stderr
    return done.stderr, sorted(path.name for path in tmp_path.iterdir() if path.name.startswith("run"))


HOWS = ("target", "subclass", "pool", "executor")
METHODS = ("fork", "spawn", "forkserver")
IDLE = ("idle", "loader", "manager")
COMBINATIONS = [(how, method) for how in HOWS for method in METHODS]
"""A child that is not forked imports torch; a server's child is a spawned one that is forked: one of them will do here, and
spawned ones are in the tests below."""
SHORT = [(how, "fork") for how in HOWS[1:]] + [("pool", "forkserver")]


@pytest.mark.parametrize(("how", "method"), chosen(COMBINATIONS, SHORT))
def test_what_a_child_trains_is_guarded(how: str, method: str, tmp_path: Path) -> None:
    told, folders = run(tmp_path, how, method)
    assert told.count(TRAINED) == 1, told
    assert told.count(NOTHING_HERE) == 1, told  # the parent's own line
    assert len(folders) == 1, folders
    assert folders[0].startswith("run-"), folders
    assert json.loads((tmp_path / folders[0] / "run.json").read_text())["parameters"] == 2


def test_ranks_that_are_started_by_hand_are_guarded_together(tmp_path: Path) -> None:
    told, folders = run(tmp_path, "ranks", "spawn")
    assert told.count(TRAINED) == 1, told
    assert "one rank" not in told
    assert len(folders) == 1, folders
    assert json.loads((tmp_path / folders[0] / "run.json").read_text())["world_size"] == 2


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_child_of_a_parent_that_trains_has_a_guard_and_a_folder_of_its_own(method: str, tmp_path: Path) -> None:
    told, folders = run(tmp_path, "both", method)
    assert told.count(TRAINED) == 1, told
    assert told.count("2 of 2 parameters, 6 steps") == 1, told
    assert folders[0] == "run", folders
    assert len(folders) == 2, folders
    events = (tmp_path / "run" / "rank00000" / "events.jsonl").read_text().splitlines()
    coverage = [json.loads(line) for line in events if '"coverage"' in line]
    assert [row["evidence"]["steps"]["held"] for row in coverage if "evidence" in row] == [6]


def test_a_process_that_the_script_forks_by_itself_is_guarded(tmp_path: Path) -> None:
    told, folders = run(tmp_path, "os_fork", "fork")
    assert told.count(TRAINED) == 1, told
    assert told.count("2 of 2 parameters, 6 steps") == 1, told
    assert len(folders) == 2, folders


@pytest.mark.parametrize(
    ("how", "method"),
    [*((how, "fork") for how in IDLE), *((how, "spawn") for how in chosen(IDLE, ["loader"]))],
)
def test_children_that_train_nothing_say_nothing(how: str, method: str, tmp_path: Path) -> None:
    told, folders = run(tmp_path, how, method)
    lines = [line for line in told.splitlines() if "bitwitness" in line]
    if how == "loader":
        assert told.count("2 of 2 parameters, 4 steps") == 1
        assert folders == ["run"]
    else:
        assert len(lines) == 1, told
        assert NOTHING_HERE in lines[0]
        assert folders == []


def test_a_process_that_the_guard_does_not_reach_is_named(tmp_path: Path) -> None:
    told, _ = run(tmp_path, "stubborn", "spawn")
    assert "what the process stubborn trains is not guarded: Stubborn says itself what is pickled of it" in told
    assert TRAINED not in told


def test_grandchildren_are_guarded(tmp_path: Path) -> None:
    told, folders = run(tmp_path, "grandchild", "fork")
    assert told.count(TRAINED) == 1, told
    assert len(folders) == 1


def test_the_exit_codes_of_children_stay_theirs(tmp_path: Path) -> None:
    for method in chosen(("fork", "spawn"), ("spawn",)):
        run(tmp_path, "codes", method, out=False)


def test_an_explicit_guard_is_inert_in_a_forked_child(tmp_path: Path) -> None:
    # In an interpreter of its own: autograd's threads, which another test may have started here, do not survive a fork.
    code = "import pathlib, sys; sys.path.insert(0, sys.argv[1]); import test_children; test_children.fork_once(sys.argv[2])"
    command = [sys.executable, "-c", code, str(Path(__file__).parent), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stderr


def fork_once(folder: str) -> None:
    tmp_path = Path(folder)
    net = nn.Linear(4, 1)
    with bw.Guard(net, out=tmp_path / "run", self_test=False) as guard:
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        train(net, optimizer, 2)
        child = os.fork()
        if child == 0:
            code = 1
            try:
                train(net, optimizer, 3)
                guard.__exit__(None, None, None)
                assert guard.watch is not None
                assert guard.coverage()["steps"]["held"] == 2
                with bw.Guard(net, self_test=False) as own:
                    train(net, optimizer, 3)
                assert own.watch is not None
                assert own.coverage()["steps"]["held"] == 3
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        train(net, optimizer, 2)
    assert guard.coverage()["steps"]["held"] == 4
    assert len((tmp_path / "run" / "rank00000" / "events.jsonl").read_text().splitlines()) == 1


def train(net: nn.Module, optimizer: torch.optim.Optimizer, count: int) -> None:
    for _ in range(count):
        net(torch.ones(2, 4)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
