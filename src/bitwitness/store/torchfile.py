"""Files of `torch.save`, opened so that nothing in them is run, and nothing in them takes more memory than their size."""

from __future__ import annotations

import math
import pickle
import re
import warnings
import zipfile
from collections.abc import Iterator, Mapping
from io import BytesIO
from pathlib import Path
from typing import Any

import torch

from bitwitness.errors import UnreadError
from bitwitness.files.reading import open_file
from bitwitness.files.shown import quoted, shown
from bitwitness.store.entry import FoundTensors, TensorEntry
from bitwitness.store.nesting import DEEPEST, nests_tuples_deeply

_DEEPEST = 64
"""Containers inside one another. Training states have a handful; a file made to break its reader has as many as it likes."""
_MOST_ENTRIES = 1_000_000  # likewise: an optimizer's state has a few for each parameter
_LARGEST_PICKLE = 256 << 20  # bytes, likewise: values beside the tensors' numbers, which are files of their own
_LONGEST_NAME = 4096  # characters, likewise
_MOST_CHARACTERS = 64 << 20  # of all names together
_TENSORS = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)


def read_torch_file(path: Path, *, damaged: bool = False) -> FoundTensors:
    """Open a file of `torch.save`; its tensors are mapped, and nested names become one with dots.

    ``damaged``: known to be; what can still be read is read, without asking for the archive's own checksums.

    Raises
    ------
    UsageError
        If it is damaged, or holds anything but tensors and plain values.

    """
    open_file(path, "a file of torch.save").close()  # of a device or a FIFO there is no end
    size = path.stat().st_size
    content = _load(path, size, shown(path), mmap=True, checked=not damaged)
    return tensors_in(content, shown(path), size)


def tensors_in(content: Any, where: str, size: int | None) -> FoundTensors:
    """Return the tensors and numbers of nested containers by their dotted names.

    Parameters
    ----------
    where
        What holds them, for messages.
    size
        Bytes that any one tensor takes at most: those of the file. None for what lies in memory, on any device.

    Raises
    ------
    UnreadError
        If they are nested more deeply, or more of them, than a state can be.

    """
    found = FoundTensors({}, [])
    for name, value in _flat(content, where):
        number = _as_tensor(value)
        if number is not None:
            found.entries.setdefault(name, TensorEntry(number.dtype, (), lambda number=number: number))  # type: ignore[misc]
        elif not isinstance(value, torch.Tensor):
            found.ignored += 1
        elif name in found.entries:
            found.problems.append(f"{where}: two entries are called {quoted(name)}; the second was left out")
        elif (why := _unusual(value, size)) is not None:
            found.problems.append(f"{where}: {quoted(name)} was left out: {why}")
        else:
            tensor = value.detach()
            found.entries[name] = TensorEntry(tensor.dtype, tuple(tensor.shape), lambda tensor=tensor: tensor)  # type: ignore[misc]
    return found


def _as_tensor(value: Any) -> torch.Tensor | None:
    """Return a number that a state holds beside tensors, a step count or a learning rate, to be compared as they are."""
    if isinstance(value, float):
        return torch.tensor(value, dtype=torch.float64)
    fits = isinstance(value, int) and abs(value) < 1 << 63
    return torch.tensor(value, dtype=torch.int64) if fits else None


def tensor_from(data: bytes, where: str) -> torch.Tensor:
    """Return the one tensor that `torch.save` wrote as these bytes."""
    return _only_tensor(_load(BytesIO(data), len(data), where), len(data), where)


def tensor_in(path: Path) -> torch.Tensor:
    """Return the one tensor that `torch.save` wrote to a file."""
    open_file(path, "a file of torch.save").close()
    size = path.stat().st_size
    return _only_tensor(_load(path, size, shown(path)), size, shown(path))


def _only_tensor(value: Any, size: int, where: str) -> torch.Tensor:
    if not isinstance(value, torch.Tensor):
        raise UnreadError(f"{where} holds a {type(value).__name__}; expected one tensor: it is damaged")
    if (why := _unusual(value, size)) is not None:
        raise UnreadError(f"{where} cannot be compared: {why}")
    return value.detach()


def _load(source: Path | BytesIO, size: int, where: str, *, mmap: bool = False, checked: bool = True) -> Any:
    _check_archive(source, size, where, checked=checked)
    if isinstance(source, BytesIO):
        source.seek(0)
    try:
        with warnings.catch_warnings():
            # torch 2.15 says how long it may take to look at a sparse tensor's indices; it has to. Torch 2.12 says that it
            # does not look.
            warnings.filterwarnings("ignore", message="Validating sparse tensor invariants|Sparse invariant checks")
            return torch.load(source, map_location="cpu", weights_only=True, mmap=mmap)
    except pickle.UnpicklingError as error:
        raise UnreadError(
            f"{where} holds more than tensors and plain values ({_reason(error)}); unpickling that could run code, so it was "
            "not read. Save the state_dict alone, or convert the file to safetensors where you trust it"
        ) from error
    except Exception as error:
        raise UnreadError(f"{where} is damaged: {_reason(error)}; expected a whole file of torch.save") from error


def _check_archive(source: Path | BytesIO, size: int, where: str, *, checked: bool = True) -> None:
    """Refuse what is no archive, and one that unpacks to more than it is."""
    try:
        with zipfile.ZipFile(source) as archive:
            members = archive.infolist()
            stored = not any(one.compress_type != zipfile.ZIP_STORED for one in members)
            stored = stored and sum(one.file_size for one in members) <= size
            pickles = [
                one for one in members if stored and one.filename.endswith(".pkl") and one.file_size <= _LARGEST_PICKLE
            ]
            deep = any(nests_tuples_deeply(archive.read(one)) for one in pickles)
            # torch can be told to write no checksums, and writes zeros then.
            damaged = archive.testzip() if checked and stored and any(one.CRC for one in members) else None
    except Exception as error:  # a hostile archive makes zipfile raise what it likes
        raise UnreadError(
            f"{where} is no whole archive of torch.save ({_reason(error)}); it was cut short, or saved before torch 1.6: "
            "get it again, or load and save it anew"
        ) from error
    if not stored:
        raise UnreadError(
            f"{where} unpacks to more than its {size} bytes; torch.save writes nothing like that: refused"
        )
    if damaged is not None:
        raise UnreadError(f"{where} is damaged: the checksum of its part {shown(damaged)} differs; get it again")
    if deep or any(one.filename.endswith(".pkl") and one.file_size > _LARGEST_PICKLE for one in members):
        raise UnreadError(
            f"{where} nests tuples deeper than {DEEPEST}, or describes more than a state can hold: refused"
        )


def _unusual(tensor: torch.Tensor, size: int | None) -> str | None:
    """Return why a tensor cannot be compared as plain numbers, if it cannot."""
    if tensor.is_nested:  # it has no shape
        return "it is a nested tensor; expected a plain dense tensor"
    if type(tensor) not in _TENSORS or tensor.layout != torch.strided or tensor.is_quantized:
        return (
            f"it is a {type(tensor).__name__} of layout {tensor.layout}, {tensor.dtype}; expected a plain dense tensor"
        )
    if tensor.device.type == "meta" or (tensor.device.type != "cpu" and size is not None):
        return f"it lies on {tensor.device} and has no values"
    if size is not None and math.prod(tensor.shape) * tensor.dtype.itemsize > size:
        return (
            f"its shape {list(tensor.shape)} takes more than the file's {size} bytes; call .contiguous() before saving"
        )
    return None


def _flat(content: Any, where: str) -> Iterator[tuple[str, Any]]:
    """Yield leaves with their dotted names; a file may hold lists that hold themselves."""
    waiting: list[tuple[str, Any, int]] = [("", content, 0)]
    count = characters = 0
    while waiting:
        name, value, depth = waiting.pop()
        count, characters = count + 1, characters + len(name)
        if depth > _DEEPEST or count > _MOST_ENTRIES:
            raise UnreadError(f"{where} is nested deeper than {_DEEPEST}, or has over {_MOST_ENTRIES} entries; refused")
        if len(name) > _LONGEST_NAME or characters > _MOST_CHARACTERS:
            raise UnreadError(
                f"{where} has a name of {len(name)} characters, {shown(name, 80)}, or too many such; refused"
            )
        if isinstance(value, Mapping):
            inner = list(value.items())
        elif isinstance(value, list | tuple | torch.Size):
            inner = list(enumerate(value))
        else:
            yield name or "tensor", value
            continue
        prefix = f"{name}." if name else ""
        waiting += [
            (f"{prefix}{key if isinstance(key, str) else quoted(key)}", one, depth + 1) for key, one in reversed(inner)
        ]


def _reason(error: Exception) -> str:
    """Return the part of torch's pages that says what was found."""
    text = str(error)
    if named := re.search(r"(?:GLOBAL|class) ([\w.]{1,200})", text):
        return named[1]
    if "WeightsUnpickler error: " in text:
        text = text.partition("WeightsUnpickler error: ")[2]
    return ascii((text.splitlines() or [type(error).__name__])[0][:200])[1:-1]
