"""Activation checkpointing: what is recomputed otherwise is a suspicion, and a replay tells who was wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from bitwitness import Guard
from bitwitness.testing import FaultyDevice, from_mapping

STEPS = 8


class Net(nn.Module):
    """Three blocks, each a checkpointed region; ``how`` runs a block."""

    def __init__(self, how: Callable[[nn.Module, torch.Tensor], torch.Tensor], drop: float = 0.1) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Dropout(drop), nn.Linear(16, 16))
            for _ in range(3)
        )
        self.how = how
        self.first = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + self.how(block, x)
        return x.square().mean()


def plain(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return block(x)


def reentrant(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return checkpoint(block, x, use_reentrant=True)


def without(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return checkpoint(block, x, use_reentrant=False)


def selective(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
    def contexts() -> Any:
        return create_selective_checkpoint_contexts([torch.ops.aten.addmm.default])

    return checkpoint(block, x, use_reentrant=False, context_fn=contexts)


def wrapped(kind: CheckpointImpl) -> Callable[[], Net]:
    def make() -> Net:
        net = Net(plain)
        for index, block in enumerate(net.blocks):
            net.blocks[index] = checkpoint_wrapper(block, kind)
        return net

    return make


KINDS = {
    "reentrant": lambda: Net(reentrant),
    "without reentrance": lambda: Net(without),
    "selective": lambda: Net(selective),
    "wrapper": wrapped(CheckpointImpl.NO_REENTRANT),
    "reentrant wrapper": wrapped(CheckpointImpl.REENTRANT),
}


def train(make: Callable[[], nn.Module], *, guarded: bool, **settings: Any) -> tuple[list[torch.Tensor], Guard | None]:
    torch.manual_seed(0)
    net = make()
    optimizer = torch.optim.AdamW(net.parameters(), 0.01)
    batches = torch.Generator().manual_seed(1)
    guard = Guard(net, optimizer, deep_every=1, quiet=True, **settings) if guarded else None
    if guard is not None:
        guard.start()
    for _ in range(STEPS):
        net(torch.randn(8, 16, generator=batches)).backward()
        optimizer.step()
        optimizer.zero_grad()
    bits = [value.clone() for value in net.state_dict().values()] + [torch.get_rng_state()]
    if guard is not None:
        guard.close()
    return bits, guard


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_recomputations_are_compared_and_change_nothing(kind: str) -> None:
    clean, _ = train(KINDS[kind], guarded=False)
    bits, guard = train(KINDS[kind], guarded=True)
    table = guard.coverage()
    assert same(bits, clean)
    assert table["recompute"]["regions"] == 3
    assert table["recompute"]["recomputations_compared"] == 3 * (STEPS - 1)  # a first forward is not looked at
    # BatchNorm saves its running mean and variance, which each execution moves
    assert set(table["recompute"]["do_not_repeat"].values()) <= {2}
    assert not [f for f in guard.findings if f.sensor == "recompute"]
    assert not table["failures"]


@pytest.mark.parametrize("kind", ["reentrant", "without reentrance"])
@pytest.mark.parametrize("execution", [0, 1])
def test_a_wrong_execution_of_either_kind_is_seen_and_healed(kind: str, execution: int) -> None:
    fault = {"site": f"blocks.1.0/addmm#{execution}:forward", "kind": "add", "value": 0.01, "pattern": "all"}
    clean, _ = train(KINDS[kind], guarded=False)
    with FaultyDevice(from_mapping({"fault": [{**fault, "steps": [6], "times": 1}]})) as device:
        bits, guard = train(KINDS[kind], guarded=True, act="protect", trend={"enabled": False}, checksum={"enabled": False})
    assert len(device.fired) == 1
    (finding,) = [f for f in guard.findings if f.sensor == "recompute"]
    assert finding.step == 6
    assert ".#1" in finding.message or "blocks.1" in finding.message
    assert [str(v.cause) for v in guard.verdicts] == ["transient_hardware"], guard.verdicts
    assert same(bits, clean)


def unpreserved(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return checkpoint(block, x, use_reentrant=False, preserve_rng_state=False)


def counting(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Compute with how often it was called, as a schedule inside a model does."""

    def region(y: torch.Tensor) -> torch.Tensor:
        block.calls = getattr(block, "calls", 0) + 1
        return block(y) * (1 + block.calls)

    return checkpoint(region, x, use_reentrant=True)


@pytest.mark.parametrize("how", [unpreserved, counting])
def test_regions_that_do_not_repeat_are_left_alone_and_named(how: Callable[..., torch.Tensor]) -> None:
    clean, _ = train(lambda: Net(how, 0.5), guarded=False)
    bits, guard = train(lambda: Net(how, 0.5), guarded=True)
    assert same(bits, clean)
    assert not [f for f in guard.findings if f.sensor == "recompute"]
    assert set(guard.coverage()["recompute"]["do_not_repeat"]) == {".#0", ".#1", ".#2"}
    assert [line for line in guard.coverage()["not_covered"] if line.startswith("recompute: ")]
