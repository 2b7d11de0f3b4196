"""Measures msprobe's PrecisionDebugger; started by `record.py` with a Python that has ``mindstudio-probe`` installed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from rounds import Job, Recording, serve

LEVELS = {"modules": "L0", "ops": "L1", "mix": "mix"}
TASKS = {"structure": "structure", "stats": "statistics", "hash": "statistics", "tensors": "tensor"}


class Peer(Recording):
    """A PrecisionDebugger, used as its manual says: started and stopped in each step."""

    def __init__(self, debugger: Any, model: torch.nn.Module) -> None:
        self._debugger = debugger
        self._model = model

    def before_step(self) -> None:
        """Start."""
        self._debugger.start(self._model)

    def after_step(self) -> None:
        """Stop, and have the step written."""
        self._debugger.stop()
        self._debugger.step()


def settings(job: Job, folder: Path) -> dict[str, Any]:
    """Return the ``config.json`` that asks for what the job asks for."""
    task = TASKS[job.content]
    section: dict[str, Any] = {"scope": [], "list": [], "data_mode": ["all"]}
    if task == "statistics":
        section["summary_mode"] = "md5" if job.content == "hash" else "statistics"
    return {
        "task": task,
        "dump_path": str(folder),
        "rank": [],
        "step": [],
        "level": LEVELS[job.level],
        "async_dump": job.async_dump,
        task: section,
    }


@contextmanager
def opened(job: Job, model: torch.nn.Module, folder: Path) -> Iterator[Recording]:
    """Make the debugger; a process can have one."""
    from msprobe.pytorch import PrecisionDebugger

    folder.mkdir()
    config = folder.with_name("config.json")
    config.write_text(json.dumps(settings(job, folder)))
    yield Peer(PrecisionDebugger(config_path=str(config)), model)


def tool() -> str:
    """Return name and version."""
    return f"msprobe {version('mindstudio-probe')}"


if __name__ == "__main__":
    serve(opened, tool)
