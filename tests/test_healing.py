"""A healed run ends with the fault-free run's very bits, however it trains."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from extent import chosen
from ranks import forked

JOB = Path(__file__).parent / "jobs" / "healing.py"
pytestmark = pytest.mark.ranks


def test_every_kind_of_training_is_healed(tmp_path: Path) -> None:
    ranks = chosen(4, 2)
    launched = forked(ranks, [str(JOB)], tmp_path, imported=("transformers.models.gpt2.modeling_gpt2",))
    text = "\n".join(log.read_text() for log in launched.logs)
    told = [json.loads(line) for line in text.splitlines() if line.startswith('{"training"')]
    assert launched.code == 0, text[-4000:]
    assert len(told) == 9
    for training in told:  # the last one computes its loss outside the model, from outputs that were wrong
        assert training["struck"] == 1, training
        assert training["failures"] == {}
        assert training["verdicts"] == ["step 5: transient_hardware [1] healed"], training
        assert training["same"] == ranks, training
