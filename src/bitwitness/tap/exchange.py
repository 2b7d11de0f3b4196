"""One collective: what it is, and how its parts are read from what a process group's method was called with."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from bitwitness.stats.local import is_torchs_own
from bitwitness.tap.compat import process_groups

_REDUCTIONS = ("SUM", "AVG", "MAX", "MIN", "PRODUCT", "BAND", "BOR", "BXOR")
_IN_PLACE = ("all_reduce", "broadcast")


@dataclass(slots=True, eq=False)
class Exchange:
    """One collective of this rank.

    Attributes
    ----------
    op
        ``all_reduce``, ``broadcast``, ``all_gather``, ``reduce_scatter`` or ``all_to_all``.
    group
        Its members, by their numbers in the job.
    rank
        This rank's place among them.
    index
        How many collectives of these members came before it in the step.
    sent, received
        Tensors in the order of the ranks that they are for or from; one tensor that all share is to be cut into as many
        equal pieces, or into those of ``sizes_sent`` and ``sizes_received`` rows.
    reduction
        ``sum``, ``avg``, ``max``, ``min`` and so on; empty where nothing is reduced.
    root
        Who sends a broadcast: place in the group.
    noted
        What the handler keeps of it.

    """

    op: str
    group: tuple[int, ...]
    rank: int
    index: int
    sent: list[Tensor]
    received: list[Tensor]
    reduction: str = ""
    root: int = -1
    sizes_sent: list[int] = field(default_factory=list)
    sizes_received: list[int] = field(default_factory=list)
    noted: dict[str, Any] = field(default_factory=dict)
    versions: tuple[int, ...] = ()

    @property
    def in_place(self) -> bool:
        """Whether what is received takes the place of what was sent."""
        return self.op in _IN_PLACE


def members_of(group: Any) -> tuple[int, ...]:
    """Return a group's ranks; none where torch does not know it."""
    c10d: Any = sys.modules["torch.distributed.distributed_c10d"]
    known = next((one for one in process_groups() if one is group or one.group_name == group.group_name), None)
    return () if known is None else tuple(c10d.get_process_group_ranks(known))


def read_call(op: str, name: str, members: tuple[int, ...], rank: int, args: tuple[Any, ...]) -> Exchange | None:
    """Return what a process group's method was called with; None in a form that is not known."""
    reduction, root = "", -1
    if op in _IN_PLACE:
        sent = received = list(args[0]) if isinstance(args[0], list | tuple) else [args[0]]
        if len(sent) != 1 or len(args) != 2:
            return None
        reduction = _reduction(args[1].reduceOp) if op == "all_reduce" else ""
        root = int(args[1].rootRank) if op == "broadcast" else -1
    else:
        received, sent = (_flat(value) for value in args[:2])
    if op == "reduce_scatter":
        reduction = _reduction(args[2].reduceOp)
    exchange = Exchange(op, members, rank, 0, sent, received, reduction, root)
    if name in ("all_to_all_single", "alltoall_base"):
        exchange.sizes_received, exchange.sizes_sent = list(args[2]), list(args[3])
    return exchange if plain(sent) and plain(received) else None


def _reduction(op: Any) -> str:
    known: Any = sys.modules["torch.distributed"].ReduceOp
    return next((name.lower() for name in _REDUCTIONS if op == getattr(known, name)), "other")


def _flat(value: Any) -> list[Tensor]:
    """Return the tensors of an argument: one, a list of them, or a list of one list."""
    if isinstance(value, Tensor):
        return [value]
    if len(value) == 1 and isinstance(value[0], list | tuple):
        return list(value[0])
    return list(value)


def plain(tensors: list[Tensor]) -> bool:
    """Tell whether all are strided tensors of no class of their own."""
    return all(is_torchs_own(t) and t.layout is torch.strided for t in tensors)
