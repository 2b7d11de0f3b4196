"""A recording without the micro-batches from which no gradient comes back to the model.

Where one script calls a model without gradients, which is not recorded, and another detaches what it returns, only the second
has that call; the backward of another model, which came of it, makes a micro-batch of it.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import torch

from bitwitness.comparison.frame import StepFrame
from bitwitness.store.source import Source

_COMPUTED = ("op", "module", "saved", "collective")


class WithoutIdle:
    """A `bitwitness.store.source.Source` of another one's micro-batches that have a backward of the model, numbered anew."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self.path, self.kind, self.info, self.problems = source.path, source.kind, source.info, source.problems

    def ranks(self) -> list[int]:
        """Return the ranks that recorded."""
        return self._source.ranks()

    def steps(self, rank: int) -> list[int]:
        """Return the steps that a rank recorded."""
        return self._source.steps(rank)

    def table(self, rank: int, step: int) -> pa.Table:
        """Return a step's rows without those of idle micro-batches."""
        table = self._source.table(rank, step)
        left_out = idle(StepFrame(table))
        if not left_out:
            return table
        micro = np.asarray(table.column("micro").fill_null(0).combine_chunks())
        computed = np.isin(np.array(table.column("kind").to_pylist(), dtype=object), _COMPUTED)
        kept = np.flatnonzero(~(computed & np.isin(micro, left_out)))
        number = table.schema.get_field_index("micro")
        anew = micro - np.searchsorted(left_out, micro)
        table = table.set_column(number, table.schema.field(number), pa.array(anew, table.schema.field(number).type))
        return table.take(pa.array(kept))

    def tensor(self, rank: int, reference: str, dtype: str, shape: tuple[int, ...], layout: str | None) -> torch.Tensor:
        """Return a kept value."""
        return self._source.tensor(rank, reference, dtype, shape, layout)

    def stacks(self, rank: int) -> dict[int, str]:
        """Return a rank's call stacks."""
        return self._source.stacks(rank)


def idle(frame: StepFrame) -> list[int]:
    """Return the micro-batches, in order, with no backward inside the model, where others of the step have one."""
    kinds, phases = frame.texts["kind"], frame.texts["phase"]
    inside = kinds.equals("module") | (kinds.equals("op") & ~frame.texts["module"].equals("."))
    reached = np.unique(frame.micro[phases.equals("backward") & inside & ~frame.recomputed])
    computed = np.unique(frame.micro[phases.equals("forward") & (kinds.equals("op") | kinds.equals("saved") | inside)])
    return np.setdiff1d(computed, reached).tolist() if len(reached) else []
