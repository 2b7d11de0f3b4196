"""Seals: of every format every flipped bit is found and the tensor named; a hostile seal does no harm."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from test_saved_checkpoints import flip

import bitwitness as bw
from bitwitness import UsageError
from bitwitness.cli import main
from bitwitness.errors import UnreadError
from bitwitness.store.seal import sealed

TENSORS = {"a.weight": torch.arange(600.0).view(20, 30), "b.bias": torch.ones(50, dtype=torch.bfloat16)}
DAMAGED = ("model.pt", "model.safetensors", "hf/model-00001-of-00002.safetensors", "dcp/__0_0.distcp", "dcp/.metadata")
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def of(name: str) -> str:
    """Return the checkpoint that a file belongs to."""
    return name.partition("/")[0]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sealed")
    torch.save({"model": TENSORS, "optimizer": {"state": {0: {"step": 3}}}}, folder / "model.pt")
    save_file(TENSORS, folder / "model.safetensors")
    (folder / "hf").mkdir()
    names = {name: f"model-0000{i}-of-00002.safetensors" for i, name in enumerate(TENSORS, start=1)}
    for name, file in names.items():
        save_file({name: TENSORS[name]}, folder / "hf" / file)
    (folder / "hf" / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": names}))
    (folder / "hf" / "config.json").write_text("{}")
    dcp.save({"model": TENSORS, "n": 3}, checkpoint_id=folder / "dcp", no_dist=True)
    for one in ("model.pt", "model.safetensors", "hf", "dcp"):
        bw.checkpoint.seal(folder / one)
    return folder


@pytest.fixture
def folder(written: Path, tmp_path: Path) -> Path:
    shutil.copytree(written, tmp_path / "checkpoints")
    return tmp_path / "checkpoints"


def test_what_was_not_touched_is_intact_and_other_files_are_nobodys_business(written: Path) -> None:
    counts = {}
    for one in ("model.pt", "model.safetensors", "hf", "dcp"):
        checked = bw.checkpoint.verify(written / one)
        assert checked.intact, str(checked)
        counts[one] = checked.files, checked.tensors
    assert counts == {"model.pt": (1, 3), "model.safetensors": (1, 2), "hf": (3, 2), "dcp": (2, 2)}


@given(st.sampled_from(DAMAGED), st.floats(0, 1, exclude_max=True), st.integers(0, 7))
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_every_flipped_bit_is_found(written: Path, name: str, where: float, bit: int) -> None:
    path = written / name
    at = int(path.stat().st_size * where)
    flip(path, at, bit)
    try:
        checked = bw.checkpoint.verify(written / of(name))
        assert {one.file for one in checked.damage} == {path.name}
        assert all(one.identity == "same" for one in checked.damage)
    finally:
        flip(path, at, bit)
    assert bw.checkpoint.verify(written / of(name)).intact


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("model.pt", "model.a.weight"),
        ("model.safetensors", "a.weight"),
        ("hf/model-00001-of-00002.safetensors", "a.weight"),
        ("dcp/__0_0.distcp", "model.a.weight"),
    ],
)
def test_the_damaged_tensor_is_named(folder: Path, name: str, tensor: str) -> None:
    path = folder / name
    flip(path, path.read_bytes().index(TENSORS["a.weight"].numpy().tobytes()) + 1001)
    checked = bw.checkpoint.verify(folder / of(name))
    assert [(one.file, one.tensor) for one in checked.damage] == [(path.name, tensor)], str(checked)


def test_cut_missing_and_exchanged_files_are_told(folder: Path) -> None:
    os.truncate(folder / "model.pt", 900)
    assert "it has 900 bytes, and was sealed with" in str(bw.checkpoint.verify(folder / "model.pt"))
    first, second = (folder / "hf" / f"model-0000{i}-of-00002.safetensors" for i in (1, 2))
    first.rename(folder / "hf" / "other")
    checked = bw.checkpoint.verify(folder / "hf")
    assert [(one.file, one.what) for one in checked.damage] == [(first.name, "it is missing")]
    second.rename(first)
    (folder / "hf" / "other").rename(second)
    assert {one.file for one in bw.checkpoint.verify(folder / "hf").damage} == {first.name, second.name}
    (folder / "dcp" / "__0_0.distcp").unlink()
    assert "__0_0.distcp: it is missing" in str(bw.checkpoint.verify(folder / "dcp"))
    with pytest.raises(UnreadError, match="incomplete, and was not sealed: __0_0.distcp is missing"):
        bw.checkpoint.seal(folder / "dcp")


def test_what_would_run_code_is_sealed_as_bytes_and_never_run(tmp_path: Path) -> None:
    class Runs:
        def __reduce__(self) -> tuple:
            return os.mkdir, (str(tmp_path / "it ran"),)

    torch.save({"weight": torch.ones(100), "evil": Runs()}, tmp_path / "model.pt")
    assert not bw.checkpoint.seal(tmp_path / "model.pt").tensors
    assert bw.checkpoint.verify(tmp_path / "model.pt").intact
    flip(tmp_path / "model.pt", 700)
    assert "SHA-256 differs" in str(bw.checkpoint.verify(tmp_path / "model.pt"))
    assert not (tmp_path / "it ran").exists()


def test_the_command_line_answers_with_its_exit_code(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(folder / "model.safetensors")
    assert main(["checkpoint", "verify", path]) == 0
    flip(Path(path), 1000)
    assert main(["checkpoint", "verify", path, "--json", str(folder / "said.json")]) == 1
    said = json.loads((folder / "said.json").read_text())
    assert said["status"] == "findings"
    assert said["damage"][0]["tensor"] == "a.weight"
    assert main(["checkpoint", "verify", str(folder / "none")]) == 2
    (folder / ".model.safetensors.seal.json").unlink()
    assert main(["checkpoint", "verify", path]) == 3
    assert "has no seal" in capsys.readouterr().err
    assert main(["checkpoint", "seal", path, "-q"]) == 0 == main(["checkpoint", "verify", path, "-q"])
    assert main(["checkpoint", "list", str(folder)]) == 3


HOSTILE = {
    "no JSON": "{",
    "nested": "[" * 100_000,
    "another format": json.dumps({"format": "bitwitness seal 9"}),
    "no checksum": json.dumps({"format": "bitwitness seal 1", "files": {}}),
    "NaN": '{"format": "bitwitness seal 1", "crc": NaN}',
}
BAD_FIELDS = {
    "files": [{"../../etc/passwd": {"length": 1, "sha256": "0" * 64, "mtime_ns": 0, "inode": 0}}, [], {"a": 3}],
    "tensors": [[["x", "f", [-1], "0" * 16]], [["x", 3, None, "0" * 16]], [["x"]], 7, [["x", "f", None, "zz"]]],
    "parts": [1 << 40, -1, "2"],
    "kind": ["pickle", 3],
    "step": [-4, "x"],
}


def test_a_hostile_seal_is_refused_in_one_line(folder: Path) -> None:
    place = folder / ".model.pt.seal.json"
    good = json.loads(place.read_text())
    good.pop("crc")
    texts = list(HOSTILE.values())
    texts += [json.dumps(sealed({**good, key: bad})) for key, values in BAD_FIELDS.items() for bad in values]
    texts += [place.read_text().replace('"length": ', '"length": 1')]
    for text in texts:
        place.write_text(text)
        with pytest.raises(UnreadError) as refused:
            bw.checkpoint.verify(folder / "model.pt")
        assert "\n" not in str(refused.value)
        assert len(str(refused.value)) < 1500
    os.truncate(place, 1 << 40)  # a sparse file
    with pytest.raises(UnreadError, match="of at most"):
        bw.checkpoint.verify(folder / "model.pt")
    place.unlink()
    os.mkfifo(place)
    with pytest.raises(UnreadError, match="is a FIFO"):
        bw.checkpoint.verify(folder / "model.pt")


@pytest.mark.parametrize("path", ["", "\0", "nowhere"])
def test_what_is_not_there_is_a_usage_error(path: str) -> None:
    with pytest.raises(UsageError):
        bw.checkpoint.seal(path)
