"""Ranks that differ, or that exchange something by themselves: nobody innocent is blamed, faults are found or left open."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from extent import EVERYTHING, chosen
from ranks import forked

JOBS = Path(__file__).parent / "jobs"
pytestmark = [pytest.mark.ranks, pytest.mark.timeout(1800 if EVERYTHING else 300)]


def run(ranks: int, logs: Path, job: str, *names: str) -> dict[tuple[str, str], dict]:
    """Make trials of a job; return what was concluded, by trial and fault."""
    launched = forked(ranks, [str(JOBS / f"{job}.py"), *names], logs)
    text = "\n".join(log.read_text() for log in launched.logs)
    rows = [json.loads(line) for line in text.splitlines() if line.startswith('{"trial"')]
    assert launched.code == 0, text[-4000:]
    told = {(row["trial"], row["fault"]): row for row in rows}
    for row in rows:
        assert row["error"] == [None] * ranks, row
        assert all(failures == {} for failures in row["failures"]), row
        if row["fault"] == "clean":
            assert row["stopped"] == [None] * ranks, row
            known = [["step 2: software [] reported"]] if row["trial"] == "nan with a token count" else [[]]
            assert row["verdicts"] == known * ranks, row
            assert all(count >= 3 for count in row["suspicions"]), row
    return told


def bits_held(told: dict) -> None:
    for (name, fault), row in told.items():
        assert fault != "clean" or all(row["same"]), (name, row["same"])


def healed(row: dict, rank: int = 1) -> None:
    assert row["verdicts"] == [[f"step 3: transient_hardware [{rank}] healed"]] * len(row["same"]), row
    assert all(row["same"]), row


def convicted(row: dict, site: str, rank: int = 1) -> None:
    assert row["verdicts"] == [[f"step 3: persistent_hardware [{rank}] stopped"]] * len(row["same"]), row
    assert row["stopped"] == [17] * len(row["same"]), row
    assert row["messages"][0][0][0].startswith(site), row["messages"]


def left_open(row: dict, reason: str) -> None:
    """Nobody is accused, nothing is done, and coverage says why."""
    assert row["stopped"] == [None] * len(row["same"]), row
    assert not any("hardware" in verdict for verdicts in row["verdicts"] for verdict in verdicts), row
    assert any(reason in gap for gap in row["not_covered"][1]), row["not_covered"]


def test_a_healthy_device_may_compute_otherwise(tmp_path: Path) -> None:
    told = run(4, tmp_path, "odd_trials", *chosen((), ("halves later bf16", "key bias")))
    for (name, fault), row in told.items():
        if name.startswith("halves") and fault == "clean":
            assert all(row["same"])
        elif fault == "transient":
            assert row["verdicts"] == [["step 3: transient_hardware [1] healed"]] * 4, (name, row)
        elif fault != "clean":
            site = "v/mm#0:backward" if name == "key bias" else "layers.0.mlp.up/addmm#0:forward"
            convicted(row, site, 3 if fault == "persistent there" else 1)


INSIDE = {
    "sync norm": "a/addmm",
    "sync norm, backward": "b/mm",
    "contrastive inside": "body.2/addmm",
    "wrapped experts": "0/addmm",
    "token count": "2/addmm",
}
ALONE = {
    "split by hand": "the forward exchanges something with other ranks",
    "split in pairs": "the forward exchanges something with other ranks",
    "experts": "ranks exchange something in the backward",
    "tensor parallel": "another rank holds other parts",
    "reduced by hand": "the script changes gradients",
}
LOSS = {"contrastive outside": "body.2/addmm", "count after the forward": "2/addmm"}


def test_ranks_may_exchange_something_by_themselves(tmp_path: Path) -> None:
    short = ("sync norm, backward", "contrastive outside", "split by hand", "reduced by hand")
    told = run(chosen(4, 3), tmp_path, "communicating_trials", *chosen((), short))
    for (name, fault), row in told.items():
        if fault == "clean":
            assert name.startswith("nan") or all(row["same"]), row
        elif name in ALONE:
            left_open(row, ALONE[name])
        elif fault == "persistent":
            convicted(row, (INSIDE | LOSS)[name])
        elif name in LOSS:
            left_open(row, "ranks exchange something in the loss code")
        else:
            healed(row)


def test_what_one_rank_does_or_holds_for_itself_is_no_fault(tmp_path: Path) -> None:
    names = ("accumulated with norm", "reduced twice", "probed by one rank", "drawn from a generator")
    told = run(2, tmp_path, "communicating_trials", *names)
    bits_held(told)
    left_open(told["reduced twice", "clean"], "reduced over the ranks more than once in a step")
    left_open(
        told["drawn from a generator", "clean"], "strengths (generator) does not tell whether it moves in the forward"
    )


def test_a_generator_that_the_forward_does_not_draw_from_keeps_no_other_device_from_being_asked(tmp_path: Path) -> None:
    told = run(2, tmp_path, "communicating_trials", "its own generator")
    bits_held(told)
    for use in ("used", "unused"):
        row = told[f"its own generator, {use}", "clean"]
        reasons = [gap for gap in row["not_covered"][1] if "what each rank holds for itself" in gap]
        assert bool(reasons) == (use == "used"), row["not_covered"]
        healed(told[f"its own generator, {use}", "transient"])
        convicted(told[f"its own generator, {use}", "persistent"], "body.2/addmm")


@pytest.mark.parametrize("ranks", chosen([2, 3], [3]))
def test_how_gradients_are_reduced_is_the_scripts_affair(ranks: int, tmp_path: Path) -> None:
    told = run(ranks, tmp_path, "communicating_trials", "post-local sgd", "power sgd")
    bits_held(told)
    skipped = told["power sgd", "transient"]
    assert skipped["verdicts"] == [["step 3: transient_hardware [1] skipped"]] * ranks, skipped
    assert "the communication hook powerSGD_hook reduces the gradients" in str(skipped["messages"])


def test_what_ranks_do_not_share_from_first_to_last_is_no_fault(tmp_path: Path) -> None:
    told = run(2, tmp_path, "unfrozen_trials")
    bits_held(told)
    assert told["sharded, unfrozen", "clean"]["left_open"] == [0, 0]
    left_open(
        told["wrapped, unfrozen", "clean"], "0.bias was frozen when the model was guarded: a DistributedDataParallel"
    )
    left_open(told["partly each rank's own", "clean"], "DistributedDataParallel is told to leave out 2.bias")


def test_faults_in_a_loss_outside_the_model(tmp_path: Path) -> None:
    told = run(chosen(4, 2), tmp_path, "losses")
    bits_held(told)
    sites = {
        "cross entropy": "./_log_softmax#0:forward",
        "cross entropy, backward": "./_log_softmax_backward_data#0:backward",
        "penalty": "./sgn#0:backward",
        "auxiliary loss": "./sqrt#0:forward",
    }
    for name, site in sites.items():
        healed(told[name, "transient"])
        convicted(told[name, "persistent"], site)
        assert "losses.py:" in told[name, "persistent"]["messages"][0][0][1]


def test_static_memory_and_a_replay_without_memory(tmp_path: Path) -> None:
    told = run(2, tmp_path / "static", "static_memory")
    bits_held(told)
    left_open(told["static gradients", "clean"], "lie in memory that a re-execution overwrites")
    told = run(2, tmp_path / "memory", "out_of_memory", "out of memory, wrapped")
    bits_held(told)
    assert told["out of memory, wrapped", "clean"]["left_open"][0] >= 3


@pytest.mark.skipif(not EVERYTHING, reason="takes a launch of its own")
def test_a_pipeline_of_two_stages(tmp_path: Path) -> None:
    told = run(2, tmp_path, "pipelines")
    bits_held(told)
    for fault in ("transient", "persistent"):
        left_open(told["pipeline", fault], "the script changes gradients")
