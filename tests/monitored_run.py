"""A monitored run made of made-up numbers: losses, gradient norms and statistics of modules, with what a test plants."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa

from bitwitness import Finding, Note, Site
from bitwitness.finding import Severity
from bitwitness.store.monitored import SCHEMA
from bitwitness.store.seal import Seal
from bitwitness.store.tablefile import TableFiles
from bitwitness.store.writer import RunWriter

SPIKE, STEP, RANK = "layers.3.mlp", 137, 1
"""Where and when one number is 10,000 times too large."""


def modules(count: int) -> list[str]:
    """Return names as a transformer has them."""
    parts = ("attn.qkv", "attn.out", "mlp.up", "mlp.down", "mlp", "norm1", "norm2", "attn")
    return [f"layers.{number // len(parts)}.{parts[number % len(parts)]}" for number in range(count - 2)] + [
        "tokens",
        "head",
    ]


def write_monitored(
    folder: Path, *, steps: int = 200, names: list[str] | None = None, ranks: int = 2, guarded: bool = True
) -> Path:
    """Write a run folder with series, and return it; the planted spike is there where its step, module and rank are."""
    names = modules(50) if names is None else names
    random = np.random.default_rng(0)
    for rank in range(ranks):
        writer = RunWriter(folder, rank, ranks)
        if guarded:
            writer.event(
                Note(
                    "coverage",
                    steps - 1,
                    rank,
                    evidence=COVERAGE | {"steps": {"held": steps, "judged": steps, "deep": 2}},
                )
            )
        writer.ended("finished", "the end of the training", steps)
        writer.close()
        write_series(folder, rank, _series(steps, names, rank, random))
    return folder


def watched_run(folder: Path, *, alerts: bool = False) -> Path:
    """Write a run that rules watched; with ``alerts`` it has NaN and one more."""
    writer = RunWriter(folder, 0, 1)
    writer.describe(monitor={"watch": True, "rules": ["nonfinite", "exploding"]})
    names = modules(20) if alerts else [name for name in modules(20) if name != "head"]
    write_series(folder, 0, _series(60, names, 0, np.random.default_rng(0)))
    for rule, step, name in (("nonfinite", 57, "head"), ("exploding", 58, "tokens")) if alerts else ():
        site = Site(name, "module", 0, "forward", "out0").at(rank=0, step=step)
        evidence = {"series": f"activation/{name}/out0", "also": ["activation/layers.0.mlp/out0"], "also_count": 1}
        message = f"activation of {name} (out0) is not what it was, and that takes some words to say"
        writer.event(Finding(f"monitor.{rule}", site, Severity.WARNING, message, evidence, step, 0))
    writer.ended("finished", "the end of the training", 60)
    writer.close()
    return folder


def write_series(folder: Path, rank: int, table: pa.Table) -> Path:
    """Write the next file of a rank's series, with its seal, and return it."""
    place = folder / f"rank{rank:05d}"
    TableFiles(place, Seal(place)).write("monitor", table)
    return max(place.glob("monitor-*.parquet"))


COVERAGE = {
    "parameters": {"watched": 12, "of": 12},
    "suspicions": 1,
    "dismissed": 1,
    "replay": {"calibrations": 3, "same_bits": True},
    "not_covered": [],
    "failures": {},
    "sensors": {"off": {}},
}


def _series(steps: int, names: list[str], rank: int, random: np.random.Generator) -> pa.Table:
    when = np.arange(steps)
    loss = 8.0 * np.exp(-when / (steps / 3)) + 2.0 + random.normal(0, 0.02, steps)
    norm = 1.0 + 3.0 * np.exp(-when / 20) + random.normal(0, 0.05, steps)
    if rank == RANK and steps > STEP:
        norm[STEP] = 60.0
    tables = [_told("loss", when, loss), _told("grad_norm", when, norm)]
    for kind in ("activation", "grad"):
        size = np.exp(random.normal(0, 0.1, (steps, len(names))) + np.linspace(-2, 3, len(names)))
        if rank == RANK and SPIKE in names and steps > STEP:
            size[STEP, names.index(SPIKE)] *= 1e4
        bad = np.zeros((steps, len(names)), dtype=np.int64)
        if rank == 0 and kind == "activation" and "head" in names:
            bad[-3:, names.index("head")] = 7
        tables.append(_statistics(kind, when, names, size, bad))
    return pa.concat_tables(tables)


def _told(metric: str, when: np.ndarray, values: np.ndarray) -> pa.Table:
    columns = {"step": when, "micro": np.full(len(when), -1), "value": values}
    texts = {"kind": "training", "name": ".", "metric": metric}
    return _table(len(when), columns, {name: np.full(len(when), text) for name, text in texts.items()})


def _statistics(kind: str, when: np.ndarray, names: list[str], size: np.ndarray, bad: np.ndarray) -> pa.Table:
    count = size.size
    columns = {
        "step": np.repeat(when, len(names)), "micro": np.full(count, -1), "count": np.full(count, 64), "nan": bad.ravel(),
        "inf": np.zeros(count, np.int64), "zeros": np.zeros(count, np.int64), "min": -size.ravel() / 3,
        "max": size.ravel() / 2, "mean": np.zeros(count), "l2": size.ravel(),
    }  # fmt: skip
    texts = {"kind": np.full(count, kind), "name": np.tile(np.array(names, dtype=object), len(when))}
    return _table(count, columns, texts | {"slot": np.full(count, "out0")})


def _table(count: int, columns: dict[str, np.ndarray], texts: dict[str, np.ndarray]) -> pa.Table:
    arrays = []
    for field in SCHEMA:
        if field.name in texts:
            arrays.append(pa.array(texts[field.name], pa.string()).dictionary_encode().cast(field.type))
        elif field.name in columns:
            arrays.append(pa.array(columns[field.name]).cast(field.type))
        else:
            arrays.append(pa.nulls(count, field.type))
    return pa.Table.from_arrays(arrays, schema=SCHEMA)
