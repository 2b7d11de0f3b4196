"""Reads what msprobe dumped, step by step, as if a recording of ours were read.

A dump holds ``step{n}/{rank{n}|proc{pid}|rank}/`` with ``dump.json`` (what was seen), ``stack.json`` (where it was called),
``construct.json`` (which module called it) and, if tensors were kept, ``dump_tensor_data/``. The whole dump, one step or one
rank of it can be named.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from bitwitness.errors import UnreadError, UsageError
from bitwitness.files.reading import listed, open_file, read_json
from bitwitness.store.msprobe_entry import clean
from bitwitness.store.msprobe_rows import StepReader
from bitwitness.store.rows import SCHEMA

if TYPE_CHECKING:
    import torch

_STEP = re.compile(r"step(\d{1,9})", re.ASCII)
_RANK = re.compile(r"(rank|proc)(\d{0,9})", re.ASCII)
_FILE = re.compile(r"(\d{1,9})\|([^/\\\0]+\.(?:pt|npy))", re.ASCII)
_FIELD = re.compile(r'"(task|level|framework)"\s*:\s*"([\w .-]{1,40})"')
_LARGEST = 4_000_000_000  # bytes of a JSON file, which is read as a whole
_TOLD = 5  # problems of one file that are told one by one


def is_msprobe(path: Path) -> bool:
    """Tell whether a folder is a dump of msprobe, or a step or a rank of one."""
    return any(os.path.lexists(folder / "dump.json") for _, folder in _rank_folders(path, lambda _: None))


def _rank_folders(path: Path, tell: Callable[[str], None]) -> Iterator[tuple[int, Path]]:
    """Yield the folders that should hold a ``dump.json``, each with its step; ``tell``: of what cannot be listed."""
    if os.path.lexists(path / "dump.json"):
        yield _step_of(path.absolute().parent), path
        return
    children = _children(path, tell)
    own = [child for child in children if _RANK.fullmatch(child.name)]
    for child in own:
        yield _step_of(path.absolute()), child
    steps = [] if own else [child for child in children if _STEP.fullmatch(child.name)]
    for step in sorted(steps, key=_step_of):
        if os.path.lexists(step / "dump.json"):
            yield _step_of(step), step
        inside = [child for child in _children(step, tell) if _RANK.fullmatch(child.name)]
        for child in inside:
            yield _step_of(step), child


def _children(path: Path, tell: Callable[[str], None]) -> list[Path]:
    try:
        return [path / entry.name for entry in listed(path, "a folder of msprobe's") if entry.is_dir()]
    except (UsageError, OSError) as error:
        tell(f"{path} was left out: {error}")
        return []


def _step_of(path: Path) -> int:
    found = _STEP.fullmatch(path.name)
    return int(found[1]) if found else 0


def _ranks_of(names: Iterable[str]) -> dict[str, int]:
    """Return the rank for which a folder's name stands; processes without one are numbered by their ids."""
    ranks: dict[str, int] = {}
    processes: list[tuple[int, str]] = []
    for name in sorted(set(names)):
        found = _RANK.fullmatch(name)
        if found and found[1] == "proc" and found[2]:
            processes.append((int(found[2]), name))
        else:
            ranks[name] = int(found[2] or 0) if found else 0
    taken = set(ranks.values())
    free = (number for number in range(len(taken) + len(processes)) if number not in taken)
    return ranks | {name: next(free) for _, name in sorted(processes)}


class MsprobeSource:
    """A dump of msprobe; see `bitwitness.store.source.Source`.

    Parameters
    ----------
    path
        The folder that ``dump_path`` named, one ``step{n}`` of it, or one ``rank{n}`` of that.

    Raises
    ------
    UsageError
        If it holds no dump that can be read.

    """

    kind = "msprobe"

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fspath(path)
        self.info: dict[str, Any] = {}
        self.problems: list[str] = []
        self._folders: dict[int, dict[int, Path]] = {}
        self._stacks: dict[int, dict[str, int]] = {}
        found = list(_rank_folders(Path(path), self._tell))
        ranks = _ranks_of(folder.name for _, folder in found)
        for step, folder in found:
            if self._looks_whole(folder / "dump.json"):
                others = self._folders.setdefault(ranks[folder.name], {})
                if step in others:
                    self._tell(f"{folder} was left out: {others[step]} holds the same rank's step {step}")
                else:
                    others[step] = folder
        if not self._folders:
            raise UnreadError(
                f"{self.path} holds no dump of msprobe that can be read; expected step*/rank*/dump.json or "
                "step*/proc*/dump.json" + "".join(f"; {problem}" for problem in self.problems[:3])
            )

    def ranks(self) -> list[int]:
        """Return the ranks that dumped anything."""
        return sorted(self._folders)

    def steps(self, rank: int) -> list[int]:
        """Return a rank's dumped steps in ascending order."""
        return sorted(self._folders.get(rank, {}))

    def table(self, rank: int, step: int) -> pa.Table:
        """Return the rows of one step."""
        folder = self._folders.get(rank, {}).get(step)
        if folder is None:
            return SCHEMA.empty_table()
        path = folder / "dump.json"
        body = self._load(path)
        data = body.get("data")
        if not isinstance(data, dict):
            if body:
                self._tell(f"{path} was left out: it holds no 'data'; expected an object of calls by name")
            return SCHEMA.empty_table()
        parents = self._load(folder / "construct.json", missing_ok=True)
        reader = StepReader(step, parents, self._number_stacks(rank, folder))
        table = reader.table(rank, data)
        for problem in reader.problems[:_TOLD]:
            self._tell(f"{path}: left out {problem}")
        if len(reader.problems) > _TOLD:
            self._tell(f"{path}: left out {len(reader.problems) - _TOLD} more of the kind")
        return table

    def stacks(self, rank: int) -> dict[int, str]:
        """Return the call stacks by number, innermost line first."""
        for step in self.steps(rank):
            self._number_stacks(rank, self._folders[rank][step])
        return {number: text for text, number in self._stacks.get(rank, {}).items()}

    def _number_stacks(self, rank: int, folder: Path) -> dict[str, int]:
        """Return the number of each name's stack; the same text has the same number in all steps."""
        known = self._stacks.setdefault(rank, {})
        numbers: dict[str, int] = {}
        for entry in self._load(folder / "stack.json", missing_ok=True).values():
            if not isinstance(entry, list) or len(entry) != 2 or not all(isinstance(part, list) for part in entry):
                continue
            names, lines = entry
            text = clean("\n".join(" ".join(line.split()) for line in lines if isinstance(line, str)))
            if text:
                number = known.setdefault(text, len(known))
                numbers |= {name: number for name in names if isinstance(name, str)}
        return numbers

    def tensor(self, rank: int, reference: str, dtype: str, shape: tuple[int, ...], layout: str | None) -> torch.Tensor:  # noqa: ARG002 - files hold tensors in their own order
        """Return a kept value; see `bitwitness.store.source.Source`."""
        found = _FILE.fullmatch(reference)
        folder = self._folders.get(rank, {}).get(int(found[1])) if found else None
        if found is None or folder is None:
            raise UnreadError(
                f"{self.path}: {clean(reference)!r} names no tensor file of this dump; the row is damaged"
            )
        return _load_tensor(folder / "dump_tensor_data", found[2], dtype, shape)

    # -- files -----------------------------------------------------------------------------------------------------

    def _looks_whole(self, path: Path) -> bool:
        """Tell whether a file begins and ends like one that was written to its end; takes what it says of the dump."""
        try:
            with open_file(path, "the dump.json of msprobe") as file:
                size = os.fstat(file.fileno()).st_size
                head = file.read(4096)
                file.seek(max(0, size - 4096))
                tail = file.read(4096)
        except UsageError as error:
            self._tell(f"{path} was left out: {error}")
            return False
        except OSError as error:
            self._tell(f"{path} was left out: {error.strerror}; expected a JSON file that can be read")
            return False
        if size > _LARGEST:
            self._tell(f"{path} was left out: it has {size} bytes; expected at most {_LARGEST}")
            return False
        if not head.lstrip().startswith(b"{") or not tail.rstrip().endswith(b"}"):
            self._tell(f"{path} was left out: it is cut short or no JSON; expected an object, from {{ to }}")
            return False
        self.info = dict(_FIELD.findall(head.decode("utf-8", "replace"))) | self.info
        return True

    def _load(self, path: Path, *, missing_ok: bool = False) -> dict[str, Any]:
        """Return what a JSON file holds; if it cannot be read, that is told, and it is empty."""
        if missing_ok and not os.path.lexists(path):
            return {}
        try:
            found = read_json(path, "whole JSON, as msprobe writes it", _LARGEST)
        except UsageError as error:
            self._tell(f"{path} was left out: {error}")
        except MemoryError:
            self._tell(f"{path} was left out: there is too little memory for it")
        else:
            if isinstance(found, dict):
                return found
            self._tell(f"{path} was left out: it holds no object; expected the {path.name} that msprobe writes")
        return {}

    def _tell(self, problem: str) -> None:
        """Note a problem once: tables may be read again."""
        if problem not in self.problems:
            self.problems.append(problem)


def _load_tensor(folder: Path, name: str, dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Read one tensor, and nothing else: no code that a file brings along is run."""
    import torch

    path = folder / name
    try:
        inside = path.resolve().parent == folder.resolve() and path.is_file()
    except (OSError, ValueError, RuntimeError):
        inside = False
    if not inside:
        raise UnreadError(f"there is no tensor file {clean(str(path))}; expected it in the dump's own dump_tensor_data")
    try:
        tensor = _read_npy(path) if name.endswith(".npy") else torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # what a damaged or hostile file makes torch raise is not bounded
        why = (str(error).splitlines() or [type(error).__name__])[0][:200]
        raise UnreadError(
            f"{path} cannot be read: {clean(why)}; expected one tensor, saved by torch or NumPy"
        ) from error
    if not isinstance(tensor, torch.Tensor) or tensor.layout != torch.strided or tensor.is_meta or tensor.is_quantized:
        raise UnreadError(f"{path} holds {type(tensor).__name__}; expected one plain, dense tensor")
    tensor = tensor.detach()
    if tensor.nbytes > path.stat().st_size:  # one element spread over a shape that no memory holds
        raise UnreadError(
            f"{path} claims {tensor.nbytes} bytes and has fewer; expected a tensor that was saved as a whole"
        )
    if tuple(tensor.shape) != tuple(shape):
        raise UnreadError(
            f"{path}: the row says shape {list(shape)}, the file {list(tensor.shape)}; one of them is damaged"
        )
    wanted = getattr(torch, dtype, None)
    if not isinstance(wanted, torch.dtype) or tensor.dtype == wanted:
        return tensor
    if not name.endswith(".npy"):  # NumPy lacks some types, which are widened there
        raise UnreadError(f"{path}: the row says {dtype}, the file {tensor.dtype}; one of them is damaged")
    return tensor.to(wanted)


def _read_npy(path: Path) -> torch.Tensor:
    import numpy as np
    import torch

    return torch.from_numpy(np.load(path, allow_pickle=False))
