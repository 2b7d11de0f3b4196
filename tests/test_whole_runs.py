"""Two whole runs that differ in one thing, or in nothing that matters: the first sentence says what it is."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import whole_runs as w
from extent import chosen
from torch import nn
from whole_runs import Conv, Recurrent, Rewritten, Training

import bitwitness as bw
from bitwitness.cli import main
from bitwitness.store.opening import open_source
from bitwitness.store.seal import FIELD, sealed

GPT = Training()
CONV, LSTM = Training(make=Conv), Training(make=Recurrent)
DROPPING = Training(make=lambda: w.GPT(0.2))
SGD = Training(optimizer="SGD", lr=0.1)
WEIGHT = "b.1.f1.weight"
Recordings = Callable[[Training, str, str], Path | None]

# What B does otherwise, and words of the sentence that tells it.
PLANTED: dict[str, tuple[Training, Training, tuple[str, ...]]] = {
    "clipping halved": (GPT.but(clip=0.2), GPT.but(clip=0.1), ("1/2 times", "clipping", "0.2 after", "0.1 after")),
    "clipping removed": (GPT.but(clip=0.2), GPT, ("clipping", "run B leaves them as they are")),
    "clipping with SGD": (SGD.but(clip=0.2), SGD.but(clip=0.1), ("1/2 times", "clipping")),
    "clipping of an LSTM": (LSTM.but(clip=0.02), LSTM, ("clipping",)),
    "gradients not zeroed": (GPT, GPT.but(zero=False), ("step 1", "zero_grad")),
    "untied": (GPT.but(make=lambda: w.GPT(tied=True)), GPT, ("head.weight is a parameter of its own in run B",)),
    "a hook": (GPT, GPT.but(prepare=w.hooked(WEIGHT, 1.1)), ("b.1.f1/weight", "1.1 times")),
    "an edit under noise": (GPT, GPT.but(prepare=w.one_ulp, edit=w.gradient(WEIGHT, 1.5)), (WEIGHT, "B multiplies it by 1.5")),
    "zeroed under noise": (GPT, GPT.but(prepare=w.one_ulp, edit=w.gradient(WEIGHT, 0.0)), (WEIGHT, "sets it to zero")),
    "an edit that torch does not count": (GPT, GPT.but(edit=w.unseen), ("1/100 times", "run B multiplies them by 0.01")),
    "channels swapped": (CONV, CONV.but(data=lambda x: x.flip(1).contiguous()), ("input", "same values in another order")),
    "images flipped": (CONV, CONV.but(data=lambda x: x.flip(3).contiguous()), ("input", "same values in another order")),
    "batch permuted": (CONV, CONV.but(data=lambda x: x.roll(1, 0)), ("input", "same values in another order")),
    "positions rolled": (GPT, GPT.but(make=lambda: w.GPT(rolled=1)), ("roll", "only run B has it")),
    "another seed": (DROPPING, DROPPING.but(seed=5), ("b.0.drop", "random numbers")),
    "evaluation mode": (DROPPING, DROPPING.but(prepare=lambda m: m.eval()), ("b.0.drop", "B has the model in evaluation mode")),
    "a row, autocast": (GPT, GPT.but(autocast=True, prepare=w.parameter(WEIGHT, w.larger_row)), ("b.1.f1", "differs")),
    "a row": (GPT, GPT.but(prepare=w.parameter(WEIGHT, w.larger_row)), ("b.1.f1", "weight differs")),
    "a weight transposed": (GPT, GPT.but(prepare=w.parameter("b.1.o.weight", lambda p: p.t())), ("b.1.o", "another order")),
    "accumulation undivided": (GPT, GPT.but(micros=4, divide=False), ("4 times", "1 against 4", "not divided")),
    "statistics of micro-batches": (CONV, CONV.but(micros=2), ("b1", "micro-batch by its own statistics")),
    "clipping, other precisions": (GPT.but(clip=0.2), GPT.but(clip=0.1, autocast=True), ("clipping", "0.1 after")),
    "undivided, other precisions": (GPT, GPT.but(micros=2, divide=False, autocast=True), ("1 against 2", "not divided")),
    "clipping under noise": (GPT.but(clip=0.2), GPT.but(clip=0.19, prepare=w.one_ulp), ("clipping", "0.19 after")),
    "loss scaled": (GPT, GPT.but(scale=8.0), ("8 times", "loss scale")),
    "loss scaled with SGD": (SGD, SGD.but(scale=8.0), ("8 times", "loss scale")),
    "sum for mean": (GPT, GPT.but(reduction="sum"), ("'mean' against 'sum'", "64 times")),
    "sign": (GPT, GPT.but(scale=-1.0), ("other sign",)),
    "maximize": (GPT, GPT.but(maximize=True), ("maximize False against True", "other parameters")),
    "learning rate": (GPT, GPT.but(lr=2e-2), ("lr 0.01 against 0.02", "other parameters")),
    "weight decay": (GPT, GPT.but(decay=0.1), ("weight_decay 0.0 against 0.1",)),
    "warm-up": (GPT.but(warm_up=1), GPT.but(warm_up=2), ("lr 0.0025 against 0.005",)),
    "another optimizer": (GPT, GPT.but(optimizer="SGD"), ("AdamW against SGD",)),
    "groups of a norm": (
        Training(make=lambda: w.Grouped(4)), Training(make=lambda: w.Grouped(2)), ("part at n/", "group 4 against 2"),
    ),
    "another activation in bfloat16": (
        Training(make=lambda: Rewritten("gelu", other=False), autocast=True),
        Training(make=lambda: Rewritten("gelu", other=True), autocast=True),
        ("is computed by gelu", " in run A and by "),
    ),
    "mean of means": (
        Training(make=lambda: w.Returning(padded=True), steps=1),
        Training(make=lambda: w.Returning(padded=True), steps=1, micros=2),
        ("differ by no one factor", "a mean of means"),
    ),
    "frozen in the one step": (
        GPT.but(steps=1),
        GPT.but(steps=1, prepare=lambda m: m.b[1].f1.requires_grad_(False)),
        ("frozen", "b.1.f1.weight, b.1.f1.bias"),
    ),
    "stepped twice in the one step": (
        GPT.but(steps=1),
        GPT.but(steps=1, again=True),
        ("run B's optimizer", "2 times against 1"),
    ),
    "changed between steps": (
        GPT,
        GPT.but(between=w.parameter(WEIGHT, lambda p: p.mul_(1.01))),
        (WEIGHT, "changed between these two steps"),
    ),
    "clipped by value": (
        GPT.but(clip=0.01),
        GPT.but(edit=lambda m: nn.utils.clip_grad_value_(m.parameters(), 1e-4)),
        ("clips each value at 0.0001",),
    ),
    "a sum for a mean that clipping hides": (
        GPT.but(clip=0.01),
        GPT.but(clip=0.01, scale=8.0),
        ("every gradient", "8 times"),
    ),
    "a loss of zero": (GPT.but(steps=1), GPT.but(steps=1, scale=0.0), ("is zero in run B",)),
    "Adam for AdamW at a small rate": (
        GPT.but(lr=1e-5, decay=0.01),
        GPT.but(lr=1e-5, optimizer="Adam"),
        ("AdamW against Adam",),
    ),
    "images transposed": (CONV, CONV.but(data=lambda x: x.transpose(2, 3)), ("input", "read in another order")),
    "frozen": (GPT, GPT.but(prepare=lambda m: m.b[1].f1.weight.requires_grad_(False)), (WEIGHT, "frozen")),
    "clipped by hand, at another norm": (
        GPT.but(clip=0.2),
        GPT.but(edit=w.clip_by_hand(0.1)),
        ("is 1/2 times as large", "run B multiplies them by"),
    ),
}  # fmt: skip
EQUAL: dict[str, tuple[Training, Training]] = {
    "the same": (GPT, GPT),
    "one ulp": (GPT, GPT.but(prepare=w.one_ulp)),
    "one ulp, SGD": (SGD, SGD.but(prepare=w.one_ulp)),
    "one ulp, convolutions": (CONV, CONV.but(prepare=w.one_ulp)),
    "a mask's filling, in other precisions": (
        Training(make=lambda: Rewritten("masked", other=False)),
        Training(make=lambda: Rewritten("masked", other=False), autocast=True),
    ),
    "one ulp, LSTM": (LSTM, LSTM.but(prepare=w.one_ulp)),
    "no mkldnn": (CONV, CONV.but(mkldnn=False)),
    "no mkldnn, LSTM": (LSTM, LSTM.but(mkldnn=False)),
    "channels last": (
        CONV,
        CONV.but(
            prepare=lambda m: m.to(memory_format=torch.channels_last),
            data=lambda x: x.contiguous(memory_format=torch.channels_last),
        ),
    ),
    "accumulation": (GPT, GPT.but(micros=4)),
    "accumulation of what the model returns": (Training(make=w.Returning), Training(make=w.Returning, micros=4)),
    "a loss scale that is taken out": (GPT, GPT.but(scale=1024.0, unscale=True)),
    "two scales of float16": (GPT.but(scaler=256.0), GPT.but(scaler=4096.0)),
    "two scales of float16, clipped": (GPT.but(scaler=4096.0, clip=0.2), GPT.but(scaler=256.0, clip=0.2)),
    "a sum that is divided": (GPT, GPT.but(reduction="sum", mean_of_sum=True)),
    "an optimizer of one's own": (SGD, SGD.but(optimizer="HandSGD")),
    "other precision": (GPT, GPT.but(autocast=True)),
    "other precision, clipped": (GPT.but(clip=0.2), GPT.but(clip=0.2, autocast=True)),
    "accumulation in bfloat16": (GPT.but(autocast=True), GPT.but(autocast=True, micros=4)),
    **{
        kind: (
            Training(make=lambda k=kind: Rewritten(k, other=False)),  # type: ignore[misc]
            Training(make=lambda k=kind: Rewritten(k, other=True)),  # type: ignore[misc]
        )
        for kind in ("mean", "bmm", "experts", "attention", "rms")
    },
    "clipped by hand": (GPT.but(clip=0.1), GPT.but(edit=w.clip_by_hand(0.1))),
}
FACES = [("mix", "stats"), ("mix", "tensors"), ("modules", "stats"), ("ops", "stats"), ("mix", "hash")]


def cases(names: dict[str, Any]) -> list[tuple[str, str, str]]:
    """Return every name in every face; in `make test` each in one, in the first most."""
    every = [(name, *face) for name in names for face in FACES]
    short = [(name, *FACES[1 + i // 4 % 4 if i % 4 == 0 else 0]) for i, name in enumerate(names)]
    return chosen(every, short)


@pytest.fixture(scope="module")
def usual(tmp_path_factory: pytest.TempPathFactory) -> Recordings:
    """Recordings of the trainings that many are compared with, made when they are first asked for."""
    made: dict[tuple[int, str, str], Path] = {}

    def record(training: Training, level: str, content: str) -> Path | None:
        if not any(training is one for one in (GPT, CONV, LSTM, DROPPING, SGD)):
            return None
        key = id(training), level, content
        made[key] = made.get(key) or training.record(tmp_path_factory.mktemp("usual"), level=level, content=content)
        return made[key]

    return record


def compared(usual: Recordings, folder: Path, a: Training, b: Training, level: str, content: str) -> bw.Report:
    first = usual(a, level, content) or a.record(folder / "a", level=level, content=content)
    return bw.compare(first, b.record(folder / "b", level=level, content=content))


@pytest.mark.parametrize(("name", "level", "content"), cases(PLANTED))
def test_what_was_planted_is_said(usual: Recordings, tmp_path: Path, name: str, level: str, content: str) -> None:
    a, b, words = PLANTED[name]
    report = compared(usual, tmp_path, a, b, level, content)
    assert report.status == "findings", report.conclusion
    if level == "ops" and name in ("statistics of micro-batches", "undivided, other precisions", "mean of means"):
        return  # whose operators were not put together
    if level == "modules" and name in (
        "another activation in bfloat16",
        "positions rolled",
        "a hook",
        "untied",
        "another seed",
        "sum for mean",
    ):
        return  # of which modules alone tell the place, or that it was not recorded, and no more
    said = report.conclusion if level == "mix" else report.conclusion.replace("its inputs agree", "")
    missing = [word for word in words if word not in said]
    assert not missing or level != "mix", (missing, report.conclusion)
    assert len(missing) < len(words), report.conclusion


@pytest.mark.parametrize(("name", "level", "content"), cases(EQUAL))
def test_what_is_equal_is_fine(usual: Recordings, tmp_path: Path, name: str, level: str, content: str) -> None:
    a, b = EQUAL[name]
    report = compared(usual, tmp_path, a, b, level, content)
    if level == "modules" and name == "two scales of float16, clipped":
        assert "a loss scale" in report.conclusion  # modules alone do not tell it from a sum for a mean
        return
    assert report.status == "fine", report.conclusion
    assert not report.suspects
    if "other precision" in name:
        assert report.conclusion.startswith("rounding of bfloat16: the runs compute in float32 against bfloat16")


@pytest.mark.parametrize("optimizer", ["AdamW", "SGD"])
def test_a_resumed_run_is_known_by_its_weights(tmp_path: Path, optimizer: str) -> None:
    saved: dict[str, Any] = {}
    whole = Training(steps=4, optimizer=optimizer).record(tmp_path / "whole")
    Training(steps=2, optimizer=optimizer, saved=saved).record(tmp_path / "first")
    resumed = Training(steps=2, first=2, optimizer=optimizer, saved=saved)
    right = bw.compare(whole, resumed.record(tmp_path / "right"))
    assert right.status == "fine", right.conclusion
    assert right.steps == 2
    assert right.notes == [
        "step 0 of run B starts from the weights of step 2 of run A: these two are compared, and those after them"
    ]
    assert bw.compare(whole, tmp_path / "right", steps="3").steps == 1
    lost = bw.compare(whole, resumed.but(lost=True).record(tmp_path / "lost"))
    assert lost.status == "findings"
    assert "state" in lost.conclusion
    assert "against none" in lost.conclusion


def test_steps_that_only_one_run_has_are_named(tmp_path: Path) -> None:
    a, b = GPT.but(steps=4).record(tmp_path / "a"), GPT.but(steps=2).record(tmp_path / "b")
    report = bw.compare(a, b)
    assert (report.status, report.steps) == ("fine", 2)
    assert "steps 2, 3 are in run A only, and not compared" in report.notes
    assert report.conclusion.endswith("; steps 2, 3 are in run A only, and not compared")
    description = json.loads((b / "run.json").read_text())
    del description[FIELD]
    (b / "run.json").write_text(json.dumps(sealed({**description, "state": "terminated", "ended_by": "SIGTERM"})))
    assert "steps 2, 3 are in run A only, and not compared; run B was terminated" in bw.compare(a, b).notes
    assert not any("only" in note for note in bw.compare(a, b, steps="0").notes)


def test_another_batch_accuses_nobody(usual: Recordings, tmp_path: Path) -> None:
    report = compared(usual, tmp_path, GPT, GPT.but(batch=4), "mix", "stats")
    assert report.status == "unread"
    assert not report.suspects
    assert "not given the same batch" in report.conclusion
    assert "[8, 8] in run A and [4, 8] in run B" in report.conclusion


def test_what_was_not_recorded_is_said_and_what_to_record(tmp_path: Path) -> None:
    a, b = (
        GPT.but(reduction=how).record(tmp_path / how, level="modules", phases=("forward",)) for how in ("mean", "sum")
    )
    report = bw.compare(a, b)
    assert report.status == "findings", report.conclusion
    assert report.first.reason == "loss"
    assert report.conclusion.startswith(
        "the runs part at ./loss#0:forward.value (rank 0, step 0): the loss differs (64 times as large in run B), and what the "
        "modules return agrees: it is computed otherwise, or of other targets: record operators, too (--level mix)"
    )


def test_the_first_words_are_the_conclusion(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = GPT.but(clip=0.2).record(tmp_path / "a"), GPT.but(clip=0.1).record(tmp_path / "b")
    out = tmp_path / "table.json"
    assert main(["compare", str(a), str(b), "--json", str(out)]) == 1
    assert capsys.readouterr().out.startswith(
        "the runs part at ./gradients#0:grad.read (rank 0, step 0): every gradient ("
    )
    text = out.read_text(encoding="utf-8")
    found = json.loads(text)
    assert text.index('"conclusion"') < text.index('"table"')
    assert found["gradients"]["reason"] == "clipped"
    assert len(found["table"]) == found["compared"]


def test_the_root_and_its_inputs_are_recorded_in_every_step(tmp_path: Path) -> None:
    folder = GPT.but(steps=3, micros=2).record(tmp_path / "a", level="modules")
    rows = bw.Run(folder).rows().to_pylist()
    roots = [row for row in rows if row["module"] == "." and row["op"] == "GPT" and row["phase"] == "forward"]
    wanted = [(step, micro, slot) for step in range(3) for micro in range(2) for slot in ("in0", "out0")]
    assert [(row["step"], row["micro"], row["slot"]) for row in roots] == wanted
    assert {row["name"] for row in roots if row["slot"] == "in0"} == {"input in0"}


class Scaled(torch.autograd.Function):
    """Hands a tensor on, and multiplies its gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, factor: float) -> torch.Tensor:
        """Return a copy."""
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        """Return the gradient, multiplied."""
        return grad * ctx.factor, None  # the line


class Net(nn.Module):
    """Two layers, and a function of the user's own between them."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.a, self.b, self.factor = nn.Linear(4, 8), nn.Linear(8, 2), factor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return [B, 2]."""
        return self.b(Scaled.apply(self.a(x), self.factor))  # the forward's


def test_a_backward_suspect_has_the_line_of_its_forward_or_of_a_backward_by_hand(tmp_path: Path) -> None:
    folders = []
    for factor in (1.0, 1.25):
        torch.manual_seed(0)
        net = Net(factor)
        with bw.Recorder(net, out=tmp_path / str(factor)) as recorder:
            net(torch.ones(3, 4)).square().sum().backward()
        folders.append(str(recorder.folder))
    report = bw.compare(*folders)
    assert report.first is not None
    assert report.first.text.startswith("called with other arguments: other 1.0 against 1.25"), report.conclusion
    text = Path(__file__).read_text(encoding="utf-8")
    line, forward = (
        next(i for i, one in enumerate(text.splitlines(), 1) if one.endswith(mark))
        for mark in ("# the line", "# the forward's")
    )
    assert f"test_whole_runs.py:{line} in backward" in report.first.line
    source = open_source(folders[0])
    rows = source.table(0, 0).to_pylist()
    stacks = {row["stack"] for row in rows if (row["module"], row["op"], row["phase"]) == ("b", "mm", "backward")}
    assert stacks
    assert all(f"test_whole_runs.py:{forward} in forward" in source.stacks(0)[stack] for stack in stacks)
