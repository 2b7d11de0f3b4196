"""FSDP2, hybrid sharding and tensor parallel training under guard, on real ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from extent import chosen
from ranks import forked

JOB = Path(__file__).parent / "jobs" / "sharded.py"
KINDS = {
    2: [*chosen(["plain", "kept", "mixed precision"], []), "accumulated", "tensor parallel"],
    4: [*chosen(["plain"], []), "hybrid"],
}
STEPS = chosen(8, 5)

pytestmark = pytest.mark.ranks


def run(size: int, folder: Path) -> dict[str, list[dict[str, Any]]]:
    launched = forked(size, [str(JOB), str(STEPS), *KINDS[size]], folder)
    text = "\n".join(log.read_text() for log in launched.logs)
    assert launched.code == 0, text[-5000:]
    lines = [json.loads(line) for line in text.splitlines() if line.startswith('{"case"')]
    return {line["case"]: line["ranks"] for line in lines}


@pytest.fixture(scope="module", params=[2, 4])
def told(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    return run(request.param, tmp_path_factory.mktemp(f"ranks{request.param}"))


def kinds(told: dict[str, Any]) -> list[str]:
    return [
        kind for kind in ("plain", "kept", "accumulated", "mixed precision", "hybrid") if f"identity {kind}" in told
    ]


def test_the_bits_are_the_same_though_every_step_is_run_again_by_all_ranks(told) -> None:
    for kind in kinds(told):
        for rank in told[f"identity {kind}"]:
            assert rank["same"], kind
            assert rank["table"]["failures"] == {}
            assert rank["table"]["verdicts"] == []
            assert rank["table"]["dismissed"] == STEPS - 1
            assert rank["table"]["local_gradients"] == "reduce"
            assert rank["table"]["checked"] == 1.0
            uncompared = any("parameters are sharded: no replica" in gap for gap in rank["table"]["not_covered"])
            assert uncompared == (kind != "hybrid")  # whose shards have replicas, which are compared


def test_a_transient_is_healed_to_the_very_bits(told) -> None:
    for kind in kinds(told):
        for number, rank in enumerate(told[f"transient {kind}"]):
            assert rank["struck"] == (number == 1), kind
            assert [v[:4] for v in rank["verdicts"]] == [[3, "transient_hardware", [1], "healed"]], kind
            assert rank["healed"], kind
            assert rank["failures"] == {}


def test_a_persistent_fault_names_rank_and_operator(told) -> None:
    for kind in [kind for kind in kinds(told) if f"persistent {kind}" in told]:
        for rank in told[f"persistent {kind}"]:
            assert rank["verdicts"] == [
                [3, "persistent_hardware", [1], "stopped", "blocks.2.down/mm#0:backward.out0"]
            ], kind
            assert rank["stopped"] == 17


def test_tensor_parallel_steps_are_watched_and_their_limit_is_named(told) -> None:
    if "identity tensor parallel" not in told:
        pytest.skip("tried on two ranks")
    for rank in told["identity tensor parallel"]:
        assert rank["same"]
        assert rank["table"]["failures"] == {}
        assert all("inconclusive" in verdict for verdict in rank["table"]["verdicts"])
        gaps = " ".join(rank["table"]["not_covered"])
        assert "tensor parallel: another rank holds other parts" in gaps
    for rank in told["transient tensor parallel"]:
        assert rank["verdicts"] == []  # nothing speaks against anybody
        assert rank["stopped"] is None
