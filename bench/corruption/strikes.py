"""What is struck, and how: operators through a device that computes wrongly, state and messages where they lie in memory."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from detection.faults import SORTS, Places, change
from torch import nn

from bitwitness.inject.patterns import corrupt
from bitwitness.stats.local import local_parts
from bitwitness.testing import Fault, from_mapping

COMPUTED = ("forward", "backward", "recomputed")
"""An operator's result; one of a forward that activation checkpointing runs again."""
STATE = ("weight", "optimizer state", "buffer")
"""Bits in memory between one step's end and the next forward."""
RECEIVED = ("received",)
"""A gradient in memory, between its reduction and its use."""
SENT = ("collective",)
"""What one rank gives to a collective, or is given by it."""
CLASSES = ("transient", "persistent", "intermittent")
_BITS = 12  # from the top: the sign, the exponent, the highest bits of the mantissa


def draw(
    rng: random.Random, places: Places, model: nn.Module, wanted: Sequence[str], collectives: Sequence[str] = ()
) -> dict[str, Any]:
    """Return a fault: ``place``, ``sort`` (flip or pattern), ``class``, ``where`` and ``fault`` as a user would declare it.

    ``collectives``: sites of those that the training makes.
    """
    place = rng.choice(wanted)
    if place in SENT:
        where, kind = rng.choice(collectives), "transient"
    elif place in COMPUTED:
        sites = places.operators["backward" if place == "backward" else "forward"]
        where = rng.choice([s for s in sites if ".block" in s] if place == "recomputed" else sites)
        kind = "transient" if place == "recomputed" else rng.choice(CLASSES)
    else:
        names = (
            [n for n, b in model.named_buffers() if b.is_floating_point()] if place == "buffer" else places.parameters
        )
        where, kind = rng.choice(names), "transient"
    sort = rng.choice(SORTS)
    fault = change(rng, sort, _BITS)
    if place in COMPUTED and kind != "transient":
        fault["element"] = rng.randrange(64)
    if kind == "intermittent":
        fault["probability"] = rng.choice((0.2, 0.4, 0.6))
    return {"place": place, "sort": sort, "class": kind, "where": where, "fault": fault}


def as_fault(drawn: dict[str, Any], **more: Any) -> Fault:
    """Return the declared fault of an operator."""
    once = {"times": 1} if drawn["class"] == "transient" else {}
    return from_mapping({"fault": [{**drawn["fault"], **once, **more}]})[0]


def strike(tensor: torch.Tensor, drawn: dict[str, Any], seed: int) -> bool:
    """Change bits of a tensor behind everybody's back: no version is counted; return whether any changed."""
    local = local_parts(tensor.detach())[0]
    struck = corrupt(local, from_mapping({"fault": [drawn["fault"]]})[0], np.random.default_rng(seed))
    if struck is None or torch.equal(struck.view(torch.uint8), local.contiguous().view(torch.uint8)):
        return False
    local.data.copy_(struck)
    return True


def strike_state(model: nn.Module, optimizer: torch.optim.Optimizer, drawn: dict[str, Any], seed: int) -> bool:
    """Strike the weight, the optimizer's state of it, or the buffer that is named."""
    if drawn["place"] == "buffer":
        return strike(dict(model.named_buffers())[drawn["where"]], drawn, seed)
    parameter = dict(model.named_parameters())[drawn["where"]]
    if drawn["place"] == "weight":
        return strike(parameter, drawn, seed)
    held = [v for v in optimizer.state[parameter].values() if isinstance(v, torch.Tensor) and v.dim() and v.numel()]
    return bool(held) and strike(held[seed % len(held)], drawn, seed)
