"""The short forms of the campaigns: no wrong verdict on drawn faults, none at all on clean runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import ranks
from extent import chosen

BENCH = Path(__file__).parents[1] / "bench"


def call(script: str, *arguments: str) -> str:
    done = ranks.script([str(BENCH / script), *arguments], BENCH)
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    return done.stdout


def rows(table: str) -> list[dict[str, str]]:
    lines = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines() if line.startswith("| ")
    ]
    return [dict(zip(lines[0], line, strict=True)) for line in lines[1:]]


@pytest.mark.ranks
def test_drawn_faults_get_right_verdicts(tmp_path: Path) -> None:
    told = call(
        "campaign.py",
        "--trials",
        chosen("4", "2"),
        "--nondeterministic",
        chosen("2", "1"),
        "--seed",
        "5",
        "--out",
        str(tmp_path),
    )
    for row in rows(told):
        assert row["wrong"] == "0", told
        assert row["sensed of harmful"] == row["harmful"], told
    healed = re.search(r"(\d+) of (\d+) end with the fault-free bits", told)
    assert healed is not None
    assert healed[1] == healed[2], told


def test_clean_runs_get_no_verdict(tmp_path: Path) -> None:
    for row in rows(call("clean.py", "--steps", chosen("40", "11"), "--out", str(tmp_path))):
        assert (row["verdicts"], row["failures"]) == ("0", "0"), row
        assert int(row["suspicions"]) <= 2, row


def test_light_sensors_see_most_harmful_faults_and_the_checksum_all_in_products(tmp_path: Path) -> None:
    told = call(
        "detect.py", "--only", "Llama", "--harmful", chosen("3", "2"), "--steps", chosen("80", "60"),
        "--trials", chosen("150", "60"), "--parts", "1", "--persistent", "2",
        "--data", str(tmp_path / "data"), "--out", str(tmp_path),
    )  # fmt: skip
    table = rows(told.split("## The same by training")[0].split("light steps", 1)[1])
    whole = {row["class"].strip("*"): row for row in table if "all places" in row["class"]}
    seen = float(whole["Single flips, all places equally"]["one process"].split(" %")[0])
    assert seen >= 80.0, told
    products = rows(told.split("## Deep steps")[1].split("## Persistent")[0])
    assert all(row["checksum (deep step)"].startswith(("100.0", "\u2013")) for row in products), told
    persistent = {row["training"].strip("*"): row for row in rows(told.split("## Persistent")[1].split("## Alarms")[0])}
    assert float(persistent["all"]["within 100"].split(" %")[0]) > 0.0, told
    assert (tmp_path / "detection.svg").read_text().startswith("<svg")


def test_the_origin_is_found_in_drawn_trainings() -> None:
    assert "10 of 10 right" in call("trace_campaign.py", "--trials", "10", "--quick")


def test_what_a_monitor_costs_is_measured_in_processes_of_their_own() -> None:
    told = rows(call("monitor.py", "--quick"))
    assert [row["monitored"] for row in told] == ["nothing", "gradients", "everything"]
    assert all(float(row["ratio"]) > 0.0 for row in told)  # that it is measured at all: steps are tiny, machines busy


def _struck_without_a_wrong_verdict(tmp_path: Path, *arguments: str) -> None:
    told = call("corrupt.py", *arguments, "--data", str(tmp_path / "data"), "--out", str(tmp_path), "--jobs", "1")
    tables = [rows(part) for part in told.split("\n## ") if "| wrong |" in part]
    found = [row["wrong"] for table in tables for row in table if not row["struck"].startswith("--")]
    assert found, told
    assert set(found) == {"0"}, told


def test_every_kind_of_corruption_gets_no_wrong_verdict(tmp_path: Path) -> None:
    count = chosen("60", "5")
    _struck_without_a_wrong_verdict(tmp_path, "--faults", count, "--only", "LSTM", "--parts", "alone", "checkpoint")
    again = (tmp_path / "corrupt.md").read_text()
    _struck_without_a_wrong_verdict(tmp_path, "--faults", count, "--only", "LSTM", "--parts", "alone", "checkpoint")
    assert (tmp_path / "corrupt.md").read_text() == again, "a campaign that is complete is not run again"


@pytest.mark.ranks
def test_corruption_among_ranks_gets_no_wrong_verdict(tmp_path: Path) -> None:
    cell = ("--only", "2 ranks DDP", "--parts", "group")
    _struck_without_a_wrong_verdict(tmp_path, "--faults", chosen("160", "24"), *cell)


@pytest.mark.ranks
def test_a_process_that_is_killed_in_a_recovery_loses_nothing(tmp_path: Path) -> None:
    told = call(
        "recovery_kills.py",
        "--trials",
        chosen("3", "1"),
        "--ranks",
        "2",
        "--window",
        chosen("15", "9"),
        "--out",
        str(tmp_path),
    )
    right = re.search(r"(\d+) kills .* (\d+) right", told)
    assert right is not None
    assert right[1] == right[2], told
