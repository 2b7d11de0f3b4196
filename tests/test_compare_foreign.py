"""Pairs of scripts that others wrote and that were told wrongly once: equal ones are cleared, planted ones are named."""

from __future__ import annotations

import copy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import bitwitness as bw
from bitwitness.cli import main
from bitwitness.comparison.beside import compared_beside


def compared(a: Path, b: Path) -> list[bw.Report]:
    """Compare all models of two scripts."""
    return [bw.compare(a, b), *(report for *_, report in compared_beside(a, b).reports)]


# -- the parts of a model, called one by one -----------------------------------------------------------------------


class Towers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = (nn.Sequential(nn.Linear(12, 24), nn.GELU(), nn.Linear(24, 8)) for _ in range(2))
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        a, b = self.left(x), self.right(y)
        a, b = a / a.norm(dim=-1, keepdim=True), b / b.norm(dim=-1, keepdim=True)
        logits, at = a @ b.t() * self.scale.exp(), torch.arange(len(x))
        return (F.cross_entropy(logits, at) + F.cross_entropy(logits.t(), at)) / 2


def by_parts(model: Towers, x: Tensor, y: Tensor) -> Tensor:
    a, b = F.normalize(model.left(x), dim=-1), F.normalize(model.right(y), dim=-1)
    logits = torch.einsum("td,vd->tv", a, b) * model.scale.exp()
    return -(logits.log_softmax(1).diagonal() + logits.log_softmax(0).diagonal()).mean() / 2


def towers(out: Path, loss_of: Callable[[Towers, Tensor, Tensor], Tensor]) -> Path:
    torch.manual_seed(0)
    model = Towers()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    generator = torch.Generator().manual_seed(1)
    with bw.Recorder(model, out=out):
        for _ in range(3):
            loss_of(model, *torch.randn(2, 6, 12, generator=generator)).backward()
            optimizer.step()
            optimizer.zero_grad()
    return out


def test_a_model_whose_parts_a_script_calls_is_recorded_from_its_first_step_on(tmp_path: Path) -> None:
    a = towers(tmp_path / "a", lambda model, x, y: model(x, y))
    b = towers(tmp_path / "b", by_parts)
    kinds = bw.Run(b).rows(step=0).column("kind").to_pylist()
    assert "module" in kinds
    assert "op" in kinds
    report = bw.compare(a, b)
    assert report.status == "fine", report.conclusion
    assert "evaluation mode" not in report.conclusion


SCRIPT = """
import sys, torch
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Sequential(nn.Linear(8, 16), nn.ReLU()), nn.Linear(16, 4)
    def forward(self, x):
        return self.right(self.left(x))

torch.manual_seed(0)
model = Model()
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for _ in range(2):
    x = torch.randn(4, 8)
    out = model(x) if sys.argv[1] == "whole" else model.right(model.left(x))
    out.square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_parts_that_were_recorded_each_alone_accuse_nobody(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    for name in ("whole", "parts"):
        command = [sys.executable, "-m", "bitwitness", "record", "--out", name, "script.py", name]
        subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
    assert main(["compare", str(tmp_path / "whole"), str(tmp_path / "parts")]) == 3
    said = capsys.readouterr().out
    assert said.startswith(
        "not the same pieces: run B calls parts of the model one by one, and recorded each alone, left"
    )
    assert "bw.Recorder(model)" in said
    assert "the runs part" not in said


# -- two calls or one ------------------------------------------------------------------------------------------------


def discriminator(out: Path, *, joined: bool) -> Path:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(10, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    generator = torch.Generator().manual_seed(1)
    with bw.Recorder(model, out=out):
        for _ in range(3):
            real, fake = torch.randn(2, 8, 10, generator=generator)
            if joined:
                one, other = model(torch.cat((real, fake))).chunk(2)
                (F.softplus(-one).mean() + F.softplus(other).mean()).backward()
            else:
                for x, y in ((real, torch.ones(8, 1)), (fake, torch.zeros(8, 1))):
                    F.binary_cross_entropy_with_logits(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
    return out


def test_losses_that_go_back_in_pieces_are_no_other_losses(tmp_path: Path) -> None:
    report = bw.compare(discriminator(tmp_path / "a", joined=False), discriminator(tmp_path / "b", joined=True))
    assert report.status == "fine", report.conclusion


# -- a teacher, and optimizers ---------------------------------------------------------------------------------------


class Attending(nn.Module):
    """Its key's bias has a gradient of rounding errors, of which Adam makes whole steps."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.out = nn.MultiheadAttention(16, 2, batch_first=True), nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(x + self.attention(x, x, x, need_weights=False)[0])


def taught(out: Path, *, other: bool, rate: float = 0.1) -> Path:
    torch.manual_seed(0)
    student = Attending()
    teacher = copy.deepcopy(student).requires_grad_(False)
    optimizer = torch.optim.AdamW(student.parameters(), 1e-3)
    generator = torch.Generator().manual_seed(1)
    with bw.Recorder(student, out=out), bw.Recorder(teacher, out=out):
        for _ in range(4):
            x = torch.randn(4, 6, 16, generator=generator)
            with torch.no_grad():
                wanted = teacher(x).softmax(-1)
            logits = student(x + 0.1)
            made = logits - logits.logsumexp(-1, keepdim=True) if other else logits.log_softmax(-1)
            (-(wanted * made).sum(-1)).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                pairs = list(zip(teacher.parameters(), student.parameters(), strict=True))
                if other:
                    torch._foreach_lerp_([p for p, _ in pairs], [q for _, q in pairs], rate)
                else:
                    for p, q in pairs:
                        p.mul_(1 - rate).add_(q, alpha=rate)
    return out


def test_a_teacher_may_drift_as_its_student_does(tmp_path: Path) -> None:
    a = taught(tmp_path / "a", other=False)
    reports = compared(a, taught(tmp_path / "b", other=True))
    assert [report.status for report in reports] == ["fine", "fine"], [report.conclusion for report in reports]
    _, teacher = compared(a, taught(tmp_path / "c", other=True, rate=0.9))
    assert teacher.first is not None
    assert teacher.first.step == 1, teacher.conclusion
    assert "changed between these two steps" in teacher.conclusion


class ByHand(torch.optim.Optimizer):
    """AdamW, written out."""

    def __init__(self, parameters: object, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})  # type: ignore[arg-type]

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state.setdefault(p, {"t": 0, "m": torch.zeros_like(p), "v": torch.zeros_like(p)})
                state["t"] += 1
                m, v, t = state["m"], state["v"], state["t"]
                m.mul_(0.9).add_(p.grad, alpha=0.1)
                v.mul_(0.999).addcmul_(p.grad, p.grad, value=0.001)
                moved = (m / (1 - 0.9**t)) / ((v / (1 - 0.999**t)).sqrt() + 1e-8)
                p.copy_(p - group["lr"] * (moved + 0.01 * p))


def attended(out: Path, optimizer_of: Callable[[nn.Module], torch.optim.Optimizer]) -> Path:
    torch.manual_seed(0)
    model = Attending()
    optimizer = optimizer_of(model)
    generator = torch.Generator().manual_seed(1)
    with bw.Recorder(model, out=out):
        for _ in range(4):
            model(torch.randn(4, 6, 16, generator=generator)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return out


def test_another_class_of_one_formula_is_cleared_by_most_parameters(tmp_path: Path) -> None:
    a = attended(tmp_path / "a", lambda model: torch.optim.AdamW(model.parameters(), 1e-3))
    report = bw.compare(a, attended(tmp_path / "b", lambda model: ByHand(model.parameters(), 1e-3)))
    assert report.status == "fine", report.conclusion
    report = bw.compare(a, attended(tmp_path / "c", lambda model: ByHand(model.parameters(), 2e-3)))
    assert report.status == "findings"
    assert "lr 0.001 against 0.002" in report.conclusion


# -- what a backward reads of the forward ----------------------------------------------------------------------------


class Siamese(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.predictor = nn.Linear(14, 10), nn.Linear(10, 10)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        z = self.encoder(x)
        return z, self.predictor(z)


def siamese(out: Path, *, stopped: bool) -> Path:
    torch.manual_seed(0)
    model = Siamese()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    generator = torch.Generator().manual_seed(1)

    def apart(p: Tensor, z: Tensor) -> Tensor:
        p, z = p / p.norm(dim=1, keepdim=True), z / z.norm(dim=1, keepdim=True)
        return -(p * z).sum(1).mean()

    with bw.Recorder(model, out=out):
        for _ in range(2):
            z, p = zip(*map(model, torch.randn(2, 6, 14, generator=generator)), strict=True)
            (apart(p[0], z[1].detach()) + apart(p[1], z[0].detach() if stopped else z[0])).backward()
            optimizer.step()
            optimizer.zero_grad()
    return out


def test_a_branch_that_one_run_differentiates_is_named_by_what_only_it_has(tmp_path: Path) -> None:
    report = bw.compare(siamese(tmp_path / "a", stopped=True), siamese(tmp_path / "b", stopped=False))
    assert report.status == "findings"
    assert "only run B goes backward here" in report.conclusion, report.conclusion
    assert ":backward" in report.conclusion


def test_each_forward_of_a_step_has_its_backward_recorded(tmp_path: Path) -> None:
    rows = bw.Run(siamese(tmp_path / "a", stopped=True)).rows(step=0).to_pylist()
    of_weights = [row for row in rows if row["phase"] == "backward" and row["shape"] == [10, 14]]
    assert [row["op"] for row in of_weights if row["slot"] == "out0"] == ["mm", "mm", "add"]


# -- other names -----------------------------------------------------------------------------------------------------


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(6, 9), nn.LayerNorm(9), nn.Linear(9, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.norm(self.first(x)).relu())


class Inner(nn.Module):
    def __init__(self, plain: Plain) -> None:
        super().__init__()
        self.down, self.ln, self.up = plain.second, plain.norm, plain.first  # registered the other way round

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.ln(self.up(x)).relu())


class Wrapped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner(Plain())

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


def test_parameters_of_renamed_modules_in_another_order_are_the_same_ones(tmp_path: Path) -> None:
    for name, make in (("a", Plain), ("b", Wrapped)):
        torch.manual_seed(0)
        model = make()
        optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
        with bw.Recorder(model, out=tmp_path / name):
            for _ in range(3):
                model(torch.randn(5, 6)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
    report = bw.compare(tmp_path / "a", tmp_path / "b")
    assert report.status == "fine", report.conclusion


# -- slices of one weight --------------------------------------------------------------------------------------------


class Crossing(nn.Module):
    """Attention to another sequence: queries, keys and values are made by slices of one weight."""

    def __init__(self, *, first: bool) -> None:
        super().__init__()
        self.attention, self.first = nn.MultiheadAttention(16, 2, batch_first=first), first

    def forward(self, q: Tensor, memory: Tensor) -> Tensor:
        if self.first:
            return self.attention(q, memory, memory, need_weights=False)[0]
        q, memory = q.transpose(0, 1), memory.transpose(0, 1)
        return self.attention(q, memory, memory, need_weights=True)[0].transpose(0, 1)


def test_other_slices_of_a_weight_are_no_other_weight(tmp_path: Path) -> None:
    for name, first in (("a", True), ("b", False)):
        torch.manual_seed(0)
        model = Crossing(first=first)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        with bw.Recorder(model, out=tmp_path / name):
            for _ in range(2):
                model(torch.randn(3, 5, 16), torch.randn(3, 7, 16)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
    report = bw.compare(tmp_path / "a", tmp_path / "b")
    assert report.status == "fine", report.conclusion


# -- gradients of rounding errors ------------------------------------------------------------------------------------


def test_a_bias_before_a_batch_norm_follows_its_gradient_of_rounding_errors(tmp_path: Path) -> None:
    for name, layout in (("a", torch.contiguous_format), ("b", torch.channels_last)):
        torch.manual_seed(0)
        layers = [
            nn.Conv2d(3, 8, 3),
            nn.BatchNorm2d(8),
            nn.Conv2d(8, 8, 1),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.Conv2d(8, 4, 3),
        ]
        model = nn.Sequential(*layers).to(memory_format=layout)
        optimizer = torch.optim.SGD(model.parameters(), 0.05)
        for parameter in model.parameters():
            if parameter.dim() == 1:
                nn.init.zeros_(parameter) if parameter is not layers[1].weight else None
        with bw.Recorder(model, out=tmp_path / name, content="tensors"):
            for _ in range(2):
                x = torch.randn(4, 3, 12, 12).to(memory_format=layout)
                model(x).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
    report = bw.compare(tmp_path / "a", tmp_path / "b")
    assert report.status == "fine", report.conclusion
