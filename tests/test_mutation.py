"""The short form of the mutation trial, ``bench/mutation.py``: wrong variants of two operators, beside other rules."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

TRIAL = Path(__file__).parents[1] / "bench" / "mutation.py"


def test_wrong_variants_of_an_operator_are_caught_and_the_right_one_is_not(tmp_path: Path) -> None:
    out = tmp_path / "found.jsonl"
    command = [sys.executable, str(TRIAL), "gather", "roll", "--out", str(out)]
    done = subprocess.run(
        command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(found) >= 5
    for one in found:
        assert one["bitwitness"]["wrong"] == "fail", one
        assert one["bitwitness"]["right"] == "pass", one
    assert "allclose" in done.stdout.splitlines()[0]
    assert "caught" in done.stdout
