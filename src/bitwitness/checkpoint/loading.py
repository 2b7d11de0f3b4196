"""Loading the newest checkpoint that is sealed and intact: the same on all ranks, however many there were."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint import state_dict_loader
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader

from bitwitness.checkpoint.group import Together, together
from bitwitness.checkpoint.manifest import seal_of
from bitwitness.checkpoint.own import ours
from bitwitness.checkpoint.planners import PlainLoadPlanner
from bitwitness.checkpoint.resumed import note_resumed
from bitwitness.checkpoint.saving import reason_of
from bitwitness.checkpoint.steps import bound, looked_at, name_of, steps_in
from bitwitness.checkpoint.verifying import Checked
from bitwitness.errors import UnreadError, UsageError
from bitwitness.files.shown import say, shown
from bitwitness.store.dcp import METADATA, DcpChunks
from bitwitness.store.entry import inside


def load(
    state_dict: dict[str, Any],
    where: str | os.PathLike[str],
    *,
    before: int | None = None,
    process_group: dist.ProcessGroup | None = None,
) -> int | None:
    """Load a checkpoint into a state, in place, once every byte of it was held against its seal.

    Collective over the ranks of the group, which may be more or fewer than those that saved. The ranks share the files out
    to verify them, and take the same checkpoint: a damaged one is refused by all, by name, and the one before is tried.
    Plain values that are no tensors are read as `torch.load` reads them with ``weights_only=True``.

    Parameters
    ----------
    state_dict
        As for `save`: its tensors are written into, plain values replaced, objects with ``load_state_dict`` told.
    where
        The folder that `save` was given, of which the newest intact checkpoint is taken; or one checkpoint.
    before
        As for `latest`; not for a single checkpoint, which whoever names it has chosen.
    process_group
        Of torch.distributed; the default one.

    Returns
    -------
    int or None
        The step of the checkpoint; None if there is none that may be taken. The state is then as it was. Of a checkpoint that
        was sealed by `seal` without a step: 0.

    Raises
    ------
    UnreadError
        If a checkpoint that was named is damaged or has no seal; or all that there are are damaged: to begin anew over them
        is not a thing that should happen by itself.

    """
    ranks = together(process_group)
    ranks.wait()
    place = Path(where)
    if (place / METADATA).exists() or seal_of(place).exists():
        checked, mine = looked_at(place, (ranks.rank, ranks.size))
        if (problem := ranks.worst(mine)) is not None or checked is None:
            raise UnreadError(f"{problem}; nothing was loaded")
        return _load(state_dict, checked, ranks)
    limit = bound(before)
    steps = ranks.numbers([step for step in steps_in(place) if limit is None or step < limit])
    for step in steps:
        checked, mine = looked_at(place / name_of(step), (ranks.rank, ranks.size))
        problem = ranks.worst(mine)
        if problem is None and checked is not None:
            return _load(state_dict, checked, ranks)
        if ranks.rank == 0:
            say(f"{problem}; it is refused, and the one before is taken")
    if steps:
        raise UnreadError(
            f"none of the {len(steps)} checkpoints in {shown(place)} that may be taken is intact (see above); restore one from "
            "a backup, or name another folder to begin anew"
        )
    return None


def _load(state_dict: dict[str, Any], checked: Checked, ranks: Together) -> int:
    checkpoint, step = checked.path, checked.step or 0
    if checked.kind != "dcp":
        raise UsageError(
            f"{shown(checkpoint)} is of kind {checked.kind}; load() reads those of torch.distributed.checkpoint, as save() "
            "writes them: verify() this one, and read it as it was written"
        )
    for name in DcpChunks(checkpoint).files:  # its metadata name nothing that could run
        inside(checkpoint, name)
    try:
        with ours(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            state_dict_loader.load(
                state_dict,
                storage_reader=FileSystemReader(checkpoint),
                planner=PlainLoadPlanner(),
                process_group=ranks.group,
                no_dist=ranks.group is None,
            )
    except CheckpointException as error:
        raise UnreadError(
            f"{shown(checkpoint)} is intact, and could not be loaded into this state: {shown(reason_of(error))}; what is "
            "neither a tensor nor a plain value is not read, for unpickling it could run code. The state may be loaded in part"
        ) from error
    note_resumed(step)
    return step
