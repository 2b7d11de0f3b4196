"""Activation checkpointing: what is recomputed otherwise is a suspicion, and a replay tells who was wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from bitwitness import Guard
from bitwitness.tap.compat import current_node

STEPS = 8
ALONE = {name: {"enabled": False} for name in ("trend", "checksum", "twice", "nonfinite")}


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


def train(
    make: Callable[[], nn.Module], *, guarded: bool, device: Any = None, **settings: Any
) -> tuple[list[torch.Tensor], Guard | None]:
    torch.manual_seed(0)
    net = make()
    optimizer = torch.optim.AdamW(net.parameters(), 0.01)
    batches = torch.Generator().manual_seed(1)
    guard = Guard(net, optimizer, deep_every=1, **{"quiet": True, **settings}) if guarded else None
    if guard is not None:
        guard.start()
    for step in range(STEPS):
        STEP[0] = step
        if device is not None:
            device.products = 0
        net(torch.randn(8, 16, generator=batches)).backward()
        optimizer.step()
        optimizer.zero_grad()
    bits = [value.detach().clone() for value in [*net.parameters(), *net.buffers(), torch.get_rng_state()]]
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


class Device(TorchDispatchMode):
    """A device that spoils one product of step 6: of the first forward, or the first one that is recomputed."""

    __module__ = "bitwitness.testing"  # no mode of the script's: what those do in a replay is not known

    def __init__(self, *, again: bool) -> None:
        super().__init__()
        self.again, self.products, self.struck = again, 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.addmm.default:
            self.products += 1
            due = current_node() is not None if self.again else self.products == 4
            if STEP == [6] and due and not self.struck:
                result[1, 3] += 5.0
                self.struck += 1
        return result


STEP = [0]


@pytest.mark.parametrize("kind", ["reentrant", "without reentrance", "wrapper"])
@pytest.mark.parametrize("again", [False, True])
def test_a_wrong_execution_of_either_kind_is_seen_and_healed(kind: str, again: bool) -> None:
    clean, _ = train(KINDS[kind], guarded=False)
    with Device(again=again) as device:
        bits, guard = train(KINDS[kind], guarded=True, device=device, act="protect", **ALONE)
    assert device.struck == 1
    (finding,) = [f for f in guard.findings if f.sensor == "recompute"]
    assert finding.step == 6
    assert finding.message.startswith("activation checkpointing in ")
    assert [str(v.cause) for v in guard.verdicts] == ["transient_hardware"], guard.verdicts
    # BatchNorm's statistics are moved by the recomputation, too, and a heal leaves them as they are.
    assert same(bits[:20], clean[:20])


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
