"""Several trainings in one process, each in a thread of its own: what one of them does is nothing to the others' guards."""

from __future__ import annotations

import threading


class TrainingThread:
    """The thread that runs a root's forwards.

    Its gradients must not be read from another one, which may let go of them in the middle of that.
    """

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None

    def is_here(self) -> None:
        """Say that the root runs in this thread."""
        self._thread = threading.current_thread()

    def is_another(self) -> bool:
        """Tell whether another thread, which is still there, ran the root last."""
        thread = self._thread
        return thread is not None and thread is not threading.current_thread() and thread.is_alive()
