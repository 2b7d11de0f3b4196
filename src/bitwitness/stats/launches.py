"""Reads tensors on an accelerator, each by one launch and at once, and joins what was found when it is asked for.

Nothing waits for the device; memory is some 72 bytes for each 32,768 elements until then.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bitwitness.stats.host import to_device
from bitwitness.stats.sketch import BLOCK, first_weights, signs_of_blocks

FIGURES = ("nan", "pos_inf", "neg_inf", "there", "low", "high", "total", "squares", "signed")
"""What is found of each tensor; from ``low`` on of the finite values."""
_ROWS = 8192  # of a piece of memory: some half a megabyte
_DEVICES = ("cuda",)  # ROCm's, too
_FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
_WHOLE = (torch.bool, torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)
_TILE, _JOINED = 2048, 256  # values and rows that a program has before it at a time


class Joined(NamedTuple):
    """The keys of tensors and their ``FIGURES``, [N, 9] in float64 on their device."""

    keys: list[Any]
    figures: Tensor


@dataclass(slots=True)
class _Piece:
    memory: Tensor
    stream: Any
    used: int = 0
    keys: list[Any] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)


@cache
def kernels() -> ModuleType | None:
    """Return Triton's kernels; None where there is no Triton."""
    try:
        from bitwitness.stats import kernels as found
    except Exception:  # whatever another release of it raises
        return None
    return found


class Launches:
    """Takes tensors of one device."""

    broken = False
    """A launch failed once, in this process: Triton needs a C compiler, and a device that it knows."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pieces: list[_Piece] = []
        self._open: dict[Any, _Piece] = {}

    @classmethod
    def takes(cls, values: Tensor) -> bool:
        """Tell whether a plain tensor is one that `add` takes."""
        return (
            (values.dtype in _FLOATS or values.dtype in _WHOLE)
            and values.device.type in _DEVICES
            and not cls.broken
            and values.is_contiguous()
            and values.numel() > 0
            and not values.is_neg()
            and values.device.index == torch.accelerator.current_device_index()
            and kernels() is not None
        )

    def add(self, key: Any, values: Tensor, *, signed: bool) -> bool:
        """Read a tensor that `takes`; return False if it was not possible, which it will not be again."""
        found = kernels()
        if found is None:
            return False
        count = values.numel()
        segments = -(-count // BLOCK)
        stream = torch.accelerator.current_stream(self._device)
        piece = self._open.get(stream)
        if piece is None or piece.used + segments > len(piece.memory):
            piece = self._open[stream] = self._new(segments, stream)
        weights = first_weights(BLOCK, torch.float64, self._device)
        raw = values.view(torch.uint8) if values.dtype == torch.bool else values
        try:
            found.read_segments[(segments,)](
                raw, weights, piece.memory, count, piece.used,
                SIGNED=signed, SEGMENT=BLOCK, WIDTH=len(FIGURES), TILE=_TILE, num_warps=8,
            )  # fmt: skip
        except Exception:
            Launches.broken = True
            return False
        piece.keys.append(key)
        piece.starts.append(piece.used)
        piece.counts.append(segments)
        piece.used += segments
        return True

    def _new(self, segments: int, stream: Any) -> _Piece:
        with torch.inference_mode(mode=False):
            memory = torch.empty(max(_ROWS, segments), len(FIGURES), dtype=torch.float64, device=self._device)
        piece = _Piece(memory, stream)
        self._pieces.append(piece)
        return piece

    def join(self) -> list[Joined]:
        """Return what was found since the last call, on the current stream."""
        pieces, self._pieces = self._pieces, []
        self._open.clear()
        return [self._joined(piece) for piece in pieces if piece.keys]

    def _joined(self, piece: _Piece) -> Joined:
        found, current = kernels(), torch.accelerator.current_stream(self._device)
        assert found is not None  # noqa: S101 - it has read them
        if piece.stream != current:
            current.wait_stream(piece.stream)
            piece.memory.record_stream(current)
        starts, counts = to_device([*piece.starts, *piece.counts], self._device).view(2, -1)
        signs = signs_of_blocks(1 << max(piece.counts).bit_length(), torch.float64, self._device)
        with torch.inference_mode(mode=False):
            joined = torch.empty(len(piece.keys), len(FIGURES), dtype=torch.float64, device=self._device)
        try:
            found.join_segments[(len(piece.keys),)](
                piece.memory, starts, counts, signs, joined, WIDTH=len(FIGURES), ROWS=_JOINED
            )
        except Exception:
            Launches.broken = True
            joined = _joined_by_torch(piece, signs)
        return Joined(piece.keys, joined)


def _joined_by_torch(piece: _Piece, signs: Tensor) -> Tensor:
    """Return the same by torch's operators, some for each tensor."""
    rows = []
    for start, count in zip(piece.starts, piece.counts, strict=True):
        mine = piece.memory[start : start + count]
        signed = (mine[:, 8] * (signs[:count] if count > 1 else 1.0)).sum(0, keepdim=True)
        rows.append(
            torch.cat([mine[:, :4].sum(0), mine[:, 4:5].amin(0), mine[:, 5:6].amax(0), mine[:, 6:8].sum(0), signed])
        )
    return torch.stack(rows)
