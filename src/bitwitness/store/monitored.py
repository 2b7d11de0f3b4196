"""The series of a monitored run: a row for each number, or each tensor's statistics, of one step.

    RUN/rank00000/monitor-000001.parquet

==============  =======================================================================================================
step, micro     in which step, and in which of its forwards (-1: of the step as a whole)
kind            what was looked at:

                ``training``: the step as a whole (``loss``, ``lr`` by the optimizer's groups, ``loss_scale``, ``grad_norm``);
                ``activation``, ``activation_grad``: of a module, forward and backward, slots ``in0``, ``out0``, …;
                ``grad``: of a parameter, local, before ranks are put together; ``grad_reduced``: as the optimizer reads it;
                ``param``, ``moment1`` (``exp_avg``, ``momentum_buffer``), ``moment2`` (``exp_avg_sq``);
                ``update``: ``update_ratio``, the size of the step over that of the weight;
                ``comm``: a collective's inputs and outputs;
                ``module``: what was asked for of a module (``entropy``, ``max_logit``, ``expert_share``, …)
name            the module's path (``.``: the model itself), the parameter's name, the collective's, a group's number
slot            which of several: ``in0``, ``out0``; null where there is one only
metric          what ``value`` is (``loss``, ``lr``, ``update_ratio``, ``entropy``, …); null in a row of statistics
value           the number; null in a row of statistics
count … l2      statistics as `bitwitness.stats.Stats` defines them, ``inf`` both signs together; null in a row with a ``value``
==============  =======================================================================================================
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from bitwitness.errors import UsageError
from bitwitness.files.shown import shown
from bitwitness.store.seal import SealedFolder

_TEXT = pa.dictionary(pa.int32(), pa.string())

SCHEMA = pa.schema(
    [
        ("step", pa.int32()),
        ("micro", pa.int32()),
        ("kind", _TEXT),
        ("name", _TEXT),
        ("slot", _TEXT),
        ("metric", _TEXT),
        ("value", pa.float64()),
        ("count", pa.int64()),
        ("nan", pa.int64()),
        ("inf", pa.int64()),
        ("zeros", pa.int64()),
        ("min", pa.float64()),
        ("max", pa.float64()),
        ("mean", pa.float64()),
        ("l2", pa.float64()),
    ]
)

_FILES = "monitor-*.parquet"


def is_monitored(run: str | os.PathLike[str]) -> bool:
    """Return whether a run folder holds series."""
    return next(Path(run).glob(f"rank[0-9]*/{_FILES}"), None) is not None


def monitored_ranks(run: str | os.PathLike[str]) -> list[int]:
    """Return the ranks whose series a run folder holds."""
    names = {file.parent.name.removeprefix("rank") for file in Path(run).glob(f"rank[0-9]*/{_FILES}")}
    return sorted(int(name) for name in names if name.isascii() and name.isdigit())


def read_series(
    run: str | os.PathLike[str], rank: int, *, kinds: Sequence[str] | None = None, columns: Sequence[str] | None = None
) -> tuple[pa.Table, list[str]]:
    """Read one rank's series, file by file in the order in which they were written; none that the seal does not know.

    Parameters
    ----------
    kinds, columns
        Only these; all by default.

    Returns
    -------
    tuple of pyarrow.Table and list of str
        Rows of `SCHEMA`, and what could not be read, a sentence for each damaged file; the rest is read.

    """
    wanted = SCHEMA if columns is None else pa.schema([SCHEMA.field(name) for name in columns])
    folder = Path(run) / f"rank{rank:05d}"
    seal = SealedFolder(folder)
    tables, problems = [], [problem for problem in seal.problems if not _being_written(folder, problem)]
    for file in sorted(folder.glob(_FILES)):
        if damage := seal.damage(file):  # another run's, say, whose folder was not wholly deleted
            problems = [*(problem for problem in problems if problem != damage), f"{damage}; it was left out"]
            continue
        try:
            tables.append(_read(file, wanted, kinds))
        except (UsageError, OSError, pa.ArrowException) as error:
            problems.append(f"{shown(file)} was left out: {(str(error).splitlines() or [type(error).__name__])[0]}")
    return (pa.concat_tables(tables).unify_dictionaries() if tables else wanted.empty_table()), problems


def _being_written(folder: Path, problem: str) -> bool:
    """Tell whether a file is only missing because a run that goes on has sealed it, and is about to give it its name."""
    return any(str(part).removesuffix(".part") in problem for part in folder.glob(f"{_FILES}.part"))


def _read(file: Path, wanted: pa.Schema, kinds: Sequence[str] | None) -> pa.Table:
    found = pq.ParquetFile(file)
    if missing := [name for name in SCHEMA.names if name not in found.schema_arrow.names]:
        raise UsageError(f"it has no column {missing[0]}")
    filters = None if kinds is None else [("kind", "in", list(kinds))]
    table = pq.read_table(file, columns=wanted.names, filters=filters, partitioning=None)
    return table.cast(wanted)
