"""The short forms of the campaigns: no wrong verdict on drawn faults, none at all on clean runs."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[1] / "bench"


def call(script: str, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, str(BENCH / script), *arguments], capture_output=True, text=True, check=False, timeout=250
    )
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    return done.stdout


def rows(table: str) -> list[dict[str, str]]:
    lines = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines() if line.startswith("| ")
    ]
    return [dict(zip(lines[0], line, strict=True)) for line in lines[1:]]


@pytest.mark.ranks
def test_drawn_faults_get_right_verdicts(tmp_path: Path) -> None:
    told = call("campaign.py", "--trials", "9", "--nondeterministic", "3", "--seed", "5", "--out", str(tmp_path))
    for row in rows(told):
        assert row["wrong"] == "0", told
        assert row["sensed of harmful"] == row["harmful"], told
    healed = re.search(r"(\d+) of (\d+) end with the fault-free bits", told)
    assert healed is not None
    assert healed[1] == healed[2], told


def test_clean_runs_get_no_verdict(tmp_path: Path) -> None:
    for row in rows(call("clean.py", "--steps", "120", "--out", str(tmp_path))):
        assert (row["verdicts"], row["failures"]) == ("0", "0"), row
        assert int(row["suspicions"]) <= 2, row
