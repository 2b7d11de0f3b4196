"""Wrong variants of PyTorch operators, as faulty kernels compute them: what a checker of operators is measured on.

Each is a right function, a wrong one and the inputs on which they differ, written without a look at how they'll be judged.
``python -m mutants.check`` (in ``bench``) tells which differ and by how much, and counts them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Mutant:
    """A wrong kernel: to be called as ``wrong(*inputs())``, and held against ``right``, which takes float64, too."""

    name: str
    operator: str
    fault: str
    right: Callable[..., Any]
    wrong: Callable[..., Any]
    inputs: Callable[[], tuple[Any, ...]]


def mutants() -> list[Mutant]:
    """Return all of them, sorted by name."""
    from . import backward, composites, formulas, indexing, reductions, stores, values, windows

    families = (stores, values, reductions, formulas, indexing, windows, composites, backward)
    found = [mutant for family in families for mutant in family.mutants()]
    names = [mutant.name for mutant in found]
    twice = {name for name in names if names.count(name) > 1}
    if twice:
        raise ValueError(f"Names must be unique; these occur twice: {sorted(twice)}.")
    return sorted(found, key=lambda mutant: mutant.name)
