"""Recorded and unrecorded training steps by turns, in one process: what `record.py` has each tool measured by.

Imports torch and the model only, so that it runs in whichever environment a tool is installed in, and so that the
memory of an unrecorded training is that of a training.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from gpt import DEEP, GPT

_KEPT = (".safetensors", ".pt")


@dataclass(frozen=True)
class Job:
    """One measurement: how is trained, what is recorded, and how often.

    Attributes
    ----------
    rounds
        Rounds of ``steps`` unrecorded and ``steps`` recorded steps; 0 to record (or not) without a break for ``seconds``
        and to weigh what was written and how much memory it took.
    recorded
        Whether anything is recorded, where no rounds are run.
    model
        ``sdpa`` or ``eager``: the GPT of 11.2 million parameters and how it attends; ``deep``: the one of 300 million.
    batch, context
        Sequences in a step, and tokens in each.
    tiny
        A model that proves only that it runs.

    """

    name: str
    level: str = "mix"
    content: str = "stats"
    bf16: bool = False
    foreach: bool = False
    async_dump: bool = False
    rounds: int = 0
    steps: int = 5
    seconds: float = 10.0
    recorded: bool = True
    model: str = "sdpa"
    batch: int = 4
    context: int = 128
    tiny: bool = False

    @property
    def training(self) -> tuple[str, int, int, bool, bool]:
        """What is trained, whatever is recorded of it."""
        return self.model, self.batch, self.context, self.bf16, self.foreach


class Recording:
    """What a tool does around steps; as it is, nothing."""

    def begin(self) -> None:
        """Before the first of some recorded steps."""

    def before_step(self) -> None:
        """Before each recorded step."""

    def after_step(self) -> None:
        """After each recorded step."""

    def end(self) -> None:
        """After the last of some recorded steps: what was recorded is on disk when this returns."""


Opener = Callable[[Job, torch.nn.Module, Path], AbstractContextManager[Recording]]
"""Returns a recording into a folder, not begun."""


class Training:
    """The benchmark's model, optimizer and batches."""

    def __init__(self, job: Job) -> None:
        torch.manual_seed(0)
        self.vocab, self.shape = (64, (4, 17)) if job.tiny else (4096, (job.batch, job.context + 1))
        eager, deep = job.model == "eager", DEEP if job.model == "deep" else {}
        self.model = GPT(self.vocab, 32, 1, 2, 16, eager) if job.tiny else GPT(self.vocab, eager=eager, **deep)
        if job.bf16:
            self.model.bfloat16()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, foreach=job.foreach)
        self._generator = torch.Generator().manual_seed(1)

    def batch(self) -> torch.Tensor:
        """Draw a batch."""
        return torch.randint(0, self.vocab, self.shape, generator=self._generator)

    def step(self, tokens: torch.Tensor) -> None:
        """Train one step."""
        self.model(tokens[:, :-1], tokens[:, 1:]).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def _timed(training: Training, batches: list[torch.Tensor], recording: Recording) -> float:
    """Return the process-CPU seconds a step of training on these batches."""
    started = time.process_time()
    recording.begin()
    for tokens in batches:
        recording.before_step()
        training.step(tokens)
        recording.after_step()
    recording.end()
    return (time.process_time() - started) / len(batches)


def _drop_tensors(folder: Path) -> None:
    """Remove kept tensors, of which some rounds would fill a disk."""
    for path in folder.rglob("*"):
        if path.suffix in _KEPT:
            path.unlink()


def by_turns(job: Job, opener: Opener, folder: Path) -> dict[str, Any]:
    """Time rounds, each in random order; the first warms up and is not counted."""
    training = Training(job)
    shuffle = random.Random(2)
    nothing = Recording()
    seconds: dict[str, list[float]] = {"plain": [], "recorded": []}
    for _ in range(1 if job.tiny else 2):
        training.step(training.batch())
    with opener(job, training.model, folder) as recording:
        for number in range(job.rounds + 1):
            batches = [training.batch() for _ in range(job.steps)]
            for name in shuffle.sample(["plain", "recorded"], 2):
                spent = _timed(training, batches, recording if name == "recorded" else nothing)
                if number:
                    seconds[name].append(spent)
            _drop_tensors(folder)
    return seconds


def at_a_stretch(job: Job, opener: Opener, folder: Path) -> dict[str, Any]:
    """Train (and record) for some seconds; return peak memory, and what lies in the folder afterwards."""
    training = Training(job)
    training.step(training.batch())
    steps = 0
    least = 1 if job.tiny else 4
    until = time.monotonic() + job.seconds
    with opener(job, training.model, folder) if job.recorded else _Nothing() as recording:
        recording.begin()
        while steps < least or time.monotonic() < until:
            recording.before_step()
            training.step(training.batch())
            recording.after_step()
            steps += 1
        recording.end()
    files = [path for path in folder.rglob("*") if path.is_file()]
    size = sum(path.stat().st_size for path in files)
    return {"steps": steps, "files": len(files), "mb": size / 1e6, "peak_mb": peak_mb()}


class _Nothing(AbstractContextManager[Recording]):
    """Opens a recording of nothing."""

    def __enter__(self) -> Recording:
        return Recording()

    def __exit__(self, *_: object) -> None:
        """Leave."""


def peak_mb() -> float:
    """Return the most memory this process ever had resident, in MB."""
    try:  # getrusage also counts the parent that this process was forked from
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:")) * 1024 / 1e6
    except (OSError, StopIteration):
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e6


def serve(opener: Opener, tool: Callable[[], str]) -> None:
    """Run the jobs that ``--jobs`` lists as JSON, and print a line of JSON for each; ``tool`` tells name and version."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--jobs", type=json.loads, required=True, help="a JSON list of objects: the fields of Job")
    args = parser.parse_args()
    torch.set_num_threads(1)
    for fields in args.jobs:
        job = Job(**fields)
        with tempfile.TemporaryDirectory(prefix="bench-record-") as scratch:
            found = (by_turns if job.rounds else at_a_stretch)(job, opener, Path(scratch) / "run")
        line = {"job": asdict(job), **found, "tool": tool() if job.recorded else "", "torch": torch.__version__}
        print("\n" + json.dumps(line), flush=True)
