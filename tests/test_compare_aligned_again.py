"""Equal runs that are lined up, or added up, by something else than usual: a resume behind a still step, sparse sums, noise."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from ranks import forked
from step_loop import recorded_steps
from torch import nn

import bitwitness as bw

STEPS = 3


@pytest.mark.parametrize("settings", [{}, {"level": "modules"}], ids=str)
def test_a_resume_behind_a_step_that_moved_nothing_is_known_by_its_batch(tmp_path: Path, settings: dict) -> None:
    torch.manual_seed(0)
    net, batches = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)), torch.randn(5, 4, 6)
    rates = [0.0, 0.01, 0.02, 0.03, 0.04]  # of a warm-up

    def run(name: str, model: nn.Module, first: int) -> Path:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)

        def backward(step: int) -> None:
            optimizer.param_groups[0]["lr"] = rates[first + step]
            model(batches[first + step]).square().mean().backward()

        return recorded_steps(tmp_path / name, model, optimizer, backward, len(rates) - first, **settings)

    report = bw.compare(run("a", copy.deepcopy(net), 0), run("b", copy.deepcopy(net), 1))
    assert report.status == "fine", report.conclusion
    assert any("step 0 of run B starts from the weights of step 1 of run A" in note for note in report.notes)


def test_other_batches_of_runs_that_move_nothing_are_not_taken_for_a_resume(tmp_path: Path) -> None:
    def run(name: str, seed: int) -> Path:
        torch.manual_seed(0)
        model = nn.Linear(6, 1)
        torch.manual_seed(seed)
        return recorded_steps(
            tmp_path / name,
            model,
            torch.optim.SGD(model.parameters(), lr=0.0),
            lambda _step: model(torch.randn(4, 6)).square().mean().backward(),
            STEPS,
        )

    report = bw.compare(run("a", 1), run("b", 2))
    assert "input in0 differs" in report.conclusion


def test_sparse_gradients_of_bags_that_ranks_add_up_are_those_of_one_process(tmp_path: Path) -> None:
    job = str(Path(__file__).parent / "jobs" / "bags.py")
    for ranks, name in ((1, "a"), (2, "b")):
        done = forked(ranks, [job, str(tmp_path / name)], tmp_path / f"logs-{name}")
        assert done.code == 0, done.logs[0].read_text()
    report = bw.compare(tmp_path / "a", tmp_path / "b")
    assert report.status == "fine", report.conclusion


class Block(nn.Module):
    """Of a ConvNeXt, whose norms' gradients are sums of many rounded terms."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(width, width, 7, padding=3, groups=width)
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.scale = nn.Parameter(torch.full((width,), 0.1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(self.conv(x).permute(0, 2, 3, 1))
        return x + (self.scale * self.down(nn.functional.gelu(self.up(h)))).permute(0, 3, 1, 2)


def convolutional(out: Path, *, moved: bool, seed: int = 0, wrong: float = 1.0) -> Path:
    torch.manual_seed(seed)
    stem, blocks = nn.Conv2d(3, 16, 4, 4), nn.Sequential(Block(16), Block(16))
    model = nn.Sequential(stem, blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 5))
    images, labels = torch.randn(2, 16, 3, 48, 48), torch.randint(0, 5, (2, 16))
    with torch.no_grad():
        for weight in model.parameters() if moved else ():
            weight.copy_(torch.nextafter(weight, torch.full_like(weight, 1e3)))

    def backward(step: int) -> None:
        with torch.autocast("cpu", torch.bfloat16):
            out = model(images[step])
        nn.functional.cross_entropy(out.float(), labels[step]).backward()
        blocks[0].up.weight.grad *= wrong

    return recorded_steps(out, model, torch.optim.SGD(model.parameters(), lr=0.01), backward, 2, level="modules")


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_last_bit_of_noise_under_a_coarse_dtype_is_noise_in_sums_at_level_modules(tmp_path: Path, seed: int) -> None:
    a = convolutional(tmp_path / "a", moved=False, seed=seed)
    report = bw.compare(a, convolutional(tmp_path / "b", moved=True, seed=seed))
    assert report.status == "fine", report.conclusion
    report = bw.compare(a, convolutional(tmp_path / "c", moved=True, seed=seed, wrong=1.2))
    assert "1.0.up.weight" in report.conclusion or "1.0.up/weight" in report.conclusion
