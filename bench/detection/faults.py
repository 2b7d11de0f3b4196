"""Drawing a fault: its class, its place and what it does to the value there."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from bitwitness.inject.outputs import computed, computes
from bitwitness.tap.modules import ModuleTracker
from bitwitness.tap.operators import OperatorTap

PLACES = ("forward", "backward", "gradient", "weight", "activation gradient")
"""An operator's result in forward or backward; a weight's gradient; a weight; the gradient of a module's output."""

SORTS = ("flip", "pattern")
CLASSES = tuple((place, sort) for place in PLACES for sort in SORTS)
_BITS = 9  # the sign and the eight exponent bits of float32 and bfloat16
_CHANGES: tuple[dict[str, Any], ...] = (
    {"kind": "nullify"},
    {"kind": "multiply", "factor": 64.0},
    {"kind": "multiply", "factor": -30.0},
    {"kind": "multiply", "factor": 1e4},
    {"kind": "stuck_at", "bit": -3, "value": 1},
    {"kind": "multiply_max"},
    {"kind": "permute"},
)
_SHAPES = ("row", "column", "tile", "warp")


@dataclass(frozen=True)
class Places:
    """Where faults can strike in one step of a model."""

    operators: dict[str, list[str]]  # by phase: sites
    parameters: list[str]
    modules: list[str]


def survey(model: nn.Module, step: Callable[[], torch.Tensor]) -> Places:
    """Run one step and return every place in it."""
    sites: dict[str, dict[str, None]] = {"forward": {}, "backward": {}}

    def note(call: Any) -> None:
        if call.module == "." and call.phase == "backward" and "detach" in call.op:
            return
        for slot, tensor in computed(call):
            if tensor.is_floating_point() and tensor.numel():
                sites[call.phase][str(call.site(slot))] = None

    seen: dict[str, None] = {}
    handles = [
        module.register_forward_hook(
            lambda _m, _i, out, name=name: seen.setdefault(name) if _takes_gradient(out) else None
        )
        for name, module in model.named_modules()
        if name
    ]
    tracker = ModuleTracker()
    tracker.name_tree(model)
    with OperatorTap(tracker, note, computes):
        loss = step()
        tracker.restart_calls()
        loss.backward()
    for handle in handles:
        handle.remove()
    parameters = [name for name, p in model.named_parameters() if p.requires_grad]
    return Places({phase: list(found) for phase, found in sites.items()}, parameters, list(seen))


def _takes_gradient(out: Any) -> bool:
    return isinstance(out, torch.Tensor) and out.requires_grad


def draw(rng: random.Random, places: Places, classes: Sequence[tuple[str, str]] = CLASSES) -> dict[str, Any]:
    """Return a trial: ``place``, ``sort``, ``where`` and ``fault`` (as a user would declare it)."""
    place, sort = rng.choice(classes)
    if place in places.operators:
        where = rng.choice(places.operators[place])
    else:
        where = rng.choice(places.modules if place == "activation gradient" else places.parameters)
    return {"place": place, "sort": sort, "where": where, "fault": change(rng, sort)}


def change(rng: random.Random, sort: str, bits: int = _BITS) -> dict[str, Any]:
    """Return what a fault does to a value, as a user would declare it; a flip is of one of the ``bits`` highest."""
    if sort == "flip":
        return {"kind": "bitflip", "bit": -1 - rng.randrange(bits)}
    return {**rng.choice(_CHANGES), "pattern": rng.choice(_SHAPES)}
