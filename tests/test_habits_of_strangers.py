"""What scripts of strangers do around a step: switches that they put back, sets that give elements away, an overflow."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

import loops
import pytest
import torch
from torch import Tensor, nn

import bitwitness as bw
from bitwitness.testing import EVERY_STEP, FaultyDevice, from_mapping

STEPS = 8


@contextmanager
def denormals_as_zero() -> Iterator[None]:
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(False)


@contextmanager
def products_in_bfloat16() -> Iterator[None]:
    """By the precision of one backend, after which torch refuses to tell the one of all."""
    torch.backends.mkldnn.matmul.fp32_precision = "bf16"
    try:
        yield
    finally:
        torch.backends.mkldnn.matmul.fp32_precision = "none"


class Tiny(nn.Module):
    """Looks whether numbers are zero that are too small for full precision."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        return self.b(y * (0.5 + (y.detach() * 1e-40 != 0)))


class Slots(nn.Module):
    """Takes an arbitrary free slot in each forward, and gives another one back."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.rows = nn.Linear(8, 8), nn.Embedding(16, 8)
        self.free = {0, 3, 5, 8, 11, 32, 80, 144}

    def forward(self, x: Tensor) -> Tensor:
        slot = self.free.pop()
        self.free.add(slot + 16)
        return self.a(x) + self.rows.weight[slot % 16]


def train(make: Callable[[], nn.Module], watch, around=nullcontext) -> tuple[bytes, torch.optim.Optimizer]:
    torch.manual_seed(3)
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    with watch(model, optimizer):
        for _ in range(STEPS):
            x = torch.randn(4, 8)
            optimizer.zero_grad()
            with around():
                model(x).square().mean().backward()
            optimizer.step()
    return b"".join(p.detach().numpy().tobytes() for p in model.parameters()), optimizer


def watched(make: Callable[[], nn.Module], around=nullcontext, **settings) -> tuple[bytes, bw.Guard]:
    guards: list[bw.Guard] = []

    def watch(model, optimizer):
        guards.append(bw.Guard(model, optimizer, quiet=True, **settings))
        return guards[0]

    found, _ = train(make, watch, around)
    return found, guards[0]


@pytest.mark.parametrize("around", [denormals_as_zero, products_in_bfloat16])
def test_a_switch_that_is_put_back_before_the_optimizer_holds_when_a_step_is_run_again(around) -> None:
    plain, _ = train(Tiny, lambda *_: nullcontext(), around)
    found, guard = watched(Tiny, around, **EVERY_STEP)
    assert found == plain
    told = guard.coverage()
    assert told["failures"] == {}
    assert told["verdicts"] == []
    assert told["dismissed"] >= STEPS - 2


def test_a_set_that_gives_elements_away_ends_replays_before_the_first(capsys: pytest.CaptureFixture[str]) -> None:
    plain, _ = train(Slots, lambda *_: nullcontext())
    found, _ = watched(Slots, deep_every=1)
    assert found == plain
    assert "Slots.free (set) gives away elements in the forward" in capsys.readouterr().err


def test_an_optimizer_that_keeps_no_state_has_none_under_the_guard() -> None:
    guards: list[bw.Guard] = []

    def watch(model, optimizer):
        guards.append(bw.Guard(model, optimizer, quiet=True, deep_every=1))
        return guards[0]

    _, optimizer = train(Tiny, watch)
    assert len(optimizer.state) == 0


def test_an_overflow_under_a_scaler_that_is_finite_when_run_again_is_the_devices() -> None:
    fault = {"kind": "multiply", "factor": 1e6, "pattern": "all", "steps": [14], "times": 1, "site": "*up/mm:backward"}
    guards: list[bw.Guard] = []

    def watch(model, optimizers):
        guards.append(bw.Guard(model, optimizers, act="protect", deep_every=0, self_test=False, quiet=True))
        return guards[-1]

    plain = loops.scaler_that_skips(lambda *_: nullcontext())
    with FaultyDevice(from_mapping({"fault": [fault]})) as device:
        found = loops.scaler_that_skips(watch)
    assert len(device.fired) == 1
    verdicts = [verdict for guard in guards for verdict in guard.coverage()["verdicts"]]
    assert len(verdicts) == 1
    assert "transient_hardware [0] healed" in verdicts[0]
    assert found == plain
