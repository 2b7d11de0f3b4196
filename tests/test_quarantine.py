"""The list of devices that are left out: what it holds, until when, how it is shared, and that damage is named and kept."""

from __future__ import annotations

import json
import multiprocessing
import socket
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from threading import Event, Thread

import pytest

from bitwitness import Cause, UsageError, Verdict
from bitwitness.cli import main
from bitwitness.errors import UnreadError, UnwrittenError
from bitwitness.finding import Action, Device
from bitwitness.launch import quarantine as module
from bitwitness.launch.adapters import health, response, serve
from bitwitness.launch.quarantine import Quarantine, default_file, device_named, key_of
from bitwitness.store import RunWriter

GPU = Device("node7", 3, "12ab-34cd", "cuda")
HERE = Device(socket.gethostname(), 1, "a-machine", "cpu")


def add_ten(path: str, first: int) -> None:
    for slot in range(first, first + 10):
        Quarantine(path).add(Device("host", slot, "x", "cpu"), "a test")


def test_what_is_added_is_there_until_it_expires_or_is_cleared(tmp_path: Path) -> None:
    listed = Quarantine(tmp_path / "deep" / "q.json")
    assert listed.entries() == []
    listed.add(GPU, "computes wrongly", run="/runs/7", step=40)
    listed.add(HERE, "for a moment", expires=timedelta(microseconds=1))
    (entry,) = listed.entries()
    assert (entry.device, entry.step, entry.run) == (GPU, 40, "/runs/7")
    assert entry.expires - datetime.now(UTC) > timedelta(days=6.9)
    assert listed.holds(Device("another-host", 0, "GPU-12AB-34CD", "cuda")) is not None  # a card that was moved
    assert listed.holds(Device("node7", 3, "12ab-34ce", "cuda")) is None  # another card in its place
    assert [one.device for one in listed.clear("GPU-12ab-34cd")] == [GPU]
    assert listed.entries() == []
    assert (tmp_path / "deep" / "q.json").stat().st_mode & 0o077 == 0


def test_a_device_without_a_number_of_its_own_is_known_by_its_place() -> None:
    assert key_of(Device("a", 1, "the-machine", "cpu")) == "cpu:a:1"
    assert key_of(Device("a", 2, "Ascend910B#2", "npu")) == "npu:a:2"
    assert key_of(Device("a", 2, "SERIAL9", "npu")) == "npu:serial9"
    for device in (GPU, HERE, Device("a", 2, "Ascend910B#2", "npu"), Device("a", 2, "serial9", "npu")):
        assert key_of(device_named(key_of(device))) == key_of(device)
    assert key_of(device_named("GPU-12AB-34CD")) == key_of(GPU)
    assert key_of(device_named("cpu:1")) == key_of(HERE)
    with pytest.raises(UsageError, match="'?nonsense'? names no device; expected cuda:UUID"):
        device_named("nonsense")


def test_writers_at_the_same_time_lose_nothing(tmp_path: Path) -> None:
    fork = multiprocessing.get_context("fork")
    writers = [fork.Process(target=add_ten, args=(str(tmp_path / "q.json"), 10 * number)) for number in range(4)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(60)
    assert sorted(entry.device.index for entry in Quarantine(tmp_path / "q.json").entries()) == list(range(40))


def test_a_lock_that_nobody_lets_go_of_is_told_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_LOCK_S", 0.1)
    listed = Quarantine(tmp_path / "q.json")
    with listed._locked(), pytest.raises(UnwrittenError, match=r"q\.json\.lock has been locked by another process"):
        Quarantine(tmp_path / "q.json").add(GPU, "")


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"schema": 2, "devices": []}', '{"schema": 1, "devices": [{"host": "a"}]}', "\0\0\0"]
)
def test_a_damaged_list_is_named_and_left_as_it_is(tmp_path: Path, text: str) -> None:
    path = tmp_path / "q.json"
    path.write_text(text)
    for work in (Quarantine(path).entries, lambda: Quarantine(path).add(GPU, ""), Quarantine(path).clear):
        with pytest.raises(UnreadError, match=r"q\.json"):
            work()
    assert path.read_text() == text


def test_where_the_list_is(tmp_path: Path) -> None:
    assert default_file({"BITWITNESS_QUARANTINE": "/q.json", "XDG_STATE_HOME": "/state"}) == Path("/q.json")
    assert default_file({"XDG_STATE_HOME": "/state"}) == Path("/state/bitwitness/quarantine.json")
    assert default_file({"XDG_STATE_HOME": "relative"}) == Path.home() / ".local/state/bitwitness/quarantine.json"


def convicted(folder: Path, step: int = 7) -> None:
    writer = RunWriter(str(folder), 0, 1)
    writer.shared_event(
        Verdict(Cause.PERSISTENT_HARDWARE, step, (0, 1), (HERE, GPU), Action.STOPPED, "computes wrongly")
    )
    writer.ended("stopped", "bitwitness", step)


def test_other_launchers_are_told_to_exclude_the_node_of_a_convicted_device(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    convicted(tmp_path / "job" / "attempt-3")
    check = ["quarantine", "check", "--quarantine", str(tmp_path / "q.json"), "--run", str(tmp_path / "job")]
    assert main(check[:4]) == 0
    assert json.loads(capsys.readouterr().out)["healthy"] is True
    for _ in range(2):
        assert main(check) == 1
        told = json.loads(capsys.readouterr().out)
        assert (told["healthy"], told["fail_count"], told["action"]) == (
            False,
            1,
            "exclude_node",
        )  # not the other host's
        assert told["resume_before"] == 7
        assert told["failed_checks"] == [f"bitwitness: cpu:{HERE.host}:1: computes wrongly"]
    assert main(["quarantine", "clear", "--quarantine", str(tmp_path / "q.json")]) == 0
    capsys.readouterr()
    assert main(check) == 0  # the same verdict does not put it back
    convicted(tmp_path / "job" / "attempt-4", step=3)
    assert main(check) == 1


def test_the_health_line_is_answered_on_a_socket(tmp_path: Path) -> None:
    path, ended = str(tmp_path / "s"), Event()
    listed = Quarantine(tmp_path / "q.json")
    listed.add(HERE, "computes wrongly")
    thread = Thread(target=serve, args=(path, lambda: health(listed), ended))
    thread.start()
    try:
        while not Path(path).exists():
            time.sleep(0.01)
        for healthy in (False, True):
            with socket.socket(socket.AF_UNIX) as asking:
                asking.settimeout(20)
                asking.connect(path)
                assert json.loads(asking.makefile().readline())["healthy"] is healthy
            listed.clear()
    finally:
        ended.set()
        thread.join(20)
    assert not Path(path).exists()
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="is no socket; name another path"):
        serve(str(tmp_path / "file"), dict, ended)


def test_the_answer_to_nvidias_launcher_is_a_protocol_buffer_of_its_schema() -> None:
    def fields(data: bytes) -> dict[int, int | bytes]:
        found: dict[int, int | bytes] = {}
        while data:
            (number, kind), data = divmod(data[0], 8), data[1:]
            size = shift = 0
            while True:
                byte, data = data[0], data[1:]
                size, shift = size | (byte & 0x7F) << shift, shift + 7
                if byte < 0x80:
                    break
            found[number], data = (data[:size], data[size:]) if kind == 2 else (size, data)
        return found

    good, bad = {"healthy": True, "failed_checks": []}, {"healthy": False, "failed_checks": ["x" * 300]}
    assert fields(response(good)) == {1: 1, 3: json.dumps(good).encode()}
    assert fields(response(bad)) == {2: 1, 3: json.dumps(bad).encode()}


def test_the_verb_lists_adds_and_clears(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("BITWITNESS_QUARANTINE", str(tmp_path / "q.json"))
    assert main(["quarantine"]) == 0
    assert "no device is in quarantine" in capsys.readouterr().out
    assert main(["quarantine", "add", "cpu:1", "--reason", "noisy", "--expires", "12h"]) == 0
    assert main(["quarantine", "add", "cuda:12ab-34cd"]) == 0
    capsys.readouterr()
    assert main(["quarantine", "list", "--json", "-"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert [row["device"] for row in told["devices"]] == [f"cpu:{HERE.host}:1", "cuda:12ab-34cd"]
    assert main(["quarantine", "clear", f"cpu:{HERE.host}:1"]) == 0
    assert "noisy" in capsys.readouterr().out
    assert main(["quarantine", "clear", "cpu:1"]) == 2
    assert "is not in" in capsys.readouterr().err
    assert main(["quarantine", "clear"]) == 0
    assert main(["quarantine", "list"]) == 0
    assert main(["quarantine", "add", "cpu:1", "--expires", "soon"]) == 2
    assert "expected a number with s, m, h or d" in capsys.readouterr().err
    (tmp_path / "q.json").write_text("{")
    assert main(["quarantine", "list"]) == 3
