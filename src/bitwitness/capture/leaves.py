"""Things that change within themselves (generators, arrays, iterators, files): what each holds, and putting it back.

Tensors are known to `capture.contents` itself.
"""

from __future__ import annotations

import ctypes
import gc
import io
import itertools
import mmap
import queue
import random
import sys
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from types import AsyncGeneratorType, CoroutineType, GeneratorType
from typing import Any

import torch

from bitwitness.tap.compat import SCRIPTED_CONTAINERS

LARGEST = 64 << 20
"""Bytes of tensors and arrays whose content is kept; the rest is known by reference and version alone."""
UNTOLD = "untold"
_UNTOLD = (GeneratorType, AsyncGeneratorType, CoroutineType, map, filter, zip)
"""Things that do not tell how far they have come: each time that they are asked, they count as moved."""
_CHANNELS = frozenset(
    (
        *("_queue", "socket", "ssl", "sqlite3", "multiprocessing.queues", "multiprocessing.connection", "subprocess"),
        *(
            "multiprocessing.pool",
            "multiprocessing.managers",
            "concurrent.futures.thread",
            "concurrent.futures.process",
        ),
        *("_hashlib", "zlib", "_bz2", "_lzma", "multiprocessing.shared_memory"),
    )
)
"""Modules whose objects give and take what nobody can take back."""
_FOREIGN_FUNCTION: type = ctypes.CFUNCTYPE(None).__mro__[1]
_ASKED = itertools.count()
_SPAWNED = "n_children_spawned"
"""What a numpy seed counts, and cannot be set back."""
_BY_TYPE: tuple[tuple[Any, str], ...] = (
    (torch.Generator, "torch"),
    (random.Random, "python"),
    (bytearray, "bytes"),
    ((io.StringIO, io.BytesIO), "memory"),
    (array, "array.array"),
    (memoryview, "memoryview"),
    (mmap.mmap, "map of a file"),
    ((ctypes._SimpleCData, ctypes.Structure, ctypes.Union, ctypes.Array), "ctypes"),
    ((ctypes.CDLL, _FOREIGN_FUNCTION), UNTOLD),
    (torch.jit.ScriptModule, "script"),
    ((*SCRIPTED_CONTAINERS, ctypes._Pointer), UNTOLD),
    (torch.UntypedStorage, "storage"),
    (queue.Queue, "queue"),
    (_UNTOLD, UNTOLD),
)


@dataclass(frozen=True, slots=True)
class Position:
    """How far an iterator has come, which shows that it moved, and does not put it back."""

    text: str


def is_generator(thing: Any) -> bool:
    """Tell whether something draws random numbers."""
    return kind_of(thing) in ("torch", "python", "numpy", "numpy.legacy")


def kind_of(thing: Any) -> str | None:
    """Return the name of a thing's kind; None if it is of none."""
    for kinds, name in _BY_TYPE:
        if isinstance(thing, kinds):
            return name
    if type(thing).__module__ == "multiprocessing.sharedctypes" and hasattr(thing, "get_obj"):
        return "shared"
    if (numpys := _kind_of_numpys(thing)) is not None:
        return numpys
    if isinstance(thing, io.IOBase) or type(thing).__module__ == "_csv":
        return "file"
    if any(kind.__module__ in _CHANNELS for kind in type(thing).__mro__) or _is_store(type(thing)):
        return UNTOLD
    return "iterator" if hasattr(type(thing), "__next__") and hasattr(type(thing), "__iter__") else None


def _is_store(kind: type) -> bool:
    """Tell whether a class is one of torch's stores of keys and values; process groups, of the same module, hold no numbers."""
    return kind.__module__ == "torch._C._distributed_c10d" and kind.__name__.endswith("Store")


def _kind_of_numpys(thing: Any) -> str | None:
    numpy: Any = sys.modules.get("numpy")
    if numpy is None:
        return None
    if isinstance(thing, numpy.random.Generator):
        return "numpy"
    if isinstance(thing, numpy.random.SeedSequence):
        return "seeds"
    if isinstance(thing, numpy.random.RandomState):
        return "numpy.legacy"
    if isinstance(thing, numpy.ndarray) and thing.dtype != object:
        return "array"
    return None


def _set_numpy(thing: Any, state: Any) -> None:
    thing.bit_generator.state = {key: value for key, value in state.items() if key != _SPAWNED}


def _set_items(thing: Any, content: Any) -> None:
    thing[...] = content


def _set_bytes(thing: Any, content: Any) -> None:
    thing[:] = content


def _set_memory(thing: Any, content: Any) -> None:
    value, position = content
    thing.seek(0)
    thing.truncate()
    thing.write(value)
    thing.seek(position)


def _set_array(thing: Any, content: Any) -> None:
    del thing[:]
    thing.frombytes(content)


def _set_shared(thing: Any, content: Any) -> None:
    ctypes.memmove(ctypes.addressof(thing.get_obj()), content, len(content))


def _viewed(thing: Any) -> Any:
    return None if thing.readonly or not thing.c_contiguous or thing.nbytes > LARGEST else bytes(thing)


def _set_viewed(thing: Any, content: Any) -> None:
    thing.cast("B")[:] = content


def _mapped(thing: Any) -> Any:
    return None if thing.closed or len(thing) > LARGEST else thing[:]


def _script(thing: Any) -> Any:
    """Return a scripted module's attributes; what it holds as parameters and buffers is known elsewhere."""
    held = {name: thing._c.getattr(name) for name in thing._concrete_type.get_attributes()}
    return {name: value.detach().clone() if isinstance(value, torch.Tensor) else value for name, value in held.items()}


def _set_script(thing: Any, content: Any) -> None:
    for name, value in content.items():
        now = thing._c.getattr(name)
        if isinstance(value, torch.Tensor) and isinstance(now, torch.Tensor) and now.shape == value.shape:
            with torch.no_grad():
                now.copy_(value)
        else:
            thing._c.setattr(name, value)


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _set_storage(thing: torch.UntypedStorage, content: torch.Tensor) -> None:
    _bytes_of(thing).copy_(content)


def _set_ctypes(thing: Any, content: Any) -> None:
    ctypes.memmove(ctypes.addressof(thing), content, len(content))


def _numpy_state(thing: Any) -> Any:
    state = dict(thing.bit_generator.state)
    seeds = getattr(thing.bit_generator, "seed_seq", None)
    return {**state, _SPAWNED: getattr(seeds, _SPAWNED, 0)}


def _position(thing: Any) -> Position | None:
    try:
        return Position(repr(thing.__reduce__()[1:]))
    except Exception:  # most iterators do not tell
        return _untold(thing)


def _file_position(thing: Any) -> Position | None:
    """Return how far a file was read or written; of a reader or writer of the csv module, the file that it holds."""
    files = [thing] if isinstance(thing, io.IOBase) else [getattr(f, "__self__", f) for f in gc.get_referents(thing)]
    for file in files:
        if not isinstance(file, io.IOBase) or file in (sys.__stdout__, sys.__stderr__) or file.closed:
            continue
        try:
            return Position(str(file.tell()))
        except (OSError, ValueError):  # a pipe, or a text that is read line by line
            return _untold(file)
    return _untold(thing) if type(thing).__module__ == "_csv" else None


def _waiting(thing: Any) -> Position:
    """Return what waits in a queue, and how much was ever put into it and not called done."""
    return Position(f"{thing.unfinished_tasks} {[id(item) for item in list(thing.queue)]}")


def _untold(_thing: Any) -> Position:
    return Position(str(next(_ASKED)))


_KINDS_OF_STATE: dict[str | None, tuple[Callable[[Any], Any], Callable[[Any, Any], None]]] = {
    "torch": (lambda g: g.get_state(), lambda g, state: g.set_state(state)),
    "python": (lambda g: g.getstate(), lambda g, state: g.setstate(state)),
    "numpy": (_numpy_state, _set_numpy),
    "numpy.legacy": (lambda g: g.get_state(), lambda g, state: g.set_state(state)),
    "array": (lambda a: a.copy() if a.nbytes <= LARGEST else None, _set_items),
    "bytes": (bytes, _set_bytes),
    "memory": (lambda f: None if f.closed else (f.getvalue(), f.tell()), _set_memory),
    "iterator": (_position, lambda _thing, _content: None),
    "memoryview": (_viewed, _set_viewed),
    "ctypes": (bytes, _set_ctypes),
    "map of a file": (_mapped, _set_bytes),
    "storage": (lambda s: _bytes_of(s).clone() if s.nbytes() <= LARGEST else None, _set_storage),
    "script": (_script, _set_script),
    "seeds": (lambda s: Position(str(s.n_children_spawned)), lambda _thing, _content: None),
    "array.array": (lambda a: a.tobytes(), _set_array),
    "shared": (lambda s: bytes(s.get_obj()), _set_shared),
    "file": (_file_position, lambda _thing, _content: None),
    "queue": (_waiting, lambda _thing, _content: None),
    UNTOLD: (_untold, lambda _thing, _content: None),
}


def content_of(thing: Any) -> Any:
    """Return a copy of the state of a generator, an array or an iterator; None if it has none to show."""
    return _KINDS_OF_STATE[kind_of(thing)][0](thing)


def restorable(thing: Any, content: Any) -> bool:
    """Tell whether `put_back` makes a thing what it was: a numpy generator that has spawned others stays one that has."""
    return kind_of(thing) != "numpy" or _numpy_state(thing)[_SPAWNED] == content[_SPAWNED]


def put_back(thing: Any, content: Any) -> None:
    """Have a thing hold again what `content_of` returned."""
    _KINDS_OF_STATE[kind_of(thing)][1](thing, content)
