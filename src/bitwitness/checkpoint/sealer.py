"""Seals what a script has written, in a thread of its own: files are hashed while the training goes on.

What was written is known by its path. A file that the script renames takes its seal along, one that it removes or writes anew
loses it. A file that changes before it is hashed is not sealed: half a file would be damaged for ever.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from bitwitness.checkpoint.contents import Contents, contents_of, hashes_in
from bitwitness.checkpoint.filehash import hash_file
from bitwitness.checkpoint.manifest import Manifest, SealedTensor, part_of, seal_of, write_manifest
from bitwitness.checkpoint.own import ours
from bitwitness.checkpoint.sealing import sealed_files
from bitwitness.errors import UsageError
from bitwitness.store.dcp import METADATA

Changed = Callable[[Path, list[str]], None]


@dataclass(slots=True)
class Written:
    """What a script wrote.

    Attributes
    ----------
    path
        Where it is now.
    kind
        As a manifest has it.
    tensors
        What it holds, as it was in memory.
    rank, size
        Who wrote a DCP checkpoint, and how many.

    """

    path: Path
    kind: str
    tensors: tuple[SealedTensor, ...]
    rank: int = 0
    size: int = 1
    identity: tuple[int, int] | None = None
    gone: bool = False
    done: bool = False


class Sealer:
    """Seals one process's checkpoints.

    Parameters
    ----------
    differs
        Told, from the thread, of tensors that are not in the file what they were in memory.
    failed
        Told once, from the thread, of an error of our own.

    """

    def __init__(self, differs: Changed, failed: Callable[[Exception], None]) -> None:
        self._differs, self._failed = differs, failed
        self._jobs: queue.SimpleQueue[Written | None] = queue.SimpleQueue()
        self._known: dict[str, Written] = {}
        self._one_at_a_time = threading.Lock()
        self._thread: threading.Thread | None = None
        self.sealed = 0

    def put(self, written: Written) -> None:
        """Have something sealed that was just written."""
        with suppress(OSError):
            found = written.path.stat()
            written.identity = (found.st_ino, found.st_mtime_ns)
        with self._one_at_a_time:
            self._known[os.path.abspath(written.path)] = written
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="bitwitness-seal", daemon=True)
            self._thread.start()
        self._jobs.put(written)

    def close(self) -> None:
        """Seal what is left, and end the thread."""
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join()
            self._thread = None

    # -- what the script does with its files ---------------------------------------------------------------------

    def forget(self, path: Path) -> None:
        """Take a seal away: what it is about is about to be written anew, or was removed."""
        with self._one_at_a_time:
            written = self._known.pop(os.path.abspath(path), None)
            if written is not None:
                written.gone = True
            with suppress(OSError):
                seal_of(path).unlink()

    def moved(self, source: Path, target: Path) -> None:
        """Have a seal follow what was renamed: a file, or a folder with what is in it."""
        old, new = os.path.abspath(source), os.path.abspath(target)
        with self._one_at_a_time:
            if (replaced := self._known.pop(new, None)) is not None:
                replaced.gone = True
            for name in [name for name in self._known if name == old or name.startswith(old + os.sep)]:
                written = self._known.pop(name)
                written.path = Path(new + name[len(old) :])
                self._known[os.path.abspath(written.path)] = written
                if not written.done:  # it may just have been looked for under its old name
                    self._jobs.put(written)
            written_here = self._known.get(new)
            if written_here is None or written_here.path.is_dir():
                return
            with suppress(OSError):
                if written_here.done:
                    seal_of(source).replace(seal_of(target))
                else:
                    seal_of(target).unlink()

    # -- the thread ----------------------------------------------------------------------------------------------

    def _work(self) -> None:
        with ours():
            while (written := self._jobs.get()) is not None:
                try:
                    self._seal(written)
                except (UsageError, OSError):
                    pass  # it is gone, or another: nothing is wrong with that
                except Exception as error:  # ours: the training is not to know
                    self._failed(error)

    def _seal(self, written: Written) -> None:
        if written.done:
            return
        made = self._dcp(written) if written.kind == "dcp" else self._file(written)
        if made is None:
            return
        with self._one_at_a_time:
            if written.gone:
                return
            for place, manifest in made(written.path):
                write_manifest(place, manifest)
            written.done = True
            self.sealed += 1

    def _file(self, written: Written) -> Callable[[Path], list[tuple[Path, Manifest]]] | None:
        path = written.path
        hashed = hash_file(path)
        if hashed is None or (hashed.inode, hashed.mtime_ns) != written.identity:
            return None
        if not self._same(Contents(written.kind, path.parent, (path.name,)), written, path.name):
            return None
        return lambda now: [
            (seal_of(now), Manifest(written.kind, {now.name: hashed}, _renamed(written.tensors, now.name)))
        ]

    def _dcp(self, written: Written) -> Callable[[Path], list[tuple[Path, Manifest]]] | None:
        whole = contents_of(written.path)
        own = tuple(name for name in whole.files if name.startswith(f"__{written.rank}_"))
        names = (*own, METADATA)
        files = sealed_files(Contents("dcp", whole.folder, names))
        if not self._same(Contents("dcp", whole.folder, own), written, ""):
            return None
        of = files[METADATA].sha256
        if written.size == 1:
            return lambda now: [(seal_of(now), Manifest("dcp", files, written.tensors, of=of))]
        mine = Manifest("dcp", {name: files[name] for name in own}, written.tensors, of=of)
        if written.rank:
            return lambda now: [(part_of(now, written.rank), mine)]
        head = Manifest("dcp", {METADATA: files[METADATA]}, of=of, parts=written.size)
        return lambda now: [(part_of(now, 0), mine), (seal_of(now), head)]

    def _same(self, contents: Contents, written: Written, file: str) -> bool:
        """Hold what can be read back against what was in memory; tell what is not the same."""
        if not written.tensors:
            return True
        found = hashes_in(contents, damaged=True)
        if not all((contents.folder / name).exists() for name in contents.files):
            return True  # renamed meanwhile, and not what it was hashed under; its bytes were read before
        back = {(one.name, one.offsets): one.hash for one in found.sealed}
        unread = {(name, offsets) for name, _, offsets in found.unread}
        lost = ("", None) in unread  # nothing can be read of a file
        bad = []
        for one in written.tensors:
            key = one.name, one.offsets
            if (key in back and back[key] != one.hash) or key in unread or (lost and key not in back):
                bad.append(one.name)
        if bad:
            self._differs(contents.folder / file if file else contents.folder, bad)
        return not bad


def _renamed(tensors: tuple[SealedTensor, ...], file: str) -> tuple[SealedTensor, ...]:
    return tuple(SealedTensor(one.name, file, one.offsets, one.hash) for one in tensors)
