"""Damaged and hostile recordings: a clear error or a part left out, never code run, never a file written elsewhere."""

from __future__ import annotations

import contextlib
import json
import shutil
import struct
import subprocess
from pathlib import Path

import openpyxl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from compare_zoo import CASES, record
from extent import chosen
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from ranks import script
from resealing import reseal

import bitwitness as bw
from bitwitness import UsageError
from bitwitness.cli import main
from bitwitness.oracle.recorded import compare_recorded_with_float64, operator_of
from bitwitness.store.rows import SCHEMA
from bitwitness.store.run import RunSource
from bitwitness.store.seal import SEAL
from bitwitness.store.tensorfile import TensorReader


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return record(tmp_path_factory.mktemp("good") / "run", CASES["conv"], content="tensors", steps=2)


@pytest.fixture
def run(good: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(good, tmp_path / "run"))


def stats_files(run: Path) -> list[Path]:
    """One of each step: kept tensors are followed by their rows."""
    return sorted(run.glob("rank00000/stats-*.parquet"))


def change(run: Path, **columns: object) -> None:
    """Give every row these values."""
    for path in stats_files(run):
        rows = pq.read_table(path).to_pylist()
        pq.write_table(pa.Table.from_pylist([row | columns for row in rows], schema=SCHEMA), path)
    reseal(run)


@pytest.mark.parametrize("size", [0, 4, 100, 5000])
def test_a_truncated_file_is_named_and_the_rest_is_read(run: Path, size: int) -> None:
    path, other = stats_files(run)
    path.write_bytes(path.read_bytes()[:size])
    for said in ("stats-000001.parquet is damaged", "stats-000001.parquet was left out"):
        source = RunSource(run)
        assert source.steps(0) == [1]
        assert any(said in problem for problem in source.problems)
        reseal(run)
    other.unlink()
    with pytest.raises(UsageError, match="holds no recorded rows that can be read"):
        RunSource(run)


@settings(max_examples=chosen(25, 6), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@example([(0.25380136002151704, 128)])  # a name that is no text
@example([(0.5796241291233132, 36)])  # a mean of 3e304, beside a deviation of 1e-3
@given(st.lists(st.tuples(st.floats(0, 1), st.integers(0, 255)), min_size=1, max_size=8))
def test_flipped_bytes_end_in_nothing_but_our_own_error(run: Path, good: Path, flips: list[tuple[float, int]]) -> None:
    for sealed in (False, True):
        shutil.copy(good / "rank00000" / SEAL, run / "rank00000" / SEAL)
        data = bytearray(stats_files(good)[0].read_bytes())
        for where, value in flips:
            data[int(where * (len(data) - 1))] = value
        stats_files(run)[0].write_bytes(data)
        if sealed:
            reseal(run)
        with contextlib.suppress(UsageError):
            report = bw.compare(run, good)
            changed = data != stats_files(good)[0].read_bytes()
            assert sealed or report.status == ("unread" if changed else "fine")


FILE = "step00000000-000001.safetensors"


@pytest.mark.parametrize(
    "reference",
    [
        "../../../etc/passwd|x",
        "/etc/passwd|x",
        "..|x",
        "a/b.safetensors|x",
        "step00000000-000001.safetensors|no such",
        "",
        "|",
        "no.safetensors|x",
    ],
)
def test_a_reference_out_of_the_run_is_refused(run: Path, good: Path, reference: str) -> None:
    change(run, tensor=reference)
    report = bw.compare(run, good)
    assert report.problems
    assert report.first is None
    with pytest.raises(UsageError):
        RunSource(run).tensor(0, reference, "float32", (1,), None)


@pytest.mark.parametrize(
    ("columns", "said"),
    [
        ({"shape": [1 << 40, 1 << 40]}, "the row says shape"),
        ({"shape": [-5]}, "the row says shape"),
        ({"dtype": "float16"}, "one of them is damaged"),
        ({"dtype": "__class__"}, "unknown dtype"),
        ({"layout": "1,99999999999"}, "do not fit"),
        ({"layout": "x"}, "do not fit"),
    ],
)
def test_rows_that_contradict_their_tensors_are_named(run: Path, good: Path, columns: dict, said: str) -> None:
    change(run, **columns)
    report = bw.compare(run, good)
    assert any(said in problem for problem in report.problems), report.problems[:3]


def header(path: Path, entries: object, data: bytes = b"\0" * 16) -> None:
    text = entries if isinstance(entries, bytes) else json.dumps(entries).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


@pytest.mark.parametrize(
    "entries",
    [
        {"x": {"dtype": "F32", "shape": [1 << 60], "data_offsets": [0, 16]}},
        {"x": {"dtype": "F32", "shape": [4], "data_offsets": [0, 1 << 50]}},
        {"x": {"dtype": "F32", "shape": [4], "data_offsets": [-16, 0]}},
        {"x": {"dtype": "F32", "shape": "4", "data_offsets": [0, 16]}},
        {"x": {"dtype": ["F32"], "shape": [4], "data_offsets": [0, 16]}},
        {"x": {"dtype": "F32", "shape": [True], "data_offsets": [0, 4]}},
        {"x": None},
        [],
        b"[" * 100_000,
        b"not json",
    ],
)
def test_a_tensor_files_header_is_not_believed(tmp_path: Path, entries: object) -> None:
    path = tmp_path / "x.safetensors"
    header(path, entries)
    with pytest.raises(UsageError, match=r"damaged|holds no tensor"):
        TensorReader(path).read("x")
    path.write_bytes(struct.pack("<Q", 1 << 62))
    with pytest.raises(UsageError, match="does not fit into the file"):
        TensorReader(path)


@pytest.mark.parametrize(
    "function",
    [
        "aten.from_file.default",
        "aten.add_.Tensor",
        "os.system",
        "aten.bernoulli.default",
        "aten.__class__.mro",
        "prims.add.default",
        "",
        "aten",
    ],
)
def test_what_a_recording_names_is_not_run_blindly(tmp_path: Path, function: str) -> None:
    text = json.dumps({"f": function, "a": ["/etc/passwd", True, 10], "k": {}})
    assert operator_of(text) is None
    assert compare_recorded_with_float64(text, [torch.ones(2)], torch.ones(2), 0) is None
    assert compare_recorded_with_float64("[" * 100_000, [torch.ones(2)], torch.ones(2), 0) is None
    wrong = json.dumps({"f": "aten.mm.default", "a": [{"$": 7}, {"$": -1}], "k": {"x": 1}})
    assert compare_recorded_with_float64(wrong, [torch.ones(2, 2)], torch.ones(2, 2), 0) is None


NASTY = '=cmd|" /C calc"!A0<script>alert(1)</script>\x1b[31m'


def test_names_are_harmless_in_tables_and_on_the_terminal(
    run: Path, good: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    change(run, module=NASTY, name=NASTY)
    other = Path(shutil.copytree(run, tmp_path / "other"))
    change(other, l2=5.0, max=7.0)
    for path in (run, other):
        shutil.rmtree(path / "rank00000" / "tensors")
    code = main(
        [
            "compare",
            str(run),
            str(other),
            "--csv",
            str(tmp_path / "t.csv"),
            "--xlsx",
            str(tmp_path / "t.xlsx"),
            "--json",
            str(tmp_path / "t.json"),
        ]
    )
    assert code == 3  # the kept values are gone
    assert "\x1b[31m" not in capsys.readouterr().out
    for line in (tmp_path / "t.csv").read_text().splitlines()[1:]:
        assert not any(cell.startswith(("=", "+", "@")) for cell in line.split(","))
    sheet = openpyxl.load_workbook(tmp_path / "t.xlsx").active
    cells = [cell for row in sheet.iter_rows(min_row=2) for cell in row]
    assert all(cell.data_type != "f" for cell in cells)
    assert any(isinstance(cell.value, str) and cell.value.startswith("'=cmd") for cell in cells)
    assert json.loads((tmp_path / "t.json").read_text())["table"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other", "run", "t.csv", "t.json", "t.xlsx"]


def test_other_columns_and_kinds_of_columns(run: Path) -> None:
    path, other = stats_files(run)
    other.unlink()
    table = pq.read_table(path)
    pq.write_table(table.drop_columns(["module"]), path)
    reseal(run)
    with pytest.raises(UsageError, match="has no column module"):
        RunSource(run)
    texts = pa.array(["many"] * table.num_rows)
    pq.write_table(table.set_column(table.schema.get_field_index("micro"), "micro", texts), path)
    reseal(run)
    source = RunSource(run)
    assert source.table(0, 0).num_rows == 0
    assert "was left out" in source.problems[0]


@pytest.mark.parametrize("what", ["missing", "file", "empty", "unreadable"])
def test_what_is_no_recording_is_said(tmp_path: Path, what: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "x"
    if what == "file":
        path.write_text("")
    elif what != "missing":
        path.mkdir()
    if what == "unreadable":
        (path / "rank00000").mkdir()
        (path / "rank00000" / "stats-000001.parquet").write_text("no")
    assert main(["compare", str(path), str(path)]) in ((2,) if what == "missing" else (2, 3))
    said = capsys.readouterr().err
    assert str(path) in said
    assert "expected" in said


def test_output_that_cannot_be_written_is_an_error_before_the_work(
    good: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["compare", str(good), str(good), "--csv", str(tmp_path / "no" / "t.csv")]) == 2
    assert "cannot write" in capsys.readouterr().err


def test_record_and_compare_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "train.py"
    path.write_text(
        "import sys, torch\n"
        "torch.manual_seed(0)\n"
        "net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.GELU(), torch.nn.Linear(8, 1))\n"
        "if len(sys.argv) > 1: net[1].approximate = sys.argv[1]\n"
        "opt = torch.optim.SGD(net.parameters(), lr=0.1)\n"
        "g = torch.Generator().manual_seed(1)\n"
        "for _ in range(3):\n"
        "    net(torch.randn(5, 4, generator=g)).square().mean().backward(); opt.step(); opt.zero_grad()\n"
        "print('done')\n"
    )

    def command(*args: str) -> subprocess.CompletedProcess[str]:
        return script(["-m", "bitwitness", *args], tmp_path)

    for name, given_ in (("a", []), ("b", ["tanh"])):
        done = command("record", "--out", name, "--content", "tensors", str(path), *given_)
        assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr
        assert f"recorded in {tmp_path / name}" in done.stderr
    done = command("compare", "a", "b", "--json", "t.json")
    assert done.returncode == 1
    assert (
        "the runs part at 1/gelu#0:forward.out0 (rank 0, step 0): called with other arguments: approximate none against tanh"
        in done.stdout
    )
    assert "train.py:8" in done.stdout
    told = json.loads((tmp_path / "t.json").read_text())
    assert told["first"]["site"] == "1/gelu#0:forward.out0"
    assert told["table"][0]["result"] == "equal"
    capsys.readouterr()
    assert main(["compare", str(tmp_path / "a"), str(tmp_path / "a"), "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out)["first"] is None
    assert main(["diff-env", str(tmp_path / "a"), str(tmp_path / "b")]) == 1
