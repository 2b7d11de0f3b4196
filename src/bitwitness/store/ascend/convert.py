"""Dump files turned into what other tools read: tensors to .npy or .safetensors, overflow records to the vendor's JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import IO, Any, Literal

from bitwitness.errors import UnwrittenError, UsageError
from bitwitness.files.reading import files_below, open_file
from bitwitness.files.shown import shown
from bitwitness.files.writing import new_file, target_of
from bitwitness.store.ascend.dtypes import numpy_dtype
from bitwitness.store.ascend.dump import DumpTensor, read_dump
from bitwitness.store.ascend.names import parse_name
from bitwitness.store.ascend.opdebug import is_opdebug_name, read_opdebug
from bitwitness.store.ascend.wire import AscendFileError

Form = Literal["npy", "safetensors"]


def dump_files(source: Path, failed: Callable[[str], None]) -> Iterator[Path]:
    """Yield a file, or all files below a folder, in order; tables beside them (.csv, .json, .npy) are passed over.

    ``failed`` is told of what cannot be read below a folder.

    Raises
    ------
    UsageError
        If there is no such file or folder.
    UnreadError
        If it may not be read.

    """
    if not source.is_dir():
        open_file(source, "a dump file, or a folder of them").close()
        yield source
        return
    for folder, names in files_below(source, "a folder of dump files", failed):
        for name in names:
            if not name.endswith((".csv", ".json", ".npy", ".safetensors", ".txt", ".part")):
                yield folder / name
        if (
            not names
            and (is_opdebug_name(folder.name) or parse_name(folder.name) is not None)
            and not any(folder.iterdir())
        ):
            failed(f"{shown(folder)} is an empty folder; expected a dump file, as its name says")


def convert_file(path: Path, folder: Path, form: Form = "npy") -> list[tuple[Path, str]]:
    """Convert one file; return what was written, each with what it holds.

    Raises
    ------
    AscendFileError
        If the file is damaged; nothing is written then.
    UsageError
        If it cannot be read, or the folder not be written.

    """
    if is_opdebug_name(path.name):
        text = json.dumps(read_opdebug(path).to_json(), indent=2) + "\n"
        target = folder / f"{path.name}.output.0.json"
        _write(target, lambda file: file.write(text.encode()))
        return [(target, "overflow record")]
    tensors = [tensor for tensor in read_dump(path).tensors if tensor.offset is not None]
    if not tensors:
        raise AscendFileError(str(path), 0, "a header without any payload", "a dump file that holds tensors")
    return _to_safetensors(path, tensors, folder) if form == "safetensors" else _to_npy(path, tensors, folder)


def _to_npy(path: Path, tensors: list[DumpTensor], folder: Path) -> list[tuple[Path, str]]:
    import numpy as np

    written = []
    for tensor in tensors:
        values, note = _for_numpy(tensor)
        target = folder / f"{path.name}.{tensor.kind}.{tensor.index}.npy"
        _write(target, partial(np.save, arr=values, allow_pickle=False))
        written.append((target, note))
    return written


def _for_numpy(tensor: DumpTensor) -> tuple[Any, str]:
    """Return a tensor as a type that .npy knows, and what was done to it."""
    import numpy as np

    values = tensor.array()
    label = f"{tensor.dtype} {list(values.shape)} {tensor.layout}"
    if math.prod(tensor.shape) != values.size:
        label += f", where its header says {list(tensor.shape)}"
    if numpy_dtype(tensor.dtype) is None and values.dtype == np.uint8 and tensor.dtype not in ("uint8", "uint1"):
        return values, f"{label}: raw bytes, since NumPy has no {tensor.dtype}"
    if values.dtype.type.__module__ != "numpy":  # .npy would hold them as nameless bytes
        wide = values.astype(np.int8 if "int" in tensor.dtype else np.float32)
        return wide, f"{label}: widened to {wide.dtype}, exactly"
    return values, label


def _to_safetensors(path: Path, tensors: list[DumpTensor], folder: Path) -> list[tuple[Path, str]]:
    """Write all tensors of a file into one; the format is public (github.com/huggingface/safetensors) and simple."""
    import numpy as np

    header: dict[str, Any] = {}
    parts: list[bytes] = []
    at = 0
    for tensor in tensors:
        values = tensor.array()
        if values.dtype == np.complex128:  # which the format lacks: pairs of real and imaginary parts
            values = values.view(np.float64).reshape(*values.shape, 2)
        name = _SAFE.get(str(values.dtype))
        if name is None:
            values, _ = _for_numpy(tensor)
            name = _SAFE[str(values.dtype)]
        data = np.ascontiguousarray(values).tobytes()
        key = f"{tensor.kind}.{tensor.index}"
        header[key] = {"dtype": name, "shape": list(values.shape), "data_offsets": [at, at + len(data)]}
        parts.append(data)
        at += len(data)
    header["__metadata__"] = {f"{t.kind}.{t.index}": f"{t.dtype} {t.layout}" for t in tensors}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    target = folder / f"{path.name}.safetensors"

    def write(file: IO[Any]) -> None:
        file.write(len(text).to_bytes(8, "little") + text)
        file.writelines(parts)

    _write(target, write)
    return [(target, f"{len(tensors)} tensors")]


_SAFE = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2", "float8_e8m0fnu": "F8_E8M0", "int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8",
    "uint64": "U64", "uint32": "U32", "uint16": "U16", "uint8": "U8", "bool": "BOOL", "complex64": "C64",
}  # fmt: skip


def _write(target: Path, write: Callable[[IO[Any]], Any]) -> None:
    """Write a file whole or not at all."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UnwrittenError(f"cannot write {shown(target)}: {error.strerror}; give another folder with -o") from error
    try:
        target = target_of(target)
    except UsageError as error:  # nobody asked for that name: it is made from the dump's, and may be too long
        raise UnwrittenError(str(error)) from error
    with new_file(target, binary=True) as file:
        write(file)
