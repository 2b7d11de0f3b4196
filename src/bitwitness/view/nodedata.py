"""Graphs in the file format of Google's Model Explorer: the graph, and the data that colours its nodes.

The format is that of ``model_explorer.graph_builder`` and ``model_explorer.node_data_builder`` (0.1.34), written here by hand:
nothing of that package is imported.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

from bitwitness.view.colours import LOOKS, State, worst
from bitwitness.view.found import Found
from bitwitness.view.graph import Graph, GraphNode, Value

_MARKED = 2_000
"""Groups that get a colour: each is looked for in a regular expression of the page."""
_STEPS = (
    (1e-7, "#cfead6"),
    (1e-5, "#e6f0c0"),
    (1e-3, "#fff3b0"),
    (1e-2, "#ffd8a8"),
    (1e-1, "#f5a08c"),
    (math.inf, "#c5221f"),
)


def graph_json(graph: Graph, found: Mapping[str, Found]) -> dict[str, Any]:
    """Return a graph for Model Explorer's JSON loader; groups take the colour of the worst node in them."""
    return {
        "id": graph.name,
        "nodes": [_node(node, found.get(node.id)) for node in graph.nodes],
        "groupNodeAttributes": _module_attributes(graph.nodes),
        "groupNodeConfigs": _group_colours(graph, found),
    }


def states_json(graph: Graph, found: Mapping[str, Found]) -> dict[str, Any]:
    """Return the node data that colours by state, in words: a collapsed group tells how many of each are in it."""
    results = {}
    for node in graph.nodes:
        look = LOOKS[found[node.id].state if node.id in found else State.SEEN]
        results[node.id] = {"value": look.label, "bgColor": look.background, "textColor": look.text}
    return {
        graph.name: {
            "results": results,
            "name": "found",
            "showExpandedSummaryOnGroupNode": True,
            "showLabelCountColumnsInChildrenStatsTable": True,
        }
    }


def changes_json(graph: Graph, found: Mapping[str, Found]) -> dict[str, Any] | None:
    """Return the node data that colours by how far results are apart, relatively; None where nothing was compared."""
    changes = {key: one.change for key, one in found.items() if one.change is not None}
    if not changes:
        return None
    # JSON has no infinity; what is in no relation any more is put at the end of the scale.
    results = {key: {"value": min(change, 1e30) if change == change else 1e30} for key, change in changes.items()}  # noqa: PLR0124
    limits = [{"value": min(limit, 1e31), "bgColor": colour} for limit, colour in _STEPS]
    return {graph.name: {"results": results, "name": "relative change", "thresholds": limits}}


def _node(node: GraphNode, found: Found | None) -> dict[str, Any]:
    attributes = [{"key": key, "value": value} for key, value in attributes_of(node, found)]
    made: dict[str, Any] = {
        "id": node.id,
        "label": node.label,
        "namespace": node.path,
        "attrs": attributes,
        "incomingEdges": [
            {"sourceNodeId": maker, "sourceNodeOutputId": out, "targetNodeInputId": slot}
            for maker, out, slot in node.reads
        ],
        "outputsMetadata": [
            {"id": str(number), "attrs": [{"key": key, "value": text} for key, text in told_of(value)]}
            for number, value in enumerate(node.outputs)
        ],
    }
    if node.kind == "module":
        made["config"] = {"pinToGroupTop": True}
    return made


def attributes_of(node: GraphNode, found: Found | None) -> list[tuple[str, str]]:
    """Return what a click on a node shows beside its outputs: what was found, its arguments and inputs, its call stack."""
    told = []
    if found is not None:
        told.append(("found", LOOKS[found.state].label))
        if found.text:
            told.append(("why", found.text))
        if found.change is not None:
            told.append(("relative change", f"{found.change:.3g}"))
        if found.other:
            told.append(("in the other run", found.other))
    told += [("site", node.site), ("kind", node.kind)]
    told += [("micro-batch", str(node.micro))] if node.micro else []
    told += [("arguments", node.args)] if node.args else []
    told += [(f"reads {value.slot}", _line(value)) for value in node.inputs]
    return told + ([("called at", node.stack)] if node.stack else [])


def _line(value: Value) -> str:
    return ", ".join(f"{key} {text}" for key, text in told_of(value) if key != "slot")


def told_of(value: Value) -> Iterable[tuple[str, str]]:
    """Yield what is known of a value, name by name, as text."""
    yield "slot", value.slot
    yield "shape", f"{value.dtype}{list(value.shape)}"
    if value.name:
        yield "name", value.name
    for key, number in value.stats.items():
        yield key, f"{number:.6g}" if isinstance(number, float) else str(number)


def _module_attributes(nodes: Iterable[GraphNode]) -> dict[str, dict[str, str]]:
    """Return what a click on a group shows: the results of the module that it is."""
    told: dict[str, dict[str, str]] = {}
    for node in nodes:
        if node.kind == "module":
            group = told.setdefault(node.path, {"module": node.label})
            group |= {value.slot: _line(value) for value in node.outputs}
    return told


def _group_colours(graph: Graph, found: Mapping[str, Found]) -> list[dict[str, Any]]:
    """Return the colours of groups that hold something to look at: one regular expression for each state."""
    states: dict[tuple[str, ...], list[State]] = {}
    for node in graph.nodes:
        state = found[node.id].state if node.id in found else State.SEEN
        for depth in range(1, len(node.group) + 1):
            states.setdefault(node.group[:depth], []).append(state)
    groups = {"/".join(group): worst(those) for group, those in states.items()}
    configs = []
    for state in (State.MADE_HERE, State.PASSED_ON, State.UNMATCHED):
        names = [re.escape(name) for name, its in groups.items() if its is state][:_MARKED]
        if names:
            look = LOOKS[state]
            border = look.background if state is State.MADE_HERE else look.text
            light = {"backgroundColor": "#fce8e6"} if state is State.MADE_HERE else {"backgroundColor": look.background}
            configs.append(
                {"namespaceRegex": f"^({'|'.join(names)})$", "borderColor": border, "textColor": "#202124"} | light
            )
    return configs
