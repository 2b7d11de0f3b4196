"""The gradient that a backward starts from: torch's own one is made again in a replay, the script's is taken as it was."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

import bitwitness as bw
from bitwitness.demo.model import ByteGPT, batch, standard_library
from bitwitness.stats.digest import bit_hashes
from bitwitness.testing import FaultyDevice, from_mapping

FAULT = {
    "site": "./ones_like#0:forward.out0",
    "kind": "multiply",
    "factor": 1e4,
    "pattern": "tile",
    "steps": [25],
    "times": 1,
}


def trained(back: Callable[[Tensor, int], object], *faults: dict[str, object]) -> tuple[list[int], bw.Guard, int]:
    """Train 30 steps; return the bits, the guard, and how often the faults struck."""
    torch.manual_seed(0)
    model = ByteGPT(width=32, layers=1, heads=2, context=16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    text, generator = standard_library(1 << 16), torch.Generator().manual_seed(0)
    with (
        bw.Guard(model, optimizer, act="protect", self_test=False) as guard,
        FaultyDevice(from_mapping({"fault": list(faults)}) if faults else [], model=model) as device,
    ):
        for step in range(30):
            back(model(*batch(text, generator, 2, 16)), step)
            optimizer.step()
            optimizer.zero_grad()
    return bit_hashes(list(model.parameters())).tolist(), guard, len(device.fired)


def test_a_wrong_first_gradient_that_torch_made_is_healed() -> None:
    clean, guard, _ = trained(lambda loss, _: loss.backward())
    assert not guard.verdicts
    healed, guard, fired = trained(lambda loss, _: loss.backward(), FAULT)
    assert fired == 1
    assert [(v.cause, v.action) for v in guard.verdicts] == [("transient_hardware", "healed")]
    assert healed == clean


def test_a_first_gradient_that_the_script_gave_is_its_own() -> None:
    def scaled(loss: Tensor, step: int) -> None:
        loss.backward(torch.tensor(1e4 if step == 25 else 1.0))

    def through_grad(loss: Tensor, step: int) -> None:
        torch.autograd.backward([loss], [torch.full((), 1e4)] if step == 25 else None)

    for way in (scaled, through_grad):
        _, guard, _ = trained(way)
        assert not guard.verdicts
        assert guard.coverage()["suspicions"] == guard.coverage()["dismissed"] >= 1
