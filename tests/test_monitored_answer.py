"""What ``status`` and ``report`` say of a monitored run: the first alert, what was watched, and how the run ended."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import bitwitness as bw
from bitwitness import Finding, Note, Site
from bitwitness.cli import main
from bitwitness.finding import Severity
from bitwitness.report import build_report
from bitwitness.report.markdown import to_markdown
from bitwitness.report.page import to_html
from bitwitness.store.claim import clear_run, holds_run
from bitwitness.store.monitored import read_series
from bitwitness.store.writer import RunWriter


def train(out: Path, steps: int = 4, *, nan_at: int | None = None, **settings: Any) -> Path:
    """Train under a monitor; at a step a gradient is made NaN."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with bw.Monitor(net, out=out, **settings):
        for step in range(steps):
            net(torch.randn(5, 4)).square().mean().backward()
            if step == nan_at:
                net[2].weight.grad.view(-1)[1] = float("nan")
            optimizer.step()
            optimizer.zero_grad()
    return out


def status(run: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, dict]:
    capsys.readouterr()
    code = main(["status", str(run), "--json"])
    return code, json.loads(capsys.readouterr().out)


def alert(writer: RunWriter, rule: str, step: int, message: str, *, rank: int = 0, **evidence: object) -> None:
    site = Site("0", "module", 0, "forward", "out0").at(rank=rank, step=step)
    writer.event(Finding(f"monitor.{rule}", site, Severity.WARNING, message, evidence, step, rank))


def test_a_run_without_alerts_says_what_was_watched_and_what_that_does_not_tell(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, told = status(train(tmp_path / "run"), capsys)
    assert (code, told["status"]) == (0, "fine")
    assert told["sentence"].startswith("nothing unusual: ")
    assert (
        " series over 4 steps (0 to 3) of 1 rank were watched by rules; whether the arithmetic is right"
        in told["sentence"]
    )
    assert any("the guard checks that" in gap for gap in told["not_covered"])
    assert (told["watched"]["alerts"], told["watched"]["steps"], told["watched"]["first"]) == (0, 4, None)
    report = build_report([tmp_path / "run"])
    assert report.story.word == "nothing unusual"
    assert report.story.headline.startswith("Nothing unusual was seen in 4 steps of ")
    assert any("all its checksums were verified" in line for line in report.story.runs[0].believed)
    assert "its numbers were not judged" not in to_html(report)


def test_a_nan_that_was_alerted_comes_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = train(tmp_path / "run", nan_at=2)
    code, told = status(run, capsys)
    assert (code, told["status"]) == (1, "findings")
    first = "NaN or Inf at step 2, rank 0: local gradient of 2.weight: 1 NaN and 0 Inf of 8 values"
    assert told["sentence"].startswith(f"NOT healthy: {first}")
    assert "'bitwitness trace', which names the operator" in told["to_do"]
    assert told["watched"]["first"]["sensor"] == "monitor.nonfinite"
    report = build_report([run])
    assert report.story.headline.startswith("NaN or Inf came up at step 2 on rank 0: local gradient of 2.weight")
    assert report.story.runs[0].events[0].title == "Step 2: monitor.nonfinite on rank 0"
    assert report.story.to_do[0] == "Run it with 'bitwitness trace', which names the operator and the line."
    assert to_markdown(report).startswith("# ❌ NaN or Inf")
    assert main(["report", str(run), "--json", "-"]) == 1
    capsys.readouterr()
    assert main(["status", "-v", str(run)]) == 1
    assert "alert: step 2, rank 0: nonfinite: local gradient of 2.weight" in capsys.readouterr().out


@pytest.mark.parametrize("settings", [{"watch": False}, {"rules": ("spike",)}], ids=["no rules", "another rule"])
def test_a_nan_that_no_rule_was_on_for_is_not_green(
    settings: dict, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, told = status(train(tmp_path / "run", nan_at=2, **settings), capsys)
    assert (code, told["status"]) == (1, "findings")
    assert (
        "the series hold NaN or Inf, first at step 2, rank 0 in grad/2.weight, and no rule was on" in told["sentence"]
    )
    code, told = status(train(tmp_path / "fine", **settings), capsys)
    assert code == 0
    assert any("rules" in gap for gap in told["not_covered"])
    if settings == {"watch": False}:
        assert told["sentence"].endswith("which no rules watched; they hold no NaN or Inf")
        assert build_report([tmp_path / "fine"]).story.word == "not judged"


def test_an_alert_that_nobody_has_proven_is_told_with_its_post_mortem(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = train(tmp_path / "run", 8)
    writer = RunWriter(run, 1, None)  # another rank's, which trains by itself
    alert(writer, "drift", 6, "later, and told of before", rank=1)
    writer = RunWriter(run, 2, None)
    alert(
        writer, "exploding", 5, "activation of 0 (out0) is 9 times its usual size", rank=2, also=["activation/2/out0"]
    )
    steps = [{"step": 4, "loss": 1.0, "batch": ["ab"]}, {"step": 5, "loss": 9.0, "grad_moved": ["0.weight x9"]}]
    alert(writer, "post_mortem", 5, "the spike of step 5: the data: and so on", rank=2, steps=steps)
    code, told = status(run, capsys)
    assert (code, told["status"]) == (1, "findings")
    assert told["sentence"].startswith(
        "unusual, and nobody has proven it wrong: first at step 5, rank 2: exploding: activation of 0 (out0) is 9 times its "
        "usual size; 2 alerts in all; the spike of step 5: the data: and so on; "
    )
    assert "'bitwitness run' proves or dismisses" in told["to_do"]
    report = build_report([run])
    assert "nobody has proven it wrong. 2 alerts in all. The spike of step 5: the data" in report.story.headline
    (block,) = (one for one in report.story.runs[0].events[0].blocks if one.title == "The last steps")
    assert block.columns == ["step", "loss", "batch", "grad_moved"]
    assert block.rows == [["4", "1", "ab", ""], ["5", "9", "", "0.weight x9"]]


def test_a_run_that_did_not_come_to_its_end_says_so_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    net = nn.Linear(4, 1)

    def fail() -> None:
        with bw.Monitor(net, out=tmp_path / "run"), bw.Recorder(net, out=tmp_path / "recorded"):
            net(torch.randn(5, 4)).square().mean().backward()
            torch.optim.SGD(net.parameters(), lr=0.1).step()
            raise IndexError("out of range")

    with pytest.raises(IndexError):
        fail()
    code, told = status(tmp_path / "run", capsys)
    assert code == 0
    assert told["sentence"].startswith("the script failed (IndexError: out of range); until then nothing unusual: ")
    story = build_report([tmp_path / "run"]).story
    assert story.headline.startswith("The script failed (IndexError: out of range). Until then: nothing unusual")
    assert (story.attention, story.word) == (True, "the script failed")
    assert "See why the script failed" in story.to_do[0]
    assert status(tmp_path / "recorded", capsys)[1]["sentence"].startswith("the script failed (IndexError: ")
    assert build_report([tmp_path / "recorded"]).story.headline.startswith("The script failed (")


def test_a_run_that_has_just_begun_says_that_nothing_is_there_yet(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    writer = RunWriter(tmp_path / "run", 0, 1)
    writer.describe(monitor={"watch": True, "rules": ["nonfinite", "spike"]})
    code, told = status(tmp_path / "run", capsys)
    assert (code, told["state"]) == (0, "running")
    assert told["sentence"].startswith("monitored, no alert so far: no step of its series is on disk yet")
    alert(writer, "spike", 1, "the loss jumps to 9")
    code, told = status(tmp_path / "run", capsys)
    assert code == 1
    assert "first at step 1, rank 0: spike: the loss jumps to 9; 1 alert in all" in told["sentence"]


def test_what_a_monitor_could_not_look_at_is_no_all_clear(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = train(tmp_path / "run")
    writer = RunWriter(run, 1, None)
    writer.event(Note("a sink failed at step 3 and gets no more: OSError", 3, 1, "monitor", Severity.WARNING))
    assert status(run, capsys)[0] == 0
    writer.event(Note("the watch rules failed and are off: ValueError", 3, 1, "monitor", Severity.WARNING))
    code, told = status(run, capsys)
    assert (code, told["problems"]) == (3, ["the watch rules failed and are off: ValueError"])
    assert told["sentence"].startswith("not known: the watch rules failed and are off: ValueError; ")


def test_a_guards_answer_and_the_rules_stand_side_by_side(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    with bw.Guard(net, out=tmp_path / "run"), bw.Monitor(net, out=tmp_path / "run"):
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for _ in range(4):
            net(torch.randn(5, 4)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    code, told = status(tmp_path / "run", capsys)
    assert code == 0
    assert told["sentence"].startswith("healthy: 4 of 4 parameters, 4 steps")
    assert told["sentence"].endswith("were watched by rules")
    alert(RunWriter(tmp_path / "run", 1, None), "drift", 3, "it drifts", rank=1)
    code, told = status(tmp_path / "run", capsys)
    assert code == 1
    assert told["sentence"].startswith(
        "unusual, and nobody has proven it wrong: first at step 3, rank 1: drift: it drifts"
    )
    assert "; the guard: healthy: 4 of 4" in told["sentence"]


def test_nothing_of_an_overwritten_run_is_read_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = train(tmp_path / "run", 9, nan_at=7)
    (run / "rank00000" / "notes.txt").write_text("mine")
    clear_run(run)
    assert [path.name for path in run.rglob("*") if path.is_file()] == ["notes.txt"]
    train(run, 3)
    table, problems = read_series(run, 0)
    assert (max(table.column("step").to_pylist()), problems) == (2, [])
    assert status(run, capsys)[0] == 0
    # a file of another run, which the seal does not know
    other = train(tmp_path / "other", 9)
    (other / "rank00000" / "monitor-000001.parquet").rename(run / "rank00000" / "monitor-000007.parquet")
    table, problems = read_series(run, 0)
    assert max(table.column("step").to_pylist()) == 2
    assert "monitor-000007.parquet is not in the seal beside it" in problems[0]
    code, told = status(run, capsys)
    assert (code, told["status"]) == (3, "unread")


SCRIPT = """
import sys, torch
torch.manual_seed(0)
net = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for step in range(int(sys.argv[1])):
    net(torch.randn(5, 4)).square().mean().backward()
    if step == 5:
        net.weight.grad.fill_(float("nan"))
    optimizer.step()
    optimizer.zero_grad()
"""


def test_overwritten_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    run, command = tmp_path / "run", ["monitor", "--out", str(tmp_path / "run")]
    assert main([*command, str(tmp_path / "train.py"), "8"]) == 0
    assert status(run, capsys)[0] == 1
    assert main([*command, "--overwrite", str(tmp_path / "train.py"), "3"]) == 0
    code, told = status(run, capsys)
    assert (code, told["watched"]["steps"], told["watched"]["alerts"]) == (0, 3, 0)
    report = build_report([run])
    assert report.story.status == "fine"
    assert report.charts["heat"]["spans"] == [[0, 0], [1, 1], [2, 2]]


def test_a_kill_in_the_middle_of_overwriting_leaves_no_run_that_looks_whole(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    unlink, left = Path.unlink, 0

    def until(self: Path, missing_ok: bool = False) -> None:
        nonlocal left
        if left == 0:
            raise KeyboardInterrupt
        left -= self.exists()
        unlink(self, missing_ok)

    monkeypatch.setattr(Path, "unlink", until)
    files = sum(path.is_file() for path in train(tmp_path / "run").rglob("*"))
    assert files >= 3
    for kept in range(1, files):
        run, left = train(tmp_path / f"run{kept}"), kept
        with pytest.raises(KeyboardInterrupt):
            clear_run(run)
        assert holds_run(run)  # nobody writes into it without clearing it
        assert status(run, capsys)[0] == 3, kept
        left = files
        clear_run(run)
        assert not holds_run(run)


def test_what_happens_at_one_step_comes_before_what_went_on_for_a_while(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = train(tmp_path / "run", 8)
    writer = RunWriter(run, 1, None)
    alert(writer, "drift", 3, "a norm stays below its usual size", rank=1)
    alert(writer, "vanished", 6, "activation of 0 (out0) is zero", rank=1)
    _, told = status(run, capsys)
    assert "first at step 6, rank 1: vanished: activation of 0 (out0) is zero; 2 alerts in all" in told["sentence"]


@pytest.mark.parametrize("key", ["image/rgb", "a#b:c", "x@y"])
def test_names_with_the_signs_of_sites_lose_no_alert(
    key: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Towers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.towers = nn.ModuleDict({key: nn.Linear(4, 4)})

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.towers[key](x)

    net = Towers()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with bw.Monitor(net, out=tmp_path / "run"):
        for step in range(4):
            net(torch.full((5, 4), float("nan") if step == 2 else 1.0)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    code, told = status(tmp_path / "run", capsys)
    assert (code, told["status"]) == (1, "findings"), told["sentence"]
    assert "NaN" in told["sentence"]
    assert told["sentence"].startswith("NOT healthy: NaN or Inf at step 2")


def test_a_report_of_two_says_where_their_series_part(tmp_path: Path) -> None:
    same, other = train(tmp_path / "a"), train(tmp_path / "b")
    told = build_report([same, other])
    assert told.beside[0].endswith("all 30 series are equal to the last digit in 4 steps")
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with bw.Monitor(net, out=tmp_path / "c"):
        for step in range(4):
            net(torch.randn(5, 4)).square().mean().backward()
            if step == 2:
                net[2].weight.grad.mul_(3.0)
            optimizer.step()
            optimizer.zero_grad()
    told = build_report([tmp_path / "c", same])
    assert ": the runs part at step 2, in grad 2.weight of rank 0: A's is +200.0% against B's (" in told.beside[0]
    assert any(
        line.startswith("rank 0, update 2.weight: from step 2 on, by +200.0% against B's") for line in told.beside
    )
    assert told.to_dict()["beside"] == told.beside
    assert "The two beside each other" in to_markdown(told)
    assert "The two beside each other" in to_html(told)
