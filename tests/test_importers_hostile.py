"""Dumps of other tools with kept values, damage and malice: what is wrong is named, and nothing of it is run."""

from __future__ import annotations

import copy
import json
import os
import pickle
import tempfile
from pathlib import Path
from typing import Any

import msprobe_writer as writer
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msprobe_writer import X, call, described, step_of_a_model

from bitwitness import Site, UsageError
from bitwitness.store.msprobe import MsprobeSource
from bitwitness.store.opening import open_source


def sites(rows: list[dict[str, Any]]) -> list[str]:
    return [Site(r["module"], r["op"], r["call"], r["phase"], r["slot"]).short for r in rows]


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
    odd: dict[str, Any] = {"dict.pt": {"x": X}, "sparse.pt": X.to_sparse(), "vast.pt": torch.ones(1).expand(1 << 40)}
    place = writer.write(tmp_path / "dump", {}, tensors={"good.pt": X, **odd})
    folder = place / "dump_tensor_data"
    torch.save(Bomb(str(tmp_path / "harm")), folder / "saved.pt")
    (folder / "bare.pt").write_bytes(pickle.dumps(Bomb(str(tmp_path / "harm"))))
    np.save(folder / "objects.npy", np.array([Bomb(str(tmp_path / "harm"))], dtype=object), allow_pickle=True)
    (folder / "empty.pt").write_bytes(b"")
    (folder / "short.pt").write_bytes((folder / "good.pt").read_bytes()[:-300])
    source = MsprobeSource(tmp_path / "dump")
    for name in ("saved.pt", "bare.pt", "objects.npy", "empty.pt", "short.pt", "dict.pt", "sparse.pt", "vast.pt"):
        with pytest.raises(UsageError, match="expected (one|a tensor)"):
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
    references = [r["tensor"] for r in rows if r["tensor"]] + [
        "good.pt",
        "1|good.pt",
        "0|folder.pt/../good.pt",
        "0|0|good.pt",
        "-1|good.pt",
        "|",
    ]
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
    rows = MsprobeSource(tmp_path).table(0, 0).to_pylist()
    assert sites(rows) == [f"a_b_c_d_e/F#0:forward.{slot}" for slot in ("in0", "in.k\\ud800", "in.q_")]
    assert {(r["count"], r["min"], r["max"], r["nan"], r["hash"], r["tensor"], r["micro"]) for r in rows} == {
        (12, None, None, None, None, None, 0)
    }


KEYS = st.sampled_from(["type", "shape", "dtype", "value", "data_name"])
ANYTHING = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=5)
    | st.sampled_from([10**30, -1, "../x"]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=4,
)


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
        places = places_in(body)
        container, key = places[data.draw(st.integers(0, len(places) - 1))]
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
