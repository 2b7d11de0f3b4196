"""Ascend files, written by an independent writer: every field, every type, and whatever else a disk may hold."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path

import ascend_writer as writer
import ml_dtypes
import numpy as np
import pytest
from extent import chosen
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bitwitness.store.ascend.convert import convert_file, dump_files
from bitwitness.store.ascend.dtypes import NAMES
from bitwitness.store.ascend.dump import read_dump
from bitwitness.store.ascend.opdebug import is_opdebug_name, read_opdebug
from bitwitness.store.ascend.status import decode
from bitwitness.store.ascend.wire import AscendFileError

VALUES = {
    1: np.float32, 2: np.float16, 3: np.int8, 4: np.uint8, 5: np.int16, 6: np.uint16, 7: np.int32, 8: np.int64, 9: np.uint32,
    10: np.uint64, 11: np.bool_, 12: np.float64, 16: np.complex64, 17: np.complex128, 18: np.int8, 19: np.int16, 20: np.int32,
    21: np.uint8, 22: np.uint16, 27: ml_dtypes.bfloat16, 34: ml_dtypes.float8_e5m2, 35: ml_dtypes.float8_e4m3fn,
    36: ml_dtypes.float8_e8m0fnu, 37: ml_dtypes.float6_e3m2fn, 38: ml_dtypes.float6_e2m3fn, 39: ml_dtypes.float4_e2m1fn,
    28: ml_dtypes.int4, 30: ml_dtypes.int2, 31: ml_dtypes.uint2,
}  # fmt: skip


def test_every_field_is_read(tmp_path: Path) -> None:
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    y = np.arange(4, dtype=np.int32)
    data = writer.dump(
        inputs=[writer.Tensor(1, (2, 3), x.tobytes(), layout=0), writer.Tensor(7, (4,), y.tobytes(), packed=False)],
        outputs=[writer.Tensor(2, (3,), np.ones(3, np.float16).tobytes(), layout=29)],
        buffers=[b"buffer"],
        spaces=[b"space"],
        attributes=[("axis", "1")],
        extra=writer.nested(9, b"message") + writer.nested(77, b"newer") + bytes([0x9D, 1, 1, 2, 3, 4]),
    )
    dump = read_dump(writer.write(tmp_path / "Conv2D.Conv2D_1.3.7.1600000000000000", data))
    assert (dump.version, dump.dump_time, dump.op_name, dump.message) == (
        "2.0",
        1_600_000_000_000_000,
        "Conv2D_1",
        "message",
    )
    assert dump.attributes == {"axis": "1"}
    first, other = dump.inputs
    assert (first.dtype, first.layout, first.shape, first.original_shape) == ("float32", "NCHW", (2, 3), (2, 3))
    np.testing.assert_array_equal(first.array(), x)
    np.testing.assert_array_equal(other.array(), y)
    assert (dump.outputs[0].layout, dump.outputs[0].array().tolist()) == ("FRACTAL_NZ", [1.0, 1.0, 1.0])
    assert (dump.buffers[0].raw(), dump.spaces[0].raw()) == (b"buffer", b"space")


@pytest.mark.parametrize("number", sorted(NAMES))
def test_every_type_is_read_or_kept_as_bytes(tmp_path: Path, number: int) -> None:
    kind = VALUES.get(number)
    values = np.arange(4).astype(kind) if kind is not None else np.arange(8, dtype=np.uint8)
    file = writer.write(tmp_path / "A.b.1.2", writer.dump(outputs=[writer.Tensor(number, (4,), values.tobytes())]))
    array = read_dump(file).outputs[0].array()
    if kind is not None:
        np.testing.assert_array_equal(array.astype(np.complex128), values.astype(np.complex128))
    else:
        assert array.tobytes() == values.tobytes()
    for form in ("npy", "safetensors"):
        ((target, note),) = convert_file(file, tmp_path / form, form)
        assert target.exists()
        if form == "npy":
            loaded = np.load(target)
            np.testing.assert_array_equal(loaded.astype(np.complex128), array.astype(np.complex128))
            assert kind is not None or "raw bytes" in note or NAMES[number] == "uint1"


@pytest.mark.parametrize(
    ("number", "data", "expected"),
    [(28, b"\xf1\x28", [1, -1, -8, 2]), (31, b"\xe4", [0, 1, 2, 3]), (39, b"\x21\x43", [0.5, 1.0, 1.5, 2.0])],
)
def test_packed_small_numbers_come_out_one_by_one(tmp_path: Path, number: int, data: bytes, expected: list) -> None:
    file = writer.write(tmp_path / "A.b.1.2", writer.dump(inputs=[writer.Tensor(number, (4,), data)]))
    assert read_dump(file).inputs[0].array().tolist() == expected


def test_safetensors_can_be_read_by_their_own_library(tmp_path: Path) -> None:
    from safetensors.numpy import load_file

    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    file = writer.write(tmp_path / "A.b.1.2", writer.dump(inputs=[writer.Tensor(1, (2, 3), x.tobytes())]))
    ((target, _),) = convert_file(file, tmp_path, "safetensors")
    np.testing.assert_array_equal(load_file(target)["input.0"], x)


def test_a_tensor_with_a_null_address_has_no_payload(tmp_path: Path) -> None:
    x = np.ones(4, np.float32).tobytes()
    tensors = [writer.Tensor(1, (4,), b"?" * 16, address=0, absent=True), writer.Tensor(1, (4,), x)]
    dump = read_dump(writer.write(tmp_path / "A.b.1.2", writer.dump(inputs=tensors)))
    assert (dump.inputs[0].offset, dump.inputs[0].raw()) == (None, b"")
    assert dump.inputs[1].array().tolist() == [1.0] * 4
    whole = [writer.Tensor(1, (4,), x, address=0)]  # a null address, and a payload all the same: it fits
    assert (
        read_dump(writer.write(tmp_path / "A.b.1.3", writer.dump(inputs=whole))).inputs[0].array().tolist() == [1.0] * 4
    )


def test_the_published_example_becomes_the_vendors_json(tmp_path: Path) -> None:
    file = writer.write(
        tmp_path / "Opdebug.Node_OpDebug.59.1597922031178434", writer.opdebug(writer.record(writer.CORE))
    )
    ((target, _),) = convert_file(file, tmp_path / "out")
    assert target.name == "Opdebug.Node_OpDebug.59.1597922031178434.output.0.json"
    told = json.loads(target.read_text())
    nothing = {
        "model_id": 0,
        "stream_id": 0,
        "task_id": 0,
        "task_type": 0,
        "pc_start": "0x0",
        "para_base": "0x0",
        "status": 0,
    }
    assert list(told) == ["DHA Atomic Add", "L2 Atomic Add", "AI Core"]
    assert told["DHA Atomic Add"] == told["L2 Atomic Add"] == nothing
    assert told["AI Core"] == {
        "model_id": 514,
        "stream_id": 563,
        "task_id": 57,
        "task_type": 0,
        "pc_start": "0x1008005b0000",
        "para_base": "0x100800297000",
        "kernel_code": "0x1008005ae000",
        "block_idx": 1,
        "status": 32,
    }
    assert list(told["AI Core"]) == list(writer.CORE)


@pytest.mark.parametrize(
    ("kind", "version", "count", "unit"),
    [(0, 0, 11, "AIC"), (1, 0, 11, "AIV"), (1, 1, 14, "AIV"), (2, 0, 8, "AICPU"), (3, 0, 10, "SDMA")],
)
def test_the_second_version_is_read(tmp_path: Path, kind: int, version: int, count: int, unit: str) -> None:
    data = writer.second(kind, list(range(1, count + 1)), version)
    for bare in (data, writer.opdebug(data)):
        debug = read_opdebug(writer.write(tmp_path / "OpDebug.Node_Opdebug.5.9", bare))
        told = debug.to_json()
        assert (told["magic"], told["version"]) == ("0x5a5a5a5a", version)
        assert (told["acc_list"]["valid"], told["acc_list"]["acc_type"]) == (1, unit)
        record = told["acc_list"]["data"]
        assert (record["model_id"], record["stream_id"], record["task_id"]) == (1, 2, 3)
        assert record["status"] == ([11, 12, 13, 14] if version else count)
        assert all(
            isinstance(record.get(name, "0x"), str) for name in ("pc_start", "para_base", "src_addr", "dst_addr")
        )


@pytest.mark.parametrize(
    ("status", "unit", "text"),
    [
        (272, "AI Core", "integer addition, subtraction, multiplication or multiply-add overflow + FP32-to-FP16 or"),
        (32, "AI Core", "floating-point overflow"),
        (2546, "DHA Atomic Add", "atomic overflow"),
        (2546, "L2 Atomic Add", "no error"),
        (0x840, "AI Core", "unknown bit 0x040 (no published meaning) + unknown bit 0x800 (no published meaning)"),
        (0x420, "AIV", "floating-point overflow + Cube accumulation overflow"),
        (0x820, "AI Core", "floating-point overflow + unknown bit 0x800 (no published meaning)"),
        (0xFF00, "DHA Atomic Add", "unknown code 0xff (no published meaning)"),
        (7 << 16, "L2 Atomic Add", "unknown code 0x7 (no published meaning)"),
        (5 << 16, "L2 Atomic Add", "invalid source and destination operands (NaN)"),
        (0, "AI Core", "no error"),
        (3, "SDMA", "unknown code 0x3 (no published meaning)"),
    ],
)
def test_a_status_in_words(status: int, unit: str, text: str) -> None:
    assert decode(status, unit).text.startswith(text)


@given(
    status=st.integers(0, 2**64 - 1), unit=st.sampled_from(["AI Core", "DHA Atomic Add", "L2 Atomic Add", "SDMA", "?"])
)
@settings(max_examples=500, deadline=None)
def test_every_status_has_words(status: int, unit: str) -> None:
    assert decode(status, unit).text


@pytest.mark.parametrize(
    ("name", "is_one"),
    [("Opdebug.Node_OpDebug.59.1", True), ("OpDebug.Node_Opdebug.59.1", True), ("Add.Add_1.2.3", False)],
)
def test_both_spellings_of_the_name_are_known(name: str, is_one: bool) -> None:
    assert is_opdebug_name(name) is is_one


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "byte 0: 0 bytes; expected the header's length"),
        (b"\x5a\x5a\x5a\x5a" + b"\0" * 40, "'nano' dump"),
        ((1 << 40).to_bytes(8, "little") + b"\0" * 8, "a header of 1099511627776 bytes; expected between 1 and 8"),
        (
            writer.dump(outputs=[writer.Tensor(1, (4,), b"\0" * 16)])[:-1],
            "15 bytes after the header; expected 16 bytes",
        ),
        ((2).to_bytes(8, "little") + b"\x0a\x7f", "field 1 of 127 bytes where 0 are left"),
        ((1).to_bytes(8, "little") + b"\x80", "the bytes end inside a number"),
    ],
)
def test_a_damaged_file_is_named_with_the_byte(tmp_path: Path, data: bytes, words: str) -> None:
    file = writer.write(tmp_path / "Add.Add_1.2.3", data)
    with pytest.raises(AscendFileError) as error:
        read_dump(file)
    assert words in str(error.value)
    assert str(file) in str(error.value)
    with pytest.raises(AscendFileError):
        convert_file(file, tmp_path / "out")
    assert not list((tmp_path / "out").glob("*")) if (tmp_path / "out").exists() else True


GOOD = [
    writer.dump(
        inputs=[writer.Tensor(27, (3, 5), b"\1" * 30), writer.Tensor(28, (4,), b"\x12\x34", address=0)],
        outputs=[writer.Tensor(1, (2, 2), b"\2" * 16)],
        buffers=[b"b" * 9],
        spaces=[b"s"],
        attributes=[("k", "v")],
    ),
    writer.opdebug(writer.record(writer.CORE)),
    writer.second(1, range(14), 1),
    writer.opdebug(writer.second(3, range(10))),
]


def read_all(path: Path) -> None:
    """Read a file in every way; whatever it holds, only an `AscendFileError` that names it may come of it."""
    for reader in (read_dump, read_opdebug):
        try:
            found = reader(path)
            for tensor in getattr(found, "tensors", ()):
                assert tensor.array().nbytes <= max(8 * tensor.size, 8)
            if hasattr(found, "to_json"):
                json.dumps(found.to_json())
        except AscendFileError as error:
            assert f"{path}, byte " in str(error)  # noqa: PT017 - there may be no error


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz") / "Opdebug.Node_OpDebug.1.2"


@given(
    which=st.sampled_from(GOOD),
    cut=st.integers(0, 2300),
    flips=st.lists(st.tuples(st.integers(0, 2300), st.integers(1, 255)), max_size=6),
)
@settings(max_examples=chosen(4000, 500), deadline=None, suppress_health_check=list(HealthCheck))
def test_truncated_and_flipped_files_are_read_or_named(scratch: Path, which: bytes, cut: int, flips: list) -> None:
    data = bytearray(which[: len(which) - cut % (len(which) + 1)])
    for at, mask in flips:
        if data:
            data[at % len(data)] ^= mask
    scratch.write_bytes(data)
    read_all(scratch)


@given(data=st.binary(max_size=400), length=st.integers(0, 400), honest=st.booleans())
@settings(max_examples=chosen(4000, 500), deadline=None, suppress_health_check=list(HealthCheck))
def test_arbitrary_bytes_are_read_or_named(scratch: Path, data: bytes, length: int, honest: bool) -> None:
    header = min(length, len(data)) if honest else length << 20
    scratch.write_bytes(header.to_bytes(8, "little") + data)
    read_all(scratch)


dims = st.lists(st.integers(0, 2**63), max_size=4).map(tuple)
tensors = st.lists(
    st.builds(writer.Tensor, st.integers(0, 50), dims, st.binary(max_size=40), st.integers(0, 300), st.integers(0, 1)),
    max_size=3,
)


@given(inputs=tensors, outputs=tensors, buffers=st.lists(st.binary(max_size=9), max_size=2), tail=st.binary(max_size=3))
@settings(max_examples=chosen(2000, 300), deadline=None, suppress_health_check=list(HealthCheck))
def test_any_header_gives_its_tensors_back(
    scratch: Path, inputs: list, outputs: list, buffers: list, tail: bytes
) -> None:
    scratch.write_bytes(writer.dump(inputs, outputs, buffers) + tail)
    dump = read_dump(scratch)
    assert [t.raw() for t in dump.tensors] == [t.payload for t in [*inputs, *outputs]] + buffers
    for tensor in dump.tensors:
        assert tensor.array().nbytes <= max(8 * tensor.size, 8)


def test_a_claim_of_gigabytes_takes_no_memory(tmp_path: Path) -> None:
    tensor = writer.Tensor(1, (1 << 40,), b"")
    header = writer.nested(3, tensor.output() + writer.number(6, 1 << 42))
    file = writer.write(tmp_path / "A.b.1.2", len(header).to_bytes(8, "little") + header)
    tracemalloc.start()
    with pytest.raises(AscendFileError, match="4398046511104 bytes"):
        read_dump(file)
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()


def test_a_folder_gives_its_dump_files(tmp_path: Path) -> None:
    for name in ("A.b.1.2", "sub/C.d.3.4", "mapping.csv", "x.json"):
        writer.write(tmp_path / name, b"")
    assert [str(path.relative_to(tmp_path)) for path in dump_files(tmp_path, pytest.fail)] == ["A.b.1.2", "sub/C.d.3.4"]
