"""Whether one run recorded a part of the other's model alone: scripts may call a model, or its parts one by one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from bitwitness.comparison.matching.frame import StepFrame
from bitwitness.comparison.matching.lined import Place
from bitwitness.store.beside import runs_of_process
from bitwitness.store.source import Source


def models_of(source: Source) -> list[Path]:
    """Return the recordings of all models of the process that a recording is of; none of another tool's."""
    return runs_of_process(source.path) if source.kind == "bitwitness" else []


def recorded_in_parts(a: Source, b: Source, models: Sequence[Sequence[Path]], first: Place) -> str:
    """Say that one run's process recorded several models, the first of which is a part of the other's; else empty.

    Each part has a recording of its own then, in which it is the model.

    Parameters
    ----------
    models
        Both processes' recordings, as `models_of`.
    first
        The first step that is compared.

    """
    if len(models[0]) == len(models[1]):
        return ""
    roots = _classes(a, first.rank, first.step), _classes(b, first.rank, first.step_b)
    whole, part = (0, 1) if len(models[1]) > len(models[0]) else (1, 0)
    name = roots[part].get(".", "")
    paths = [path for path, op in roots[whole].items() if op == name]
    if roots[whole].get(".", name) == name or not paths:
        return ""
    return (
        f"run {'AB'[part]} calls parts of the model one by one, and recorded each alone, {paths[0]} ({name}) first, "
        f"where run {'AB'[whole]} calls the {roots[whole]['.']} as a whole"
    )


def _classes(source: Source, rank: int, step: int) -> dict[str, str]:
    nodes = StepFrame(source.table(rank, step)).nodes
    return {node.module: node.op for node in nodes if node.kind == "module" and node.phase == "forward"}
