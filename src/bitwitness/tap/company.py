"""Which ranks train a model together."""

from __future__ import annotations

import torch.distributed as dist
from torch import nn

from bitwitness.ranks import Alone, Ranks, SideChannel
from bitwitness.tap.compiled import distributed
from bitwitness.tap.sharded import sharding_of


def join_ranks(model: nn.Module, deadline_s: float) -> Ranks:
    """Return the side channel among the ranks that train ``model`` together, or `Alone`."""
    if (wrapper := distributed(model)) is not None:
        group = wrapper.process_group
        return SideChannel(group, deadline_s=deadline_s) if dist.get_world_size(group) > 1 else Alone()
    sharding = sharding_of(model)
    if sharding.spread and dist.is_initialized() and dist.get_world_size(sharding.group()) > 1:
        return SideChannel(sharding.group(), deadline_s=deadline_s)
    return Alone()
