"""The ranks or micro-batches of a run as one, where two runs spread their model or their batch differently.

What only makes sense on one rank (operators on local shards, local gradients, what passes between ranks) is left out.
Parameters, reduced gradients and updates are put together by their DTensor placement; what every rank holds alike is taken
once; a module's other values are shards of the batch: extremes of all, sums of all. What has no dimension, a loss that the
model returns, is a mean of each part's own, of unknown weight, and left out; the loss that a backward begins at is the mean
over ranks, as their gradients are, and the sum over micro-batches.
"""

from __future__ import annotations

import re
from typing import Any

import pyarrow as pa
import torch

from bitwitness.comparison.gradients.dropped import LAST_ALONE, keeps_last_alone
from bitwitness.comparison.gradients.losses import LOSS, told
from bitwitness.comparison.gradients.ownranks import OWN, own_of_ranks
from bitwitness.comparison.matching.frame import COMPUTED, MICROS, RANKS, StepFrame
from bitwitness.comparison.matching.together import Cells, same, stacked, total, total_loss
from bitwitness.errors import UsageError
from bitwitness.store.rows import SCHEMA
from bitwitness.store.source import Source

_PLACEMENT = re.compile(r"(?P<how>.*) of \[(?P<shape>[\d, ]*)\] on mesh")
_SHARD = re.compile(r"(?:Shard\(dim=|S\()(\d+)\)")
# Kinds of rows that mean the same on one rank as on several; the others are left out (see the module's text).
_WHOLE = ("module", "parameter", "buffer", "optimizer", "saved", "gradient")
_KEY = ("kind", "phase", "module", "op", "call", "slot", "micro")


def spread_differently(a: Source, b: Source) -> bool:
    """Return whether two runs have other ranks, or the same ranks with other parts of the model."""
    if a.ranks() != b.ranks():
        return True
    return bool(a.ranks()) and _placements(a) != _placements(b)


def _placements(source: Source) -> set[str | None]:
    rank = source.ranks()[0]
    steps = source.steps(rank)
    if not steps:
        return set()
    table = source.table(rank, steps[0])
    texts = table.column("placement").combine_chunks().dictionary.to_pylist() if table.num_rows else []
    return {_how(text) for text in texts}


def _how(text: str | None) -> str | None:
    found = _PLACEMENT.match(text or "")
    return found["how"] if found else None


class MergedSource:
    """A `bitwitness.store.source.Source` of one rank, made of all ranks of another.

    ``ordered``: parts of a batch come in its order, so that values can be put together, and not only their statistics.
    """

    _joined = "ranks|"
    """Begins the reference of a value that is put together when it is asked for."""

    def __init__(self, source: Source, *, ordered: bool = True) -> None:
        self._source, self._ordered = source, ordered
        self.path, self.kind, self.info, self.problems = source.path, source.kind, source.info, source.problems
        self._parts: dict[str, tuple[int | None, list[tuple[int, Cells]]]] = {}

    def ranks(self) -> list[int]:
        """Return the one rank."""
        return [0]

    def steps(self, _rank: int) -> list[int]:
        """Return the steps that all ranks recorded."""
        source = self._source
        return sorted(set.intersection(*(set(source.steps(rank)) for rank in source.ranks())))

    def stacks(self, _rank: int) -> dict[int, str]:
        """Return the first rank's call stacks."""
        return self._source.stacks(self._source.ranks()[0])

    def table(self, _rank: int, step: int) -> pa.Table:
        """Return the step's rows, those of all ranks put together."""
        self._parts.clear()
        ranks = self._source.ranks()
        tables = [self._source.table(rank, step) for rank in ranks]
        recorded = [table.to_pylist() for table in tables]
        keyed = [_keyed(rows) for rows in recorded]
        rows = []
        for key, first in keyed[0].items():
            others = [rows_of_rank[key] for rows_of_rank in keyed[1:] if key in rows_of_rank]
            if len(others) == len(ranks) - 1 and (
                merged := self._merged(list(zip(ranks, [first, *others], strict=True)))
            ):
                rows.append(merged)
        frame = StepFrame(tables[0])
        return pa.Table.from_pylist(rows, schema=SCHEMA).replace_schema_metadata(
            {
                RANKS: str(len(ranks)),
                MICROS: str(frame.micros),
                COMPUTED: frame.computed,
                LOSS: _loss_of(tables[0], recorded[0]),
                OWN: own_of_ranks(keyed),
            }
        )

    def _merged(self, parts: list[tuple[int, Cells]], batch: int | None = None) -> Cells | None:
        """Put a value together; ``batch``: what begins with this size is a part of one, and not all of something held alike."""
        first = parts[0][1]
        row = {**first, "rank": 0, "producer": -1}
        found = _PLACEMENT.match(first["placement"] or "")
        # A placement such as "S(0)" or "R, Shard(dim=1)": how each dimension of the mesh of ranks holds the tensor.
        dims = [int(dim) for dim in _SHARD.findall(found["how"])] if found else []
        if found and "P" in re.sub(r"S\(\d+\)", "", found["how"]):
            return None  # partial sums: what they add up to was never held by a rank
        of_batch = first["kind"] == "module" and (first["name"] or "input ").startswith("input ")  # and no weight
        is_part = of_batch and first["shape"] and first["shape"][0] == batch
        alike = not is_part and all(same(first, other) for _, other in parts[1:])
        if (found and not dims) or (alike and not dims):
            return row | {"placement": None}
        if not found and first["kind"] not in ("module", "saved"):
            return None
        if not found and first["op"] == "loss":
            return total_loss([cells for _, cells in parts], len(parts))
        if not found and (first["phase"] == "backward" or not first["shape"]):
            return None  # each rank's loss is a mean over its own batch
        shape = _whole_shape(found["shape"]) if found else stacked(parts)
        # Shards over several dimensions of a mesh do not lie one after the other, so their values are not put together.
        self._keep(row, dims[0] if len(dims) == 1 else 0 if not found else None, parts)
        return (
            row
            | total([cells for _, cells in parts])
            | {"shape": shape, "placement": None, "hash": None, "layout": None}
        )

    def _keep(self, row: Cells, dim: int | None, parts: list[tuple[int, Cells]]) -> None:
        """Have the parts put together when the value is asked for."""
        of_batch = not _PLACEMENT.match(parts[0][1]["placement"] or "")
        fitting = len({tuple(cells["shape"][1:]) for _, cells in parts}) == 1  # samples of other lengths do not
        if (
            dim is None
            or (of_batch and not (self._ordered and fitting))
            or any(cells["tensor"] is None or "|every=" in cells["tensor"] for _, cells in parts)
        ):
            row["tensor"] = None
            return
        row["tensor"] = f"{self._joined}{parts[0][0]}.{len(self._parts)}"
        self._parts[row["tensor"]] = dim, parts

    def tensor(
        self, _rank: int, reference: str, dtype: str, shape: tuple[int, ...], layout: str | None
    ) -> torch.Tensor:
        """Return a kept value, its parts put together."""
        if not reference.startswith(self._joined):
            return self._source.tensor(self._source.ranks()[0], reference, dtype, shape, layout)
        dim, parts = self._parts[reference]
        pieces = [
            self._source.tensor(rank, cells["tensor"], cells["dtype"], tuple(cells["shape"]), cells["layout"])
            for rank, cells in parts
        ]
        try:
            whole = torch.cat(pieces, dim or 0)
        except (RuntimeError, IndexError) as error:
            raise UsageError(f"{self.path}: the ranks' parts of {parts[0][1]['module']} do not fit: {error}") from error
        if tuple(whole.shape) != shape:
            raise UsageError(f"{self.path}: {parts[0][1]['module']}: parts make {list(whole.shape)}, not {list(shape)}")
        return whole


class MergedMicros(MergedSource):
    """A source whose steps' micro-batches are put together: modules' values one after the other, losses added up."""

    _joined = "micros|"

    def ranks(self) -> list[int]:
        """Return the ranks that recorded."""
        return self._source.ranks()

    def steps(self, rank: int) -> list[int]:
        """Return the steps that a rank recorded."""
        return self._source.steps(rank)

    def stacks(self, rank: int) -> dict[int, str]:
        """Return a rank's call stacks."""
        return self._source.stacks(rank)

    def table(self, rank: int, step: int) -> pa.Table:
        """Return the step's rows, those of all micro-batches put together."""
        own = f"{self._joined}{rank}."
        self._parts = {name: parts for name, parts in self._parts.items() if not name.startswith(own)}
        recorded = self._source.table(rank, step)
        every = recorded.to_pylist()
        found = [
            row for row in every if row["kind"] not in ("module", "saved") or row["phase"] != "backward"
        ]  # each micro-batch's loss is a mean of its own
        micros = sorted({row["micro"] for row in found})
        # What belongs to no micro-batch bears the number of the one that ran before: it is the same for all of them.
        keyed = [_keyed([row | {"micro": 0} for row in found if row["micro"] == micro]) for micro in micros]
        batch = _batch_size(keyed)
        rows: list[Cells] = []
        for key in dict.fromkeys(key for part in keyed for key in part):
            parts = [part[key] for part in keyed if key in part]
            if len(parts) == 1 or parts[0]["kind"] in ("parameter", "buffer"):
                rows.append(parts[0] | {"producer": -1})
            elif parts[0]["op"] == "loss":
                rows.append(total_loss(parts, 1))
            elif merged := self._merged([(rank, part) for part in parts], batch):
                rows.append(merged | {"rank": rank})
        frame = StepFrame(recorded)
        return pa.Table.from_pylist(rows, schema=SCHEMA).replace_schema_metadata(
            {
                MICROS: str(len(micros)),
                COMPUTED: frame.computed,
                LOSS: told(every),
                LAST_ALONE: str(int(keeps_last_alone(frame))),
            }
        )

    def tensor(self, rank: int, reference: str, dtype: str, shape: tuple[int, ...], layout: str | None) -> torch.Tensor:
        """Return a kept value, its parts put together."""
        if not reference.startswith(self._joined):
            return self._source.tensor(rank, reference, dtype, shape, layout)
        return super().tensor(rank, reference, dtype, shape, layout)


def _loss_of(table: pa.Table, rows: list[Cells]) -> str:
    """Return by what a rank's loss is made, also where its micro-batches were put together."""
    known = (table.schema.metadata or {}).get(LOSS.encode())
    return known.decode() if known else told(rows)


def _batch_size(micros: list[dict[tuple[Any, ...], Cells]]) -> int | None:
    """Return the first size of the model's first input that differs between micro-batches; None if none does."""
    for key, row in micros[0].items() if micros else ():
        is_input = row["kind"] == "module" and row["module"] == "." and (row["name"] or "").startswith("input ")
        if is_input and row["shape"] and any(key in other and not same(row, other[key]) for other in micros[1:]):
            return int(row["shape"][0])
    return None


def _keyed(rows: list[Cells]) -> dict[tuple[Any, ...], Cells]:
    """Return a rank's rows that can be put together, by what they are and how often it came before."""
    seen: dict[tuple[Any, ...], int] = {}
    found = {}
    for row in rows:
        if row["kind"] not in _WHOLE or row["recomputed"] or (row["kind"] == "gradient" and row["slot"] == "local"):
            continue
        key = tuple(row[name] for name in _KEY)
        seen[key] = seen.get(key, 0) + 1
        found[(*key, seen[key])] = row
    return found


def _whole_shape(text: str) -> list[int]:
    return [int(size) for size in text.split(",") if size.strip()]
