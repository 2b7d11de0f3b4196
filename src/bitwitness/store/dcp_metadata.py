"""The metadata of `torch.distributed.checkpoint` is a pickle that names torch's dtypes: it is read without calling anything.

What it may name is listed here, and each name stands for something inert of ours: an object that keeps what it is given.
Not even torch's own classes are called. A name that is not listed ends the reading.
"""

from __future__ import annotations

import pickle
from io import BytesIO
from pathlib import Path
from typing import Any, ClassVar

import torch

from bitwitness.errors import UnreadError, UsageError
from bitwitness.files.reading import read_bytes
from bitwitness.files.shown import shown

_LARGEST = 512 << 20  # bytes: the metadata are read as a whole, and have some hundred bytes for each chunk of a tensor
_DCP = "torch.distributed.checkpoint"
_SHARD = "torch.distributed._shard"
_MEGATRON = "megatron.core.dist_checkpointing"


class Plain:
    """Stands for any object of the metadata: it keeps its arguments and its state, and does nothing.

    A class of its own stands for each name, and has it.
    """

    __slots__ = ("args", "state")

    def __init__(self, *args: Any) -> None:
        self.args = args
        self.state: Any = None

    def __setstate__(self, state: Any) -> None:
        self.state = state

    @property
    def fields(self) -> dict[Any, Any]:
        """Its attributes by name; none if its state is nothing of the kind."""
        state = getattr(self, "state", None)  # what is made without its constructor has none yet
        return state if isinstance(state, dict) else {}

    def first(self, name: str) -> Any:
        """Return an attribute of an object whose state may also be a tuple that begins with it."""
        state = getattr(self, "state", None)
        return state[0] if isinstance(state, tuple) and state else self.fields.get(name)


_OBJECTS = {
    *((f"{_DCP}.metadata", name) for name in ("Metadata", "TensorStorageMetadata", "BytesStorageMetadata")),
    *((f"{_DCP}.metadata", name) for name in ("ChunkStorageMetadata", "TensorProperties", "MetadataIndex")),
    *((f"{_DCP}.metadata", name) for name in ("StorageMeta", "_MEM_FORMAT_ENCODING")),
    (f"{_DCP}.filesystem", "_StorageInfo"),
    # Of torch before 2.3.
    (f"{_SHARD}.sharded_tensor.metadata", "TensorProperties"),
    (f"{_SHARD}.sharded_tensor.metadata", "MEM_FORMAT_ENCODING"),
    # Megatron-LM's own metadata: torch's, and a field more.
    (f"{_MEGATRON}.strategies.torch", "MCoreMetadata"),
    (f"{_MEGATRON}.mapping", "MCoreMetadata"),
    ("torch.serialization", "_get_layout"),
    # Where it was saved to.
    *(("pathlib", name) for name in ("PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath")),
    *(("pathlib._local", name) for name in ("PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath")),
}
# The operations of a pickle that dcp.save uses. Others might take more memory than the file has bytes.
_OPERATIONS = (
    *("PROTO", "FRAME", "STOP", "MARK", "POP", "POP_MARK", "MEMOIZE", "BINPUT", "LONG_BINPUT", "BINGET", "LONG_BINGET"),
    *("NONE", "NEWTRUE", "NEWFALSE", "BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT"),
    *("SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8", "SHORT_BINBYTES", "BINBYTES"),
    *("EMPTY_DICT", "EMPTY_LIST", "EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "APPEND", "APPENDS"),
    *("GLOBAL", "STACK_GLOBAL", "NEWOBJ", "REDUCE", "BUILD"),
)
_KINDS = {(module, name): type(name, (Plain,), {"__slots__": ()}) for module, name in _OBJECTS}


def _ordered() -> dict[Any, Any]:
    return {}


_CONTAINERS = {("torch", "Size"): tuple, ("collections", "OrderedDict"): _ordered}


class _Reader(pickle._Unpickler):
    """Unpickles what is listed, and nothing else."""

    stack: Any
    pop_mark: Any
    dispatch: ClassVar[dict[int, Any]] = {
        code: pickle._Unpickler.dispatch[code] for code in (getattr(pickle, name)[0] for name in _OPERATIONS)
    }

    def __init__(self, data: bytes, path: Path) -> None:
        super().__init__(BytesIO(data))
        self._path = path

    def find_class(self, module: str, name: str, /) -> Any:
        """Return what stands for a name."""
        if (module, name) in _KINDS:
            return _KINDS[module, name]
        if (module, name) in _CONTAINERS:
            return _CONTAINERS[module, name]
        if module == "torch" and isinstance(dtype := vars(torch).get(name), torch.dtype):
            return dtype
        raise UnreadError(
            f"{shown(self._path)} names {f'{module}.{name}'[:200]!a}, which no checkpoint of torch needs; unpickling it could "
            "run code, so it was not read. Get the checkpoint again, from where you trust it"
        )

    def _set_item(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self._set(key, value)

    def _set_items(self) -> None:
        items = self.pop_mark()
        for key, value in zip(items[::2], items[1::2], strict=True):
            self._set(key, value)

    def _set(self, key: Any, value: Any) -> None:
        # Hashing a tuple that is nested deeply enough would end the process.
        if type(key) not in (str, int) and not isinstance(key, Plain):
            raise pickle.UnpicklingError(f"a key is a {type(key).__name__}")
        self.stack[-1][key] = value

    dispatch[pickle.SETITEM[0]] = _set_item
    dispatch[pickle.SETITEMS[0]] = _set_items


def read_metadata(path: Path) -> dict[Any, Any]:
    """Return the fields of the metadata.

    Raises
    ------
    UsageError
        If it is damaged, or names a class or function that is not listed here.

    """
    try:
        data = read_bytes(path, "the .metadata of a DCP checkpoint", _LARGEST)
        found = _Reader(data, path).load()
    except UsageError:
        raise
    except Exception as error:  # a damaged pickle raises whatever its bytes happen to ask for
        raise UnreadError(
            f"{shown(path)} is damaged: {shown(error, 200) or type(error).__name__}; expected the metadata that torch's "
            "dcp.save writes: get the checkpoint again"
        ) from error
    return found.fields if isinstance(found, Plain) else {}
