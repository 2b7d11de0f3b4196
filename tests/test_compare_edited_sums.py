"""What is made of gradients before an optimizer reads them, and reductions written otherwise: told as what they are."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from ranks import forked
from step_loop import recorded_steps
from torch import Tensor, nn

import bitwitness as bw
from bitwitness.comparison.measuring.describe import argument_differences

STEPS, WIDTH, LARGEST_NORM = 3, 12, 0.05
Clip = Callable[[nn.Module], object]


def drawn(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, 3))


def by_torch(model: nn.Module) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), LARGEST_NORM)


def by_hand(model: nn.Module, *, past_torch: bool = False) -> None:
    grads = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    norm = torch.stack([grad.double().square().sum() for grad in grads]).sum().sqrt()
    for grad in grads:
        (grad.data if past_torch else grad).mul_(min(1.0, LARGEST_NORM / (float(norm) + 1e-6)))


def accumulated(out: Path, clip: Clip, content: str) -> Path:
    """Train on two micro-batches a step, whose gradients are clipped together."""
    model = mlp()

    def backward(step: int) -> None:
        for micro in range(2):
            x = drawn(8, WIDTH, seed=2 * step + micro)
            (F.cross_entropy(model(x), x[:, :3].argmax(1)) / 2).backward()
        clip(model)

    return recorded_steps(out, model, torch.optim.AdamW(model.parameters(), lr=1e-3), backward, STEPS, content=content)


@pytest.mark.parametrize("content", ["stats", "tensors"])
@pytest.mark.parametrize("past_torch", [False, True])
def test_clipping_accumulated_gradients_by_hand_is_clipping(tmp_path: Path, content: str, *, past_torch: bool) -> None:
    a = accumulated(tmp_path / "a", by_torch, content)
    b = accumulated(tmp_path / "b", lambda model: by_hand(model, past_torch=past_torch), content)
    report = bw.compare(a, b)
    assert report.status == "fine", report.conclusion
    unclipped = bw.compare(a, accumulated(tmp_path / "c", lambda _model: None, content))
    assert "when the optimizer reads it, and not when the backward leaves it" in unclipped.conclusion


def test_a_momentum_that_moves_running_statistics_alone_is_a_finding_at_level_modules(tmp_path: Path) -> None:
    def run(out: Path, momentum: float) -> Path:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4, momentum=momentum), nn.ReLU(), nn.Flatten())

        def backward(step: int) -> None:
            model(drawn(4, 3, 6, 6, seed=step)).square().mean().backward()

        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        return recorded_steps(out, model, optimizer, backward, STEPS, level="modules")

    report = bw.compare(run(tmp_path / "a", 0.1), run(tmp_path / "b", 0.9))
    assert report.status == "findings", report.conclusion
    assert report.first is not None
    assert report.first.site.startswith("1/BatchNorm2d#0:forward.out.running_"), report.conclusion
    assert "nothing is left" not in report.conclusion


@pytest.mark.parametrize("content", ["stats", "tensors"])
def test_a_sum_over_other_dimensions_is_another_argument(tmp_path: Path, content: str) -> None:
    def run(out: Path, *, each: bool) -> Path:
        model = mlp()

        def backward(step: int) -> None:
            targets = torch.randint(0, 3, (8, 6), generator=torch.Generator().manual_seed(step))
            logits = model(drawn(8, 6, WIDTH, seed=step))
            counted = targets != 0
            lost = F.cross_entropy(logits.transpose(1, 2), targets, ignore_index=0, reduction="none")
            of_each = (lost.sum(1) / counted.sum(1).clamp(min=1)).mean()
            (of_each if each else lost.sum() / counted.sum()).backward()

        return recorded_steps(out, model, torch.optim.SGD(model.parameters(), lr=0.1), backward, STEPS, content=content)

    report = bw.compare(run(tmp_path / "a", each=False), run(tmp_path / "b", each=True))
    assert report.status == "findings"
    assert "its inputs agree and its result does not" not in report.conclusion
    over_all = {"f": "aten.sum.default", "a": [{"$": 0}], "k": {}}
    over = {"f": "aten.sum.dim_IntList", "a": [{"$": 0}, [1]], "k": {}}
    assert argument_differences(over_all, over, rank=2) == ["dim all against [1]"]
    assert argument_differences(over_all, {**over, "a": [{"$": 0}, [0, 1]]}, rank=2) == []


@pytest.mark.parametrize("content", ["stats", "tensors"])
def test_an_update_of_another_gradient_accuses_no_optimizer(tmp_path: Path, content: str) -> None:
    """Of two ranks, where one weight's gradient is not reduced: its update differs, too, and is no optimizer's fault."""
    script = tmp_path / "train.py"
    script.write_text(
        f"""
import sys, torch
import torch.distributed as dist
from torch import nn
import bitwitness as bw
dist.init_process_group("gloo")
torch.manual_seed(0)
model = nn.Sequential(nn.Linear({WIDTH}, {WIDTH}), nn.GroupNorm(2, {WIDTH}), nn.GELU(), nn.Linear({WIDTH}, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
with bw.Recorder(model, out=sys.argv[1], content={content!r}):
    for step in range(2):
        generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
        model(torch.randn(4, {WIDTH}, generator=generator)).square().mean().backward()
        for name, parameter in model.named_parameters():
            if name != sys.argv[2]:
                dist.all_reduce(parameter.grad)
                parameter.grad /= 2
        optimizer.step()
        optimizer.zero_grad()
dist.destroy_process_group()
"""
    )
    for name, left_out in (("a", "none"), ("b", "1.weight")):
        launched = forked(2, [str(script), str(tmp_path / name), left_out], tmp_path / f"logs_{name}")
        assert launched.code == 0, launched
    report = bw.compare(tmp_path / "a", tmp_path / "b")
    assert (
        "the gradient of 1.weight is the same on all ranks in run A, and each rank's own in run B" in report.conclusion
    )
    assert "SGD" not in report.conclusion


@pytest.mark.parametrize("level", ["mix", "modules"])
def test_elements_that_rounding_turns_in_a_relu_accuse_nobody(tmp_path: Path, level: str) -> None:
    """An input that differs by an ulp leaves some element just above zero in one run, and just below in the other."""

    def run(out: Path, above: float) -> Path:
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(WIDTH, 64), nn.ReLU(), nn.Linear(64, 2))

        def backward(step: int) -> None:
            x = drawn(64, WIDTH, seed=step)
            with torch.no_grad():  # puts one element of what the ReLU reads next to zero
                hidden = model[0]
                hidden.bias[5] = -(x[7] @ hidden.weight[5]) * (1 + above)
            model(x).square().mean().backward()

        return recorded_steps(out, model, torch.optim.SGD(model.parameters(), lr=0.0), backward, STEPS, level=level)

    report = bw.compare(run(tmp_path / "a", 1e-7), run(tmp_path / "b", -1e-7))
    assert report.status == "fine", report.conclusion
