"""The recording of a run that goes on: opened again when it has grown."""

from __future__ import annotations

from pathlib import Path
from threading import Lock

from bitwitness.errors import UsageError
from bitwitness.view.scene import Scene, one_run


class Growing:
    """Gives the scene of a run as it is now; None as long as nothing was recorded."""

    def __init__(self, run: Path, *, step: int | None = None, rank: int | None = None) -> None:
        self._run, self._step, self._rank = run, step, rank
        self._seen: list[str] | None = None
        self._scene: Scene | None = None
        self._lock = Lock()

    def __call__(self) -> Scene | None:
        """Return the scene."""
        with self._lock:
            files = sorted(str(file) for file in self._run.glob("rank*/stats-*.parquet"))
            if files != self._seen:
                try:
                    scene: Scene | None = self.look()
                except UsageError:
                    scene = None
                if scene is None or self._scene is None or scene.places != self._scene.places:
                    self._scene = scene
                self._seen = files
            return self._scene

    def look(self) -> Scene:
        """Open the recording; raises `UsageError` where there is none, or not what was asked for."""
        return one_run(self._run, step=self._step, rank=self._rank)
