"""Two trainings in two threads of one process: each is guarded, and neither guard reads what the other thread lets go of."""

from __future__ import annotations

import re
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from extent import chosen
from ranks import script
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.overrides import _get_current_function_mode_stack

import bitwitness as bw
from bitwitness.capture.lossgraph import Result
from bitwitness.capture.losstape import LossTape
from bitwitness.capture.tapedcalls import Tape

JOB = str(Path(__file__).parent / "jobs" / "threads.py")
QUESTIONED = 'act = "protect"\nself_test = false\n[trend]\nz = 1e-9\nwarmup = 1\n[replay]\nrest = false\n'


def bits(text: str) -> list[str]:
    return re.findall(r"^BITS .*$", text, re.MULTILINE)


@pytest.mark.parametrize(
    "settings", [*chosen([""], []), QUESTIONED], ids=lambda text: "questioned" if text else "default"
)
def test_two_trainings_in_two_threads(settings: str, tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text(settings)
    plain = script([JOB], tmp_path)
    for number in range(chosen(3, 1)):
        arguments = ["--config", str(tmp_path / "config.toml"), "--out", str(tmp_path / f"run{number}"), JOB]
        guarded = script(["-m", "bitwitness", "run", *arguments], tmp_path)
        assert guarded.returncode == 0, guarded.stderr[-3000:]
        assert bits(guarded.stdout) == bits(plain.stdout) != []
        assert "VERDICT" not in guarded.stderr
        assert "not recorded" not in guarded.stderr, guarded.stderr
        covered = re.findall(r"(?:healthy|known.*|NOT.*)[:;] (\d+) of (\d+) parameters, (\d+) steps", guarded.stderr)
        assert covered == [("8", "8", "30")] * 2, guarded.stderr
        assert len(re.findall(r", model 2\] (?:healthy|not known)", guarded.stderr)) == 1, guarded.stderr


@pytest.mark.parametrize("settings", ["", QUESTIONED], ids=["default", "questioned"])
def test_random_numbers_that_another_thread_draws_are_left_alone(settings: str, tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text(settings)
    job = str(Path(JOB).with_name("threads_drawing.py"))
    plain = script([job], tmp_path)
    for _ in range(chosen(2, 1)):
        guarded = script(["-m", "bitwitness", "run", "--config", "config.toml", job], tmp_path)
        assert guarded.returncode == 0, guarded.stderr[-3000:]
        assert bits(guarded.stdout) == bits(plain.stdout) != [], guarded.stderr[-3000:]
        assert "VERDICT" not in guarded.stderr
    if settings:
        assert "another thread of the script works (Thread-" in guarded.stderr


def test_a_recording_holds_no_operators_of_another_thread(tmp_path: Path) -> None:
    job = str(Path(JOB).with_name("threads_drawing.py"))
    done = script(["-m", "bitwitness", "record", "--out", "run", job], tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    drawing = 0
    for folder in ("run", "run-2"):
        rows = [row for row in bw.Run(tmp_path / folder).rows().to_pylist() if row["kind"] == "op"]
        products = [row for row in rows if (row["op"], row["phase"], row["slot"]) == ("addmm", "forward", "out0")]
        assert 25 <= len(products) <= 50
        assert len({row["module"] for row in products}) == 2
        drawing += any("dropout" in row["op"] or "bernoulli" in row["op"] for row in rows)
    assert drawing == 1


def test_guards_that_come_and_go_leave_another_threads_hooks_alone() -> None:
    """Torch goes through its hooks while the guard of another thread comes, and while it goes."""
    inside, go_on = threading.Event(), threading.Event()
    failed: list[BaseException] = []

    def wait(*_: object) -> None:
        inside.set()
        go_on.wait(30)

    def train() -> None:
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(torch.ones(1, 2)).sum().backward()
        try:
            optimizer.step()
        except BaseException as error:
            failed.append(error)

    def meanwhile(act: Callable[[], object]) -> None:
        inside.clear()
        go_on.clear()
        worker = threading.Thread(target=train)
        worker.start()
        assert inside.wait(30)
        act()
        go_on.set()
        worker.join()

    for register in (register_optimizer_step_pre_hook, register_optimizer_step_post_hook):
        other = nn.Linear(2, 1)
        guard = bw.Guard(other, torch.optim.SGD(other.parameters(), lr=0.1), self_test=False)
        with bw.Guard(nn.Linear(2, 1), self_test=False):  # one is there already
            entry = register(wait)
            meanwhile(guard.start)
            meanwhile(guard.close)
            entry.remove()
    first = bw.Guard(nn.Linear(2, 1), self_test=False)
    with first:
        entry = register_optimizer_step_post_hook(wait)
        meanwhile(first.close)  # the last one
    entry.remove()
    assert failed == []


def test_two_threads_that_take_turns_at_every_instruction(tmp_path: Path) -> None:
    plain = script([JOB, "3"], tmp_path)
    guarded = script(["-m", "bitwitness", "run", JOB, "3"], tmp_path)
    assert guarded.returncode == 0, guarded.stderr[-3000:]
    assert bits(guarded.stdout) == bits(plain.stdout) != []
    assert len(set(bits(plain.stdout))) == 1
    for word in ("Traceback", "failed", "VERDICT", "unguarded"):
        assert word not in guarded.stderr, guarded.stderr[-3000:]


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


def test_looking_at_other_threads_waits_for_no_garbage_collection() -> None:
    """CPython's issue 106883: a collection inside ``sys._current_frames()`` waits for ever for the lock that it holds."""
    script = """
        import gc, threading, time
        from bitwitness.tap.threads import elsewhere

        class Garbage:
            def __init__(self):
                self.me, self.local = self, threading.local()
                self.local.x = 1

        for _ in range(30):
            threading.Thread(target=time.sleep, args=(30,), daemon=True).start()
        gc.set_threshold(30)
        until = time.monotonic() + 3
        while time.monotonic() < until:
            Garbage()
            elsewhere(lambda frame: False)
        print("done", flush=True)
        import os
        os._exit(0)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout == "done\n", done.stderr
