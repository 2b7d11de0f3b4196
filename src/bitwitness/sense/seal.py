"""What changed parameters or optimizer state between the end of a step and the next use of gradients, if anything.

Nobody has to: an optimizer writes them in its step. Gradients are sealed alike, from their backward's end to their use. What a
script does to them meanwhile (loading, an exchange with averages, clamping) is no fault, and most of it leaves a trace: another
tensor, other memory, or torch's own count of writes. What leaves none is told by its extent: a script writes whole tensors,
memory loses a bit.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from bitwitness.sense.held import Name, Reading, read
from bitwitness.stats.changed import Change, change_of
from bitwitness.stats.digest import bit_hash, flat_bits
from bitwitness.stats.local import local_parts

_FEW_ROWS, _FEW_COLUMNS = 4, 8  # what a few words move; more is a row of a matrix, or all of it
_SMALLEST = 256  # elements: of fewer any number may be all that a script's write has changed (a clamped temperature)


@dataclass(frozen=True, slots=True)
class Broken:
    """A tensor that has changed without a trace.

    ``few``: a few words of many. ``one_bit``: exactly one bit of it.
    """

    name: Name
    tensor: torch.Tensor
    change: Change

    @property
    def few(self) -> bool:
        """Whether it is a few words of a tensor that has many."""
        small = self.change.rows <= _FEW_ROWS and self.change.columns <= _FEW_COLUMNS
        return small and self.tensor.numel() >= _SMALLEST

    @property
    def one_bit(self) -> bool:
        """Whether exactly one bit of it has changed."""
        return self.few and self.change.word is not None and self.change.word.flipped == 1

    @property
    def of_mantissa(self) -> bool:
        """Whether exactly one bit of it has changed, and it is of a number's mantissa.

        What changes a sign (``neg_``, ``abs_``), or multiplies by two, flips one bit of a sign or an exponent as well.
        """
        return self.few and self._flipped[0] in range(_mantissa_bits(self.tensor.dtype))

    @property
    def by_no_script(self) -> bool:
        """Whether a number's highest exponent bit alone has flipped: its size changed by 2^64 at the least, and no other bit.

        Zero and powers of two do not count: a script that writes 2 for 0, or infinity for 1, flips no other bit either.
        """
        bit, before = self._flipped
        return bit == 8 * self.tensor.itemsize - 2 and bool(before & (1 << _mantissa_bits(self.tensor.dtype)) - 1)

    @property
    def _flipped(self) -> tuple[int, int]:
        """Which bit of a floating number has flipped alone, from the lowest, and the number's bits before; -1 if none has."""
        word = self.change.word
        if word is None or word.flipped != 1 or not self.tensor.is_floating_point():
            return -1, 0
        place, bit = divmod((word.before ^ word.after).bit_length() - 1, 8 * self.tensor.itemsize)
        return bit, word.before >> place * 8 * self.tensor.itemsize

    def evidence(self) -> dict[str, object]:
        """Return what is known of the change, ready for JSON."""
        told: dict[str, object] = {"rows_of_8168_bytes": self.change.rows, "of": self.change.of}
        if (word := self.change.word) is None:
            return told
        size = self.tensor.itemsize
        byte = ((word.before ^ word.after) & -(word.before ^ word.after)).bit_length() - 1 >> 3
        offset, bits = byte // size * size, 8 * size
        before, after = (value >> 8 * offset & (1 << bits) - 1 for value in (word.before, word.after))
        element = (word.at + offset) // size
        shape = tuple(local_parts(self.tensor)[0].shape)
        index = [int(i) for i in torch.unravel_index(torch.tensor(element), shape)] if shape else []
        told |= {
            "element": index,
            "bits_before": f"{before:0{bits // 4}x}",
            "bits_after": f"{after:0{bits // 4}x}",
            "bits_flipped": word.flipped,
        }
        return told


def _mantissa_bits(dtype: torch.dtype) -> int:
    return round(-math.log2(torch.finfo(dtype).eps)) if dtype.is_floating_point else 0


class Seal:
    """Tensors as a step left them, and what would tell that somebody has written to them since."""

    def __init__(self, tensors: dict[Name, torch.Tensor]) -> None:
        self._marks = {name: _marks(tensor) for name, tensor in tensors.items()}
        self._reading = read(tensors)
        self._reading.tensors = dict.fromkeys(tensors, torch.empty(0))  # what is replaced is to be freed
        self._place = {name: index for index, name in enumerate(tensors)}
        self.bytes = sum(local_parts(tensor)[0].nbytes for tensor in tensors.values())

    def __len__(self) -> int:
        return len(self._place)

    @property
    def word(self) -> int:
        """One hash of all that is sealed, in its order."""
        return int(bit_hash(self._reading.hashes))

    def drop_parameters(self, names: set[str]) -> None:
        """Expect nothing of some parameters, and of what is kept of them, any more."""
        self._place = {name: place for name, place in self._place.items() if name.parameter not in names}

    def broken(self, now: Reading) -> list[Broken]:
        """Return the tensors that changed without a trace."""
        found = []
        before, after = self._reading.hashes.tolist(), now.hashes.tolist()
        for index, (name, tensor) in enumerate(now.tensors.items()):
            place = self._place.get(name)
            if place is None or self._marks[name] != _marks(tensor):
                continue  # new, replaced or written to
            if before[place] != after[index]:
                change = _change(self._reading, place, now, index, tensor)
                found.append(Broken(name, tensor, change))
        return found


def _change(before: Reading, place: int, now: Reading, index: int, tensor: torch.Tensor) -> Change:
    return change_of(before.batch.kept(place), now.batch.kept(index), flat_bits(local_parts(tensor)[0]))


def _marks(tensor: torch.Tensor) -> tuple[int, int, tuple[int, ...]]:
    """Return where a tensor lies, how often torch knows it was written to, and its shape."""
    values = local_parts(tensor)[0]
    writes = 0 if tensor.is_inference() else tensor._version + values._version
    return values.data_ptr(), writes, tuple(values.shape)
