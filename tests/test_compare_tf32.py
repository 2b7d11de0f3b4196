"""TF32, to which CUDA rounds what convolutions read by default: told from float32, and a fault behind it found.

There is no such device here: a dispatch mode rounds what convolutions read to 11 significant bits, and the recorder is told so.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import bitwitness as bw

PRECISION = "bitwitness.record.operators._precision"


def rounded(x: Any) -> Any:
    """Round to nearest, ties to even, 10 bits after the point."""
    if not isinstance(x, torch.Tensor) or x.dtype is not torch.float32:
        return x
    bits = x.contiguous().view(torch.int32)
    return ((bits + 0xFFF + ((bits >> 13) & 1)) & ~0x1FFF).view(torch.float32)


class TensorFloat32(TorchDispatchMode):
    """Convolutions as a device with TF32 computes them."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if "convolution" in str(func):
            args = tuple(map(rounded, args))
        return func(*args, **(kwargs or {}))


class Net(nn.Module):
    """Two convolutions with batch norms and ReLUs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 16, 3, padding=1)
        self.norm, self.other = nn.BatchNorm2d(16), nn.BatchNorm2d(16)
        self.relu, self.head = nn.ReLU(), nn.Linear(16, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.relu(self.norm(self.first(x)))
        x = x + self.relu(self.other(self.second(x)))
        return self.head(x.mean((2, 3)))


Change = Callable[[Net], None]


def nudged(net: Net) -> None:
    """Move one weight by an ulp or so, as another order of summation would its gradient."""
    with torch.no_grad():
        net.first.weight.view(-1)[0] *= 1 + 2e-7


def spoiled(net: Net) -> None:
    with torch.no_grad():
        net.second.weight[3] *= 1.5


@pytest.fixture
def recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Record three steps."""

    def run(name: str, content: str, *, reduced: bool, change: Change | None = None) -> Path:
        torch.manual_seed(0)
        net = Net()
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
        generator = torch.Generator().manual_seed(1)
        if change is not None:
            change(net)
        with monkeypatch.context() as patched, TensorFloat32() if reduced else nullcontext():
            if reduced:
                patched.setattr(PRECISION, lambda call: "tf32" if "convolution" in call.op else "")
            with bw.Recorder(net, out=tmp_path / name, content=content):
                for _ in range(3):
                    x, y = (
                        torch.randn(8, 3, 12, 12, generator=generator),
                        torch.randint(0, 10, (8,), generator=generator),
                    )
                    optimizer.zero_grad()
                    nn.functional.cross_entropy(net(x), y).backward()
                    optimizer.step()
        return tmp_path / name

    return run


@pytest.mark.parametrize("content", ["stats", "tensors"])
def test_tf32_against_float32_is_rounding_of_tf32(recorded: Callable[..., Path], content: str) -> None:
    report = bw.compare(recorded("a", content, reduced=False), recorded("b", content, reduced=True))
    assert report.status == "fine"
    assert report.suspects == []
    assert report.conclusion.startswith("rounding of tf32: the runs compute in float32 against tf32")


@pytest.mark.parametrize("content", ["stats", "tensors"])
def test_two_runs_in_tf32_differ_by_what_it_rounds(recorded: Callable[..., Path], content: str) -> None:
    report = bw.compare(recorded("a", content, reduced=True), recorded("b", content, reduced=True, change=nudged))
    assert report.status == "fine"
    assert report.suspects == []


@pytest.mark.parametrize("content", ["stats", "tensors"])
@pytest.mark.parametrize("reduced", [(False, True), (True, True)])
def test_a_fault_behind_tf32_is_found(recorded: Callable[..., Path], content: str, reduced: tuple[bool, bool]) -> None:
    first, second = (
        recorded(f"{i}", content, reduced=one, change=c)
        for i, (one, c) in enumerate(zip(reduced, (None, spoiled), strict=True))
    )
    report = bw.compare(first, second)
    assert report.status == "findings"
    assert "second.weight" in report.conclusion
