"""Under a guard a script's own checkpoints are sealed when written and verified when read; what was replaced is no alarm."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

import pytest
import ranks
import safetensors
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from test_saved_checkpoints import flip
from torch import nn

import bitwitness as bw
from bitwitness import Cause, Finding, Note, Verdict
from bitwitness.checkpoint import sealer
from bitwitness.finding import Event

pytestmark = pytest.mark.filterwarnings(
    "ignore:torch.distributed is disabled", "ignore:Detected an existing checkpoint"
)


class Trained:
    """A guarded model that takes a step now and then, and what the guard said."""

    def __init__(self, **settings: object) -> None:
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(64, 96), nn.Linear(96, 8))
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1)
        self.said: list[Event] = []
        self.settings = {"self_test": False, "quiet": True, **settings}

    def __enter__(self) -> Self:
        self.guard = bw.Guard(self.net, self.optimizer, on_event=self.said.append, **self.settings)
        self.guard.__enter__()
        self.net(torch.ones(2, 64)).square().mean().backward()
        self.optimizer.step()
        return self

    def __exit__(self, *error: object) -> None:
        self.guard.__exit__(None, None, None)

    def told(self, kind: type) -> list[str]:
        return [one.message for one in self.said if isinstance(one, kind) and getattr(one, "sensor", "") == "seal"]


@pytest.fixture
def originals() -> Iterator[None]:
    def held() -> list[object]:
        owners = (torch, torch.serialization, safetensors.torch, safetensors, dcp, os)
        names = ("save", "load", "save_file", "load_file", "safe_open", "replace", "rename", "remove", "unlink")
        return [getattr(owner, name, None) for owner in owners for name in names]

    before = held()
    yield
    assert all(a is b for a, b in zip(before, held(), strict=True)), "every patch is removed"


def write_all(net: nn.Module, folder: Path) -> None:
    torch.save({"model": net.state_dict(), "step": 1}, folder / "part")
    os.replace(folder / "part", folder / "model.pt")  # noqa: PTH105 - as scripts do
    safetensors.torch.save_file(net.state_dict(), folder / "model.safetensors")
    dcp.save({"model": net.state_dict()}, checkpoint_id=folder / "dcp")


def read_all(net: nn.Module, folder: Path) -> None:
    torch.load(folder / "model.pt")
    safetensors.torch.load_file(folder / "model.safetensors")
    with safetensors.safe_open(folder / "model.safetensors", "pt") as file:
        file.keys()
    dcp.load({"model": net.state_dict()}, checkpoint_id=folder / "dcp")


@pytest.fixture
def written(tmp_path: Path, originals: None) -> Path:
    del originals
    with Trained() as training:
        write_all(training.net, tmp_path)
        torch.save({"rng": torch.get_rng_state()}, tmp_path / "small.pt")
        torch.save(training.net.state_dict(), tmp_path / "gone.pt")
        (tmp_path / "gone.pt").unlink()
    assert training.told(Note)[0] in ("checkpoints: 3 sealed, 0 verified", "checkpoints: 4 sealed, 0 verified")
    return tmp_path


def damage(path: Path, content: torch.Tensor) -> None:
    flip(path, path.read_bytes().index(content.detach().numpy().tobytes()[:256]) + 33)


def test_what_was_written_is_sealed_and_reads_without_a_word(written: Path) -> None:
    names = {str(one.relative_to(written)) for one in written.rglob("*seal.json")}
    assert names == {".model.pt.seal.json", ".model.safetensors.seal.json", "dcp/bitwitness.seal.json"}
    for one in ("model.pt", "model.safetensors", "dcp"):
        checked = bw.checkpoint.verify(written / one)
        assert (checked.intact, checked.tensors >= 4) == (True, True), str(checked)
    with Trained() as training:
        read_all(training.net, written)
    assert training.told(Note) == ["checkpoints: 0 sealed, 3 verified"]
    assert not training.told(Finding)


def test_bits_that_rot_are_a_verdict_that_names_file_and_tensor(written: Path) -> None:
    weight = torch.load(written / "model.pt")["model"]["0.weight"]
    with Trained() as training:
        for file in ("model.pt", "model.safetensors", "dcp/__0_0.distcp"):
            damage(written / file, weight)
        read_all(training.net, written)
    verdicts = [one for one in training.said if isinstance(one, Verdict)]
    assert [one.cause for one in verdicts] == [Cause.CORRUPT_STATE] * 3, training.said
    for one, file in zip(verdicts, ("model.pt", "model.safetensors", "__0_0.distcp"), strict=True):
        assert file in one.message
        assert "0.weight'" in one.message
        assert str(one.action) == "reported"


def test_what_was_replaced_rewritten_copied_or_not_sealed_is_no_alarm(written: Path) -> None:
    weights = {"0.weight": torch.zeros(96, 64)}
    weight = torch.load(written / "model.pt")["model"]["0.weight"]
    torch.save(weights, written / "other.pt")
    (written / "other.pt").replace(written / "model.pt")  # by a program that knows nothing of seals
    safetensors.torch.save_file(weights, written / "model.safetensors")
    shutil.copytree(written / "dcp", written / "moved")  # another inode, the same time of writing
    with Trained() as training:
        torch.load(written / "model.pt")
        safetensors.torch.load_file(written / "model.safetensors")
        dcp.load({"model": training.net.state_dict()}, checkpoint_id=written / "moved")
        damage(written / "moved" / "__0_0.distcp", weight)
        dcp.load({"model": training.net.state_dict()}, checkpoint_id=written / "moved")
    assert not [one for one in training.said if isinstance(one, Verdict)]
    notes = training.told(Note)
    assert "model.pt is not the sealed file any more" in notes[0]
    assert "model.safetensors is not the sealed file any more" in notes[1]
    assert "is a copy of a checkpoint that was sealed" in training.told(Finding)[0]


def test_a_file_that_is_shorter_now_was_written_anew_though_its_time_was_kept(written: Path) -> None:
    path = written / "model.pt"
    found, kept = path.stat(), torch.load(path)
    with path.open("wb") as file:  # by a program that strips the optimizer from it
        torch.save(kept["model"], file)
    os.utime(path, ns=(found.st_atime_ns, found.st_mtime_ns))
    with Trained() as training:
        torch.load(path)
    assert not [one for one in training.said if isinstance(one, Verdict)]
    assert "model.pt is not the sealed file any more" in training.told(Note)[0]


def test_a_file_written_again_has_a_new_seal_and_seals_follow_their_files(tmp_path: Path, originals: None) -> None:
    del originals
    with Trained() as training:
        for factor in (1.0, 2.0):
            torch.save({"w": torch.full((5000,), factor)}, tmp_path / "model.pt")
        until = time.monotonic() + 30
        while not (tmp_path / ".model.pt.seal.json").exists() and time.monotonic() < until:
            time.sleep(0.01)
        (tmp_path / "model.pt").rename(tmp_path / "kept.pt")
        (tmp_path / "part").mkdir()
        torch.save({"w": torch.ones(5000)}, tmp_path / "part" / "in.pt")
        (tmp_path / "part").rename(tmp_path / "whole")
    assert sorted(str(one.relative_to(tmp_path)) for one in tmp_path.rglob("*.json")) == [
        ".kept.pt.seal.json",
        "whole/.in.pt.seal.json",
    ]
    assert bw.checkpoint.verify(tmp_path / "whole" / "in.pt").intact
    assert not [one for one in training.said if isinstance(one, Finding | Verdict)]


def test_a_file_that_is_renamed_while_it_is_looked_for_is_sealed_under_its_new_name(
    tmp_path: Path, originals: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    del originals
    original, looked_for, renamed = sealer.hash_file, threading.Event(), threading.Event()

    def late(path: Path, *more: Any, **options: Any) -> Any:
        if path.name == "part":
            looked_for.set()
            assert renamed.wait(30)
        return original(path, *more, **options)

    monkeypatch.setattr(sealer, "hash_file", late)
    with Trained() as training:
        torch.save({"model": training.net.state_dict()}, tmp_path / "part")
        assert looked_for.wait(30)
        os.replace(tmp_path / "part", tmp_path / "model.pt")  # noqa: PTH105 - as scripts do
        renamed.set()
    assert (tmp_path / ".model.pt.seal.json").exists()


def test_what_is_changed_between_memory_and_disk_is_told_and_not_sealed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = torch.save

    def save(content: object, path: Path) -> None:
        whole(content, path)
        damage(path, content["w"])

    monkeypatch.setattr(torch, "save", save)
    with Trained() as training:
        torch.save({"w": torch.arange(5000.0)}, tmp_path / "model.pt")
    assert "read back 'w' (1 in all) is not what it was in memory" in training.told(Finding)[0]
    assert not (tmp_path / ".model.pt.seal.json").exists()


def test_it_can_be_turned_off(tmp_path: Path, originals: None) -> None:
    del originals
    (tmp_path / "off.toml").write_text("[seal]\ncheckpoints = false\n")
    with Trained(config=tmp_path / "off.toml") as training:
        torch.save(training.net.state_dict(), tmp_path / "model.pt")
    assert not (tmp_path / ".model.pt.seal.json").exists()


SCRIPT = """
import sys, torch
from pathlib import Path
path = Path(sys.argv[1])
torch.manual_seed(0)
net = torch.nn.Sequential(torch.nn.Linear(64, 96), torch.nn.Linear(96, 8))
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
if path.exists():
    net.load_state_dict(torch.load(path))
for _ in range(2):
    net(torch.ones(2, 64)).square().mean().backward()
    optimizer.step()
torch.save(net.state_dict(), path)
print("ended", float(net[0].weight.detach().double().sum()))
"""


def run(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = ["-m", "bitwitness", "run", *options, str(folder / "train.py"), str(folder / "model.pt")]
    return ranks.script(command, folder)


def test_a_script_goes_on_or_is_stopped_as_configured(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    first = run(tmp_path)
    assert (first.returncode, (tmp_path / ".model.pt.seal.json").exists()) == (0, True), first.stderr
    flip(tmp_path / "model.pt", 2000)
    stopped = run(tmp_path, "--act", "protect")
    assert (stopped.returncode, stopped.stdout) == (17, ""), stopped.stderr
    assert "VERDICT step 0: corrupt_state, action stopped" in stopped.stderr
    assert "'0.weight'" in stopped.stderr
    went_on = run(tmp_path, "--out", "run")
    assert went_on.returncode == 0
    assert "ended" in went_on.stdout
    assert "corrupt_state, action reported" in went_on.stderr
    told = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    assert [one["cause"] for one in told if one["type"] == "verdict"] == ["corrupt_state"]
