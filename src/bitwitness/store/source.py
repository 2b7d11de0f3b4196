"""What a comparison reads: recordings of ours and those of other tools, all in the same shape."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import pyarrow as pa

if TYPE_CHECKING:
    import torch


class Source(Protocol):
    """A recording: for each rank and step a table of `bitwitness.store.rows.SCHEMA`, in the order of execution."""

    path: str
    """Where it lies, as the user named it."""
    kind: str
    """Whose format it is: ``bitwitness``, ``msprobe``, ``ascend``."""
    info: dict[str, Any]
    """What is known of the run: the fields of ``run.json``, where there are any."""
    problems: list[str]
    """What could not be read, one sentence each; it grows as reading goes on."""

    def ranks(self) -> list[int]:
        """Return the ranks that recorded anything."""

    def steps(self, rank: int) -> list[int]:
        """Return a rank's recorded steps in ascending order."""

    def table(self, rank: int, step: int) -> pa.Table:
        """Return the rows of one step."""

    def tensor(self, rank: int, reference: str, dtype: str, shape: tuple[int, ...], layout: str | None) -> torch.Tensor:
        """Return a kept value: what a row's ``tensor``, ``dtype``, ``shape`` and ``layout`` columns say.

        Only every n-th element, flat, if it was sampled.

        Raises
        ------
        UsageError
            If it is not there, or damaged.

        """

    def stacks(self, rank: int) -> dict[int, str]:
        """Return the call stacks by number, innermost line first."""
