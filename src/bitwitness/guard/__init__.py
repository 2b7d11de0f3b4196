"""The guard: one training under watch, from the first forward to the last optimizer step."""

from bitwitness.guard.guard import Guard

__all__ = ["Guard"]
