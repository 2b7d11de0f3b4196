"""One kept tensor of a dump of msprobe, and nothing else: no code that a file brings along is run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from bitwitness.errors import UnreadError, UsageError
from bitwitness.files.reading import open_file
from bitwitness.files.shown import shown

if TYPE_CHECKING:
    import torch


def read_tensor(folder: Path, name: str, dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
    """Read the tensor that a row names.

    Raises
    ------
    UsageError
        If there is none, it is damaged, or the row says something else of it.

    """
    import torch

    path = folder / name
    try:
        inside = path.resolve().parent == folder.resolve() and path.is_file()
    except (OSError, ValueError, RuntimeError):
        inside = False
    if not inside:
        raise UnreadError(f"there is no tensor file {shown(path)}; expected it in the dump's own dump_tensor_data")
    try:
        tensor = _read_npy(path) if name.endswith(".npy") else _read_saved(path)
    except UsageError as error:
        raise UnreadError(f"{error}; expected one plain tensor, saved by torch or NumPy") from error
    except Exception as error:  # what a damaged or hostile file makes NumPy or torch raise is not bounded
        why = (str(error).splitlines() or [type(error).__name__])[0]
        raise UnreadError(
            f"{shown(path)} cannot be read: {shown(why, 200)}; expected one tensor, saved by torch or NumPy"
        ) from error
    if tuple(tensor.shape) != tuple(shape):
        raise UnreadError(
            f"{shown(path)}: the row says shape {list(shape)}, the file {list(tensor.shape)}; one of them is damaged"
        )
    wanted = getattr(torch, dtype, None)
    if not isinstance(wanted, torch.dtype) or tensor.dtype == wanted:
        return tensor
    if not name.endswith(".npy"):  # NumPy lacks some types, which are widened there
        raise UnreadError(
            f"{shown(path)}: the row says {shown(dtype, 40)}, the file {tensor.dtype}; one of them is damaged"
        )
    return tensor.to(wanted)


def _read_saved(path: Path) -> torch.Tensor:
    from bitwitness.store.torchfile import tensor_in

    return tensor_in(path)


def _read_npy(path: Path) -> torch.Tensor:
    import numpy as np
    import torch

    open_file(path, "a tensor that NumPy saved").close()
    # Mapped: an array that claims more than the file has is refused before there is memory for it.
    mapped = np.load(path, mmap_mode="r", allow_pickle=False)
    if not isinstance(mapped, np.ndarray):
        raise UnreadError(f"{shown(path)} holds {type(mapped).__name__}; expected one array")
    return torch.from_numpy(np.array(mapped))
