"""Why a step cannot be run again."""

from __future__ import annotations

_KEPT = 300  # characters of a reason: the script's own code runs again, and may raise what it likes


class ReplayError(Exception):
    """The step cannot be run again; the text says why."""


def reason_of(error: Exception) -> str:
    """Return in a line why a step could not be run again; of what is no `ReplayError`, with its class."""
    text = str(error) if isinstance(error, ReplayError) else f"{type(error).__name__}: {error}"
    return text.splitlines()[0][:_KEPT]
