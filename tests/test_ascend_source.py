"""Folders of Ascend dump files, read as if they were recordings of ours."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ascend_writer
import ml_dtypes
import numpy as np
import pytest
import torch

from bitwitness import Site, UsageError
from bitwitness.stats import stats_of
from bitwitness.store.ascend.source import AscendSource
from bitwitness.store.opening import open_source


def sites(rows: list[dict[str, Any]]) -> list[str]:
    return [Site(r["module"], r["op"], r["call"], r["phase"], r["slot"]).short for r in rows]


def ascend_file(folder: Path, name: str, node: str, x: np.ndarray[Any, Any], kind: int = 1) -> Path:
    tensor = ascend_writer.Tensor(kind, x.shape, x.tobytes())
    return ascend_writer.write(folder / name, ascend_writer.dump([tensor], [tensor], [b"buffer"], name=node))


def test_ascend_files_read_as_rows(tmp_path: Path) -> None:
    x = np.array([[1, np.nan, 0], [np.inf, -2, 3]], np.float32)
    ascend_file(tmp_path, "MatMul.net_fc_MatMul.3.7.1600000000000009", "net/fc/MatMul", -x)
    ascend_file(tmp_path, "MatMul.net_fc_MatMul.5.7.1600000000000001", "net/fc/MatMul", x)
    ascend_file(tmp_path, "Add.Add_1.4.7.1600000000000010", "Add_1", x.astype(ml_dtypes.bfloat16), 27)
    ascend_writer.write(
        tmp_path / "Opdebug.Node_OpDebug.5.1600000000000011", ascend_writer.opdebug(ascend_writer.record())
    )
    source = open_source(tmp_path)
    assert (source.kind, source.ranks(), source.steps(0)) == ("ascend", [0], [0])
    rows = source.table(0, 0).to_pylist()
    assert sites(rows) == [
        "net.fc/MatMul#0:forward.in0",
        "net.fc/MatMul#0:forward.out0",
        "net.fc/MatMul#1:forward.in0",
        "net.fc/MatMul#1:forward.out0",
        "./Add#0:forward.in0",
        "./Add#0:forward.out0",
    ]
    stats = stats_of(torch.from_numpy(x), with_hash=True)
    row = rows[0]
    assert [row[c] for c in ("count", "nan", "pos_inf", "neg_inf", "zeros", "min", "max", "mean", "l2", "hash")] == [
        6, 1, 1, 0, 1, -2.0, 3.0, stats.mean, stats.l2, stats.hash,
    ]  # fmt: skip
    for row in rows:
        read = source.tensor(0, row["tensor"], row["dtype"], tuple(row["shape"]), row["layout"])
        sign = -1 if row["call"] else 1  # the later of the two, whatever its task's number
        torch.testing.assert_close(read.float() * sign, torch.from_numpy(x), rtol=0, atol=0, equal_nan=True)
    assert rows[-1]["dtype"] == "bfloat16"
    assert (source.stacks(0), source.problems) == ({}, [])


def test_ascend_folders_tell_devices_and_iterations(tmp_path: Path) -> None:
    x = np.ones(3, np.float32)
    for device, iteration in ((0, 2), (0, 10), (5, 2)):
        folder = tmp_path / "20260101120000" / str(device) / "model" / "1" / str(iteration)
        ascend_file(folder, "Add.Add_1.4.7.1600000000000010", "Add_1", x * device)
    source = AscendSource(tmp_path)
    assert (source.ranks(), source.steps(0), source.steps(5)) == ([0, 5], [2, 10], [2])
    row = source.table(5, 2).to_pylist()[0]
    assert (row["rank"], row["step"], row["max"]) == (5, 2, 5.0)
    assert source.tensor(5, row["tensor"], "float32", (3,), None).tolist() == [5.0] * 3


@pytest.mark.parametrize("kind", range(42))
def test_ascend_values_of_any_type_are_read_or_told(tmp_path: Path, kind: int) -> None:
    ascend_file(tmp_path, "Add.Add_1.4.7.1600000000000010", "a/b", np.arange(16, dtype=np.uint8), kind)
    source = AscendSource(tmp_path)
    for row in source.table(0, 0).to_pylist():
        assert source.tensor(0, row["tensor"], row["dtype"], tuple(row["shape"]), None).numel()
    assert not source.problems


def test_damaged_ascend_files_are_told(tmp_path: Path) -> None:
    good = ascend_file(tmp_path, "Add.a.4.7.1600000000000010", "a", np.ones(3, np.float32))
    data = good.read_bytes()
    ascend_writer.write(tmp_path / "Add.b.4.7.1600000000000011", data[:-20])
    ascend_writer.write(tmp_path / "Add.c.4.7.1600000000000012", b"nonsense that is no header")
    ascend_writer.write(tmp_path / "notes", b"a note")
    source = AscendSource(tmp_path)
    assert source.table(0, 0).num_rows == 2
    assert len(source.problems) == 2
    for reference in (
        "../x|input.0",
        "/etc/passwd|input.0",
        f"{good.name}|input.1",
        f"{good.name}|buffer.0",
        f"{good.name}|input.99999999",
    ):
        with pytest.raises(UsageError):
            source.tensor(0, reference, "float32", (3,), None)
    with pytest.raises(UsageError, match="the row says"):
        source.tensor(0, f"{good.name}|input.0", "float32", (4,), None)
