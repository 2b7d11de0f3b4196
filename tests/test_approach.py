"""What comes near the end of a narrow dtype is told, but not a mask that the script makes."""

from __future__ import annotations

import torch
from torch.autograd import forward_ad

from bitwitness import Guard
from bitwitness.nonfinite.approach import ApproachSensor
from bitwitness.tap.modules import ModuleTracker
from bitwitness.tap.operators import OperatorTap

STEPS = 8  # every operator of bfloat16 has had its turn by then


def told(dtype: torch.dtype) -> list[str]:
    sensor, found = ApproachSensor(0.9), []
    upper, least = torch.ones(8, 8, dtype=torch.bool).triu(1), torch.finfo(dtype).min
    for step in range(STEPS):
        with OperatorTap(ModuleTracker(), sensor, sensor.select):
            scores = torch.randn(8, 8).to(dtype)
            (scores + torch.full((8, 8), least, dtype=dtype).triu(1)).softmax(-1)
            scores.masked_fill(upper, least).softmax(-1)
            torch.where(upper, least, scores).softmax(-1)
        found += [one.message for one in sensor.drain(step, 0, scaled=False)]
    return found


def test_masks_are_not_told_as_near_the_end() -> None:
    for dtype in (torch.bfloat16, torch.float16):
        assert told(dtype) == []


def test_a_result_near_the_end_of_its_dtype_is_told_in_its_turn() -> None:
    sensor = ApproachSensor(0.9)
    found = []
    for step in range(STEPS):
        with OperatorTap(ModuleTracker(), sensor, sensor.select):
            x = torch.full((4, 4), 1e19, dtype=torch.bfloat16)
            _ = x * (x * 3.3)
        found += [one.message for one in sensor.drain(step, 0, scaled=False)]
    assert len(found) == 1
    assert "mul (forward) comes close to bfloat16's largest number" in found[0]


def test_large_results_have_their_turn_too_less_often() -> None:
    sensor, found, looked_at = ApproachSensor(0.9), [], 0
    for step in range(40):
        with OperatorTap(ModuleTracker(), sensor, sensor.select):
            x = torch.full((1024, 640), 1e19, dtype=torch.bfloat16)
            _ = x * (x * 3.3)
        looked_at += bool(sensor._seen)
        found += [one.message for one in sensor.drain(step, 0, scaled=False)]
    assert len(found) == 1
    assert looked_at <= 8


def test_a_small_result_of_a_large_input_is_not_looked_at_more_often_than_that_input() -> None:
    """A weight's gradient, of activations that take far longer to read."""
    sensor, looked_at = ApproachSensor(0.9), 0
    for step in range(40):
        with OperatorTap(ModuleTracker(), sensor, sensor.select):
            x = torch.ones((2048, 640), dtype=torch.bfloat16)
            _ = x[:, :8].t() @ x
        looked_at += bool(sensor._seen)
        sensor.drain(step, 0, scaled=False)
    assert looked_at <= 8


def test_zeros_that_lie_nowhere_are_left_alone() -> None:
    model = torch.nn.Linear(8, 8).bfloat16()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with Guard(model, optimizer, deep_every=1, quiet=True) as guard:
        for _ in range(10):
            x = torch.randn(4, 8, dtype=torch.bfloat16)
            with forward_ad.dual_level():
                out, tangent = forward_ad.unpack_dual(model(forward_ad.make_dual(x, torch.ones_like(x))))
            optimizer.zero_grad()
            (out.square().mean() + tangent.square().mean()).backward()
            optimizer.step()
    assert not guard.reporter.failures
    assert not guard.findings
