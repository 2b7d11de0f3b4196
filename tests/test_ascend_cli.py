"""``bitwitness ascend`` as a user types it: convert, decode, summary of whole dump paths."""

from __future__ import annotations

import json
import time
from pathlib import Path

import ascend_writer as writer
import numpy as np
import pytest

from bitwitness.cli import main

ROOT = "20200808163566"


def overflow(folder: Path, when: int, *, debug_task: int = 59, **record: dict) -> Path:
    return writer.write(folder / f"Opdebug.Node_OpDebug.{debug_task}.{when}", writer.opdebug(writer.record(**record)))


def test_convert_writes_arrays_and_the_vendors_json(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    source = tmp_path / "dump"
    half = np.array([1, 2, 3], np.float16)
    writer.write(source / "Add.Add_1.3.7.100", writer.dump(inputs=[writer.Tensor(2, (3,), half.tobytes())]))
    overflow(source, 101, core=writer.CORE)
    assert main(["ascend", "convert", "-d", str(source), "-out", str(tmp_path / "out")]) == 0
    np.testing.assert_array_equal(np.load(tmp_path / "out" / "Add.Add_1.3.7.100.input.0.npy"), half)
    told = json.loads((tmp_path / "out" / "Opdebug.Node_OpDebug.59.101.output.0.json").read_text())
    assert told["AI Core"]["status"] == 32
    assert "2 files converted" in capsys.readouterr().out


def test_convert_names_what_is_damaged_and_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    source = tmp_path / "dump"
    writer.write(source / "Add.Add_1.3.7.100", b"short")
    overflow(source, 101, core=writer.CORE)
    assert main(["ascend", "convert", "-d", str(source), "-o", str(tmp_path)]) == 3
    told = capsys.readouterr()
    assert "Add.Add_1.3.7.100, byte 0: 5 bytes; expected the header's length" in told.err
    assert "1 file converted, 1 could not be read" in told.out
    assert main(["ascend", "convert", "-d", str(source / "Add.Add_1.3.7.100")]) == 3
    long = writer.write(source / f"Add.{'A' * 235}.3.7.100", writer.dump(inputs=[writer.Tensor(2, (1,), bytes(2))]))
    assert main(["ascend", "convert", "-d", str(long), "-o", str(tmp_path)]) == 4
    assert "File name too long" in capsys.readouterr().err
    assert main(["ascend", "convert", "-d", str(tmp_path / "nothing")]) == 2
    assert "No such file or directory" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["272", "0x110"])
def test_decode_takes_both_spellings(text: str, capsys: pytest.CaptureFixture) -> None:
    assert main(["ascend", "decode", text, "--unit", "aicore"]) == 0
    assert "FP32-to-FP16 or 32-bit-integer-to-FP16 conversion overflow" in capsys.readouterr().out
    assert main(["ascend", "decode", text, "--json"]) == 0
    assert [one["status"] for one in json.loads(capsys.readouterr().out)["decoded"]] == [272] * 3


@pytest.mark.parametrize("text", ["", "x", "-1", "0x1ffffffffffffffff"])
def test_decode_says_what_is_no_status(text: str, capsys: pytest.CaptureFixture) -> None:
    assert main(["ascend", "decode", "--", text]) == 2
    assert "expected a number of at most 64 bits" in capsys.readouterr().err


def test_the_published_example_is_summed_up(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    folder = tmp_path / ROOT / "0" / "11" / "0"
    overflow(folder, 1597922031178434, core=writer.CORE)
    operator = writer.dump(inputs=[writer.Tensor(1, (1,), b"\0" * 4)])
    writer.write(folder / "Mul.network_mul_3.57.563.1597922031178000", operator)
    writer.write(folder / "Mul.network_mul_3.57.563.1597922031179000", operator)
    writer.write(folder / "Add.other_stream.57.9.1597922031170000", operator)
    writer.write(folder / "Add.the_debug_tasks_number.59.563.1597922031170000", operator)
    assert main(["ascend", "summary", str(tmp_path)]) == 1
    told = capsys.readouterr().out
    assert told.startswith("INF_NAN_MODE_ENABLE")
    assert (
        "1 overflows in 5 files. The earliest, iteration 0: Mul network_mul_3 on AI Core: floating-point overflow"
        in told
    )
    assert "Mul.network_mul_3.57.563.1597922031178000" in told
    assert main(["ascend", "summary", str(tmp_path), "--json"]) == 1
    (one,) = json.loads(capsys.readouterr().out)["overflows"]
    assert (one["time"], one["device"], one["model_id"], one["iteration"]) == (ROOT, "0", 514, 0)
    assert (one["stream_id"], one["task_id"], one["block"], one["op_type"]) == (563, 57, 1, "Mul")
    assert one["status"]["hex"] == "0x00000020"


def test_the_smallest_iteration_comes_first_over_devices_and_times(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    for time_folder, device, iteration, when, task in (
        (ROOT, "1", 7, 50, 1),
        (ROOT, "0", 3, 90, 2),
        ("20200808170000", "0", 3, 80, 3),
        (ROOT, "0", 10, 10, 4),
    ):
        core = writer.CORE | {"task_id": task}
        overflow(tmp_path / time_folder / device / "net" / "11" / str(iteration), when, core=core)
    overflow(tmp_path / ROOT / "0" / "11" / "1", 5)  # nothing is set in it: no overflow
    assert main(["ascend", "summary", str(tmp_path), "--json", "-o", str(tmp_path / "told")]) == 1
    found = json.loads(capsys.readouterr().out)["overflows"]
    assert [one["task_id"] for one in found] == [3, 2, 1, 4]
    assert found[0]["model_name"] == "net"
    assert json.loads((tmp_path / "told" / "summary.json").read_text())["overflows"] == found
    assert "iteration 3" in (tmp_path / "told" / "summary.txt").read_text()


def test_atomic_additions_and_the_second_version_are_decoded(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    folder = tmp_path / ROOT / "0" / "11" / "0"
    overflow(folder, 1, dha={"stream_id": 4, "task_id": 5, "status": 2546}, l2={"task_id": 6, "status": 2 << 16})
    numbers = [1, 8, 9, 0, 2, 3, 0, 0, 5, 6, 0x30]
    writer.write(folder / "OpDebug.Node_Opdebug.7.2", writer.opdebug(writer.second(1, numbers)))
    writer.write(folder / "MatMul.mm_1.9.8.3.4.2.3.0", writer.dump())
    writer.write(folder / "MatMul.mm_2.9.8.1.4.2.4.0", writer.dump())
    assert main(["ascend", "summary", str(folder), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)["overflows"]
    assert [(one["unit"], one["status"]["causes"]) for one in found][:2] == [
        ("DHA Atomic Add", ["atomic overflow"]),
        ("L2 Atomic Add", ["atomic underflow"]),
    ]
    assert (found[2]["unit"], found[2]["context_id"], found[2]["thread_id"], found[2]["block"]) == ("AIV", 2, 3, 6)
    assert found[2]["op_name"] == "mm_1"  # the other one ran in another thread


def test_long_names_are_looked_up(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    folder = tmp_path / ROOT / "0" / "11" / "0"
    overflow(folder, 10, core=writer.CORE)
    writer.write(folder / "12345678901234567890", writer.dump())
    name = "x" * 300
    writer.write(folder / "mapping.csv", f"damaged\n12345678901234567890,MatMul.{name}.57.563.9\n".encode())
    assert main(["ascend", "summary", str(tmp_path), "--json"]) == 1
    (one,) = json.loads(capsys.readouterr().out)["overflows"]
    assert (one["op_type"], one["op_name"], one["operator_dump"]) == ("MatMul", name, "12345678901234567890")


def test_a_runtime_log_names_the_operator(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    overflow(tmp_path / ROOT / "0" / "11" / "0", 10, core=writer.CORE)
    log = tmp_path / "plog" / "device-0.log"
    writer.write(
        log,
        b"[INFO] RUNTIME(1): launch stream_id=563, task_id=58, kernel_name=other\n"
        b"[INFO] RUNTIME(1): launch stream_id=563, task_id=57, kernel_name=te_mul_7, model_id=514\n"
        + b"\xff"
        * 100_000,
    )
    assert main(["ascend", "summary", str(tmp_path / ROOT), "--log", str(tmp_path / "plog"), "--json"]) == 1
    (one,) = json.loads(capsys.readouterr().out)["overflows"]
    assert one["log"] == {"at": f"{log}:2", "kernel_name": "te_mul_7", "model_id": "514"}
    assert main(["ascend", "summary", str(tmp_path / ROOT), "--log", str(tmp_path / "nothing")]) == 2


def test_an_empty_path_is_no_all_clear_and_a_missing_one_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    assert main(["ascend", "summary", str(tmp_path)]) == 3
    assert "there are no files: nothing was looked at" in capsys.readouterr().out
    assert main(["ascend", "summary", str(tmp_path / "nothing")]) == 2
    assert "No such file or directory" in capsys.readouterr().err


def test_damaged_records_are_named_and_the_rest_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    folder = tmp_path / ROOT / "0" / "11" / "0"
    overflow(folder, 10, core=writer.CORE)
    writer.write(folder / "Opdebug.Node_OpDebug.1.11", b"?" * 100)
    assert main(["ascend", "summary", str(tmp_path)]) == 3
    told = capsys.readouterr()
    assert "Opdebug.Node_OpDebug.1.11, byte 0" in told.err
    assert "floating-point overflow" in told.out


def test_saturation_is_said_first(
    tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INF_NAN_MODE_ENABLE", "0")
    writer.write(tmp_path / "Add.Add_1.3.7.100", writer.dump([], [], []))
    assert main(["ascend", "summary", str(tmp_path)]) == 0
    assert capsys.readouterr().out.startswith(
        "INF_NAN_MODE_ENABLE = 0 here: saturation. Inf became the dtype's largest"
    )


def test_a_large_folder_takes_seconds_and_shows_how_far_it_is(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    folder = tmp_path / ROOT / "0" / "11" / "0"
    overflow(folder, 10, core=writer.CORE)
    for number in range(25_000):
        (folder / f"Add.add_{number}.{number}.563.{number}").touch()
    started = time.process_time()
    assert main(["ascend", "summary", str(tmp_path)]) == 1
    assert time.process_time() - started < 10
    told = capsys.readouterr()
    assert "25001 files seen" in told.err
    assert "Add add_57" in told.out
