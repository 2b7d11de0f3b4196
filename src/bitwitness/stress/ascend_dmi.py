"""Ascend's own diagnosis of its AI cores, where the tool is installed.

``ascend-dmi --dg -i aicore -q`` takes minutes, needs the devices for itself and answers in lines, one of them ``PASS``,
``SKIP``, ``EMERGENCY_WARN`` (replace the hardware) or ``FAIL`` (MindCluster ToolBox, "AICORE diagnosis").
"""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import dataclass
from typing import Any

TOOL = "ascend-dmi"
_STATES = ("EMERGENCY_WARN", "IMPORTANT_WARN", "GENERAL_WARN", "FAIL", "SKIP", "PASS")
_MOST_LINES = 40


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What the tool said: its worst ``state``, empty where it gave none, and why or its last lines as ``text``."""

    state: str
    text: str

    @property
    def faulty(self) -> bool:
        """Whether the tool asks for other hardware."""
        return self.state == "EMERGENCY_WARN"

    @property
    def undecided(self) -> bool:
        """Whether it was not told that all is well: it failed, was skipped, or ended otherwise."""
        return self.state != "PASS" and not self.faulty

    def as_dict(self) -> dict[str, Any]:
        """Return it as JSON takes it."""
        return {"state": self.state, "text": self.text}


def diagnosed(devices: tuple[int, ...], seconds: float) -> Diagnosis | None:
    """Run the diagnosis of these devices; None where the tool is not installed."""
    tool = shutil.which(TOOL)
    if tool is None:
        return None
    command = [tool, "--dg", "-i", "aicore", "-d", ",".join(map(str, devices)), "-q"]
    try:
        found = subprocess.run(  # noqa: S603 - the tool's own path, and numbers
            command,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=seconds,
            stdin=subprocess.DEVNULL,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Diagnosis("", f"it had not ended after {seconds:g} seconds, and was ended")
    except OSError as error:
        return Diagnosis("", f"it could not be run: {error.strerror or error}")
    lines = (found.stdout + found.stderr).strip().splitlines()[-_MOST_LINES:]
    text = "\n".join(lines)
    states = [state for state in _STATES if re.search(rf"\b{state}\b", text)]
    return Diagnosis(states[0] if states else "", text or f"it said nothing, and ended with {found.returncode}")
