"""The two demonstrations, as a user runs them."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

import pytest
from extent import chosen
from ranks import forked

from bitwitness.demo.launch import Launched
from bitwitness.demo.main import last_words
from bitwitness.demo.main import main as demo_on
from bitwitness.demo.seed import main as seed

pytestmark = pytest.mark.ranks


def launch(
    ranks: int, arguments: list[str], logs: Path, *, echo: bool, environment: dict[str, str] | None = None
) -> Launched:
    return forked(ranks, arguments, logs, environment=environment)


def demo(out: Path, *arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-m", "bitwitness", "demo", "--out", str(out), *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=1000,
    )


def test_the_demo_heals_one_fault_and_names_the_other(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # the fault-free run on forked ranks; `make demo` runs it under torchrun
    code = demo_on(argparse.Namespace(seed=False, out=str(tmp_path), steps=45), launch)
    told = capsys.readouterr().out
    assert code == 0, told
    assert "step 20: transient hardware, rank 1; action: healed" in told
    assert "step 40: persistent hardware, rank 2; action: stopped" in told
    assert "is in quarantine" in told
    assert "the training finished after 1 relaunch" in told
    assert "layers.2.mlp.up/addmm#0:forward.out0" in told
    assert "beside a threshold of" in told
    assert "bit-equal after all 45 steps; the last is step 44" in told


def test_what_is_wrong_in_the_environment_is_said_before_anything_is_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BITWITNESS_ACTT", "protect")
    done = demo(tmp_path / "out")
    assert done.returncode == 2
    assert "BITWITNESS_ACTT" in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "out").exists()


def test_who_died_is_told_with_their_last_words(tmp_path: Path) -> None:
    logs = []
    for rank, words in enumerate(("", "Traceback (most recent call last):\n  ...\nMemoryError: no room\n")):
        (tmp_path / str(rank)).mkdir()
        (tmp_path / str(rank) / "stderr.log").write_text(words)
        logs.append(tmp_path / str(rank) / "stderr.log")
    assert last_words(Launched(1, logs)) == ["rank 1 died: MemoryError: no room"]
    logs[0].write_text("bitwitness [rank 0] VERDICT step 40: ...\n")
    assert not last_words(Launched(1, logs)), "a stopped rank's neighbours end with errors of their own"


def test_the_documents_searches_find_their_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # on forked ranks, as the demo above; the document has eight
    ranks = chosen(8, 4)
    code = seed(argparse.Namespace(out=str(tmp_path)), lambda _, *args, **kwargs: launch(ranks, *args, **kwargs))
    assert code == 0, capsys.readouterr()
    logs = sorted((tmp_path / "logs").rglob("stderr.log"))
    assert len(logs) == ranks
    for log in logs:
        text = log.read_text()
        assert "name: fc1.weight, value: inf, stat: StatData{avg: " in text
        assert "count: 6, none_zero_count: 6}}" in text
        assert "Feature value detection strikes out!" in text
        assert "Global CheckSum result is 0" in text
    events = [json.loads(line) for line in (tmp_path / "run" / "events.jsonl").read_text().splitlines()]
    verdicts = [(e["step"], e["cause"], e["ranks"]) for e in events if e["type"] == "verdict"]
    assert verdicts == [(5, "persistent_hardware", [2])]
    alert = events[0]["evidence"]["alert"]
    assert (alert["health_status"], alert["error_code"], alert["fault_level"]) == ("Warning", "80818C00", "minor")
