"""The run folder: what is written at once, what a full or damaged one does."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bitwitness.errors import UsageError
from bitwitness.finding import Action, Cause, Finding, Note, Severity, Verdict
from bitwitness.site import Site
from bitwitness.store import RunWriter, free_folder, read_events
from bitwitness.store.writer import redacted


def test_events_are_standard_json_written_at_once(tmp_path: Path) -> None:
    writer = RunWriter(tmp_path / "run", 0, 1)
    evidence = {"value": float("nan"), "limit": float("inf"), "low": -float("inf"), "n": 3}
    writer.event(Finding("trend", Site("a.b", "mm"), Severity.WARNING, "odd", evidence, 4, 0))
    events, problems = read_events(tmp_path / "run" / "rank00000" / "events.jsonl")
    assert not problems
    assert events[0]["evidence"] == {"value": "NaN", "limit": "Infinity", "low": "-Infinity", "n": 3}
    assert (events[0]["type"], events[0]["site"]) == ("finding", "a.b/mm#0:forward.out0")


def test_a_verdict_carries_the_alerts_fault_code(tmp_path: Path) -> None:
    verdict = Verdict(Cause.PERSISTENT_HARDWARE, 3, (2,), (), Action.STOPPED, "bad", fault_code="80818C00")
    writer = RunWriter(tmp_path / "run", 0, 4)
    writer.shared_event(verdict)
    event = read_events(tmp_path / "run" / "events.jsonl")[0][0]
    assert (event["cause"], event["ranks"], event["fault_code"]) == ("persistent_hardware", [2], "80818C00")


def test_only_the_owner_may_look(tmp_path: Path) -> None:
    RunWriter(tmp_path / "run", 0, 1)
    assert (tmp_path / "run").stat().st_mode & 0o777 == 0o700


def test_a_half_written_line_is_named_and_the_rest_is_read(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_bytes(b'{"type": "note"}\n[1]\n\xff\xfe\n{"type": "no')
    events, problems = read_events(path)
    assert events == [{"type": "note"}]
    assert [problem.split(": ")[0].rsplit(":")[-1] for problem in problems] == ["2", "3", "4"]


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="events.jsonl of a run folder"):
        read_events(tmp_path / "none")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full, a device that is always full")
def test_a_full_disk_is_said_once_and_counted(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    writer = RunWriter(tmp_path / "run", 0, 1)
    (tmp_path / "run" / "rank00000" / "events.jsonl").symlink_to("/dev/full")
    for _ in range(3):
        writer.event(Note("hello"))
    writer.close()
    told = capsys.readouterr().err
    assert told.count("cannot write to the run folder") == 1
    assert "The training goes on" in told
    assert "3 events were not recorded" in told


def test_a_taken_folder_is_kept(tmp_path: Path) -> None:
    assert free_folder(tmp_path / "run") == tmp_path / "run"
    RunWriter(tmp_path / "run", 0, 1).describe()
    assert free_folder(tmp_path / "run") == tmp_path / "run-2"
    assert json.loads((tmp_path / "run" / "run.json").read_text())["schema"] == 1


def test_secrets_on_the_command_line_are_left_out() -> None:
    line = ["train.py", "--api-key", "abc", "--wandb_token=xyz", "--lr", "0.1"]
    assert redacted(line) == ["train.py", "--api-key", "***", "--wandb_token=***", "--lr", "0.1"]
