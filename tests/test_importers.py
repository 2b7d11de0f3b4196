"""Recordings of other tools, read as if they were ours."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msprobe_writer as writer
import pyarrow.parquet as pq
import pytest
import torch
from msprobe_writer import X, call, described, scalar, step_of_a_model

from bitwitness import Site, UsageError
from bitwitness.stats import stats_of
from bitwitness.store.msprobe import MsprobeSource
from bitwitness.store.opening import open_source
from bitwitness.store.rows import AT_LEAST_ONE, SCHEMA, Measured, Row, to_table


def sites(rows: list[dict[str, Any]]) -> list[str]:
    return [Site(r["module"], r["op"], r["call"], r["phase"], r["slot"]).short for r in rows]


def rows_of(path: Path, rank: int = 0, step: int = 0) -> list[dict[str, Any]]:
    source = MsprobeSource(path)
    table = source.table(rank, step)
    assert table.schema == SCHEMA
    assert not source.problems
    return table.to_pylist()


def test_a_dump_reads_as_rows_of_ours(tmp_path: Path) -> None:
    data, parents = step_of_a_model()
    writer.write(tmp_path, data, parents=parents)
    rows = rows_of(tmp_path)
    assert sites(rows) == [
        "blocks.0.fc/linear#0:forward.in0",
        "blocks.0.fc/linear#0:forward.in1",
        "blocks.0.fc/linear#0:forward.out0",
        "blocks.0.fc/Linear#0:forward.in0",
        "blocks.0.fc/Linear#0:forward.weight",
        "blocks.0.fc/Linear#0:forward.out0",
        "blocks.0/matmul#0:forward.in0",
        "blocks.0/matmul#0:forward.in1",
        "blocks.0/matmul#0:forward.out0",
        "blocks.0/dropout#0:forward.in0",
        "blocks.0/dropout#0:forward.out0",
        "blocks.0/matmul#1:forward.in0",
        "blocks.0/matmul#1:forward.in1",
        "blocks.0/matmul#1:forward.out0",
        "blocks.0/Block#0:forward.in0.0",
        "blocks.0/Block#0:forward.in0.1.0",
        "blocks.0/Block#0:forward.in.mask",
        "blocks.0/Block#0:forward.out0",
        "blocks.0/Block#0:forward.out.loss",
        "blocks.0/Block#0:forward.out.parts.1",
        "./mse_loss#0:forward.in0",
        "./mse_loss#0:forward.in1",
        "./mse_loss#0:forward.out0",
        "./all_reduce#0:comm.in0",
        "./mm#0:forward.in0",
        "./mm#0:forward.in1",
        "./mm#0:forward.out0",
        "blocks.0/matmul#0:backward.in0",
        "blocks.0/matmul#0:backward.out0",
        "blocks.0.fc/weight#0:grad.reduced",
        "blocks.0.fc/Linear#0:backward.grad_out0",
        "blocks.0.fc/Linear#0:backward.grad_in0",
    ]
    by_site = dict(zip(sites(rows), rows, strict=True))
    kinds = {r["op"]: r["kind"] for r in rows}
    assert (kinds["Linear"], kinds["linear"], kinds["all_reduce"], kinds["weight"]) == (
        "module",
        "op",
        "collective",
        "gradient",
    )
    assert by_site["blocks.0.fc/weight#0:grad.reduced"]["name"] == "blocks.0.fc.weight"
    assert [r["seq"] for r in rows] == list(range(len(rows)))
    assert len({r["value"] for r in rows}) == len(rows)
    assert [r["node"] for r in rows if r["op"] == "matmul"] == [2, 2, 2, 4, 4, 4, 9, 9]
    assert json.loads(by_site["blocks.0/dropout#0:forward.in0"]["args"]) == {
        "f": "dropout",
        "a": [{"$": 0}, 0.1, True],
        "k": {"inplace": False},
    }
    assert by_site["blocks.0/dropout#0:forward.out0"]["args"] is None
    assert json.loads(by_site["./all_reduce#0:comm.in0"]["args"])["k"] == {"op": "SUM"}
    row = by_site["blocks.0.fc/linear#0:forward.in0"]
    stats = stats_of(X)
    assert (row["dtype"], row["shape"], row["count"], row["nan"]) == ("float32", [3, 4], 12, 0)
    assert (row["min"], row["max"], row["mean"]) == (stats.min, stats.max, stats.mean)
    assert row["l2"] == pytest.approx(stats.l2, rel=1e-6)
    assert (row["zeros"], row["hash"], row["tensor"], row["stack"], row["producer"]) == (None, None, None, -1, -1)
    assert by_site["./mse_loss#0:forward.out0"]["l2"] == 2.5  # the file has the value there, sign and all


def test_calls_are_counted_anew_in_each_module_and_step(tmp_path: Path) -> None:
    x = described(X)
    for step in (3, 7):  # msprobe counts one API through the whole model
        names = [f"Functional.linear.{i}.forward" for i in range(4)]
        parents = dict(zip(names, [f"Module.{m}.Linear.forward.0" for m in "abab"], strict=True))
        writer.write(tmp_path, {name: call([x]) for name in names}, step=step, parents=parents)
    source = MsprobeSource(tmp_path)
    assert (source.ranks(), source.steps(0), source.steps(1)) == ([0], [3, 7], [])
    tables = [source.table(0, step).to_pylist() for step in (3, 7)]
    for rows in tables:
        assert [(r["module"], r["call"]) for r in rows] == [("a", 0), ("b", 0), ("a", 1), ("b", 1)]
    assert not {r["value"] for r in tables[0]} & {r["value"] for r in tables[1]}
    assert tables[0][-1]["seq"] < tables[1][0]["seq"]
    assert not source.table(0, 4).num_rows
    assert not source.table(5, 3).num_rows


def test_the_wrapper_of_a_whole_model_is_left_out_of_paths(tmp_path: Path) -> None:
    x = described(X)
    data = {
        "Functional.linear.0.forward": call([x]),
        "Module.module.fc.Linear.forward.0": call([x]),
        "Module.module.Net.forward.0": call([x]),
        "Module.module.fc.Linear.parameters_grad.0": {"weight": [x]},
    }
    parents = {"Functional.linear.0.forward": "Module.module.fc.Linear.forward.0"}
    writer.write(tmp_path, data, parents=parents)
    writer.write(tmp_path, {**data, "Module.other.Loss.forward.0": call([x])}, step=1, parents=parents)
    rows = rows_of(tmp_path)
    assert [(r["module"], r["op"]) for r in rows] == [
        ("fc", "linear"),
        ("fc", "Linear"),
        (".", "Net"),
        ("fc", "weight"),
    ]
    assert rows[-1]["name"] == "fc.weight"
    assert [r["module"] for r in rows_of(tmp_path, step=1)] == [
        "module.fc",
        "module.fc",
        "module",
        "module.fc",
        "other",
    ]


def test_a_parent_may_tell_the_micro_batch(tmp_path: Path) -> None:
    names = [f"Functional.linear.{i}.forward" for i in range(3)]
    parents = {
        names[0]: ["Module.a.Linear.forward.0", 0],
        names[1]: ["Module.a.Linear.forward.1", 1],
        names[2]: [None, 2],
    }
    writer.write(tmp_path, {name: call([described(X)]) for name in names}, parents=parents)
    assert [(r["module"], r["micro"], r["call"]) for r in rows_of(tmp_path)] == [("a", 0, 0), ("a", 1, 0), (".", 2, 0)]


def test_what_is_not_finite_is_not_counted_by_guessing(tmp_path: Path) -> None:
    nan, inf = float("nan"), float("inf")
    values = {
        "nan": torch.tensor([1.0, nan, inf]),
        "top": torch.tensor([1.0, 2.0, inf]),
        "low": torch.tensor([1.0, -inf]),
        "empty": torch.zeros(0, 3),
        "bool": torch.tensor([True, False]),
        "int": torch.tensor([3, 4]),
        "pair": torch.tensor([3 + 4j]),
    }
    writer.write(
        tmp_path, {f"Tensor.{k}.0.forward": call([described(x)], [], {"v": scalar(-inf)}) for k, x in values.items()}
    )
    rows = {r["op"]: r for r in rows_of(tmp_path)}
    found = {
        op: [r[c] for c in ("count", "nan", "pos_inf", "neg_inf", "min", "max", "mean", "l2")] for op, r in rows.items()
    }
    some = AT_LEAST_ONE  # there is one, and how many is not known
    assert found == {
        "nan": [3, some, None, None, None, None, None, None],
        "top": [3, None, some, None, 1.0, None, None, None],
        "low": [2, None, None, some, None, 1.0, None, None],
        "empty": [0, 0, 0, 0, None, None, None, None],
        "bool": [2, 0, 0, 0, 0.0, 1.0, None, None],
        "int": [2, 0, 0, 0, 3.0, 4.0, None, None],
        "pair": [2, None, None, None, None, None, None, None],  # extremes are of magnitudes there, not of parts
    }
    assert json.loads(rows["nan"]["args"])["k"] == {"v": {"float": "-inf"}}


def test_checksums_and_mindspore_names(tmp_path: Path) -> None:
    twice = {**described(X, framework="mindspore"), "dtype": "mindspore.float32", "md5": "f" * 40}
    data = {
        "Cell.net.fc.Dense.forward.0": call([described(X, md5=True, framework="mindspore"), twice]),
        "Mint.matmul.0.forward": call([described(X)]),
        "MintDistributed.all_gather.0.forward": call([described(X)]),
    }
    writer.write(tmp_path, data, parents={"Mint.matmul.0.forward": "Cell.net.fc.Dense.forward.0"})
    rows = rows_of(tmp_path)
    assert sites(rows) == [
        "net.fc/Dense#0:forward.in0",
        "net.fc/Dense#0:forward.in1",
        "net.fc/matmul#0:forward.in0",
        "./all_gather#0:comm.in0",
    ]
    assert [r["dtype"] for r in rows] == ["float32"] * 4
    assert f"{rows[0]['hash']:08x}" == described(X, md5=True)["md5"]
    assert rows[1]["hash"] == (1 << 60) - 1


def test_stacks_are_numbered_once_for_all_steps(tmp_path: Path) -> None:
    names = ["Tensor.add.0.forward", "Tensor.mul.0.forward"]
    lines = ["File b.py, line 2, in g, \n x + y", "File a.py, line 1, in f, \n g()"]
    for step, order in ((0, names), (1, names[::-1])):
        stacks = {str(i): [[name], [*lines, name]] for i, name in enumerate(order)} | {"7": "damaged", "8": [[1], [2]]}
        writer.write(tmp_path, {name: call([described(X)]) for name in names}, step=step, stacks=stacks)
    source = MsprobeSource(tmp_path)
    rows = [{r["op"]: r["stack"] for r in source.table(0, step).to_pylist()} for step in (1, 0)]
    assert rows[0] == rows[1]
    assert source.stacks(0)[rows[0]["add"]].splitlines() == [
        "File b.py, line 2, in g, x + y",
        "File a.py, line 1, in f, g()",
        names[0],
    ]
    assert source.stacks(0)[rows[0]["mul"]].endswith(names[1])
    assert source.stacks(9) == {}


def test_the_whole_dump_a_step_or_a_rank_of_it_may_be_named(tmp_path: Path) -> None:
    for step in (0, 10, 2):
        for rank in ("rank0", "rank3"):
            writer.write(tmp_path, {"Tensor.add.0.forward": call([described(X)])}, step=step, rank=rank)
    (tmp_path / "step11").mkdir()
    (tmp_path / "step12" / "rank0").mkdir(parents=True)
    source = open_source(tmp_path)
    assert (source.kind, source.ranks(), source.steps(3)) == ("msprobe", [0, 3], [0, 2, 10])
    assert source.info == {"task": "statistics", "level": "mix", "framework": "pytorch"}
    source = open_source(tmp_path / "step10")
    assert (source.ranks(), source.steps(0)) == ([0, 3], [10])
    source = open_source(tmp_path / "step2" / "rank3")
    assert (source.ranks(), source.steps(3)) == ([3], [2])
    assert source.table(3, 2).to_pylist()[0]["rank"] == 3
    (tmp_path / "step2" / "rank3").rename(tmp_path / "elsewhere")
    source = open_source(tmp_path / "elsewhere")
    assert (source.ranks(), source.steps(0), source.table(0, 0).num_rows) == ([0], [0], 1)


def test_processes_without_a_rank_are_numbered(tmp_path: Path) -> None:
    for step in (0, 1):
        for name in ("proc100", "proc99", "rank1"):
            writer.write(tmp_path, {f"Tensor.{name}.0.forward": call([described(X)])}, step=step, rank=name)
    source = MsprobeSource(tmp_path)
    assert source.ranks() == [0, 1, 2]
    assert [source.table(r, 1).to_pylist()[0]["op"] for r in source.ranks()] == ["proc99", "rank1", "proc100"]


def test_a_rank_that_two_folders_claim_is_read_once(tmp_path: Path) -> None:
    for name in ("rank", "rank0"):
        writer.write(tmp_path, {"Tensor.add.0.forward": call([described(X)])}, rank=name)
    source = MsprobeSource(tmp_path)
    assert source.table(0, 0).num_rows == 1
    assert "the same rank" in source.problems[0]


# -- opening -----------------------------------------------------------------------------------------------------


def test_a_recording_of_ours_opens(tmp_path: Path) -> None:
    place = (0, 0, 0, 0, "op", "forward", ".", "add", 0, "out0", "float32", (1,), None, None)
    row = Row(*place, 0, -1, None, None, -1, None, recomputed=False)
    (tmp_path / "rank00000").mkdir()
    pq.write_table(to_table(0, [row], {0: Measured(1)}), tmp_path / "rank00000" / "stats-000000.parquet")
    source = open_source(str(tmp_path))
    assert (source.kind, source.table(0, 0).num_rows) == ("bitwitness", 1)


def test_what_is_no_recording_is_named_with_what_was_expected(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "empty").mkdir()
    (tmp_path / "other").mkdir()
    for i in range(9):
        (tmp_path / "other" / f"picture{i}.png").write_text("x")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.json").write_text("{}")
    expected = r"expected a run folder.*dump of msprobe.*Ascend"
    for name, seen in (
        ("gone", "does not exist"),
        ("file", "is a file"),
        ("empty", "is empty"),
        ("other", "holds no recording, but picture0.png, .*, …"),
        ("n\0ul", "is no path|does not exist"),
    ):
        with pytest.raises(UsageError, match=f"(?:{seen}).*{expected}"):
            open_source(tmp_path / name)
    with pytest.raises(UsageError, match="no recorded rows"):
        open_source(tmp_path / "run")
