"""Recordings of trainings on several ranks: each rank's own, and runs that are spread differently."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from jobs import recording, split
from ranks import forked

import bitwitness as bw
from bitwitness.comparison.report import Report
from bitwitness.store.opening import open_source

JOB = Path(__file__).parent / "jobs" / "recording.py"
CASES = [f"{wrapper}-{what}" for wrapper in ("ddp", "fsdp", "tp") for what in ("none", "weight")]
CASES += ["ddp-residual", "hand-none", "hand-own", "hand-received", "hand-late", "hand-early"]
pytestmark = pytest.mark.ranks


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Record all cases on two ranks, and one on a single rank."""
    folder = tmp_path_factory.mktemp("runs")
    launched = forked(2, [str(JOB), str(folder), *CASES], tmp_path_factory.mktemp("logs"))
    assert launched.code == 0
    torch.manual_seed(0)
    net, generator = recording.Net(), torch.Generator().manual_seed(7)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3, foreach=False)
    with bw.Recorder(net, out=folder / "alone"):
        for _ in range(2):
            net(torch.randn(6, 16, generator=generator)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    torch.manual_seed(0)
    net, generators = recording.Net(), [torch.Generator().manual_seed(7 + rank) for rank in range(2)]
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3, foreach=False)
    with bw.Recorder(net, out=folder / "alone-clipped"):
        for _ in range(2):
            net(torch.cat([torch.randn(6, 16, generator=one) for one in generators])).square().mean().backward()
            torch.nn.utils.clip_grad_norm_(net.parameters(), recording.CLIPPED)
            optimizer.step()
            optimizer.zero_grad()
    return folder


def compared(runs: Path, a: str, b: str) -> Report:
    return bw.compare(runs / a, runs / b)


def test_a_missing_residual_on_one_rank_is_named_there_and_only_there(runs: Path) -> None:
    report = compared(runs, "ddp-none", "ddp-residual")
    assert report.first is not None
    assert (report.first.site, report.first.rank, report.first.step) == ("blocks.1/add#0:forward.out0", 1, 0)
    assert report.first.side == "a"
    assert {suspect.rank for suspect in report.suspects} == {1}  # rank 0 received its difference with the gradients
    assert "blocks.1/add#0:forward" in report.only_a


def test_a_gradient_that_one_run_does_not_reduce_is_named(runs: Path) -> None:
    report = compared(runs, "hand-none", "hand-own")
    assert report.first is not None
    assert report.first.site.startswith("blocks.1.fc1/weight#0:grad")
    assert "is the same on all ranks in run A, and each rank's own in run B: it is not reduced" in report.first.text
    assert "'" not in compared(runs, "hand-none", "hand-none").conclusion


def test_a_gradient_that_one_rank_receives_wrongly_is_told_of_that_rank(runs: Path) -> None:
    said = compared(runs, "hand-none", "hand-received").conclusion
    assert (
        "the reduced gradient of blocks.1.fc1.weight is another one on rank 1 of run B, and elsewhere the same" in said
    )


def test_gradients_that_each_rank_clips_before_they_are_reduced_are_no_rounding(runs: Path) -> None:
    both = compared(runs, "hand-late", "hand-early")
    assert "each rank changes its own gradient of " in both.conclusion
    assert "before the ranks' are put together in run B, and not before that in run A" in both.conclusion
    merged = compared(runs, "alone-clipped", "hand-early")
    assert merged.status == "findings"
    assert "in run B each rank changes its own (clips it, scales it, edits it)" in merged.conclusion
    assert compared(runs, "alone-clipped", "hand-late").status == "fine"


def test_a_gradient_that_no_rank_of_several_reduces_is_there(runs: Path) -> None:
    said = [suspect.text for suspect in compared(runs, "alone-clipped", "hand-own").suspects]
    assert any(
        "blocks.1.fc1.weight is each rank's own in run B: it is not reduced over the ranks there" in text
        for text in said
    )
    assert not any("frozen, or not used" in text for text in said)


@pytest.mark.parametrize("wrapper", ["ddp", "fsdp", "tp"])
def test_a_changed_weight_is_named_whoever_holds_it(runs: Path, wrapper: str) -> None:
    report = compared(runs, f"{wrapper}-none", f"{wrapper}-weight")
    assert report.first is not None
    assert report.first.site == "blocks.1.fc1/addmm#0:forward.out0"
    assert "its blocks.1.fc1.weight differs" in report.first.text
    assert {s.site.partition("/")[0] for s in report.suspects} == {"blocks.1.fc1"}


def test_dtensors_are_recorded_with_placement_and_mesh(runs: Path) -> None:
    source = open_source(runs / "tp-none")
    rows = source.table(1, 0).to_pylist()
    (row,) = [r for r in rows if r["kind"] == "parameter" and r["module"] == "blocks.0.fc1" and r["op"] == "weight"]
    assert row["shape"] == [16, 16]
    assert row["placement"] == "S(0) of [32, 16] on mesh(tp=2) at [1]"
    assert {r["op"] for r in rows if r["kind"] == "collective"} >= {"all_reduce", "wait_tensor"}
    local = [r for r in open_source(runs / "ddp-none").table(0, 0).to_pylist() if r["kind"] == "gradient"]
    assert {r["slot"] for r in local} == {"local", "reduced"}


@pytest.mark.parametrize(
    ("a", "b"), [("ddp-none", "fsdp-none"), ("tp-none", "alone"), ("fsdp-none", "ddp-none"), ("alone", "tp-none")]
)
def test_other_shardings_and_world_sizes_are_put_together(runs: Path, a: str, b: str) -> None:
    report = compared(runs, a, b)
    assert report.merged
    assert report.first is None, report.conclusion
    assert report.rows > 100


@pytest.mark.parametrize(("a", "b"), [("ddp-none", "fsdp-weight"), ("tp-weight", "alone")])
def test_a_changed_weight_is_named_across_shardings(runs: Path, a: str, b: str) -> None:
    report = compared(runs, a, b)
    assert report.first is not None
    assert report.first.site.startswith("blocks.1.fc1/Linear#0:forward")


DTYPES = ("fp32", "bf16")
SPLIT = [f"{d}-2-{wrong}" for d in DTYPES for wrong in ("right", "summed", "undivided", "row")]


@pytest.fixture(scope="module")
def splits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One training on two ranks with two micro-batches each, and on one rank with one, two and four."""
    folder = tmp_path_factory.mktemp("splits")
    job = JOB.with_name("split.py")
    launched = forked(
        2, [str(job), str(folder), *SPLIT, "fp32-1-right", "bf16-1-right"], tmp_path_factory.mktemp("logs")
    )
    assert launched.code == 0, [log.read_text() for log in launched.logs]
    for dtype in DTYPES:
        for micros in (1, 2, 4):
            split.train(folder, f"{dtype}-{micros}-right")
    return folder


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("a", "b"), [("1-{}-1", "2-{}-1"), ("1-{}-1", "2-{}-2"), ("1-{}-2", "2-{}-2"), ("1-{}-4", "2-{}-2")]
)
def test_one_batch_may_be_split_over_ranks_and_micro_batches(splits: Path, a: str, b: str, dtype: str) -> None:
    report = bw.compare(*(splits / f"{one.format(dtype)}-right" for one in (a, b)))
    assert report.merged
    assert report.status == "fine", report.conclusion
    assert report.rows > 60
    assert b.endswith("1") or "micro-batches a step on each rank: put together, too" in "".join(report.notes)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("micros", [1, 2])
@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ("summed", ("every gradient", "2 times", "as many times as ranks (1 against 2)")),
        ("undivided", ("every gradient", "2 times", "from the backward on")),
        ("row", ("1/weight", "operators were not compared", "as many ranks and micro-batches")),
    ],
)
def test_what_is_wrong_in_a_batch_that_is_split_is_said(
    splits: Path, wrong: str, words: tuple[str, ...], micros: int, dtype: str
) -> None:
    report = bw.compare(splits / f"1-{dtype}-{micros}-right", splits / f"2-{dtype}-2-{wrong}")
    assert report.status == "findings"
    for word in words:
        assert word in report.conclusion


def test_what_an_eager_collective_left_in_memory_is_what_is_read(tmp_path: Path) -> None:
    """It writes what it is given, which no version counts: a healthy add behind it would be convicted by float64."""
    launched = forked(2, [str(JOB.parent / "reduced_inside.py"), str(tmp_path)], tmp_path / "logs")
    assert launched.code == 0
    said = bw.compare(tmp_path / "once", tmp_path / "twice").conclusion
    assert said.startswith("the runs part at ./add#0:forward.out0"), said
    assert "in0 is ./allreduce_#0:comm in run A, and down/mm#0:forward.out0 in run B" in said
