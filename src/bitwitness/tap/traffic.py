"""Whether ranks exchanged something: the process groups' own counters of collectives, read without waiting."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from bitwitness.tap.compat import operations_begun, process_groups

Reading = tuple[tuple[int, int], ...]
"""For each process group of this process: its ``id`` and how many operations it has begun."""


def read_traffic() -> Reading:
    """Return the counters of all process groups of several ranks; empty where there are none, or they do not count."""
    found = []
    for group in process_groups():
        if group.size() == 1:
            continue  # nobody is there to exchange anything with
        try:
            found.append((id(group), operations_begun(group)))
        except RuntimeError:  # a backend that does not count
            continue
    return tuple(found)


class TrafficCount:
    """Counts the collectives that this process begins from now on, in groups of several ranks that count them."""

    def __init__(self) -> None:
        self._before = dict(read_traffic())
        self._latest: dict[int, int] = {}

    def note(self) -> None:
        """Read the counters; a group that is destroyed later has no more to tell."""
        self._latest.update(read_traffic())

    @property
    def total(self) -> int:
        """How many were begun until the counters were last read."""
        return sum(count - self._before.get(key, 0) for key, count in self._latest.items())


def groups_between(before: Reading, after: Reading) -> list[Any]:
    """Return the process groups that were used between two readings."""
    if before == after:
        return []
    known = dict(before)
    moved = {key for key, count in after if known.get(key) != count}
    return [group for group in process_groups() if id(group) in moved]


def without(begun: Reading, ended: Reading, earlier: Reading) -> Reading:
    """Return an earlier reading as it would have been had what went on between two later ones gone on before it."""
    if begun == ended:
        return earlier
    before = dict(begun)
    moved = {key: count - before.get(key, count) for key, count in ended}
    return tuple((key, count + moved.get(key, 0)) for key, count in earlier)


def strangers(partners: set[int], members: Sequence[int]) -> str | None:
    """Return why forwards cannot be run again that exchange something with ranks which are not asked to do the same.

    ``partners``: with whom they exchange something; ``members``: the ranks that train the model, and run it again, together.
    """
    others = sorted(partners - set(members))
    if not others:
        return None
    names = ", ".join(map(str, others[:4]))
    return (
        f"the forward exchanges something with other ranks ({names}), which do not train this model together with this one"
        if members
        else "the forward exchanges something with other ranks, which are not known to train this model together"
    )


def world_size() -> int:
    """Return how many ranks the job has; 1 where it is not distributed."""
    module: Any = sys.modules.get("torch.distributed.distributed_c10d")
    return int(module.get_world_size()) if module is not None and module.is_initialized() else 1
