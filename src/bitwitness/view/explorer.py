"""The static files of Google's Model Explorer, where it is installed, made fit for a page that asks nobody outside.

Its package is never imported (that would need Flask and more): the files of its web page are read once, at the start.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import quote

PACKAGE = "ai-edge-model-explorer"
TRIED = "0.1.34"
INSTALL = f"pip install --no-deps {PACKAGE}=={TRIED}"
MOST_NODES = 60_000
"""Above that many nodes Model Explorer is not used."""
AT_ONCE = 5_000
"""Up to that many it opens by itself, at the first suspect; above, our tree does, and it is all collapsed when asked for."""
KINDS = {".html": "text/html; charset=utf-8", ".js": "text/javascript; charset=utf-8", ".css": "text/css; charset=utf-8",
         ".json": "application/json", ".png": "image/png", ".svg": "image/svg+xml", ".woff2": "font/woff2"}  # fmt: skip
LOADER = {
    "id": "builtin_json",
    "type": "adapter",
    "name": "JSON adapter",
    "description": "Graphs of bitwitness view",
    "fileExts": ["json"],
    "settings": {},
}
"""What reads graphs of this format: the page asks its server which there are."""
_PATHS = ("/api/v1/", "/apipost/v1/")


@dataclass(frozen=True, slots=True)
class Explorer:
    """Model Explorer's page: its files by their names, ready to be sent, each with its kind."""

    version: str
    files: Mapping[str, tuple[str, bytes]]


def installed(prefix: str) -> Explorer | None:
    """Read Model Explorer's page; None where it is not installed, or is built otherwise than what is known.

    Parameters
    ----------
    prefix
        Under which path it is served, with a slash at its end.

    """
    try:
        version = distribution(PACKAGE).version
    except PackageNotFoundError:
        return None
    spec = find_spec("model_explorer")
    places = list(spec.submodule_search_locations or ()) if spec is not None else []
    folder = next((Path(place) / "web_app" for place in places), None)
    if folder is None or not (folder / "index.html").is_file():
        return None
    files = {}
    for file in sorted(folder.rglob("*")):
        kind = KINDS.get(file.suffix)
        if kind is not None and file.is_file():
            files[file.relative_to(folder).as_posix()] = (kind, _fitted(file, prefix))
    return Explorer(version, files)


def _fitted(file: Path, prefix: str) -> bytes:
    """Return a file whose addresses are below our prefix, and that knows none outside."""
    data = file.read_bytes()
    if file.suffix not in (".html", ".js", ".css"):
        return data
    text = data.decode("utf-8").replace("/static_files/", f"{prefix}static_files/")
    if file.suffix == ".js":
        for path in _PATHS:
            text = text.replace(f'"{path}', f'"{prefix}{path[1:]}')
        # Where it would be told to reload, by a connection that stays open.
        return text.replace('new EventSource("/apistream/server_director")', "new EventTarget()").encode()
    if file.suffix == ".html":
        text = text.replace('<base href="/">', f'<base href="{prefix}">')
        text = text.replace(
            """ media="print" onload="this.media='all'\"""", ""
        )  # our policy runs no code in attributes
        text = re.sub(r"@font-face\{[^}]*https://fonts\.gstatic\.com[^}]*\}", "", text)
        text = re.sub(r'<link rel="preconnect"[^>]*>', "", text)
    return text.encode()


def address(prefix: str, names: list[str], graphs: list[tuple[int, str]], selected: str) -> str:
    """Return the address at which Model Explorer opens some graphs, each in a pane of its own.

    Parameters
    ----------
    names
        What to call the runs.
    graphs
        For each run the number by which its graph is asked for, and the graph's name. Its node data have twice that number
        (what was found) and the next one (how far results are apart).
    selected
        The node to open at; empty for none, with all groups collapsed.

    """
    width = 1 / len(graphs)
    # What comes last colours the nodes at first.
    data = [(1, "change"), (0, "found")] if len(graphs) > 1 else [(0, "found")]
    asked = {
        "models": [{"url": f"graphs://{name}/{number}"} for name, (number, _) in zip(names, graphs, strict=True)],
        "nodeData": [f"node_data://{what}/{number * 2 + which}" for number, _ in graphs for which, what in data],
        "nodeDataTargets": [name for name in names for _ in data],
        "uiState": {
            "paneStates": [
                {
                    "deepestExpandedGroupNodeIds": [],
                    "selectedNodeId": selected,
                    "selectedGraphId": graph,
                    "selectedCollectionLabel": name,
                    "widthFraction": width,
                }
                for name, (_, graph) in zip(names, graphs, strict=True)
            ]
        },
    }
    if len(graphs) > 1:
        asked["sync"] = {"mode": "match_node_id"}
    return f"{prefix}?data={quote(json.dumps(asked))}"
