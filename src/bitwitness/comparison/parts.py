"""Whether one run recorded a part of the other's model alone: scripts may call a model, or its parts one by one."""

from __future__ import annotations

from bitwitness.comparison.frame import StepFrame
from bitwitness.store.beside import runs_of_process
from bitwitness.store.source import Source


def recorded_in_parts(a: Source, b: Source, frame_a: StepFrame, frame_b: StepFrame) -> str:
    """Say that one run's process recorded several models, the first of which is a part of the other's; else empty.

    Each part has a recording of its own then, in which it is the model.
    """
    roots, models = (
        [_classes(frame) for frame in (frame_a, frame_b)],
        [len(runs_of_process(one.path)) for one in (a, b)],
    )
    for whole, part in ((0, 1), (1, 0)):
        name = roots[part].get(".", "")
        paths = [path for path, op in roots[whole].items() if op == name]
        if models[part] > models[whole] and roots[whole].get(".", name) != name and paths:
            return (
                f"run {'AB'[part]} calls parts of the model one by one, and recorded each alone, {paths[0]} ({name}) first, "
                f"where run {'AB'[whole]} calls the {roots[whole]['.']} as a whole"
            )
    return ""


def _classes(frame: StepFrame) -> dict[str, str]:
    return {node.module: node.op for node in frame.nodes if node.kind == "module" and node.phase == "forward"}
