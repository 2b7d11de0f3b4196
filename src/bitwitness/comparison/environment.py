"""What differs between two runs before any number of theirs is compared."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from bitwitness.store.redact import HIDDEN

_EXPLAINED = {
    "weights": "the runs begin with different weights; every number after that may differ",
    "data": "the first batches are not the same; compare runs on the same data in the same order",
    "random": "the random states differ, so that what draws from them does (torch's: dropout, shuffling, initial weights; "
    "numpy's and Python's: what the script draws from these)",
    "optimizers": "optimizers or their settings differ",
    "switches": "torch's settings of determinism or precision differ",
    "versions": "software versions differ, and with them kernels",
    "script": "the scripts are not the same text",
    "variables": "environment variables that numbers may depend on differ",
    "world_size": "the numbers of ranks differ, so that sums are taken in another order",
    "devices": "the devices are of different kinds",
    "command": "the command lines differ",
}
PARTS = tuple(_EXPLAINED)
"""What is compared, what matters most first."""
ABSENT = "(not there)"


@dataclass(frozen=True, slots=True)
class Difference:
    """One thing that differs: its part (``weights``, ``switches``, …), its name, and both runs' values."""

    part: str
    name: str
    first: Any
    second: Any

    def to_dict(self) -> dict[str, Any]:
        """Return it ready for JSON."""
        return {"part": self.part, "name": self.name, "a": self.first, "b": self.second}


def differences(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[Difference]:
    """Return what differs between two runs' descriptions, what matters most first; what one did not record does not differ."""
    found: list[Difference] = []
    for part in PARTS:
        first, second = _part(a, part), _part(b, part)
        if not first or not second:
            continue
        for name in sorted(first.keys() | second.keys()):
            values = first.get(name, ABSENT), second.get(name, ABSENT)
            if values[0] != values[1]:
                found.append(Difference(part, name, *values))
    return found


def unknown(run: Mapping[str, Any]) -> list[str]:
    """Return the parts of which a run's description says nothing: they cannot be compared."""
    return [part for part in PARTS if not _part(run, part)]


def masked(*runs: Mapping[str, Any]) -> bool:
    """Tell whether arguments of the runs' commands were left out, so that they may differ where the commands look alike."""
    return any(
        HIDDEN in argument for run in runs for argument in _part(run, "command").values() if isinstance(argument, list)
    )


def _part(run: Mapping[str, Any], part: str) -> dict[str, Any]:
    """Return one part, flat: names by dots."""
    environment = run.get("environment")
    within = environment if isinstance(environment, dict) else {}
    if part == "devices":
        devices = run.get("devices")
        kinds = [str(device).partition(":")[0] for device in devices] if isinstance(devices, list) else []
        return {"kinds": sorted(set(kinds))} if kinds else {}
    value = within.get(part, run.get(part))
    return {} if value is None else _flat(value, "")


def _flat(value: Any, name: str) -> dict[str, Any]:
    if isinstance(value, dict):
        return {
            k: v for key, item in value.items() for k, v in _flat(item, f"{name}.{key}" if name else str(key)).items()
        }
    if isinstance(value, list) and any(isinstance(item, dict | list) for item in value):
        return {k: v for i, item in enumerate(value) for k, v in _flat(item, f"{name}[{i}]").items()}
    return {name or "value": value}


def explained(part: str) -> str:
    """Return what a difference in a part means."""
    return _EXPLAINED[part]
