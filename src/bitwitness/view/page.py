"""What the pages of a view ask for: our own files, and JSON of the runs."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from importlib.resources import files
from typing import Any

from bitwitness.errors import UsageError
from bitwitness.view.colours import LOOKS, State
from bitwitness.view.explorer import AT_ONCE, INSTALL, KINDS, LOADER, MOST_NODES, Explorer, address, installed
from bitwitness.view.live import Live
from bitwitness.view.nodedata import attributes_of, changes_json, graph_json, states_json, told_of
from bitwitness.view.scene import Scene, Side, to_json
from bitwitness.view.server import Answer, Pages, Query

_OURS = {"": "page.html", "page.js": "page.js", "tree.js": "tree.js", "live.js": "live.js", "page.css": "page.css"}


def pages_of(
    scene: Callable[[], Scene | None], live: Live, *, explorer: bool = True, most: int = MOST_NODES
) -> Callable[[str], Pages]:
    """Return what makes a view's pages.

    Parameters
    ----------
    scene
        Gives what is to be shown, looked at again as a run grows; None where nothing was recorded (yet).
    live
        Tells what is new.
    explorer
        Whether to use Model Explorer, where it is installed.
    most
        Nodes up to which it is used.

    """

    def made(prefix: str) -> Pages:
        found = installed(f"{prefix}explorer/") if explorer else None
        sent = {name: _our_file(file) for name, file in _OURS.items()}
        if found is not None:
            sent |= {f"explorer/{name}": file for name, file in found.files.items()}
            sent["explorer/"] = found.files["index.html"]
        asked = _Asked(scene, live, found, f"{prefix}explorer/", most, off=not explorer)
        return Pages(sent, asked.answers())

    return made


def _our_file(name: str) -> tuple[str, bytes]:
    file = files("bitwitness.view") / "static" / name
    return KINDS[f".{name.rpartition('.')[2]}"], file.read_bytes()


class _Asked:
    """The answers, each from a request's query."""

    def __init__(
        self,
        scene: Callable[[], Scene | None],
        live: Live,
        explorer: Explorer | None,
        prefix: str,
        most: int,
        *,
        off: bool,
    ) -> None:
        self._scene, self._live, self._explorer, self._prefix, self._most = scene, live, explorer, prefix, most
        self._off = off

    def answers(self) -> dict[str, Answer]:
        """Return them by path; below ``explorer/`` those that Model Explorer's page asks for."""
        ours: dict[str, Answer] = {
            "data/scene": self.scene,
            "data/place": self.place,
            "data/node": self.node,
            "data/live": lambda query: self._live.news(_number(query, "after", 10**9)),
        }
        if self._explorer is not None:
            ours |= {
                "explorer/api/v1/load_graphs_json": self.graphs,
                "explorer/api/v1/load_node_data": self.node_data,
                "explorer/api/v1/get_extensions": lambda _query: [LOADER],
                "explorer/api/v1/check_new_version": lambda _query: dict.fromkeys(
                    ("version", "runningVersion", "releaseUrl", "desktopAppUrl"), ""
                ),
            }
        return ours

    def scene(self, _query: Query) -> Any:
        """Tell of the runs, their places, and how states look."""
        scene = self._scene()
        looks = {
            look.name: {"symbol": look.symbol, "words": look.words, "rank": int(state)} for state, look in LOOKS.items()
        }
        known = {"runs": [], "conclusion": "", "places": [], "first": 0} if scene is None else to_json(scene)
        explorer = {"installed": self._explorer is not None, "off": self._off, "install": INSTALL}
        return known | {"looks": looks, "explorer": explorer, "live": [run.name for run in self._live.runs]}

    def place(self, query: Query) -> Any:
        """Return a place's graphs, as our own page shows them, its suspects, and where Model Explorer opens it."""
        scene, number, sides = self._sides(query)
        place = scene.places[number]
        suspects = scene.suspects(place)
        size = sum(len(side.graph.nodes) for side in sides)
        usable = self._explorer is not None and size <= self._most
        graphs = [(2 * number + which, side.graph.name) for which, side in enumerate(sides)]
        names = [
            f"{'AB'[which]} {_plain(name)}" if len(sides) > 1 else _plain(name)
            for which, name in enumerate(scene.names)
        ]
        selected = suspects[0]["id"] if suspects and size <= AT_ONCE else ""
        return {
            "sides": [_tree(side) for side in sides],
            "suspects": suspects,
            "explorer": address(self._prefix, names, graphs, selected) if usable else None,
            "at_once": size <= AT_ONCE,
            "nodes": size,
            "most": self._most,
        }

    def node(self, query: Query) -> Any:
        """Return all that is known of one node, in each run that has it."""
        _, _, sides = self._sides(query)
        told = []
        for side in sides:
            node = next((one for one in side.graph.nodes if one.id == query.get("id")), None)
            if node is not None:
                outputs = [list(told_of(value)) for value in node.outputs]
                found = attributes_of(node, side.found.get(node.id))
                told.append({"graph": side.graph.name, "attributes": found, "outputs": outputs})
        if not told:
            raise UsageError("no node of that name is in this step")
        return told

    def graphs(self, query: Query) -> Any:
        """Return a graph in Model Explorer's format."""
        side = self._side(_number(query, "graph_index", 10**6))
        return {"graphs": [graph_json(side.graph, side.found)]}

    def node_data(self, query: Query) -> Any:
        """Return what colours the nodes of a graph, as a text of JSON, as Model Explorer wants it."""
        number = _number(query, "node_data_index", 2 * 10**6)
        side = self._side(number // 2)
        data = changes_json(side.graph, side.found) if number % 2 else states_json(side.graph, side.found)
        return {"content": json.dumps(data or {side.graph.name: {"results": {}}}, allow_nan=False)}

    def _sides(self, query: Query) -> tuple[Scene, int, list[Side]]:
        scene = self._scene()
        number = _number(query, "place", 10**6)
        if scene is None or number >= len(scene.places):
            raise UsageError(f"there is no place {number}; expected one of those listed")
        return scene, number, scene.sides(scene.places[number])

    def _side(self, number: int) -> Side:
        _, _, sides = self._sides({"place": str(number // 2)})
        if number % 2 >= len(sides):
            raise UsageError(f"there is no graph {number}")
        return sides[number % 2]


def _number(query: Query, name: str, most: int) -> int:
    text = query.get(name, "")
    if not (text.isascii() and text.isdigit() and len(text) < 10 and int(text) <= most):
        raise UsageError(f"{name}: expected a number from 0 to {most}")
    return int(text)


def _plain(name: str) -> str:
    """Return a run's name as it may stand in Model Explorer's own addresses, which are parted by slashes."""
    return name.replace("/", "_") or "run"


def _tree(side: Side) -> Mapping[str, Any]:
    """Return a graph as short as can be: for each node its id, label, group, state and change."""
    groups: dict[str, int] = {}
    nodes = []
    for node in side.graph.nodes:
        found = side.found.get(node.id)
        state = LOOKS[found.state if found is not None else State.SEEN].name
        change = None if found is None or found.change is None or not math.isfinite(found.change) else found.change
        nodes.append([node.id, node.label, groups.setdefault(node.path, len(groups)), state, change])
    return {"name": side.graph.name, "groups": [path.split("/") for path in groups], "nodes": nodes}
