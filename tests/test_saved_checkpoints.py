"""``bw.checkpoint.save``, ``latest`` and ``load``: whole and sealed or not there; the newest that is intact is taken."""

from __future__ import annotations

import errno
import os
import random
import shutil
import signal
import time
from pathlib import Path

import pytest
import ranks
import torch

import bitwitness as bw
from bitwitness import ConfigError, UsageError
from bitwitness.checkpoint import steps
from bitwitness.errors import UnreadError, UnwrittenError

JOB = str(Path(__file__).parent / "jobs" / "saving.py")


def state(value: float = 1.0) -> dict:
    return {"weight": torch.full((300, 7), value), "bias": torch.arange(9.0), "n": 5, "lr": 0.1}


def flip(path: Path, at: int, bit: int = 2) -> None:
    """Flip a bit as a disk does: neither length nor time of writing change."""
    before, data = path.stat(), bytearray(path.read_bytes())
    data[at] ^= 1 << bit
    with path.open("r+b") as file:
        file.write(data)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    for step in (10, 20, 30):
        bw.checkpoint.save(state(step), folder, step)
    return folder


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    shutil.copytree(saved, tmp_path / "checkpoints")
    return tmp_path / "checkpoints"


def test_what_was_saved_is_loaded_in_place(folder: Path) -> None:
    mine = state(0)
    weight = mine["weight"]
    mine["n"] = 0
    assert bw.checkpoint.load(mine, folder) == 30
    assert weight.eq(30).all()
    assert mine["n"] == 5
    assert mine["lr"] == 0.1


def test_the_damaged_one_is_refused_by_name_and_the_one_before_taken(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flip(folder / "step-00000030" / "__0_0.distcp", 4000)
    said: list[str] = []
    assert bw.checkpoint.latest(folder, refused=said.append) == folder / "step-00000020"
    assert len(said) == 1
    assert "step-00000030 is damaged: __0_0.distcp: 'weight'" in said[0]
    mine = state(0)
    assert bw.checkpoint.load(mine, folder) == 20
    assert mine["weight"].eq(20).all()
    assert "step-00000030 is damaged" in capsys.readouterr().err
    with pytest.raises(UnreadError, match=r"'weight'.*nothing was loaded"):
        bw.checkpoint.load(mine, folder / "step-00000030")


def test_only_checkpoints_of_before_the_fault_are_taken(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert bw.checkpoint.latest(folder, before=30) == folder / "step-00000020"
    monkeypatch.setenv(steps.RESUME_BEFORE, "20")
    assert bw.checkpoint.load(state(), folder) == 10
    assert bw.checkpoint.latest(folder, before=25) == folder / "step-00000010", "the lower bound counts"
    monkeypatch.setenv(steps.RESUME_BEFORE, "10")
    assert bw.checkpoint.load(state(), folder) is None
    monkeypatch.setenv(steps.RESUME_BEFORE, "ten")
    with pytest.raises(ConfigError, match="BITWITNESS_RESUME_BEFORE='ten': expected the number of a step"):
        bw.checkpoint.latest(folder)


def test_where_all_are_damaged_nothing_begins_anew_by_itself(folder: Path) -> None:
    for one in folder.iterdir():
        (one / "__0_0.distcp").unlink()
    with pytest.raises(UnreadError, match="none of the 3 checkpoints"):
        bw.checkpoint.load(state(), folder)
    assert bw.checkpoint.load(state(), folder / "nothing here") is None


def test_leftovers_are_ignored_and_removed_and_old_ones_deleted(folder: Path) -> None:
    shutil.copytree(folder / "step-00000030", folder / ".step-00000040.part")
    (folder / "step-00000020").rename(folder / ".step-00000020.old")  # killed between two names
    (folder / "step-00000050").mkdir()
    assert bw.checkpoint.latest(folder) == folder / "step-00000030"
    bw.checkpoint.save(state(), folder, 30, keep=2)
    assert sorted(one.name for one in folder.iterdir()) == ["step-00000020", "step-00000030", "step-00000050"]
    assert bw.checkpoint.latest(folder, before=30) == folder / "step-00000020"


def test_a_save_in_the_background_has_the_values_of_its_call(tmp_path: Path) -> None:
    mine = state(3)
    later = bw.checkpoint.save(mine, tmp_path, 1, asynchronous=True)
    mine["weight"].zero_()
    assert later.result(60) == tmp_path / "step-00000001"
    assert later.done()
    assert bw.checkpoint.load(mine, tmp_path) == 1
    assert mine["weight"].eq(3).all()


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_save_waits_for_the_one_that_is_under_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asynchronous: bool
) -> None:
    from torch.distributed.checkpoint.filesystem import FileSystemWriter

    def slowly(self, metadata, results) -> None:
        time.sleep(0.3)
        whole(self, metadata, results)

    whole = FileSystemWriter.finish
    monkeypatch.setattr(FileSystemWriter, "finish", slowly)
    first = bw.checkpoint.save(state(1), tmp_path, 1, asynchronous=True)
    second = bw.checkpoint.save(state(2), tmp_path, 2, asynchronous=asynchronous)
    assert first.done()
    assert [one.result(60).name for one in (first, second)] == ["step-00000001", "step-00000002"]
    assert all(bw.checkpoint.verify(tmp_path / f"step-0000000{step}").intact for step in (1, 2))


def test_what_is_damaged_on_its_way_to_the_disk_is_never_a_checkpoint(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch.distributed.checkpoint.filesystem import FileSystemWriter

    def finish(self, metadata, results) -> None:
        whole(self, metadata, results)
        flip(Path(self.path) / "__0_0.distcp", 4000)

    whole = FileSystemWriter.finish
    monkeypatch.setattr(FileSystemWriter, "finish", finish)
    with pytest.raises(
        UnwrittenError, match=r"step 40 was not saved .* 'weight' in __0_0.distcp is not what was in memory"
    ):
        bw.checkpoint.save(state(), folder, 40)
    assert sorted(one.name for one in folder.iterdir()) == ["step-00000010", "step-00000020", "step-00000030"]


def full_disk(*_: object, **__: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_what_cannot_be_loaded_or_written_is_said_in_a_line(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(UnreadError, match=r"is intact, and could not be loaded into this state: .*other"):
        bw.checkpoint.load({"other": torch.zeros(3)}, folder)
    with monkeypatch.context() as patch:
        patch.setattr("torch.distributed.checkpoint.filesystem.FileSystemWriter.finish", full_disk)
        later = bw.checkpoint.save(state(), folder, 50, asynchronous=True)
        later._future.exception(60)
    with pytest.raises(UnwrittenError, match="step 50 was not saved to .* rank 0: OSError: .*No space left"):
        later.result(60)
    assert len(capsys.readouterr().err.splitlines()) == 1
    bw.checkpoint.save({"object": os.getcwd, "weight": torch.ones(3)}, folder, 60)
    with pytest.raises(UnreadError, match="could run code"):
        bw.checkpoint.load({"object": 0, "weight": torch.zeros(3)}, folder)


def test_arguments_that_cannot_be_are_refused(tmp_path: Path) -> None:
    for step, keep in ((-1, None), ("3", None), (1, 0)):
        with pytest.raises(UsageError, match="expected"):
            bw.checkpoint.save(state(), tmp_path, step, keep=keep)
    (tmp_path / "file").write_text("")
    with pytest.raises(UnwrittenError, match="the checkpoint of step 1 was not saved"):
        bw.checkpoint.save(state(), tmp_path / "file", 1)


def test_a_kill_at_any_moment_loses_nothing(tmp_path: Path) -> None:
    folder, moments = tmp_path / "checkpoints", random.Random(3)
    reached = -1
    for _ in range(3):
        job = ranks.Started([JOB, "loop", str(folder)], tmp_path)
        until = time.monotonic() + 60
        while len(job.stdout.split()) < 3 and time.monotonic() < until:
            time.sleep(0.01)
        time.sleep(moments.random() * 0.3)
        os.kill(job.pid, signal.SIGKILL)
        job.wait(10)
        said = job.stdout.split()
        assert len(said) >= 3, job.stderr
        whole = [bw.checkpoint.verify(folder / steps.name_of(step)) for step in steps.steps_in(folder)]
        told = "; ".join(map(str, whole))
        assert [one.intact for one in whole] == [True] * max(1, len(whole)), (
            f"what has a name and a seal is whole: {told}"
        )
        newest = whole[0].step
        # Each line is printed when its save returned: one in the background is at most one behind.
        assert newest is not None
        assert newest >= int(said[-1]) - 1 > reached - 1
        reached = newest
    mine = {"weights": torch.zeros(200_000), "more": {str(i): torch.zeros(1000) for i in range(8)}, "n": 0}
    assert bw.checkpoint.load(mine, folder) == reached == mine["n"]
    assert mine["weights"].eq(reached).all()


def test_ranks_save_and_load_together_and_fewer_load_what_they_saved(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    done = ranks.forked(2, [JOB, "ranks", str(folder)], tmp_path / "logs", imported=("torch.distributed.checkpoint",))
    said = "".join(log.read_text() for log in done.logs)
    assert done.code == 0, said
    assert "step-00000020 is damaged: __1_0.distcp: 'sharded' (the chunk at [10, 0])" in said
    mine = {"net": {"weight": torch.zeros(4, 8), "bias": torch.zeros(4)}, "sharded": torch.zeros(20, 5), "n": 0}
    assert bw.checkpoint.load(mine, folder) == 10
    assert mine["n"] == 3
    assert torch.equal(mine["sharded"], torch.arange(100.0).view(20, 5))
    assert mine["net"]["weight"].abs().sum() > 0
    (folder / "step-00000010" / "bitwitness.seal-00001.json").unlink()
    with pytest.raises(UnreadError, match="seal-00001.json is missing"):
        bw.checkpoint.load(mine, folder / "step-00000010")
