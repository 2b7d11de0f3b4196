"""Checkpoints that are damaged, or made to do harm: they are refused or left out, with words, and nothing in them runs."""

from __future__ import annotations

import csv
import io
import json
import os
import pickle
import struct
import warnings
import zipfile
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch.distributed.checkpoint.metadata import Metadata

import bitwitness as bw
from bitwitness import UsageError
from bitwitness.cli.checkpoints import run
from bitwitness.comparison.checkpoints import compare_checkpoints
from bitwitness.store.checkpoints import open_checkpoint


class Bomb:
    """Runs a command when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self):
        return os.system, (f"touch {self.mark}",)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    folder = tmp_path / "dcp"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"w": torch.arange(12.0).view(3, 4), "v": torch.ones(2)}, checkpoint_id=folder)
    return folder


def metadata(folder: Path) -> Metadata:
    return pickle.loads((folder / ".metadata").read_bytes())


def write(folder: Path, content: object) -> None:
    (folder / ".metadata").write_bytes(pickle.dumps(content))


def problem(folder: Path, name: str = "w") -> str:
    """Return what is said of a tensor, at the opening or when it is read."""
    opened = open_checkpoint(folder)
    assert torch.equal(opened.tensor("v"), torch.ones(2)), "the others are still read"
    if name not in opened.names():
        return next(text for text in opened.problems if repr(name) in text)
    with pytest.raises(UsageError) as caught:
        opened.tensor(name)
    return str(caught.value)


# -- what would run code ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["whole", "planner", "state"])
def test_a_pickle_that_runs_a_command_is_refused(place: str, saved: Path, tmp_path: Path) -> None:
    content: object = metadata(saved)
    if place == "planner":
        content.planner_data = {"x": Bomb(tmp_path / "mark")}
    elif place == "state":
        content.state_dict_metadata["w"].chunks = [Bomb(tmp_path / "mark")]
    else:
        content = Bomb(tmp_path / "mark")
    write(saved, content)
    with pytest.raises(UsageError, match=r"\.metadata names '(posix|nt)\.system'"):
        open_checkpoint(saved)
    assert not (tmp_path / "mark").exists()


@pytest.mark.parametrize(
    "name",
    ["builtins\neval", "builtins\ngetattr", "torch\nload", "torch\nTensor", "torch.serialization\nload", "os\npath"],
)
def test_what_is_not_listed_is_refused(name: str, saved: Path) -> None:
    (saved / ".metadata").write_bytes(f"c{name}\n.".encode())
    with pytest.raises(UsageError, match="which no checkpoint of torch needs"):
        open_checkpoint(saved)


def test_a_refused_name_cannot_command_the_terminal(saved: Path) -> None:
    (saved / ".metadata").write_bytes(b"cos\x1b[2J\nsys\x1btem\n.")
    with pytest.raises(UsageError) as caught:
        open_checkpoint(saved)
    assert "\x1b" not in str(caught.value)


def test_a_chunk_that_runs_a_command_is_refused(saved: Path, tmp_path: Path) -> None:
    buffer = io.BytesIO()
    torch.save({"x": Bomb(tmp_path / "mark")}, buffer)
    (saved / "evil.distcp").write_bytes(buffer.getvalue())
    content = metadata(saved)
    for index, info in content.storage_data.items():
        if index.fqn == "w":
            info.relative_path, info.offset, info.length = "evil.distcp", 0, len(buffer.getvalue())
    write(saved, content)
    assert "could run code" in problem(saved)
    assert not (tmp_path / "mark").exists()


def test_a_file_of_torch_save_that_runs_a_command_is_refused(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2), "x": Bomb(tmp_path / "mark")}, tmp_path / "a.pt")
    with pytest.raises(UsageError, match=r"more than tensors and plain values \((posix|nt)\.system\)"):
        open_checkpoint(tmp_path / "a.pt")
    torch.save(torch.nn.Linear(2, 2), tmp_path / "b.pt")
    with pytest.raises(UsageError, match="state_dict alone"):
        open_checkpoint(tmp_path / "b.pt")
    assert not (tmp_path / "mark").exists()


# -- names of files --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["../out.distcp", "/etc/passwd", "..", "", "a/b", "nul\0", "link.distcp"])
def test_chunks_outside_the_folder_are_not_read(name: str, saved: Path, tmp_path: Path) -> None:
    (tmp_path / "out.distcp").write_bytes((saved / "__0_0.distcp").read_bytes())
    (saved / "link.distcp").symlink_to(tmp_path / "out.distcp")
    content = metadata(saved)
    next(info for index, info in content.storage_data.items() if index.fqn == "w").relative_path = name
    write(saved, content)
    assert "expected a plain file name" in problem(saved) or "is a link out of its folder" in problem(saved)


@pytest.mark.parametrize(
    "name", ["../out.safetensors", "/out.safetensors", "..", "sub/x.safetensors", "link.safetensors"]
)
def test_an_index_that_leads_outside_is_refused(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    save_file({"w": torch.ones(2)}, tmp_path / "out.safetensors")
    save_file({"v": torch.ones(2)}, folder / "in.safetensors")
    (folder / "link.safetensors").symlink_to(tmp_path / "out.safetensors")
    index = {"weight_map": {"v": "in.safetensors", "w": name}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(UsageError, match="expected a plain file name|is a link out of its folder"):
        open_checkpoint(folder)


def test_links_into_the_blobs_of_a_hugging_face_cache_are_followed(tmp_path: Path) -> None:
    folder = tmp_path / "models--x" / "snapshots" / "abc"
    folder.mkdir(parents=True)
    (tmp_path / "models--x" / "blobs").mkdir()
    save_file({"w": torch.ones(2)}, tmp_path / "models--x" / "blobs" / "123")
    (folder / "model.safetensors").symlink_to("../../blobs/123")
    assert open_checkpoint(folder).names() == ["w"]


@pytest.mark.parametrize("text", ["{", "[]", '{"weight_map": 3}', '{"weight_map": {"w": 3}}', "[" * 100_000])
def test_an_index_that_is_none(text: str, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(UsageError, match="is damaged"):
        open_checkpoint(tmp_path)


# -- damage ----------------------------------------------------------------------------------------------------------


def test_damaged_metadata_is_told(saved: Path) -> None:
    whole = (saved / ".metadata").read_bytes()
    for content in (
        b"",
        whole[: len(whole) // 2],
        b"\x80\x04.",
        pickle.dumps([1, 2]),
        pickle.dumps({}),
        b"]\x94h\x00.",
    ):
        (saved / ".metadata").write_bytes(content)
        with pytest.raises(UsageError, match="is damaged"):
            open_checkpoint(saved)


def test_a_pickle_made_to_take_memory_or_the_stack_is_refused(saved: Path) -> None:
    far = b"\x80\x04Nr\xff\xff\xff\xff."  # a place in the memo, for which the unpickler in C makes room
    bytes_of_zeros = b"\x80\x05\x96" + struct.pack("<Q", 1 << 36) + b"."
    deep = b"\x80\x04})" + b"\x85" * 300_000 + b"Ns."  # a tuple in a tuple in a tuple, as a key
    laugh = b"\x80\x04]\x94" + b"".join(b"](h%bh%be\x94" % (bytes([i]), bytes([i])) for i in range(60)) + b"."
    for content in (far, bytes_of_zeros, deep, laugh):
        (saved / ".metadata").write_bytes(content)
        with pytest.raises(UsageError, match="is damaged"):
            open_checkpoint(saved)


def test_bits_flipped_in_metadata_never_escape(saved: Path) -> None:
    whole = bytearray((saved / ".metadata").read_bytes())
    for at in range(0, len(whole), 3):
        changed = whole.copy()
        changed[at] ^= 0x15
        (saved / ".metadata").write_bytes(changed)
        try:
            opened = open_checkpoint(saved)
            for name in opened.names():
                opened.tensor(name)
        except UsageError:
            pass


@pytest.mark.parametrize(
    "change", ["huge", "grown", "shrunk", "offsets", "overlap", "far", "long", "dtype", "gone", "text"]
)
def test_metadata_that_contradicts_the_files(change: str, saved: Path) -> None:
    content = metadata(saved)
    about = content.state_dict_metadata["w"]
    info = next(info for index, info in content.storage_data.items() if index.fqn == "w")
    chunk = about.chunks[0]
    if change == "huge":
        about.size = chunk.sizes = torch.Size([1 << 40, 4])
    elif change == "grown":
        about.size = torch.Size([6, 4])
    elif change == "shrunk":
        about.size = torch.Size([2, 4])
    elif change == "offsets":
        chunk.offsets = torch.Size([1, 0])
    elif change == "overlap":
        about.chunks = [
            type(chunk)(torch.Size([0, 0]), torch.Size([3, 2])),
            type(chunk)(torch.Size([0, 0]), torch.Size([2, 3])),
        ]
    elif change == "far":
        info.offset = 1 << 40
    elif change == "long":
        info.length = 1 << 40
    elif change == "dtype":
        about.properties.dtype = torch.int32
    elif change == "gone":
        content.storage_data = {index: one for index, one in content.storage_data.items() if index.fqn != "w"}
    else:
        about.size = "12"
    write(saved, content)
    assert "'w'" in problem(saved)


def test_a_file_cut_short(saved: Path, tmp_path: Path) -> None:
    size = (saved / "__0_0.distcp").stat().st_size
    whole = tmp_path / "whole.safetensors"
    save_file({"w": torch.arange(12.0).view(3, 4), "v": torch.ones(2)}, whole)
    os.truncate(saved / "__0_0.distcp", size - 100)
    report = compare_checkpoints(open_checkpoint(saved), open_checkpoint(whole))
    assert report.count("unreadable") == 1
    assert report.count("equal") == 1
    assert "1 of 2 parameters cannot be read" in report.conclusion
    assert "cut short" in report.problems[0]
    os.truncate(whole, whole.stat().st_size - 4)
    assert len(open_checkpoint(whole).problems) == 1
    os.truncate(whole, 20)
    with pytest.raises(UsageError, match="its header does not fit"):
        open_checkpoint(whole)


@pytest.mark.parametrize("cut", [0, 10, 300])
def test_a_file_of_torch_save_cut_short(cut: int, tmp_path: Path) -> None:
    torch.save({"w": torch.ones(200)}, tmp_path / "a.pt")
    os.truncate(tmp_path / "a.pt", cut)
    with pytest.raises(UsageError, match="no whole archive of torch.save"):
        open_checkpoint(tmp_path / "a.pt")


def test_an_archive_that_unpacks_to_more_is_refused(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.pt", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a/data.pkl", b"\0" * 10_000_000)
    with pytest.raises(UsageError, match="unpacks to more"):
        open_checkpoint(tmp_path / "a.pt")


def test_tensors_larger_than_their_file_are_left_out(tmp_path: Path) -> None:
    content = {"w": torch.ones(1).expand(1 << 40), "s": torch.eye(3).to_sparse(), "v": torch.ones(2)}
    torch.save(content, tmp_path / "a.pt")
    opened = open_checkpoint(tmp_path / "a.pt")
    assert opened.names() == ["v"]
    assert len(opened.problems) == 2


def test_a_list_that_holds_itself(tmp_path: Path) -> None:
    content: list = [torch.ones(1)]
    content.append(content)
    torch.save(content, tmp_path / "a.pt")
    with pytest.raises(UsageError, match="nested deeper"):
        open_checkpoint(tmp_path / "a.pt")


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": [], "shape": [1], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [0, 1 << 70], "data_offsets": [0, 0]},
        {"dtype": "F32", "shape": [1 << 40], "data_offsets": [0, 1 << 42]},
        {"dtype": "F9", "shape": [1], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]},
        3,
    ],
)
def test_entries_of_safetensors_that_make_no_sense(entry: object, tmp_path: Path) -> None:
    text = json.dumps({"v": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}, "w": entry}).encode()
    for name in ("a.safetensors", "b.safetensors"):
        (tmp_path / name).write_bytes(struct.pack("<Q", len(text)) + text + b"\0" * 4)
    report = compare_checkpoints(
        open_checkpoint(tmp_path / "a.safetensors"), open_checkpoint(tmp_path / "b.safetensors")
    )
    assert report.problems
    assert not report.equal


def test_a_missing_shard_is_a_problem(tmp_path: Path) -> None:
    save_file({"w": torch.ones(2)}, tmp_path / "one.safetensors")
    index = {"weight_map": {"w": "one.safetensors", "v": "two.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    opened = open_checkpoint(tmp_path)
    assert opened.names() == ["w"]
    assert "two.safetensors" in opened.problems[0]
    assert "'v'" in opened.problems[1]


def test_what_is_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "a.txt").write_text("x")
    save_file({}, tmp_path / "none.safetensors")
    for name, told in (
        ("empty", "holds no checkpoint"),
        ("a.txt", "of no known kind"),
        ("missing.pt", "does not exist"),
        ("none.safetensors", "holds no tensors"),
    ):
        with pytest.raises(UsageError, match=told) as caught:
            run(str(tmp_path / name), str(tmp_path), None, None)
        assert "expected a .safetensors file" in str(caught.value)


def test_names_with_escape_codes_and_markup(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    names = ["\x1b]0;title\x07red", "<script>alert(1)</script>", "[bold red]x[/]", "=cmd()", "a\nb", "\u202eesrever"]
    for file, value in (("a", 1.0), ("b", 2.0)):
        save_file(
            {name: torch.full((2,), value) for name in names} | {f"only\x1b{file}": torch.ones(1)},
            tmp_path / f"{file}.safetensors",
        )
    code = run(
        *(str(tmp_path / f"{file}.safetensors") for file in "ab"), str(tmp_path / "o.json"), str(tmp_path / "o.csv")
    )
    assert code == 1
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert "\u202e" not in out
    assert "[bold red]x[/]" in out
    rows = list(csv.DictReader((tmp_path / "o.csv").read_text().splitlines()))
    assert len(rows) == len(names) + 2
    assert not any(row["name"].startswith(("=", "\x1b")) for row in rows)
    kept = json.loads((tmp_path / "o.json").read_text())
    assert {row["name"] for row in kept["parameters"]} == set(names)
    assert "\x1b" not in kept["conclusion"]


def test_a_place_that_cannot_be_written_is_told_at_once(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot write"):
        run("missing.pt", "missing.pt", str(tmp_path / "no" / "o.json"), None)


def test_a_tensor_whose_description_is_damaged_keeps_a_checkpoint_from_being_sealed(tmp_path: Path) -> None:
    bw.checkpoint.save({"model": {"a": torch.randn(30), "b": torch.randn(4, 5)}}, tmp_path, 1)
    place = bw.checkpoint.latest(tmp_path)
    assert place is not None
    described = pickle.loads((place / ".metadata").read_bytes())
    described.state_dict_metadata["model.a"].chunks[0].sizes = torch.Size([-3])
    (place / ".metadata").write_bytes(pickle.dumps(described))
    (place / "bitwitness.seal.json").unlink()
    with pytest.raises(
        bw.BitwitnessError, match=r"damaged already, and was not sealed: 'model.a': a chunk of it is damaged"
    ):
        bw.checkpoint.seal(place)
    assert not (place / "bitwitness.seal.json").exists()
