"""Saving a state through torch DCP so that a checkpoint is whole and sealed, or not there."""

from __future__ import annotations

import copy
import os
import shutil
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.stateful import Stateful

from bitwitness.checkpoint.contents import Contents, hashes_in, named
from bitwitness.checkpoint.group import Together, together
from bitwitness.checkpoint.manifest import Manifest, part_of, seal_of, write_manifest
from bitwitness.checkpoint.own import ours
from bitwitness.checkpoint.planners import HashingSavePlanner
from bitwitness.checkpoint.sealing import sealed_files
from bitwitness.checkpoint.steps import clear, keep_newest, name_of, old_name, part_name
from bitwitness.errors import BitwitnessError, UnwrittenError, UsageError
from bitwitness.files.reading import listed
from bitwitness.files.shown import quoted, say, shown
from bitwitness.files.writing import sync_folder
from bitwitness.store.dcp import METADATA
from bitwitness.tap.compat import save_alone


class Saving:
    """A save that may still be under way."""

    def __init__(self, future: Future[Path]) -> None:
        self._future = future

    def done(self) -> bool:
        """Tell whether it has ended."""
        return self._future.done()

    def result(self, timeout: float | None = None) -> Path:
        """Wait for it, at most so many seconds; return the checkpoint's folder, or raise what went wrong.

        Raises
        ------
        UnwrittenError
            If it could not be written, or what was written is not what was in memory: on any rank, and then on all.
        TimeoutError
            If it is still under way.

        """
        return self._future.result(timeout)


def save(
    state_dict: dict[str, Any],
    folder: str | os.PathLike[str],
    step: int,
    *,
    asynchronous: bool = False,
    keep: int | None = None,
    process_group: dist.ProcessGroup | None = None,
) -> Saving:
    """Save a state as ``folder/step-00000040``, in the format of `torch.distributed.checkpoint`, sealed.

    Collective over the ranks of the group. Each rank writes and seals its own part, beside the final place; tensors are hashed
    in memory, before they are written, and read back after. When all is on the disk the checkpoint gets its name. A process
    that is killed at any moment leaves the earlier checkpoints as they are, and at most a hidden ``.step-….part`` that nothing
    reads and the next save removes. One that is there already for this step is replaced.

    Parameters
    ----------
    state_dict
        Tensors (DTensors, too), containers of these, plain values, objects with ``state_dict()``.
    folder
        A folder that all ranks see; made where it is not there. One job writes to it at a time.
    step
        How many steps the state has behind it.
    asynchronous
        Return when the state is copied to the host, and write in the background. A save that is still under way is waited for
        by the next.
    keep
        How many of the newest sealed checkpoints stay; all by default. A fault that is found late needs one that is older
        than its first trace: keep several.
    process_group
        Of torch.distributed; the default one.

    Returns
    -------
    Saving
        Its ``result()`` waits, returns the checkpoint's folder, and raises what went wrong. A synchronous save has ended, and
        raises by itself.

    Raises
    ------
    UsageError
        If step or keep are none.
    UnwrittenError
        If it could not be written, on any rank; or what was written is not what was in memory. Nothing is left of it.

    """
    if type(step) is not int or not 0 <= step < 10**18:
        raise UsageError(f"step = {quoted(step)}: expected the number of steps that the state has behind it")
    if keep is not None and (type(keep) is not int or keep < 1):
        raise UsageError(f"keep = {quoted(keep)}: expected how many checkpoints stay, at least 1")
    ranks = together(process_group)
    ranks.wait()
    one = _Save(Path(folder), step, keep, ranks)
    one.begin()
    future: Future[Path] = Future()
    if not asynchronous:
        future.set_result(one.finish(lambda: one.write(state_dict)))
        return Saving(future)
    written = one.write_later(state_dict)
    ranks.pending = future
    # Not a daemon: Python waits for it before it ends, so that the last checkpoint of a training is whole.
    threading.Thread(target=_settle, args=(future, one, written), name="bitwitness-checkpoint").start()
    return Saving(future)


def _settle(future: Future[Path], one: _Save, written: Callable[[], object]) -> None:
    try:
        future.set_result(one.finish(written))
    except BaseException as error:
        say(f"checkpoint of step {one.step}: {error}")
        future.set_exception(error)


class _Save:
    """One save: written beside its place, sealed, renamed."""

    def __init__(self, folder: Path, step: int, keep: int | None, ranks: Together) -> None:
        self.step = step
        self._folder, self._keep, self._ranks = folder, keep, ranks
        self._part = folder / part_name(step)
        self._planner = HashingSavePlanner()

    def begin(self) -> None:
        """Make room; collective."""
        self._all(self._make if self._ranks.rank == 0 else _nothing)

    def _make(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        clear(self._folder)
        self._part.mkdir()

    def write(self, state_dict: dict[str, Any]) -> None:
        """Write this rank's part."""
        if self._ranks.group is None:
            self._write_alone(unfolded(state_dict))
        else:
            state_dict_saver.save(state_dict, **self._arguments(), process_group=self._ranks.group)

    def write_later(self, state_dict: dict[str, Any]) -> Callable[[], object]:
        """Copy the state, begin to write; return what waits for that to end."""
        try:
            if self._ranks.group is None:
                copied = on_host(unfolded(state_dict))
                return partial(self._write_alone, copied)
            answer: Any = state_dict_saver.async_save(state_dict, **self._arguments(), process_group=self._ranks.group)
        except (Exception, CheckpointException) as error:  # told where all ranks come together
            return partial(_again, error)
        wait: Callable[[], object] = getattr(answer, "upload_completion", answer).result
        return wait

    def _write_alone(self, state_dict: dict[str, Any]) -> None:
        save_alone(state_dict, **self._arguments())

    def _arguments(self) -> dict[str, Any]:
        return {"storage_writer": FileSystemWriter(self._part, sync_files=True), "planner": self._planner}

    def finish(self, written: Callable[[], object]) -> Path:
        """Wait until it is written; seal it, and give it its name. Collective."""
        try:
            with ours():
                self._all(written)
                self._all(self._seal_own)
                self._all(self._publish if self._ranks.rank == 0 else _nothing)
        except BaseException:
            if self._ranks.rank == 0:
                shutil.rmtree(self._part, ignore_errors=True)
            raise
        if self._keep is not None and self._ranks.rank == 0:
            keep_newest(self._folder, self._keep, self.step)
        return self._folder / name_of(self.step)

    def _all(self, action: Callable[[], object]) -> None:
        """Do something, and have all ranks fail where one has; collective."""
        problem: str | None = None
        cause: BaseException | None = None
        try:
            action()
        except (Exception, CheckpointException) as error:
            problem, cause = reason_of(error), error
        if (worst := self._ranks.worst(problem)) is not None:
            raise UnwrittenError(
                f"the checkpoint of step {self.step} was not saved to {shown(self._folder)}, of which the earlier ones are "
                f"untouched: {worst}"
            ) from cause

    def _seal_own(self) -> None:
        """Hash what this rank wrote, and hold what can be read back of it against what was in memory."""
        prefix = f"__{self._ranks.rank}_"
        own = [entry.name for entry in listed(self._part, "a checkpoint") if entry.name.startswith(prefix)]
        contents = Contents("dcp", self._part, tuple(own))
        files = sealed_files(contents)
        found = hashes_in(contents)
        back = {one.key: one.hash for one in found.sealed}
        for one in self._planner.sealed:
            if back.get(one.key) != one.hash:
                why = found.unread.get(one.key, "its bits differ")
                raise UnwrittenError(
                    f"{named(one.name, one.offsets)} in {shown(found.home.get(one.key, self._part))} is not what was in memory "
                    f"when it was read back ({why}): memory, bus or disk of this machine damaged it on the way"
                )
        metadata = sealed_files(Contents("dcp", self._part, (METADATA,)))
        of, tensors = metadata[METADATA].sha256, tuple(self._planner.sealed)
        if self._ranks.size == 1:
            self._manifest = Manifest("dcp", files | metadata, tensors, self.step, of=of)
            return
        self._manifest = Manifest("dcp", metadata, (), self.step, of=of, parts=self._ranks.size)
        write_manifest(part_of(self._part, self._ranks.rank), Manifest("dcp", files, tensors, self.step, of=of))

    def _publish(self) -> None:
        write_manifest(seal_of(self._part), self._manifest)
        sync_folder(self._part)
        place, aside = self._folder / name_of(self.step), self._folder / old_name(self.step)
        if os.path.lexists(place):
            place.rename(aside)
        self._part.rename(place)
        sync_folder(self._folder)
        with suppress(OSError):
            shutil.rmtree(aside)


def reason_of(error: BaseException) -> str:
    """Return in a line what went wrong; torch DCP tells all ranks' errors, each with its traceback, in a `BaseException`."""
    where = ""
    if isinstance(error, CheckpointException) and error.failures:
        rank, (error, _) = next(iter(error.failures.items()))
        where = f"rank {rank}: "
    first = (str(error).splitlines() or [""])[0]
    return where + (first if isinstance(error, BitwitnessError) else f"{type(error).__name__}: {first}")


def _nothing() -> None:
    return None


def _again(error: BaseException) -> None:
    raise error


def unfolded(state_dict: dict[str, Any]) -> dict[str, Any]:
    """Return a state with what objects say of themselves in their place, as torch DCP does."""
    return {key: value.state_dict() if isinstance(value, Stateful) else value for key, value in state_dict.items()}


def on_host(value: Any) -> Any:
    """Return a copy of tensors and of the containers that they are in, on the host; of plain values themselves."""
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        return {key: on_host(one) for key, one in value.items()}
    if isinstance(value, list):
        return [on_host(one) for one in value]
    return tuple(map(on_host, value)) if type(value) is tuple else copy.deepcopy(value)
