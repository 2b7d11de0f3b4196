"""Recordings of other tools, read as if they were ours; whatever else lies in their folders is named, not run."""

from __future__ import annotations

import copy
import json
import os
import pickle
import tempfile
from pathlib import Path
from typing import Any

import ascend_writer
import ml_dtypes
import msprobe_writer as writer
import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msprobe_writer import back, call, described, scalar

from bitwitness.errors import UsageError
from bitwitness.site import Site
from bitwitness.stats import stats_of
from bitwitness.store.ascend.source import AscendSource
from bitwitness.store.msprobe import MsprobeSource
from bitwitness.store.opening import open_source
from bitwitness.store.rows import SCHEMA, Measured, Row, to_table

X = torch.arange(12.0).reshape(3, 4) - 5
W = torch.ones(2, 4)
Y = X @ W.T
LINEAR = "Module.blocks.0.fc.Linear"
BLOCK = "Module.blocks.0.Block"


def step_of_a_model() -> tuple[dict[str, Any], dict[str, Any]]:
    x, w, y = described(X), described(W), described(Y)
    data = {
        "Functional.linear.0.forward": call([x, w], [y]),
        f"{LINEAR}.forward.0": call([x], [y], parameters={"weight": w}),
        "Tensor.__matmul__.0.forward": call([y, described(Y.T)], [described(Y @ Y.T)]),
        "Functional.dropout.0.forward": call([y, scalar(0.1), scalar(True)], [y], {"inplace": scalar(False)}),
        "Tensor.__matmul__.1.forward": call([y, described(Y.T)], [described(Y @ Y.T)]),
        f"{BLOCK}.forward.0": call([[x, [y]]], [y, {"loss": y, "parts": [None, y]}], {"mask": x}, parameters={}),
        "Functional.mse_loss.0.forward": call([y, y], [described(torch.tensor(-2.5))]),
        "Distributed.all_reduce.0.forward": call(
            [y], [], {"op": {"type": "torch.distributed.ReduceOp", "value": "SUM"}}
        ),
        "Aten.mm.default.0.forward": call([x, described(W.T)], [y]),
        "Tensor.__matmul__.1.backward": back([described(Y @ Y.T)], [y, None]),
        f"{LINEAR}.parameters_grad.0": {"weight": [w]},
        f"{LINEAR}.backward.0": back([y], [x]),
    }
    parents = {
        "Functional.linear.0.forward": f"{LINEAR}.forward.0",
        f"{LINEAR}.forward.0": f"{BLOCK}.forward.0",
        "Tensor.__matmul__.0.forward": f"{BLOCK}.forward.0",
        "Tensor.__matmul__.1.forward": f"{BLOCK}.forward.0",
        "Tensor.__matmul__.1.backward": f"{BLOCK}.backward.0",
        "Functional.dropout.0.forward": f"{BLOCK}.forward.0",
        "Functional.mse_loss.0.forward": None,
        "Aten.mm.default.0.forward": "optimizer",
    }
    return data, parents


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
    }
    writer.write(
        tmp_path, {f"Tensor.{k}.0.forward": call([described(x)], [], {"v": scalar(-inf)}) for k, x in values.items()}
    )
    rows = {r["op"]: r for r in rows_of(tmp_path)}
    found = {
        op: [r[c] for c in ("count", "nan", "pos_inf", "neg_inf", "min", "max", "mean", "l2")] for op, r in rows.items()
    }
    assert found == {
        "nan": [3, None, None, None, None, None, None, None],
        "top": [3, None, None, None, 1.0, None, None, None],
        "low": [2, None, None, None, None, 1.0, None, None],
        "empty": [0, 0, 0, 0, None, None, None, None],
        "bool": [2, 0, 0, 0, 0.0, 1.0, None, None],
        "int": [2, 0, 0, 0, 3.0, 4.0, None, None],
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


# -- kept values -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "x",
    [
        X,
        X.bfloat16(),
        X.to(torch.float8_e4m3fn),
        X.long(),
        torch.tensor(3.5),
        torch.zeros(0, 2),
        X.T,
        X.to(torch.complex64),
    ],
)
def test_tensors_read_back_equal(tmp_path: Path, x: torch.Tensor) -> None:
    entry = {
        "type": "torch.Tensor",
        "dtype": str(x.dtype),
        "shape": list(x.shape),
        "data_name": "Tensor.add.0.forward.input.0.pt",
    }
    writer.write(tmp_path, {"Tensor.add.0.forward": call([entry])}, step=4, tensors={entry["data_name"]: x})
    source = MsprobeSource(tmp_path)
    row = source.table(0, 4).to_pylist()[0]
    read = source.tensor(0, row["tensor"], row["dtype"], tuple(row["shape"]), row["layout"])
    assert read.dtype == x.dtype
    assert read.contiguous().reshape(-1).view(torch.uint8).equal(x.contiguous().reshape(-1).view(torch.uint8))


def test_values_that_numpy_had_to_widen_are_narrowed(tmp_path: Path) -> None:
    place = writer.write(tmp_path, {}, tensors={"a.pt": X})
    np.save(place / "dump_tensor_data" / "b.npy", X.numpy())
    source = MsprobeSource(tmp_path)
    assert source.tensor(0, "0|b.npy", "bfloat16", (3, 4), None).equal(X.bfloat16())
    for name, dtype, shape in (("a.pt", "bfloat16", (3, 4)), ("a.pt", "float32", (4, 3)), ("b.npy", "float32", (12,))):
        with pytest.raises(UsageError, match="the row says"):
            source.tensor(0, f"0|{name}", dtype, shape, None)


class Bomb:
    """Leaves a file where code of a pickle is run."""

    def __init__(self, target: str) -> None:
        self.target = target

    def __reduce__(self) -> Any:
        return os.mkdir, (self.target,)


def test_no_code_of_a_file_is_run(tmp_path: Path) -> None:
    place = writer.write(tmp_path / "dump", {}, tensors={"good.pt": X, "dict.pt": {"x": X}, "sparse.pt": X.to_sparse()})  # type: ignore[dict-item]
    folder = place / "dump_tensor_data"
    torch.save(Bomb(str(tmp_path / "harm")), folder / "saved.pt")
    (folder / "bare.pt").write_bytes(pickle.dumps(Bomb(str(tmp_path / "harm"))))
    np.save(folder / "objects.npy", np.array([Bomb(str(tmp_path / "harm"))], dtype=object), allow_pickle=True)
    (folder / "empty.pt").write_bytes(b"")
    (folder / "short.pt").write_bytes((folder / "good.pt").read_bytes()[:-300])
    source = MsprobeSource(tmp_path / "dump")
    for name in ("saved.pt", "bare.pt", "objects.npy", "empty.pt", "short.pt", "dict.pt", "sparse.pt"):
        with pytest.raises(UsageError, match="expected one"):
            source.tensor(0, f"0|{name}", "float32", (3, 4), None)
    assert not (tmp_path / "harm").exists()


def test_no_file_outside_the_dumps_own_folder_is_read(tmp_path: Path) -> None:
    torch.save(X, tmp_path / "x.pt")
    names = [
        "../x.pt",
        "../../../x.pt",
        str(tmp_path / "x.pt"),
        "a/../x.pt",
        "..",
        ".",
        "",
        "x\0.pt",
        "..\\x.pt",
        "x" * 999 + ".pt",
    ]
    names += ["link.pt", "fifo.pt", "folder.pt", "gone.pt", "half\ud800.pt", "x.pt\n", "x.pkl"]
    data = {f"Tensor.add.{i}.forward": call([described(X, name)]) for i, name in enumerate(names)}
    place = writer.write(tmp_path / "dump", data, tensors={"good.pt": X})
    folder = place / "dump_tensor_data"
    (folder / "link.pt").symlink_to(tmp_path / "x.pt")
    (folder / "folder.pt").mkdir()
    os.mkfifo(folder / "fifo.pt")
    torch.save(X, place / "x.pt")
    source = MsprobeSource(tmp_path / "dump")
    rows = source.table(0, 0).to_pylist()
    assert len(rows) == len(names)
    references = [r["tensor"] for r in rows if r["tensor"]] + ["good.pt", "1|good.pt", "0|0|good.pt", "-1|good.pt", "|"]
    for reference in references:
        with pytest.raises(UsageError, match="expected it in|names no tensor file"):
            source.tensor(0, reference, "float32", (3, 4), None)
    with pytest.raises(UsageError):
        source.tensor(1, "0|good.pt", "float32", (3, 4), None)
    assert source.tensor(0, "0|good.pt", "float32", (3, 4), None).equal(X)


# -- damage ------------------------------------------------------------------------------------------------------


def test_a_file_that_is_cut_short_costs_its_own_step_only(tmp_path: Path) -> None:
    data, parents = step_of_a_model()
    places = [writer.write(tmp_path, data, step=step, parents=parents) for step in range(4)]
    whole = (places[0] / "dump.json").read_text()
    (places[0] / "dump.json").write_text(whole[: len(whole) // 2])
    (places[1] / "dump.json").write_text(whole[: whole.rindex("}}") - 40] + "}}")  # looks whole at both ends
    (places[2] / "construct.json").write_text('{"a":')
    source = MsprobeSource(tmp_path)
    assert source.steps(0) == [1, 2, 3]
    assert [source.table(0, step).num_rows for step in (1, 2, 3)] == [0, 32, 32]
    source.table(0, 1)
    assert [str(Path(p.split(" ")[0]).relative_to(tmp_path)) for p in source.problems] == [
        "step0/rank0/dump.json",
        "step1/rank0/dump.json",
        "step2/rank0/construct.json",
    ]
    for place in places:
        (place / "dump.json").write_text("")
    with pytest.raises(UsageError, match=r"holds no dump of msprobe that can be read.*expected step"):
        MsprobeSource(tmp_path)


@pytest.mark.parametrize(
    "shape", [[1 << 63], [1 << 40, 1 << 40], [0, 1 << 70], [-1], [1.5], [True], "12", None, [[3]], [1] * 100]
)
def test_shapes_that_no_tensor_has_are_told(tmp_path: Path, shape: Any) -> None:
    writer.write(tmp_path, {"Tensor.add.0.forward": call([{**described(X), "shape": shape}, described(X)])})
    source = MsprobeSource(tmp_path)
    assert [r["slot"] for r in source.table(0, 0).to_pylist()] == ["in1"]
    assert "in0: shape" in source.problems[0]


@pytest.mark.parametrize(
    "text",
    [
        '{"data": ' + "[" * 100_000 + "]" * 100_000 + "}",
        '{"data": {"Tensor.add.0.forward": {"input_args": ' + "[" * 500 + "]" * 500 + "}}}",
        '{"data": {"Tensor.add.0.forward": {"input_kwargs": ' + '{"a":' * 300 + "1" + "}" * 300 + "}}}",
        '{"data": {"Tensor.add.0.forward": {"input_args": [{"type": "int", "value": ' + "9" * 5000 + "}]}}}",
        '{"data": {"\\ud800": 1, "Module.a.B.sideways.0": {}, "x": {}, "": {}, "Tensor..0.forward": {}, "A.b.0.forward": []}}',
        '{"data": [1]}',
        "{}}",
        '{"data": {"Tensor.add.0.forward": {"input_args": 1}}}',
        "{\xff}",
    ],
)
def test_what_is_no_dump_is_told(tmp_path: Path, text: str) -> None:
    place = writer.write(tmp_path, {})
    (place / "dump.json").write_text(text, encoding="latin-1")
    (place / "stack.json").write_text("[" * 100_000)
    source = MsprobeSource(tmp_path)
    assert source.table(0, 0).num_rows == 0
    assert source.problems
    assert all(problem.isprintable() for problem in source.problems)


def test_a_flood_of_problems_is_told_in_a_few_sentences(tmp_path: Path) -> None:
    writer.write(tmp_path, {f"nonsense{i}": {} for i in range(1000)})
    source = MsprobeSource(tmp_path)
    source.table(0, 0)
    assert len(source.problems) == 6
    assert "995 more" in source.problems[-1]


def test_values_and_names_that_do_not_fit_are_left_out_or_made_to_fit(tmp_path: Path) -> None:
    entry = {**described(X), "Max": 10**400, "Min": "x", "Mean": [], "md5": "not hex", "data_name": 7}
    writer.write(
        tmp_path,
        {"Module.a/b:c#d@e.F.forward.0": call([entry], [], {"k\ud800": entry, "q@": entry})},
        parents={"Module.a/b:c#d@e.F.forward.0": [["deep"], 10**30]},
    )
    rows = rows_of(tmp_path)
    assert sites(rows) == [f"a_b_c_d_e/F#0:forward.{slot}" for slot in ("in0", "in.k\\ud800", "in.q_")]
    assert {(r["count"], r["min"], r["max"], r["nan"], r["hash"], r["tensor"], r["micro"]) for r in rows} == {
        (12, None, None, None, None, None, 0)
    }


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.sampled_from([10**30, -1, "torch.Tensor"]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(["type", "shape", "dtype", "value"]), inner, max_size=3),
    max_leaves=4,
)  # fmt: skip


def places_in(value: Any) -> list[tuple[Any, Any]]:
    """Every place in a nest of containers: a container and a key."""
    pairs: Any = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [place for key, inner in list(pairs) for place in [(value, key), *places_in(inner)]]


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_whatever_the_files_hold_nothing_but_problems_comes_of_it(data: st.DataObject) -> None:
    entries, parents = step_of_a_model()
    stacks = {"0": [list(entries), ["File a.py, line 1"]]}
    body = copy.deepcopy({"data": entries, "parents": parents, "stacks": stacks})
    for _ in range(data.draw(st.integers(1, 3))):
        container, key = data.draw(st.sampled_from(places_in(body)))
        value = data.draw(ANYTHING)
        if isinstance(container, dict) and data.draw(st.booleans()):
            container[data.draw(st.text(max_size=5))] = container.pop(key)
        else:
            container[key] = value
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / "step0" / "rank0"
        place.mkdir(parents=True)
        for name, part in (
            ("dump", {"data": body.get("data")}),
            ("construct", body.get("parents")),
            ("stack", body.get("stacks")),
        ):
            (place / f"{name}.json").write_text(json.dumps(part))
        source = MsprobeSource(folder)
        for row in source.table(0, 0).to_pylist():
            if row["tensor"]:
                with pytest.raises(UsageError):
                    source.tensor(0, row["tensor"], row["dtype"], tuple(row["shape"]), None)
        assert all(isinstance(text, str) for text in source.stacks(0).values())
        assert all(isinstance(problem, str) for problem in source.problems)


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_bytes_that_are_lost_or_changed_cost_no_more_than_a_step(data: st.DataObject) -> None:
    entries, parents = step_of_a_model()
    with tempfile.TemporaryDirectory() as folder:
        place = writer.write(Path(folder), entries, parents=parents)
        path = place / data.draw(st.sampled_from(["dump.json", "construct.json"]))
        text = bytearray(path.read_bytes())
        at = data.draw(st.integers(0, len(text) - 1))
        text[at : at + data.draw(st.integers(1, 9))] = data.draw(st.binary(max_size=4))
        path.write_bytes(text)
        try:
            source = open_source(folder)
        except UsageError:
            return
        for rank in source.ranks():
            for step in source.steps(rank):
                source.table(rank, step)


# -- Ascend ------------------------------------------------------------------------------------------------------


def ascend_file(folder: Path, name: str, node: str, x: np.ndarray[Any, Any], kind: int = 1) -> Path:
    tensor = ascend_writer.Tensor(kind, x.shape, x.tobytes())
    return ascend_writer.write(folder / name, ascend_writer.dump([tensor], [tensor], [b"buffer"], name=node))


def test_ascend_files_read_as_rows(tmp_path: Path) -> None:
    x = np.array([[1, np.nan, 0], [np.inf, -2, 3]], np.float32)
    ascend_file(tmp_path, "MatMul.net_fc_MatMul.3.7.1600000000000009", "net/fc/MatMul", x)
    ascend_file(tmp_path, "MatMul.net_fc_MatMul.2.7.1600000000000001", "net/fc/MatMul", x)
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
        torch.testing.assert_close(read.float(), torch.from_numpy(x), rtol=0, atol=0, equal_nan=True)
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


# -- opening -----------------------------------------------------------------------------------------------------


def test_a_recording_of_ours_opens(tmp_path: Path) -> None:
    row = Row(
        0, 0, 0, 0, "op", "forward", ".", "add", 0, "out0", "float32", (1,), None, None, 0, -1, None, None, -1, None, recomputed=False
    )  # fmt: skip
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
