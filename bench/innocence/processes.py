"""Processes for the runs: so many at a time, each in a session of its own, forked from one that has imported torch."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from innocence.child import arguments, start
from innocence.runs import ROOT, Run, Task


@dataclass
class Running:
    """A process under way."""

    task: Task
    folder: Path
    pid: int
    began: float


def _start(task: Task, scratch: Path, number: int, *, fresh: bool) -> Running:
    folder = scratch / f"{number:06d}"
    (folder / "cwd").mkdir(parents=True)
    environment = {"ZOO_SEED": str(task.seed), "ZOO_TIMES": str(task.times), "OMP_NUM_THREADS": "1"}
    (folder / "config.toml").write_text(task.config)
    if task.fault is not None:
        (folder / "faults.toml").write_text(task.fault)
        environment["BITWITNESS_INJECT"] = str(folder / "faults.toml")
    sys.stdout.flush()
    sys.stderr.flush()
    if fresh and task.how != "counted":
        guarded = ["-m", "bitwitness", *arguments(task, folder)]
        command = [sys.executable, *(guarded if task.how != "plain" else [str(task.script)])]
        with (folder / "stdout").open("wb") as out, (folder / "stderr").open("wb") as err:
            process = subprocess.Popen(
                command,
                cwd=folder / "cwd",
                env={**os.environ, **environment, "PYTHONPATH": str(ROOT / "src")},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,
            )
        process.returncode = 0  # we wait for it ourselves
        return Running(task, folder, process.pid, time.monotonic())
    pid = os.fork()
    if pid == 0:
        start(task, folder, environment)
    return Running(task, folder, pid, time.monotonic())


def _text(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""


def _finish(running: Running, status: int | None, seconds: float) -> Run:
    folder = running.folder
    run = Run(running.task.script.stem, running.task.seed, seconds=seconds, hung=status is None)
    run.code = None if status is None else os.waitstatus_to_exitcode(status)
    lines = [line for line in _text(folder / "stdout").splitlines() if line.startswith("BITS ")]
    run.bits = lines[0][5:].strip() if len(lines) == 1 else None
    run.stderr = _text(folder / "stderr")
    run.weights = _text(folder / "weights") or None
    run.steps = int(_text(folder / "steps") or 0)
    run.operators = json.loads(_text(folder / "operators") or "{}")
    for path in sorted(folder.glob("run*/rank*/events.jsonl")):
        _read_events(run, path)
    shutil.rmtree(folder, ignore_errors=True)
    return run


def _read_events(run: Run, path: Path) -> None:
    again = set()
    for line in _text(path).splitlines():
        try:
            event = json.loads(line)
        except json.JSONDecodeError:
            continue
        evidence = event.get("evidence") or {}
        if any(name.startswith("replay") for name in evidence.get("hash_by_execution") or ()):
            again.add(event.get("step"))
        if event.get("type") == "verdict":
            run.verdicts.append(event)
        if event.get("type") == "note" and event.get("message") == "coverage":
            run.held += evidence.get("steps", {}).get("held", 0)
            run.suspicions += evidence.get("suspicions", 0)
            run.failures.update(evidence.get("failures") or {})
            run.not_covered += evidence.get("not_covered") or []
    run.again += len(again)


def execute(
    tasks: Iterable[Task],
    *,
    jobs: int,
    timeout: float,
    fresh: bool,
    done: Callable[[Task, Run], None],
) -> None:
    """Run the tasks, so many at a time, each in a process of its own; hand each run to ``done``."""
    waiting, active = iter(tasks), list[Running]()
    scratch = tempfile.mkdtemp(prefix="innocent-")  # no TemporaryDirectory: a child's exit would remove it
    try:
        number, exhausted = 0, False
        while active or not exhausted:
            while len(active) < jobs and not exhausted:
                task = next(waiting, None)
                if task is None:
                    exhausted = True
                else:
                    active.append(_start(task, Path(scratch), number, fresh=fresh))
                    number += 1
            for running in list(active):
                pid, status = os.waitpid(running.pid, os.WNOHANG)
                seconds = time.monotonic() - running.began
                if pid == 0 and seconds <= timeout:
                    continue
                if pid == 0:
                    os.killpg(running.pid, signal.SIGKILL)
                    os.waitpid(running.pid, 0)
                active.remove(running)
                done(running.task, _finish(running, status if pid else None, seconds))
            time.sleep(0.005)
    finally:
        for running in active:
            os.killpg(running.pid, signal.SIGKILL)
        shutil.rmtree(scratch, ignore_errors=True)
