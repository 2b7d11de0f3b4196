"""The environment variables of ours that are no settings; settings are read by `config.load`."""

from __future__ import annotations

INJECT = "BITWITNESS_INJECT"
"""A file of faults that the devices are to have."""
QUARANTINE = "BITWITNESS_QUARANTINE"
"""The list of devices that are left out."""
RESUME_BEFORE = "BITWITNESS_RESUME_BEFORE"
"""By which a launcher says at which step a fault left its first trace."""
SLOTS = "BITWITNESS_SLOTS"
"""Numbers of the devices that a launcher put this node's ranks on, ``0,2,3``: local rank 1 computes on device 2."""
NOT_SETTINGS = frozenset({INJECT, QUARANTINE, RESUME_BEFORE, SLOTS})
