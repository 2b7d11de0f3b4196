"""Starting ranks on this machine, as a user would: ``torchrun``, one log file a rank."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Launched:
    """A finished launch: torchrun's exit code, and each rank's output files."""

    code: int
    logs: list[Path]


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
    done = subprocess.run(command, env=env, stderr=quiet, stdout=quiet, check=False)  # noqa: S603 - our own module
    return Launched(done.returncode, sorted(logs.rglob("std*.log")))
