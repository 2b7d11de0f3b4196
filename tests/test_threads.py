"""Two trainings in two threads of one process: each is guarded, and neither guard reads what the other thread lets go of."""

from __future__ import annotations

import re
import sys
import threading
from pathlib import Path

import pytest
import torch
from ranks import script
from torch.overrides import _get_current_function_mode_stack

from bitwitness.capture.lossgraph import Result
from bitwitness.capture.losstape import LossTape
from bitwitness.capture.tapedcalls import Tape

JOB = str(Path(__file__).parent / "jobs" / "threads.py")
QUESTIONED = 'act = "protect"\nself_test = false\n[trend]\nz = 1e-9\nwarmup = 1\n[replay]\nrest = false\n'


def bits(text: str) -> list[str]:
    return re.findall(r"^BITS .*$", text, re.MULTILINE)


@pytest.mark.parametrize("settings", ["", QUESTIONED], ids=["default", "questioned"])
def test_two_trainings_in_two_threads(settings: str, tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text(settings)
    plain = script([JOB], tmp_path)
    for number in range(3 if not settings else 1):
        arguments = ["--config", str(tmp_path / "config.toml"), "--out", str(tmp_path / f"run{number}"), JOB]
        guarded = script(["-m", "bitwitness", "run", *arguments], tmp_path)
        assert guarded.returncode == 0, guarded.stderr[-3000:]
        assert bits(guarded.stdout) == bits(plain.stdout) != []
        assert "VERDICT" not in guarded.stderr
        assert "not recorded" not in guarded.stderr, guarded.stderr
        covered = re.findall(r"(?:healthy|known.*|NOT.*): (\d+) of (\d+) parameters, (\d+) steps", guarded.stderr)
        assert covered == [("8", "8", "60")] * 2, guarded.stderr
        assert len(re.findall(r", model 2\] (?:healthy|not known)", guarded.stderr)) == 1, guarded.stderr


def test_tensors_that_another_thread_frees_while_a_backward_begins() -> None:
    tape = Tape(torch.device("cpu"), lambda _tensor: False)
    kept = [torch.zeros(1) for _ in range(500)]
    for tensor in kept:
        tape.sources[tensor] = Result(0, 0)
    over = threading.Event()

    def frees() -> None:
        while not over.is_set():
            tensor = torch.zeros(1)
            tape.sources[tensor] = Result(0, 0)
            del tensor

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    thread = threading.Thread(target=frees)
    thread.start()
    try:
        for _ in range(300):
            assert tape.behind([], (), lambda _tensor: None).calls == {}
    finally:
        over.set()
        thread.join()
        sys.setswitchinterval(before)


def test_another_threads_backwards_leave_a_tape_alone() -> None:
    """Torch's methods are replaced for all threads while a tape is on; its mode stands on its own thread's stack only."""
    ready, inside, over = threading.Event(), threading.Event(), threading.Event()
    stacks: list[int] = []

    def other() -> None:
        ready.wait(20)
        weight = torch.ones(3, requires_grad=True)
        (weight * 2).sum().backward()
        stacks.append(len(_get_current_function_mode_stack()))
        loss = (weight * 2).sum()
        loss.register_hook(lambda _grad: (inside.set(), over.wait(20), None)[-1])
        loss.backward()

    thread = threading.Thread(target=other)
    thread.start()
    tape = LossTape(torch.device("cpu"))
    tape.begin()
    ready.set()
    inside.wait(20)
    tape.end()
    tape.new_step()
    tape.begin()
    output = torch.ones(3, requires_grad=True) * 1
    tape.add_output(output, 0, 0)
    graph = tape.graph((output.square().sum(),), ())
    tape.end()
    over.set()
    thread.join()
    assert stacks == [0]
    assert [call.name for call in graph.calls.values()] == ["square", "sum"]
