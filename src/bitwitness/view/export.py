"""Graphs and node data as files, which Model Explorer opens anywhere, without us."""

from __future__ import annotations

import json
from pathlib import Path

from bitwitness.errors import UsageError
from bitwitness.files.shown import shown
from bitwitness.files.writing import write_text
from bitwitness.view.nodedata import changes_json, graph_json, states_json
from bitwitness.view.scene import Scene


def export(scene: Scene, folder: Path) -> list[Path]:
    """Write each place's graphs, and what colours them.

    ::

        DIR/a-rank0-step3.json            the graph (of B: b-…; of a single run: run-…)
        DIR/a-rank0-step3.found.json      node data: what was found
        DIR/a-rank0-step3.change.json     node data: how far results are apart, where two runs were compared

    Raises
    ------
    UsageError
        If the folder cannot be made, or there are files in it.

    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        taken = next(folder.iterdir(), None)
    except OSError as error:
        raise UsageError(f"--export {shown(folder)}: {error.strerror}; name a folder that is new or empty") from error
    if taken is not None:
        raise UsageError(
            f"--export {shown(folder)}: {shown(taken.name)} lies there; name a folder that is new or empty"
        )
    written = []
    for rank, step in scene.places:
        for number, side in enumerate(scene.sides((rank, step))):
            stem = f"{'ab'[number] if len(scene.names) > 1 else 'run'}-rank{rank}-step{step}"
            parts = {
                "": graph_json(side.graph, side.found),
                ".found": states_json(side.graph, side.found),
                ".change": changes_json(side.graph, side.found),
            }
            for suffix, data in parts.items():
                if data is not None:
                    written.append(folder / f"{stem}{suffix}.json")
                    write_text(written[-1], json.dumps(data, allow_nan=False))
    return written
