"""Weight decay in one run's optimizer, and by hand in the other's script: the same, or not."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import bitwitness as bw

DECAY = 0.01


class Tied(nn.Module):
    """Tokens are looked up, or multiplied as one-hot vectors; the head has the same weights."""

    def __init__(self, *, looked_up: bool) -> None:
        super().__init__()
        self.emb, self.norm, self.looked_up = nn.Embedding(40, 20), nn.LayerNorm(20), looked_up

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.emb(ids) if self.looked_up else F.one_hot(ids, 40).float() @ self.emb.weight
        return F.linear(self.norm(x.cumsum(1)), self.emb.weight)


def recorded(out: Path, optimizer: str, *, by_hand: float | None, looked_up: bool = True) -> Path:
    torch.manual_seed(0)
    model = Tied(looked_up=looked_up)
    make = {"Adam": torch.optim.Adam, "SGD": torch.optim.SGD}[optimizer]
    step = make(model.parameters(), lr=2e-3, weight_decay=0.0 if by_hand else DECAY)
    draw = torch.Generator().manual_seed(1)
    with bw.Recorder(model, out=out):
        for _ in range(3):
            ids = torch.randint(0, 40, (4, 14), generator=draw)
            F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten()).backward()
            if by_hand:
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter.grad.add_(parameter, alpha=by_hand)
            step.step()
            step.zero_grad()
    return out


@pytest.mark.parametrize("optimizer", ["Adam", "SGD"])
@pytest.mark.parametrize("looked_up", [True, False])
def test_decay_by_hand_accuses_nobody(optimizer: str, looked_up: bool, tmp_path: Path) -> None:
    a = recorded(tmp_path / "a", optimizer, by_hand=None)
    b = recorded(tmp_path / "b", optimizer, by_hand=DECAY, looked_up=looked_up)
    found = bw.compare(a, b)
    assert not found.suspects, found.conclusion
    assert "rounding" in found.conclusion or "reordering" in found.conclusion or "equal" in found.conclusion


@pytest.mark.parametrize("optimizer", ["Adam", "SGD"])
def test_decay_by_hand_that_is_another_is_named(optimizer: str, tmp_path: Path) -> None:
    a = recorded(tmp_path / "a", optimizer, by_hand=None)
    b = recorded(tmp_path / "b", optimizer, by_hand=2 * DECAY)
    found = bw.compare(a, b)
    assert found.suspects
    assert "weight_decay" in found.conclusion or "changed between the backward and the step" in found.conclusion
