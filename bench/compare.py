"""What comparing two recordings costs: kept tensors, one step of statistics, and long recordings of statistics.

    python bench/compare.py [--gb 0.5] [--rows 1000000 10000000] [--only NAME …] [--quick]

``tensors``: two runs that kept tensors, all of which differ in the last bit; speed is the bytes of both folders over
process-CPU seconds. ``step``: one step of some 4,000 rows. ``rows``: as many steps as it takes; memory must not grow
with them. Rows are those of one recorded step of a small GPT, repeated, and the other run's statistics differ by as much
as rounding makes them. Each comparison runs in a process of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from gpt import GPT
from rounds import peak_mb

import bitwitness as bw
from bitwitness.comparison.runs import compare_sources
from bitwitness.store.recording import RecordingWriter
from bitwitness.store.rows import SCHEMA, Measured, Row
from bitwitness.store.run import RunSource

SPEED, SECONDS, GROWTH = 300.0, 1.0, 1.1
LAYERS = 19  # some 4,000 rows a step
FILE_ROWS = 50_000
CHAIN = 8
SHAPES = [(4, 128, 320), (4, 128, 1280), (4, 128, 960), (4, 128, 4096), (1280, 320)]
NAMES = ("tensors", "step", "rows")


# -- recordings that kept tensors --------------------------------------------------------------------------------


def _measured(x: torch.Tensor) -> Measured:
    low, high = x.aminmax()
    return Measured(x.numel(), 0, 0, 0, None, float(low), float(high), float(x.mean()), float(x.norm()))


def _describe(folder: Path) -> None:
    (folder / "run.json").write_text('{"schema": 1, "world_size": 1}\n', encoding="utf-8")


def _row(seq: int, node: int, slot: str, shape: tuple[int, ...], value: int, producer: int, tensor: str) -> Row:
    module, call = f"blocks.{node // CHAIN}", node % CHAIN
    return Row(
        *(0, 0, seq, node, "op", "forward", module, "gelu", call, slot, "float32", shape, None, None),
        *(value, producer, None, None, -1, tensor, False),
    )


def write_tensors(folders: Sequence[Path], gb: float) -> None:
    """Write two runs of one step: chains of operators, each of which reads what the one before it made."""
    generator = torch.Generator().manual_seed(0)
    writers = [RecordingWriter(folder / "rank00000", 0) for folder in folders]
    size = seq = value = node = 0
    while size < gb * 1e9:
        shape = SHAPES[(node // CHAIN) % len(SHAPES)]
        before = ["", ""]
        for link in range(CHAIN + 1):
            tensor = torch.randn(shape, generator=generator)
            last_bit = torch.randint(0, 2, shape, generator=generator, dtype=torch.int32)
            for i, x in enumerate((tensor, (tensor.view(torch.int32) ^ last_bit).view(torch.float32))):
                at = writers[i].tensor(0, f"blocks.{node // CHAIN}/{link}", x)
                if link:
                    rows = [_row(seq, node, "in0", shape, value - 1, node - 1 if link > 1 else -1, before[i])]
                    rows.append(_row(seq + 1, node, "out0", shape, value, -1, at))
                    known = dict.fromkeys((value - 1, value), _measured(x))
                    writers[i].rows(rows, lambda known=known: known, [])  # type: ignore[misc]
                before[i] = at
            size += tensor.nbytes
            value += 1
            if link:
                seq, node = seq + 2, node + 1
    for folder, writer in zip(folders, writers, strict=True):
        writer.step_ended()
        writer.close()
        _describe(folder)


# -- recordings of statistics ------------------------------------------------------------------------------------


def recorded_step(scratch: Path, layers: int) -> pa.Table:
    """Return the rows of one step of a training of a small GPT."""
    torch.manual_seed(0)
    model = GPT(64, 32, layers, 2, 16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=False)
    with bw.Recorder(model, out=scratch / "template") as recorder:
        for _ in range(2):
            tokens = torch.randint(0, 64, (4, 17))
            model(tokens[:, :-1], tokens[:, 1:]).backward()
            optimizer.step()
            optimizer.zero_grad()
    return RunSource(recorder.folder or "").table(0, 1)


def write_rows(folder: Path, template: pa.Table, rows: int, *, noise: float) -> int:
    """Write a run of at least ``rows`` rows as the recorder does, some steps a file; return how many they are."""
    target = folder / "rank00000"
    target.mkdir(parents=True)
    _describe(folder)
    generator = np.random.default_rng(1)
    steps = -(-rows // template.num_rows)
    a_file = max(1, FILE_ROWS // template.num_rows)
    for number, first in enumerate(range(0, steps, a_file), start=1):
        table = _repeated(template, range(first, min(first + a_file, steps)), generator, noise)
        pq.write_table(table, target / f"stats-{number:06d}.parquet", compression="zstd", compression_level=1)
    return steps * int(template.num_rows)


def _repeated(template: pa.Table, steps: range, generator: np.random.Generator, noise: float) -> pa.Table:
    """Return a step's rows as those of several steps: numbers go on from step to step, and statistics vary."""
    size = template.num_rows
    table = pa.concat_tables([template] * len(steps)).combine_chunks()
    step = np.repeat(np.arange(steps.start, steps.stop), size)
    changed: dict[str, Any] = {"step": step}
    for name in ("seq", "node", "value", "producer"):
        column = np.asarray(table.column(name))
        span = int(np.asarray(template.column("node" if name == "producer" else name)).max()) + 1
        changed[name] = np.where(column < 0, column, column + step * span)
    floats = np.char.startswith(np.asarray(table.column("dtype").to_pylist(), dtype=np.str_), "float")
    for name in ("min", "max", "mean", "l2"):
        column = np.asarray(table.column(name))
        changed[name] = column * (1.0 + noise * floats * generator.standard_normal(len(column)))
    arrays = [
        pa.array(changed[name], SCHEMA.field(name).type) if name in changed else table.column(name)
        for name in SCHEMA.names
    ]
    return pa.Table.from_arrays(arrays, schema=SCHEMA)


# -- measuring ---------------------------------------------------------------------------------------------------


def job(a: str, b: str) -> dict[str, Any]:
    """Compare two runs in this process; return what it took."""
    wall, cpu = time.perf_counter(), time.process_time()
    report = compare_sources(RunSource(a), RunSource(b))
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    return {
        "wall": wall,
        "cpu": cpu,
        "rows": report.rows,
        "differing": report.differing,
        "peak_mb": peak_mb(),
        "conclusion": report.conclusion,
        "problems": report.problems,
    }


def measured(folders: Sequence[Path]) -> dict[str, Any]:
    """Compare two runs in a process of its own."""
    command = [sys.executable, __file__, "--job", *map(str, folders)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    if found["problems"] or not found["differing"] or found["conclusion"].startswith("the runs part"):
        raise SystemExit(f"the comparison found what is not there: {found}")
    return found


@dataclass
class Sizes:
    """How large the runs are."""

    gb: float
    rows: Sequence[int]
    layers: int = LAYERS


def measure(sizes: Sizes, names: Sequence[str]) -> Iterator[str]:
    """Yield the lines of the table."""
    with tempfile.TemporaryDirectory(prefix="bench-compare-") as name:
        scratch = Path(name)
        if "tensors" in names:
            yield _tensors(scratch, sizes.gb)
        template = recorded_step(scratch, sizes.layers)
        if "step" in names:
            yield _step(scratch, template)
        if "rows" in names:
            yield from _rows(scratch, template, sizes.rows)


def _tensors(scratch: Path, gb: float) -> str:
    folders = [scratch / "tensors-a", scratch / "tensors-b"]
    write_tensors(folders, gb)
    size = sum(path.stat().st_size for folder in folders for path in folder.rglob("*") if path.is_file())
    found = measured(folders)
    speed = size / 1e6 / found["cpu"]
    _remove(folders)
    return line(f"kept tensors, 2 x {size / 2e9:.2g} GB", found, f"{speed:.0f} MB/s a core", SPEED, at_least=speed)


def _step(scratch: Path, template: pa.Table) -> str:
    folders = [scratch / "step-a", scratch / "step-b"]
    for folder, noise in zip(folders, (0.0, 1e-7), strict=True):
        write_rows(folder, template, 1, noise=noise)
    found = measured(folders)
    return line(
        f"statistics, one step of {template.num_rows:,} rows",
        found,
        f"{found['wall']:.2f} s",
        SECONDS,
        at_most=found["wall"],
    )


def _rows(scratch: Path, template: pa.Table, counts: Sequence[int]) -> Iterator[str]:
    least: float | None = None
    for count in counts:
        folders = [scratch / f"{count}-a", scratch / f"{count}-b"]
        for folder, noise in zip(folders, (0.0, 1e-7), strict=True):
            rows = write_rows(folder, template, count, noise=noise)
        found = measured(folders)
        _remove(folders)
        growth = found["peak_mb"] / (least or found["peak_mb"])
        told = f"{rows / found['cpu'] / 1e3:.0f} thousand rows/s"
        told += "" if least is None else f", x {growth:.2f} the memory of {counts[0]:,}"
        yield line(f"statistics, {rows:,} rows", found, told, GROWTH, at_most=None if least is None else growth)
        least = least or found["peak_mb"]


def _remove(folders: Sequence[Path]) -> None:
    """Make room for the next."""
    for folder in folders:
        for path in folder.rglob("*"):
            if path.is_file():
                path.unlink()


HEAD = ["| compared | wall s | CPU s | peak MB | result | target |", "|---|---|---|---|---|---|"]


def line(
    name: str,
    found: dict[str, Any],
    told: str,
    target: float,
    *,
    at_least: float | None = None,
    at_most: float | None = None,
) -> str:
    """Return one line of the table."""
    against = ""
    if at_least is not None:
        against = f"≥ {target:g}: {'kept' if at_least >= target else 'missed'}"
    if at_most is not None:
        against = f"≤ {target:g}: {'kept' if at_most <= target else 'missed'}"
    return f"| {name} | {found['wall']:.2f} | {found['cpu']:.2f} | {found['peak_mb']:.0f} | {told} | {against} |"


def main() -> None:
    """Measure, print, and write ``bench/results/compare.md``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gb", type=float, default=0.5, help="size of each of the runs that kept tensors")
    parser.add_argument("--rows", type=int, nargs="+", default=[1_000_000, 10_000_000])
    parser.add_argument("--only", nargs="+", choices=NAMES, help="nothing is written")
    parser.add_argument("--quick", action="store_true", help="small runs; nothing is written")
    parser.add_argument("--job", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.job:
        print(json.dumps(job(*args.job)))
        return
    sizes = Sizes(0.02, [2_000, 4_000], 1) if args.quick else Sizes(args.gb, args.rows)
    lines = [*HEAD]
    print("\n".join(lines), flush=True)
    for text in measure(sizes, args.only or NAMES):
        lines.append(text)
        print(text, flush=True)
    command = f"python bench/compare.py --gb {args.gb:g} --rows {' '.join(map(str, args.rows))}"
    about = f"`{command}`: torch {torch.__version__}, pyarrow {pa.__version__}; {platform.machine()}, {os.cpu_count()} cores."
    if not args.quick and not args.only:
        path = Path(__file__).parent / "results" / "compare.md"
        path.write_text(f"# What comparing costs\n\n{about}\n\n" + "\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
