"""The rows of a recording: one for each value that an operator, a module, a parameter or the user's own point showed.

A Parquet file of them can be read by any engine. What the columns hold:

==============  =======================================================================================================
rank, step      who, and in which optimizer step; ``micro`` numbers the forwards of a step
seq             order of the rows in a rank's recording
node            what the row belongs to: all inputs and outputs of one operator call have the same number
kind            ``op``, ``module``, ``parameter``, ``gradient``, ``optimizer``, ``buffer``, ``collective``, ``saved``
phase, module,  the row's `bitwitness.site.Site`
op, call, slot
dtype, shape    of the local tensor; ``placement`` tells how a DTensor is spread, and over which mesh
layout          strides of a tensor that lies in memory in another order than its own (a transpose); else null
count … zeros   statistics as `bitwitness.stats.Stats` defines them: extremes, mean and L2 norm are of the finite values
sketch          the sum of the values with signs by their place (`bitwitness.stats.sketch`): another order gives another one;
                of a tensor with a layout in the order of its memory; null where values are not finite
hash            64-bit hash of the bits, of a tensor with a layout in the order of its memory
value           number of the value: rows with the same number show the same bits of the same tensor
producer        the node that made the value; -1 if that was not recorded
name            parameter, buffer or user's name, where the value has one
args            an operator's other arguments, as JSON; with the node's first row
stack           where it was called: a number in the stacks table; -1 if not recorded
tensor          the safetensors file (in ``tensors/``) and the key under which the value itself lies: ``file|key``
recomputed      the operator ran again, for activation checkpointing
==============  =======================================================================================================
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import pyarrow as pa

_TEXT = pa.dictionary(pa.int32(), pa.string())

SCHEMA = pa.schema(
    [
        ("rank", pa.int32()),
        ("step", pa.int32()),
        ("micro", pa.int32()),
        ("seq", pa.int64()),
        ("node", pa.int64()),
        ("kind", _TEXT),
        ("phase", _TEXT),
        ("module", _TEXT),
        ("op", _TEXT),
        ("call", pa.int32()),
        ("slot", _TEXT),
        ("dtype", _TEXT),
        ("shape", pa.list_(pa.int64())),
        ("placement", _TEXT),
        ("layout", _TEXT),
        ("value", pa.int64()),
        ("producer", pa.int64()),
        ("name", _TEXT),
        ("args", _TEXT),
        ("stack", pa.int32()),
        ("tensor", _TEXT),
        ("recomputed", pa.bool_()),
        ("count", pa.int64()),
        ("nan", pa.int64()),
        ("pos_inf", pa.int64()),
        ("neg_inf", pa.int64()),
        ("zeros", pa.int64()),
        ("min", pa.float64()),
        ("max", pa.float64()),
        ("mean", pa.float64()),
        ("l2", pa.float64()),
        ("sketch", pa.float64()),
        ("hash", pa.int64()),
    ]
)
STACKS = pa.schema([("stack", pa.int32()), ("text", pa.string())])


AT_LEAST_ONE = -2
"""A number of NaN or Inf of which only this is known, in what other tools have recorded."""


class Row(NamedTuple):
    """A row without the statistics of its value."""

    step: int
    micro: int
    seq: int
    node: int
    kind: str
    phase: str
    module: str
    op: str
    call: int
    slot: str
    dtype: str
    shape: tuple[int, ...]
    placement: str | None
    layout: str | None
    value: int
    producer: int
    name: str | None
    args: str | None
    stack: int
    tensor: str | None
    recomputed: bool


class Measured(NamedTuple):
    """A value's statistics; None where one was not taken."""

    count: int  # type: ignore[assignment]
    nan: int | None = None
    pos_inf: int | None = None
    neg_inf: int | None = None
    zeros: int | None = None
    min: float | None = None
    max: float | None = None
    mean: float | None = None
    l2: float | None = None
    sketch: float | None = None
    hash: int | None = None


def to_table(rank: int, rows: Sequence[tuple[Any, ...]], values: dict[int, Measured]) -> pa.Table:
    """Return rows, each with its value's statistics, as a table of `SCHEMA`."""
    columns: dict[str, Sequence[Any]] = dict(zip(Row._fields, zip(*rows, strict=True), strict=True)) if rows else {}
    found = [values[number] for number in columns["value"]] if rows else []
    columns |= dict(zip(Measured._fields, zip(*found, strict=True), strict=True)) if rows else {}
    columns["rank"] = [rank] * len(rows)
    arrays = []
    for field in SCHEMA:
        data = columns.get(field.name, ())
        if pa.types.is_dictionary(field.type):
            arrays.append(_encoded(data))
        else:
            arrays.append(pa.array(data, field.type))
    return pa.Table.from_arrays(arrays, schema=SCHEMA)


def _encoded(data: Sequence[str | None]) -> pa.Array:
    """Encode strings by a dictionary; many are the same object, which makes that cheap."""
    numbers: dict[str, int] = {}
    indices = [None if text is None else numbers.setdefault(text, len(numbers)) for text in data]
    return pa.DictionaryArray.from_arrays(pa.array(indices, pa.int32()), pa.array(list(numbers), pa.string()))
