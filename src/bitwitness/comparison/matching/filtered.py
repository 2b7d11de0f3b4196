"""A recording of which only some rows are shown: all but its tables is the recording's own."""

from __future__ import annotations

import pyarrow as pa
import torch

from bitwitness.store.source import Source

COMPUTED = ("op", "module", "saved", "collective")
"""Kinds of rows that belong to a micro-batch, and not to the step as a whole."""


class Filtered:
    """A `bitwitness.store.source.Source` of another one's rows; to be derived from, with a `table` of its own."""

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
        """Return a step's rows."""
        return self._source.table(rank, step)

    def tensor(self, rank: int, reference: str, dtype: str, shape: tuple[int, ...], layout: str | None) -> torch.Tensor:
        """Return a kept value."""
        return self._source.tensor(rank, reference, dtype, shape, layout)

    def stacks(self, rank: int) -> dict[int, str]:
        """Return a rank's call stacks."""
        return self._source.stacks(rank)


def with_micros(table: pa.Table, micros: object) -> pa.Table:
    """Return a table with other numbers of micro-batches."""
    number = table.schema.get_field_index("micro")
    return table.set_column(number, table.schema.field(number), pa.array(micros, table.schema.field(number).type))
