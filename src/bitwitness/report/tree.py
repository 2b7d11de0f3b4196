"""The tree of modules, each with how bad it is inside: what the icicle shows."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from bitwitness.report.clean import name as shown_name

LEVELS = ("as usual", "slightly unusual", "unusual", "very unusual", "far off, NaN or Inf")
"""What a run's levels are called; a comparison's are `PAIR_LEVELS`."""
PAIR_LEVELS = (
    "equal",
    "rounding",
    "differs by less than a thousandth",
    "differs by less than a tenth",
    "differs by more",
)
_Z = (4.0, 9.0, 30.0, 100.0)
_MOST = 1500  # modules that are shown: beyond that the mildest are left out
_DEEP = 40


@dataclass(slots=True)
class Branch:
    """A module: its own level and the worst inside it, itself included."""

    label: str
    path: str
    level: int = -1
    worst: int = -1
    said: str = ""
    inside: dict[str, Branch] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Return it and what is in it for the page."""
        told = {"name": self.label, "path": self.path, "level": self.level, "worst": self.worst, "said": self.said}
        return told | {"inside": [one.to_dict() for one in self.inside.values()]}


def level_of_z(z: float) -> int:
    """Return the level of how unusual a module is in its own history."""
    return sum(z >= limit for limit in _Z)


def level_of_change(change: float, *, differs: bool) -> int:
    """Return the level of how far two results of one module are apart."""
    if change == 0.0 or not differs:
        return int(change != 0.0)
    return 2 + sum(change >= limit for limit in (1e-3, 1e-1)) if math.isfinite(change) else 4


def tree_of(levels: Mapping[str, tuple[int, str]]) -> Branch:
    """Return the tree of modules by their paths; ``levels``: each one's level, and what is said of it."""
    root = Branch("model", ".")
    mildest = sorted(levels, key=lambda path: -levels[path][0])[:_MOST]
    chosen = set(mildest)
    for path in (one for one in levels if one in chosen):
        level, said = levels[path]
        branch, passed = root, [root]
        for part in path.split(".")[:_DEEP] if path not in (".", "") else ():
            below = part if branch is root else f"{branch.path}.{part}"
            branch = branch.inside.setdefault(part, Branch(shown_name(part), shown_name(below)))
            passed.append(branch)
        if level > branch.level:
            branch.level, branch.said = level, said
        for one in passed:
            one.worst = max(one.worst, level)
    return root


def levels_of_run(worst: Mapping[str, tuple[float, int, int]]) -> dict[str, tuple[int, str]]:
    """Return levels from how unusual each module or parameter ever was."""
    found = {}
    for path, (z, step, rank) in worst.items():
        said = "NaN or Inf" if math.isinf(z) else f"{z:.3g} deviations from its usual"
        found[path] = level_of_z(z), f"{said}, step {step}, rank {rank}"
    return found
