"""What torch DCP asks while it writes and reads: tensors are hashed as they lie in memory, and nothing is unpickled freely."""

from __future__ import annotations

import io
import threading
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.planner import ReadItem, WriteItem

from bitwitness.checkpoint.manifest import SealedTensor
from bitwitness.stats import in_hex
from bitwitness.stats.digest import bit_hash


class HashingSavePlanner(DefaultSavePlanner):
    """Hashes each chunk before it is written.

    Attributes
    ----------
    sealed
        The chunks that this rank wrote, once they are.

    """

    def __init__(self) -> None:
        super().__init__()
        self.sealed: list[SealedTensor] = []
        self._one_at_a_time = threading.Lock()  # a writer may have several threads

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        """Return what is to be written, as the default does; a tensor's hash is noted."""
        data = super().resolve_data(write_item)
        if isinstance(data, torch.Tensor):
            index = write_item.index
            offsets = tuple(index.offset) if index.offset is not None else (0,) * data.dim()
            one = SealedTensor(index.fqn, "", offsets, in_hex(bit_hash(data.detach())))
            with self._one_at_a_time:
                self.sealed.append(one)
        return data


class PlainLoadPlanner(DefaultLoadPlanner):
    """Takes plain values and tensors only out of what DCP has pickled: torch's own planner would run what it names."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Read a value that is no tensor; raises `pickle.UnpicklingError` for anything else than plain values."""
        plain: Any = torch.load(value, weights_only=True)
        again = io.BytesIO()
        torch.save(plain, again)
        again.seek(0)
        super().load_bytes(read_item, again)
