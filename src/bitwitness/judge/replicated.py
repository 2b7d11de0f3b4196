"""Experiment 0 on a model's state: which tensors every rank is to hold alike, and whether they do.

Parameters that are replicated; buffers that are broadcast before each forward; what optimizers keep, from the time on at which
it was seen to be the same on all ranks: some keep other things on each (`ZeroRedundancyOptimizer`, errors that they feed back).
Under FSDP2 the shards of ranks that differ in a replicating dimension of the mesh alone.
"""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import nn

from bitwitness.capture.step import StepRecord
from bitwitness.judge.replicas import Desync, find_desync
from bitwitness.ranks import Ranks
from bitwitness.sense.held import HeldState, Name, Reading, read
from bitwitness.tap.compat import ignored_by_ddp
from bitwitness.tap.sharded import Sharding

OTHER_STATE = "the ranks' optimizers keep state of other parameters, or of other kinds (ZeroRedundancyOptimizer?)"
NEVER_EQUAL = "optimizer state differed between ranks when it was first compared, and is left to them"


class Replicas:
    """Compares one root's replicated state over its ranks.

    Parameters
    ----------
    ranks
        The side channel.
    root
        The user's own module.
    held
        Finds its parameters and optimizer state.
    sharding
        How its parameters are spread.
    broadcasts
        Whether buffers are broadcast before each forward.

    """

    def __init__(self, ranks: Ranks, root: nn.Module, held: HeldState, sharding: Sharding, *, broadcasts: bool) -> None:
        self._ranks, self._root, self._held = ranks, root, held
        self._sharding, self._broadcasts = sharding, broadcasts
        self.groups: list[int] | None = None
        """Every rank's group under FSDP2, once it is known: the ranks of one hold the same shards."""
        self._replicated: frozenset[Name] = frozenset()
        self._known: set[Name] = set()
        """Optimizer state that was once equal on all ranks that are to hold the same."""
        self.apart: set[Name] = set()
        """Optimizer state that never was."""
        self.left_out: str = ""
        """Why optimizer state is not compared at all, if so."""
        self.compared = 0
        self.tensors = 0
        self.bytes = 0

    def remember(self, before: Replicas) -> None:
        """Go on with what was learned of the same root's state."""
        self.groups, self._replicated = before.groups, before._replicated
        self._known, self.apart, self.compared = before._known, before.apart, before.compared

    @property
    def unshared(self) -> bool:
        """Whether it is not known that any two ranks hold the same shards."""
        return self.groups is None or len(set(self.groups)) == len(self.groups)

    def table(self) -> dict[str, Any]:
        """Return what was compared, ready for JSON."""
        return {"steps": self.compared, "tensors": self.tensors, "bytes": self.bytes if self.compared else 0}

    @property
    def possible(self) -> bool:
        """Whether ranks may hold the same state at all."""
        return self._ranks.size > 1 and (not self._sharding.spread or self._sharding.fsdp2)

    def compare(self, record: StepRecord, reading: Reading | None = None) -> Desync | None:
        """Compare; collective. ``reading``: parameters and optimizer state as they are now, if they were read already."""
        if not self.possible or not self._shared():
            return None
        reading = reading or read(self._held.parameters() | self._held.optimizer())
        parameters = [name for name in reading.tensors if not name.key and self._is_shared(name)]
        optimizer = [name for name in reading.tensors if name.key and self._is_shared(name) and name not in self.apart]
        self.compared += 1
        self.tensors, self.bytes = len(parameters) + len(optimizer), reading.bytes
        alike = self._alike(parameters, optimizer)
        if not alike[0]:
            return None  # parts of a pipeline, say: nobody holds what another does
        reading.compared = frozenset(parameters)
        buffers = self._buffers(record)
        names: list[Any] = [*parameters, *buffers]
        hashes = torch.cat([reading.of(parameters), read(buffers).hashes])
        found = find_desync(self._ranks, names, hashes, self.groups)
        if found is not None:
            return found
        if not alike[1]:
            self.left_out = OTHER_STATE
            return None
        desync = self._compare_optimizer(optimizer, reading)
        reading.compared |= self._known.intersection(optimizer)
        return desync

    def _compare_optimizer(self, names: list[Name], reading: Reading) -> Desync | None:
        """Compare optimizer state; what differs at the first time is the ranks' own. Collective."""
        self.left_out = ""
        while names:
            found = find_desync(self._ranks, names, reading.of(names), self.groups)
            if found is None:
                break
            differing = {names[position] for position in found.positions}
            if differing & self._known:
                return found
            self.apart |= differing
            names = [name for name in names if name not in differing]
        self._known |= set(names)
        return None

    def _alike(self, *several: list[Name]) -> list[bool]:
        """Tell, of each list, whether all ranks have the same names, in one order; collective."""
        digests = [hashlib.sha256("\n".join(map(repr, names)).encode()).digest()[:8] for names in several]
        mine = torch.frombuffer(bytearray(b"".join(digests)), dtype=torch.int64)
        most, least = self._ranks.max(torch.cat([mine, ~mine])).chunk(2)
        return (most == ~least).tolist()

    def _buffers(self, record: StepRecord) -> dict[Name, torch.Tensor]:
        """Return the buffers of the last forward, if they were made the same on all ranks before it; collective."""
        here = self._broadcasts and bool(record.forwards) and record.forwards[-1].broadcast
        if self._sharding.spread or bool(self._ranks.max(torch.tensor([float(not here)]))):
            return {}
        own = ignored_by_ddp(self._root)
        pairs = zip([name for name, _ in self._root.named_buffers()], record.forwards[-1].buffers, strict=False)
        return {Name(name): value for name, value in pairs if isinstance(value, torch.Tensor) and name not in own}

    # -- shards --------------------------------------------------------------------------------------------------

    def _shared(self) -> bool:
        """Find out which ranks hold the same shards; collective, once. Return whether any two do."""
        if not self._sharding.fsdp2:
            return True
        if self.groups is None:
            place, self._replicated = _place(self._root)
            self.groups = self._ranks.gather(torch.tensor([place])).reshape(-1).tolist()
        return len(set(self.groups)) < len(self.groups)

    def _is_shared(self, name: Name) -> bool:
        return not self._sharding.fsdp2 or Name(name.parameter) in self._replicated


def _place(root: nn.Module) -> tuple[int, frozenset[Name]]:
    """Return a number that ranks have in common which hold the same shards, and the parameters for which this is so.

    Where parameters are spread in several ways, those of the most usual one.
    """
    found: dict[str, list[Name]] = {}
    for name, parameter in root.named_parameters():
        if hasattr(type(parameter), "to_local"):
            mesh, placements = parameter.device_mesh, parameter.placements  # type: ignore[attr-defined]
            whose = [c for c, placement in zip(mesh.get_coordinate(), placements, strict=True) if placement.is_shard()]
            found.setdefault(f"{tuple(mesh.mesh.shape)} {placements} {whose}", []).append(Name(name))
    if not found:
        return 0, frozenset()
    key = max(found, key=lambda one: len(found[one]))
    number = int.from_bytes(hashlib.sha256(key.encode()).digest()[:7])
    return number, frozenset(found[key])
