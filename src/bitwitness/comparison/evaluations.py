"""A recording of an optimizer that evaluates the model several times a step, cut to as many evaluations as another has."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import torch

from bitwitness.store.source import Source

_COMPUTED = ("op", "module", "saved", "collective")


class FirstMicros:
    """A `bitwitness.store.source.Source` of another one's first evaluations in each step.

    What belongs to a step as a whole, its gradients and updates, is kept, as if it belonged to the first.
    """

    def __init__(self, source: Source, count: int) -> None:
        self._source = source
        self._count = count
        self.path, self.kind, self.info, self.problems = source.path, source.kind, source.info, source.problems

    def ranks(self) -> list[int]:
        """Return the ranks that recorded."""
        return self._source.ranks()

    def steps(self, rank: int) -> list[int]:
        """Return the steps that a rank recorded."""
        return self._source.steps(rank)

    def table(self, rank: int, step: int) -> pa.Table:
        """Return a step's rows without those of further evaluations."""
        table = self._source.table(rank, step)
        kinds = np.array(table.column("kind").to_pylist(), dtype=object)
        computed, updates = np.isin(kinds, _COMPUTED), kinds == "optimizer"
        micro = np.asarray(table.column("micro").fill_null(0).combine_chunks())
        # What an optimizer read is recorded after each evaluation, and what it made of that after the last.
        last = micro == micro[updates].max(initial=0)
        kept = np.flatnonzero(np.where(computed, micro < self._count, last | ~updates))
        column = table.schema.get_field_index("micro")
        table = table.set_column(
            column, table.schema.field(column), pa.array(np.where(computed, micro, 0), table.schema.field(column).type)
        )
        return table.take(pa.array(kept))

    def tensor(self, rank: int, reference: str, dtype: str, shape: tuple[int, ...], layout: str | None) -> torch.Tensor:
        """Return a kept value."""
        return self._source.tensor(rank, reference, dtype, shape, layout)

    def stacks(self, rank: int) -> dict[int, str]:
        """Return a rank's call stacks."""
        return self._source.stacks(rank)
