"""A tensor of a checkpoint before it is loaded, and which files of a folder may be opened for it."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeGuard

from bitwitness.errors import UnreadError
from bitwitness.files.shown import quoted, shown

if TYPE_CHECKING:
    import torch

_LONGEST_NAME = 255  # bytes
_DIMENSIONS = 64  # torch's operators take no more


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """What is said of a tensor, and how to get it; `read` raises `UnreadError` where the two do not fit."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    read: Callable[[], torch.Tensor]


@dataclass(slots=True)
class FoundTensors:
    """What a file or folder holds: tensors by name, what was left out and why, how many entries are no tensors."""

    entries: dict[str, TensorEntry]
    problems: list[str]
    ignored: int = 0


def inside(folder: Path, name: str) -> Path:
    """Return a file of a folder by the name that another file of it gives.

    Raises
    ------
    UnreadError
        If the name leads out of the folder. Links into the blobs of the same Hugging Face cache are no way out: there
        every file of a snapshot is one.

    """
    if name in {"", ".", ".."} or any(c in name for c in "/\\\0"):
        raise UnreadError(
            f"{shown(folder)} names the file {quoted(name)}; expected a plain file name in that folder. Nothing was read: get "
            "the checkpoint again, from where you trust it"
        )
    if len(os.fsencode(name)) > _LONGEST_NAME:
        raise UnreadError(f"{shown(folder)} names the file {quoted(name)}, which is longer than a file's name can be")
    path = folder / name
    try:
        real, home = path.resolve(), folder.resolve()
    except (OSError, RuntimeError) as error:
        raise UnreadError(f"cannot read {shown(path)}: its links go round in circles; expected a file") from error
    homes = [home, *([home.parents[1] / "blobs"] if home.parent.name == "snapshots" else [])]
    if real.parent not in homes:
        raise UnreadError(
            f"{shown(path)} is a link out of its folder, to {real}; expected a file in it: copy the file there"
        )
    return path


def is_shape(value: object) -> TypeGuard[tuple[int, ...]]:
    """Tell whether a value read from a file is a possible shape."""
    return (
        isinstance(value, tuple)
        and len(value) <= _DIMENSIONS
        and all(type(n) is int and 0 <= n < 1 << 62 for n in value)
    )
