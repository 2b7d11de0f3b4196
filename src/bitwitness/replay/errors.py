"""Why a step cannot be run again."""

from __future__ import annotations


class ReplayError(Exception):
    """The step cannot be run again; the text says why."""
