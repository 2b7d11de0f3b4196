"""How run B's values were moved is said where the values were kept."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import bitwitness as bw
from bitwitness.comparison.measuring.order import order_in_words

X = torch.randn(6, 3, 5, 5, generator=torch.Generator().manual_seed(0))
MOVED: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], str]] = {
    "flip": (lambda x: x.flip(3), "flipped along dimension 3"),
    "transpose": (lambda x: x.transpose(2, 3).contiguous(), "transposed (dimensions 2 and 3)"),
    "roll": (lambda x: x.roll(2, 0), "rolled by 2 along dimension 0"),
    "roll back": (lambda x: x.roll(-1, 2), "rolled by -1 along dimension 2"),
    "channels": (lambda x: x[:, [2, 1, 0]], "slices 0 and 2 of dimension 1 swapped"),
    "batch": (lambda x: x[[1, 2, 0, 4, 5, 3]], "permuted along dimension 0, 6 of 6 slices"),
    "shift": (
        lambda x: torch.cat([x[1:], torch.zeros_like(x[:1])]),
        "shifted by 1 towards the beginning of dimension 0",
    ),
    "late": (
        lambda x: torch.cat([torch.zeros_like(x[:, :, :2]), x[:, :, :-2]], 2),
        "shifted by 2 towards the end of dimension 2",
    ),
    "reshape": (lambda x: x.reshape(6, 15, 5), "the same values in another shape"),
}


@pytest.mark.parametrize("name", MOVED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64, torch.int64])
def test_a_movement_is_named(name: str, dtype: torch.dtype) -> None:
    move, words = MOVED[name]
    x = (X * 100_000).to(dtype)
    assert order_in_words(x, move(x)) == words


@pytest.mark.parametrize(
    "other",
    [X, X + 1e-6, torch.zeros_like(X), X.double(), X[:3], torch.randn(6, 3, 5, 5), torch.full_like(X, torch.nan)],
)
def test_what_was_not_moved_is_not_said_to_be(other: torch.Tensor) -> None:
    assert order_in_words(X, other) is None


def test_nan_and_infinity_are_moved_too() -> None:
    x = X.clone()
    x[0, 0, 0, 0], x[1, 2, 3, 4] = torch.nan, torch.inf
    assert order_in_words(x, x.flip(0)) == "flipped along dimension 0"


@pytest.mark.parametrize("name", ["flip", "channels", "batch"])
def test_a_report_says_how_a_batch_was_moved(name: str, tmp_path: Path) -> None:
    move, words = MOVED[name]
    for side, data in (("a", X), ("b", move(X).contiguous())):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(36, 2))
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        with bw.Recorder(net, out=tmp_path / side, level="mix", content="tensors"):
            net(data).square().mean().backward()
            optimizer.step()
    found = bw.compare(tmp_path / "a", tmp_path / "b")
    assert "input" in found.conclusion
    if name == "batch":  # of which nothing is left in the gradients
        assert found.status == "fine"
        assert "holds the same values in another order" in found.conclusion
    else:
        assert found.status == "findings"
        assert words in found.conclusion
