"""Starting ranks on this machine, as a user would: ``torchrun``, one log file a rank."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bitwitness.errors import UsageError
from bitwitness.files.shown import shown
from bitwitness.launch.child import end_with_parent

_PATIENCE_S = 35.0  # torchrun gives its ranks 30 s


@dataclass(frozen=True, slots=True)
class Launched:
    """A finished launch: torchrun's exit code, and each rank's output files."""

    code: int
    logs: list[Path]


def fresh_folder(out: str | None, scratch: str) -> Path:
    """Return the folder that a demonstration writes to: one that is empty, so that its story is not an earlier one's.

    Raises
    ------
    UsageError
        If something lies in ``out``, or it cannot be made.

    """
    folder = Path(scratch if out is None else out)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise UsageError(f"--out {shown(folder)} is not empty; give the name of a fresh folder")
    except OSError as error:
        raise UsageError(f"--out {shown(folder)}: {error.strerror}; give the name of a fresh folder") from error
    return folder


def torchrun(
    ranks: int, arguments: list[str], logs: Path, *, echo: bool, environment: dict[str, str] | None = None
) -> Launched:
    """Run ``python -m torch.distributed.run --nproc-per-node RANKS ARGUMENTS`` and wait.

    Parameters
    ----------
    ranks
        Processes to start, one thread each.
    arguments
        What to run: a script, or ``-m module``, and its arguments.
    logs
        Folder for one ``stderr.log`` and ``stdout.log`` a rank.
    echo
        Show the ranks' output here, too.
    environment
        Variables beside those of this process.

    """
    where = ["--redirects", "3"] if not echo else ["--tee", "3"]
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks)),
        *(
            "--rdzv-backend",
            "c10d",
            "--rdzv-endpoint",
            "localhost:0",
            "--log-dir",
            str(logs),
            *where,
            *arguments,
        ),
    ]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", **(environment or {})}
    quiet = None if echo else subprocess.DEVNULL
    agent = subprocess.Popen(command, env=env, stderr=quiet, stdout=quiet, preexec_fn=end_with_parent)  # noqa: S603, PLW1509
    with _ended_with_us(agent):
        code = agent.wait()
    return Launched(code, sorted(logs.rglob("std*.log")))


@contextmanager
def bitwitness(arguments: list[str], environment: dict[str, str]) -> Iterator[subprocess.Popen[str]]:
    """Start a verb of ours, whose output can be read as it comes."""
    command = [sys.executable, "-m", "bitwitness", *arguments]
    process = subprocess.Popen(  # noqa: S603
        command,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        preexec_fn=end_with_parent,  # noqa: PLW1509
    )
    with process, _ended_with_us(process):
        yield process


@contextmanager
def _ended_with_us(agent: subprocess.Popen[Any]) -> Iterator[subprocess.Popen[Any]]:
    """End an agent where this is left by an error, as by Ctrl-C: asked to, it ends its ranks; killed, it does not."""
    try:
        yield agent
    except BaseException:
        agent.terminate()
        try:
            agent.wait(_PATIENCE_S)
        except subprocess.TimeoutExpired:
            agent.kill()
        raise
