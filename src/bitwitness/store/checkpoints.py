"""Opens checkpoints of all common kinds; what is in them is described at once, and loaded tensor by tensor: torch's."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from bitwitness.errors import UnreadError, UsageError
from bitwitness.files.reading import read_json
from bitwitness.store.dcp import METADATA, read_dcp
from bitwitness.store.entry import FoundTensors, TensorEntry, inside
from bitwitness.store.tensorfile import TensorReader
from bitwitness.store.torchfile import read_torch_file

_INDEX = ".safetensors.index.json"
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
        """Load a tensor to the CPU; raises `UsageError` if it is damaged. Threads may load different ones."""
        try:
            return self._entry(name).read()
        except (OSError, RuntimeError, TypeError, ValueError, OverflowError, MemoryError) as error:
            raise UsageError(f"{self.path}: {name!r} cannot be read: {_short(error)}; the file is damaged") from error

    def _entry(self, name: str) -> TensorEntry:
        if name not in self._entries:
            raise UsageError(f"{self.path} holds no tensor {name!r}; names() lists what it holds")
        return self._entries[name]


def open_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """Open a checkpoint: a safetensors file, a sharded Hugging Face folder, a DCP folder, or a file of `torch.save`.

    Raises
    ------
    UsageError
        If it is none of these, is damaged, holds no tensors, or would have to run code to be read.

    """
    place = Path(path)
    try:
        found = _folder(place) if place.is_dir() else _file(place)
    except OSError as error:
        raise UsageError(f"cannot read {place}: {error.strerror}; expected {_KINDS}") from error
    if not found.entries:
        why = "".join(f"; {problem}" for problem in found.problems[:3])
        raise UnreadError(
            f"{place} holds no tensors that can be read ({found.ignored} other entries); expected {_KINDS}{why}"
        )
    return Checkpoint(place, found)


def _file(path: Path) -> FoundTensors:
    if not path.exists():
        raise UsageError(f"{path} does not exist; expected {_KINDS}")
    if path.name.endswith(_INDEX):
        return _indexed(path)
    if path.suffix == ".safetensors":
        return _safetensors(path)
    if path.suffix in _PICKLED:
        return read_torch_file(path)
    raise UnreadError(f"{path} is of no known kind; expected {_KINDS}")


def _folder(folder: Path) -> FoundTensors:
    if (folder / METADATA).exists():
        return read_dcp(folder)
    indices = sorted(folder.glob(f"*{_INDEX}"))
    if len(indices) > 1:
        names = ", ".join(repr(one.name) for one in indices[:4])
        raise UnreadError(f"{folder} holds {len(indices)} checkpoints: {names}; name one of these files instead")
    if indices:
        return _indexed(indices[0])
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        inner = [one.name for one in sorted(folder.iterdir()) if one.is_dir() and (one / METADATA).exists()]
        hint = f"; it has folders that are checkpoints: {', '.join(map(repr, inner[:4]))}" if inner else ""
        raise UsageError(f"{folder} holds no checkpoint; expected {_KINDS}{hint}")
    return _merged(folder, [one.name for one in files])


def _indexed(index: Path) -> FoundTensors:
    """Read the files that an index names, and hold them to it."""
    folder = index.parent
    if index.stat().st_size > _LARGEST_INDEX:
        raise UsageError(f"{index} has {index.stat().st_size} bytes; expected an index of at most {_LARGEST_INDEX}")
    content: Any = read_json(inside(folder, index.name), "the index of a sharded checkpoint")
    names = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(names, dict) or not all(isinstance(file, str) for file in names.values()):
        raise UnreadError(
            f"{index} is damaged: it has no weight_map of names to files; expected that of a sharded checkpoint"
        )
    files = sorted(set(names.values()))
    for file in files:
        inside(folder, file)  # all of them, before any is opened
    found = _merged(folder, files)
    missing = [name for name in names if name not in found.entries]
    if missing:
        found.problems.append(
            f"{index}: {len(missing)} of its tensors are in none of its files, such as {missing[0]!r}"
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
                raise UsageError(
                    f"{folder}: {name!r} is in {home[name]!r} and in {file!r}; expected shards of one checkpoint: name one file"
                )
            home[name], whole.entries[name] = file, entry
    return whole


def _safetensors(path: Path) -> FoundTensors:
    reader = TensorReader(path)
    found = FoundTensors({}, [])
    for name in reader.keys():  # noqa: SIM118 - not a mapping
        try:
            dtype, shape, _, _ = reader.describe(name)
        except (UsageError, TypeError) as error:
            found.problems.append(f"{path}: {name!r} was left out: {_short(error)}")
            continue
        found.entries[name] = TensorEntry(dtype, shape, lambda name=name: reader.read(name))  # type: ignore[misc]
    return found


def _short(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:300]
