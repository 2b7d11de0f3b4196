"""Fingerprints of a device that is known to be good, for those who have nothing to compare with."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bitwitness.errors import UnreadError, UsageError
from bitwitness.files.reading import read_object
from bitwitness.files.shown import shown
from bitwitness.files.writing import write_text
from bitwitness.stress.tally import Seen
from bitwitness.stress.workload import Workload

_SCHEMA = 1
_EXPECTED = "fingerprints that bitwitness stress --golden-out wrote"


@dataclass(frozen=True, slots=True)
class Golden:
    """Fingerprints by workload and input, and the model and software that they are of."""

    model: Mapping[str, str]
    fingerprints: Mapping[str, str] = field(repr=False)

    def of(self, seen: Seen, workload: Workload) -> str | None:
        """Return what is due; None where it was not done there."""
        return self.fingerprints.get(_key(seen, workload))

    def fits(self, model: Mapping[str, str], where: str) -> None:
        """Raise `UsageError` unless a device is of the same model, with the same software."""
        if dict(model) != dict(self.model):
            names = [name for name in {**self.model, **model} if model.get(name) != self.model.get(name)]
            here = ", ".join(f"{name} {shown(model.get(name))}" for name in names)
            there = ", ".join(f"{name} {shown(self.model.get(name))}" for name in names)
            raise UsageError(
                f"{where} is of another device or software, whose bits may rightly be others: it has {there}, and here is "
                f"{here}; make one on a good device of this model with this software (--golden-out)"
            )


def golden_of(model: Mapping[str, str], seen: Sequence[Seen], workloads: Sequence[Workload]) -> Golden:
    """Return the fingerprints of a test in which nothing was found; those of operators that vary are left out."""
    found = {}
    for one in seen:
        workload = workloads[one.workload]
        if not workload.exact and not one.nondeterministic and len(one.fingerprints) == 1:
            found[_key(one, workload)] = next(iter(one.fingerprints))
    return Golden(dict(model), found)


def write_golden(path: Path, golden: Golden) -> None:
    """Write a file; raises as `bitwitness.files.writing.new_file`."""
    told = {"bitwitness_golden": _SCHEMA, "device": dict(golden.model), "fingerprints": dict(golden.fingerprints)}
    write_text(path, json.dumps(told, indent=1) + "\n")


def read_golden(path: str) -> Golden:
    """Read a file.

    Raises
    ------
    UsageError, UnreadError
        If there is none, or it holds something else.

    """
    told = read_object(path, _EXPECTED)
    model, fingerprints = told.get("device", {}), told.get("fingerprints", {})
    if told.get("bitwitness_golden") != _SCHEMA or not _is_text(model) or not _is_text(fingerprints):
        raise UnreadError(f"{shown(path)} holds no such fingerprints; expected {_EXPECTED}")
    return Golden(model, fingerprints)


def _is_text(found: Any) -> bool:
    return isinstance(found, dict) and all(isinstance(value, str) for value in found.values())


def _key(seen: Seen, workload: Workload) -> str:
    return f"{workload.key} #{seen.variant}"
