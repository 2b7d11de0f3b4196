"""Opens checkpoints of all common kinds; what is in them is described at once, and loaded tensor by tensor: torch's."""

from __future__ import annotations

import os
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from bitwitness.errors import UnreadError, UsageError
from bitwitness.files.reading import listed, read_json, unread
from bitwitness.files.shown import quoted, shown
from bitwitness.store.dcp import METADATA, read_dcp
from bitwitness.store.entry import FoundTensors, TensorEntry, inside
from bitwitness.store.tensorfile import TensorReader
from bitwitness.store.torchfile import read_torch_file

_INDEX = ".safetensors.index.json"
_SHARD = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.safetensors", re.ASCII | re.DOTALL)
_PICKLED = (".pt", ".pth", ".bin")
_LARGEST_INDEX = 256 << 20  # bytes, read as a whole: a line for each tensor
_KINDS = (
    "a .safetensors file, a .pt, .pth or .bin file of torch.save, a folder of *.safetensors, or a folder of "
    "torch.distributed.checkpoint (.metadata and *.distcp)"
)


class Checkpoint:
    """The tensors of a checkpoint by name.

    Attributes
    ----------
    path
        Where it is.
    problems
        What was left out, and why.
    ignored
        How many entries are no tensors.

    """

    def __init__(self, path: Path, found: FoundTensors) -> None:
        self.path = os.fspath(path)
        self.problems = found.problems
        self.ignored = found.ignored
        self._entries = found.entries

    def names(self) -> list[str]:
        """Return the tensors' names in the checkpoint's order."""
        return list(self._entries)

    def describe(self, name: str) -> tuple[torch.dtype, tuple[int, ...]]:
        """Return a tensor's dtype and shape as they are declared; nothing is loaded."""
        entry = self._entry(name)
        return entry.dtype, entry.shape

    def tensor(self, name: str) -> torch.Tensor:
        """Load a tensor to the CPU; raises `UnreadError` if it is damaged. Threads may load different ones."""
        try:
            return self._entry(name).read()
        except (OSError, RuntimeError, TypeError, ValueError, OverflowError, MemoryError) as error:
            raise UnreadError(
                f"{shown(self.path)}: {quoted(name)} cannot be read: {_short(error)}; the file is damaged"
            ) from error

    def _entry(self, name: str) -> TensorEntry:
        if name not in self._entries:
            raise UsageError(f"{shown(self.path)} holds no tensor {quoted(name)}; names() lists what it holds")
        return self._entries[name]


def open_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """Open a checkpoint: a safetensors file, a sharded Hugging Face folder, a DCP folder, or a file of `torch.save`.

    Raises
    ------
    UsageError
        If there is no such file or folder.
    UnreadError
        If it is none of these, is damaged, holds no tensors, or would have to run code to be read.

    """
    place = Path(path)
    if not os.fspath(path):
        raise UsageError(f"a path is empty; expected {_KINDS}")
    try:
        place.stat()
        found = _folder(place) if place.is_dir() else _file(place)
    except UnreadError:
        raise
    except (OSError, ValueError) as error:
        raise _unread(place, error) from error
    except UsageError as error:  # of a file in it that is not there
        raise UnreadError(str(error)) from error
    if not found.entries:
        why = "".join(f"; {problem}" for problem in found.problems[:3])
        raise UnreadError(
            f"{shown(place)} holds no tensors that can be read ({found.ignored} other entries); expected {_KINDS}{why}"
        )
    return Checkpoint(place, found)


def _unread(place: Path, error: OSError | ValueError) -> UsageError:
    if isinstance(error, FileNotFoundError) and not os.path.lexists(place):
        return UsageError(f"{shown(place)} does not exist (seen from {Path.cwd()}); expected {_KINDS}")
    if isinstance(error, OSError):
        return unread(place, error, _KINDS)
    return UsageError(f"{shown(place)} is no path: {error}; expected {_KINDS}")  # a null byte


def _file(path: Path) -> FoundTensors:
    if path.name.endswith(_INDEX):
        return _indexed(path)
    if path.suffix == ".safetensors":
        return _safetensors(path)
    if path.suffix in _PICKLED:
        return read_torch_file(path)
    raise UnreadError(f"{shown(path)} is of no known kind; expected {_KINDS}")


def _folder(folder: Path) -> FoundTensors:
    names = [entry.name for entry in listed(folder, _KINDS)]
    if METADATA in names:
        return read_dcp(folder)
    indices = [name for name in names if name.endswith(_INDEX)]
    if len(indices) > 1:
        some = ", ".join(map(quoted, indices[:4]))
        raise UnreadError(f"{shown(folder)} holds {len(indices)} checkpoints: {some}; name one of these files instead")
    if indices:
        return _indexed(folder / indices[0])
    files = [name for name in names if name.endswith(".safetensors")]
    if not files:
        inner = [name for name in names if os.path.lexists(folder / name / METADATA)]
        hint = f"; it has folders that are checkpoints: {', '.join(map(quoted, inner[:4]))}" if inner else ""
        raise UnreadError(f"{shown(folder)} holds no checkpoint; expected {_KINDS}{hint}")
    found = _merged(folder, files)
    found.problems += _missing_shards(folder, files)
    return found


def _missing_shards(folder: Path, files: list[str]) -> list[str]:
    """Return what shards are not there, by the numbers in the names of those that are (model-00001-of-00003.safetensors)."""
    numbered = [found for file in files if (found := _SHARD.fullmatch(file))]
    sets = {(one[1], one[3]) for one in numbered}
    counts = {key: len({one[2] for one in numbered if (one[1], one[3]) == key}) for key in sets}
    return [
        f"{shown(folder)}: {have} of {int(of)} files {shown(name)}-…-of-{of}.safetensors are there; the rest is missing"
        for (name, of), have in sorted(counts.items())
        if have < int(of)
    ]


def _indexed(index: Path) -> FoundTensors:
    """Read the files that an index names, and hold them to it."""
    folder = index.parent
    content: Any = read_json(inside(folder, index.name), "the index of a sharded checkpoint", _LARGEST_INDEX)
    names = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(names, dict) or not all(isinstance(file, str) for file in names.values()):
        raise UnreadError(
            f"{shown(index)} is damaged: it has no weight_map of names to files; expected that of a sharded checkpoint"
        )
    files = sorted(set(names.values()))
    for file in files:
        inside(folder, file)  # all of them, before any is opened
    found = _merged(folder, files)
    missing = [name for name in names if name not in found.entries]
    if missing:
        found.problems.append(
            f"{shown(index)}: {len(missing)} of its tensors are in none of its files, such as {quoted(missing[0])}"
        )
    return found


def _merged(folder: Path, files: list[str]) -> FoundTensors:
    """Read the shards of a checkpoint; one that cannot be read is a problem, the same name in two is refused."""
    whole = FoundTensors({}, [])
    home: dict[str, str] = {}
    for file in files:
        path = inside(folder, file)
        try:
            part = _safetensors(path)
        except UsageError as error:
            whole.problems.append(f"{error}; it was left out")
            continue
        whole.problems += part.problems
        for name, entry in part.entries.items():
            if name in home:
                raise UnreadError(
                    f"{shown(folder)}: {quoted(name)} is in {quoted(home[name])} and in {quoted(file)}; expected shards of one "
                    "checkpoint: name one file"
                )
            home[name], whole.entries[name] = file, entry
    return whole


def _safetensors(path: Path) -> FoundTensors:
    reader = TensorReader(path)
    found = FoundTensors({}, [])
    places: list[tuple[int, int]] = []
    for name in reader.keys():  # noqa: SIM118 - not a mapping
        try:
            dtype, shape, first, last = reader.describe(name)
        except (UsageError, TypeError, ValueError) as error:  # ValueError: sizes of thousands of digits
            found.problems.append(f"{shown(path)}: {quoted(name)} was left out: {_short(error)}")
            continue
        places.append((first, last))
        found.entries[name] = TensorEntry(dtype, shape, lambda name=name: reader.read(name))  # type: ignore[misc]
    # The format leaves no holes: where there is one, a number of the header is not what was written.
    places.sort()
    filled = all(end == begin for (_, end), (begin, _) in pairwise([*places, (path.stat().st_size, 0)]))
    if places and not filled and not found.problems:
        found.problems.append(
            f"{shown(path)} is damaged: its tensors do not fill it; a header's number or the end is wrong"
        )
    return found


def _short(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:300]
