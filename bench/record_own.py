"""Measures bitwitness.Recorder; started by `record.py`, see there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from rounds import Job, Recording, serve


class Own(Recording):
    """A `bitwitness.Recorder`, switched on and off."""

    def __init__(self, recorder: Any) -> None:
        self._recorder = recorder

    def begin(self) -> None:
        """Start."""
        self._recorder.resume()

    def end(self) -> None:
        """Stop, and have everything written."""
        self._recorder.pause()


@contextmanager
def opened(job: Job, model: torch.nn.Module, folder: Path) -> Iterator[Recording]:
    """Open a recorder that does not record yet."""
    import bitwitness as bw

    settings: dict[str, Any] = {"level": job.level, "content": job.content, "async_dump": job.async_dump}
    with bw.Recorder(model, out=folder, recording=False, **settings) as recorder:
        yield Own(recorder)


def tool() -> str:
    """Return name and version."""
    return f"bitwitness {version('bitwitness')}"


if __name__ == "__main__":
    serve(opened, tool)
