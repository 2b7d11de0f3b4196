"""One run of one script: what is to be made, and what it left behind."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
CONVICTIONS = ("transient_hardware", "persistent_hardware", "corrupt_state")
STOPPED = 17
QUESTIONED = """act = "protect"
self_test = false
[trend]
z = 1e-9
warmup = 1
[replay]
rest = false
"""
"""Every step is suspicious, and so run again."""
AS_USERS = 'act = "protect"\n'
"""What a user gets who sets nothing but what is to be done."""
UNQUESTIONED = """act = "observe"
self_test = false
[trend]
z = 1e9
[replay]
rest = false
"""
"""What a faulty device does to a training that nobody mends."""


@dataclass
class Run:
    """What one run of one script left behind."""

    script: str
    seed: int
    bits: str | None = None
    weights: str | None = None
    code: int | None = None
    hung: bool = False
    seconds: float = 0.0
    steps: int = 0
    stderr: str = ""
    held: int = 0
    suspicions: int = 0
    again: int = 0
    verdicts: list[dict[str, Any]] = field(default_factory=list)
    failures: dict[str, Any] = field(default_factory=dict)
    not_covered: list[str] = field(default_factory=list)
    operators: dict[str, int] = field(default_factory=dict)

    @property
    def causes(self) -> list[str]:
        """The causes of its verdicts, as the tool calls them."""
        return [str(cause_of(verdict)) for verdict in self.verdicts]


@dataclass(frozen=True)
class Task:
    """One run to be made: plain, counted (plain, its operators listed), guarded or faulted.

    Attributes
    ----------
    times
        The main loop of the script is so many times as long.
    config
        The guard's settings, in TOML.
    fault
        A fault for the device to have, in TOML.

    """

    script: Path
    seed: int
    how: str
    times: int = 1
    config: str = QUESTIONED
    fault: str | None = None


def cause_of(verdict: dict[str, Any]) -> object:
    """Return the cause that a verdict's event names."""
    evidence = verdict.get("evidence")
    inside = evidence.get("cause") if isinstance(evidence, dict) else None
    return verdict.get("cause") or inside


def acted(run: Run, action: str) -> bool:
    """Tell whether any of a run's verdicts led to an action."""
    return any(verdict.get("action") == action for verdict in run.verdicts)


@dataclass
class Found:
    """All runs of one campaign, and what was wrong with them; by script, seed, and kind of fault."""

    plain: dict[tuple[str, int], Run] = field(default_factory=dict)
    guarded: dict[tuple[str, int], Run] = field(default_factory=dict)
    wrong: dict[tuple[str, int], list[str]] = field(default_factory=dict)
    unsteady: list[str] = field(default_factory=list)
    counted: dict[str, Run] = field(default_factory=dict)
    idle: dict[tuple[str, int], Run] = field(default_factory=dict)
    struck: dict[tuple[str, int, str], tuple[str, str]] = field(default_factory=dict)
    faulted: dict[tuple[str, int, str, str], Run] = field(default_factory=dict)
    misjudged: dict[tuple[str, int, str], list[str]] = field(default_factory=dict)

    def free(self, script: str, seed: int) -> Run:
        """Return a plain run, with the weights that it ends with on the emulated device, when that is healthy.

        It computes some operators part by part, so that its healthy bits are not always the plain ones.
        """
        return replace(self.plain[script, seed], weights=self.idle[script, seed].weights)

    @property
    def failed(self) -> bool:
        """Whether anything was disturbed or misjudged."""
        return bool(self.unsteady) or any(self.wrong.values()) or any(self.misjudged.values())
