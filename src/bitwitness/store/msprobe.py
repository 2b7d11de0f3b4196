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
from bitwitness.files.reading import MOST_BYTES, listed, opened, read_json
from bitwitness.files.shown import quoted
from bitwitness.store.msprobe_beside import stack_entry, wrong_parents
from bitwitness.store.msprobe_entry import Malformed, clean
from bitwitness.store.msprobe_rows import StepReader
from bitwitness.store.msprobe_tensor import read_tensor
from bitwitness.store.rows import SCHEMA

if TYPE_CHECKING:
    import torch

_STEP = re.compile(r"step(\d{1,9})", re.ASCII)
_RANK = re.compile(r"(rank|proc)(\d{0,9})", re.ASCII)
_FILE = re.compile(r"(\d{1,9})\|([^/\\\0]+\.(?:pt|npy))", re.ASCII)
_FIELD = re.compile(r'"(task|level|framework)"\s*:\s*"([\w .-]{1,40})"')
_TOLD = 5  # problems of one file that are told one by one


def is_msprobe(path: Path) -> bool:
    """Tell whether a folder is a dump of msprobe, or a step or a rank of one."""
    return any(os.path.lexists(folder / "dump.json") for _, folder in _rank_folders(path, lambda _: None))


def _rank_folders(path: Path, tell: Callable[[str], None]) -> Iterator[tuple[int, Path]]:
    """Yield the folders that should hold a ``dump.json``, each with its step; ``tell``: of what cannot be listed."""
    if os.path.lexists(path / "dump.json"):
        yield _step_of(path.absolute().parent), path
        return
    own = _children(path, _RANK, tell)
    for child in own:
        yield _step_of(path.absolute()), child
    for step in [] if own else sorted(_children(path, _STEP, tell), key=_step_of):
        alone = os.path.lexists(step / "dump.json")
        if alone:
            yield _step_of(step), step
        told: list[str] = []
        inside = _children(step, _RANK, told.append)
        for child in inside:
            yield _step_of(step), child
        if not alone and not inside and not told:
            told.append(f"{step} was left out: it holds no rank's folder and no dump.json")
        for problem in told:
            tell(problem)


def _children(path: Path, named: re.Pattern[str], tell: Callable[[str], None]) -> list[Path]:
    """Return the folders in a folder that have a name of a kind; ``tell``: of what has such a name and is no folder."""
    try:
        entries = [entry for entry in listed(path, "a folder of msprobe's") if named.fullmatch(entry.name)]
    except UsageError as error:
        tell(f"{path} was left out: {error}")
        return []
    folders = []
    for entry in entries:
        if Path(entry.path).is_dir():
            folders.append(path / entry.name)
        else:
            tell(f"{path / entry.name} was left out: it is no folder; expected that of a step or a rank")
    return folders


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
        parents = self._load(folder / "construct.json")
        reader = StepReader(step, parents, self._number_stacks(rank, folder), kept=body.get("task") == "tensor")
        table = reader.table(rank, data)
        self._tell_some(path, reader.problems)
        self._tell_some(folder / "construct.json", list(wrong_parents(parents)))
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
        path = folder / "stack.json"
        problems: list[str] = []
        for key, entry in self._load(path).items():
            try:
                names, lines = stack_entry(key, entry)
            except Malformed as error:
                problems.append(f"{quoted(key)}: {error}")
                continue
            text = clean("\n".join(" ".join(line.split()) for line in lines))
            if text:
                numbers |= dict.fromkeys(names, known.setdefault(text, len(known)))
        self._tell_some(path, problems)
        return numbers

    def tensor(self, rank: int, reference: str, dtype: str, shape: tuple[int, ...], layout: str | None) -> torch.Tensor:  # noqa: ARG002 - files hold tensors in their own order
        """Return a kept value; see `bitwitness.store.source.Source`."""
        found = _FILE.fullmatch(reference)
        folder = self._folders.get(rank, {}).get(int(found[1])) if found else None
        if found is None or folder is None:
            raise UnreadError(f"{self.path}: {quoted(reference)} names no tensor file of this dump; the row is damaged")
        return read_tensor(folder / "dump_tensor_data", found[2], dtype, shape)

    # -- files -----------------------------------------------------------------------------------------------------

    def _looks_whole(self, path: Path) -> bool:
        """Tell whether a file begins and ends like one that was written to its end; takes what it says of the dump."""
        try:
            with opened(path, "the dump.json of msprobe") as file:
                size = os.fstat(file.fileno()).st_size
                head = file.read(4096)
                file.seek(max(0, size - 4096))
                tail = file.read(4096)
        except UsageError as error:
            self._tell(f"{path} was left out: {error}")
            return False
        if size > MOST_BYTES:
            self._tell(f"{path} was left out: it has {size} bytes; expected at most {MOST_BYTES}")
            return False
        if not head.lstrip().startswith(b"{") or not tail.rstrip().endswith(b"}"):
            self._tell(f"{path} was left out: it is cut short or no JSON; expected an object, from {{ to }}")
            return False
        self.info = dict(_FIELD.findall(head.decode("utf-8", "replace"))) | self.info
        return True

    def _load(self, path: Path) -> dict[str, Any]:
        """Return what a JSON file holds; if it is not there or cannot be read, that is told, and it is empty."""
        try:
            found = read_json(path, "whole JSON, as msprobe writes it")
        except UsageError as error:
            self._tell(f"{path} was left out: {error}")
        except MemoryError:
            self._tell(f"{path} was left out: there is too little memory for it")
        else:
            if isinstance(found, dict):
                return found
            self._tell(f"{path} was left out: it holds no object; expected the {path.name} that msprobe writes")
        return {}

    def _tell_some(self, path: Path, problems: list[str]) -> None:
        """Note the first problems of a file, and how many more there are."""
        for problem in problems[:_TOLD]:
            self._tell(f"{path}: left out {problem}")
        if len(problems) > _TOLD:
            self._tell(f"{path}: left out {len(problems) - _TOLD} more of the kind")

    def _tell(self, problem: str) -> None:
        """Note a problem once: tables may be read again."""
        if problem not in self.problems:
            self.problems.append(problem)
