"""Bad inputs over all reading verbs and formats, the short form: `make campaign` draws ten thousand."""

from __future__ import annotations

import gc
import os
import signal
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from extent import chosen
from ranks import script

from bitwitness.cli import main
from bitwitness.comparison.table import XlsxTable
from bitwitness.files.shown import shown

INPUTS = Path(__file__).parents[1] / "bench" / "inputs.py"


def test_no_bad_input_gives_a_traceback_a_hang_or_a_wrong_all_clear(tmp_path: Path) -> None:
    done = script([str(INPUTS), "--trials", chosen("10000", "150"), "--seed", "7"], tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    assert "0 wrong" in done.stdout


@pytest.mark.parametrize("option", ["--json", "--csv", "--xlsx", "--propose-map"])
def test_outputs_replace_nothing_but_regular_files(option: str, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "folder").mkdir()
    for name, seen in (
        ("/dev/null", "is a device"),
        (tmp_path / "fifo", "is a FIFO"),
        (tmp_path / "folder", "is a folder"),
    ):
        code = main(["compare", str(tmp_path), str(tmp_path), option, str(name)])
        said = capsys.readouterr().err
        assert code in (2, 3), said  # the inputs may be looked at first
        assert option == "--propose-map" or seen in said
    assert main(["compare", str(tmp_path), str(tmp_path), option, ""]) in (2, 3)
    assert stat.S_ISCHR(Path("/dev/null").stat().st_mode)
    assert stat.S_ISFIFO((tmp_path / "fifo").stat().st_mode)
    if option == "--csv":
        twice = ["compare", "a", "b", "--csv", str(tmp_path / "x"), "--json", str(tmp_path / "x")]
        assert main(twice) == 2
        assert "--csv and --json name one file" in capsys.readouterr().err


def as_nobody(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Call the command line as a user who may not read everything."""
    code = (
        "import os, sys\n"
        "from bitwitness.cli import main\n"
        "import bitwitness.store.ascend.summary, bitwitness.store.ascend.convert\n"
        "os.geteuid() or (os.setgid(65534), os.setuid(65534))\n"
        "sys.exit(main(sys.argv[1:]))"
    )
    return subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=False)


def test_a_folder_that_may_not_be_listed_is_no_all_clear(tmp_path: Path) -> None:
    for parent in [tmp_path, *tmp_path.parents]:
        if parent.owner() == tmp_path.owner() and parent != Path("/"):
            parent.chmod(parent.stat().st_mode | 0o755)
    fine, closed = tmp_path / "dump" / "a", tmp_path / "dump" / "b"
    for folder in (fine, closed):
        folder.mkdir(parents=True)
        (folder / "Add.Add_1.3.7.100").write_text("x")
    (tmp_path / "dump").chmod(0o755)
    fine.chmod(0o755)
    assert as_nobody("ascend", "summary", str(tmp_path / "dump")).returncode == 0
    closed.chmod(0o700)
    for verb in (["summary", str(tmp_path / "dump")], ["convert", "-o", "/tmp", "-d", str(tmp_path / "dump")]):
        done = as_nobody("ascend", *verb)
        if os.geteuid() == 0:  # else it is this user's own folder
            assert done.returncode == 3, done
            assert f"cannot read {closed}: Permission denied" in done.stderr
    if os.geteuid() == 0:
        assert as_nobody("ascend", "summary", str(closed)).returncode == 3


def test_a_closed_output_and_a_full_disk_are_no_findings(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "bitwitness", "ascend", "decode", "272"]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 4
    assert done.stderr == (
        "bitwitness: cannot write the answer: No space left on device; free the space, or write it elsewhere\n"
    )
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True, check=False)
    os.close(write)
    assert (done.returncode, done.stderr) == (141, "")


def test_a_failure_of_ours_is_one_line_and_a_file(
    tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr("bitwitness.store.ascend.status.decode", lambda *_: 1 / 0)
    assert main(["ascend", "decode", "272"]) == 70
    said = capsys.readouterr().err
    assert len(said.splitlines()) == 1
    (file,) = tmp_path.glob("bitwitness-*.txt")
    assert str(file) in said
    assert "ZeroDivisionError" in file.read_text()
    monkeypatch.setattr("bitwitness.store.ascend.status.decode", lambda *_: os.kill(os.getpid(), signal.SIGTERM))
    assert main(["ascend", "decode", "272"]) == 143


def test_what_a_terminal_would_obey_is_shown() -> None:
    assert shown("a\x1b[31mb\u202ec\ud800\n") == r"a\x1b[31mb\u202ec\ud800\n"
    assert shown("x" * 100_000).endswith("… (100,000 characters)")
    assert len(shown("x" * 100_000)) < 400


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full, a device that is always full")
def test_a_spreadsheet_on_a_full_disk_fails_once_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    afterwards: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda told: afterwards.append(told.exc_value))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with Path("/dev/full").open("w+b", buffering=0) as full:
        table = XlsxTable(full)
        for _ in range(3):
            table.add({})
        with pytest.raises(OSError, match="No space left on device"):
            table.finish({})
        del table
        gc.collect()
    assert [error for error in afterwards if not isinstance(error, Warning)] == []
    assert not list(tmp_path.iterdir())
