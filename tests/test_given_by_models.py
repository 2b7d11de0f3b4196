"""NaN that one model gives to another: the one that made it is blamed, and no data."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

import bitwitness as bw


def test_what_another_model_computed_is_not_called_a_bad_batch(tmp_path: Path) -> None:
    torch.manual_seed(0)
    body, head = nn.Linear(8, 16), nn.Linear(16, 1)
    optimizer = torch.optim.SGD([*body.parameters(), *head.parameters()], lr=0.01)
    with bw.Guard(head, optimizer, out=tmp_path / "run", quiet=True, self_test=False) as guard:
        for step in range(8):
            hidden = body(torch.randn(4, 8))
            if step == 6:
                hidden = hidden * float("inf")
            head(hidden).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    first = next(one for one in guard.findings if one.evidence.get("kind") == "given")
    assert "what the model was given was not finite, and was computed before it" in first.message
    assert "look at what computes it, before this model" in first.message
    assert {str(verdict.cause) for verdict in guard.verdicts}.isdisjoint({"data", "software"})


def test_a_bad_batch_is_called_one(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with bw.Guard(model, optimizer, out=tmp_path / "run", quiet=True, self_test=False) as guard:
        for step in range(8):
            model(torch.randn(4, 8) * (float("inf") if step == 6 else 1.0)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert str(guard.verdicts[0].cause) == "data"
