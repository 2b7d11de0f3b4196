"""Models that a script saves or copies whole while they are watched: as without bitwitness."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from torch import nn

import bitwitness as bw


class Tagger(nn.Module):
    """An LSTM, which says itself what is pickled of it, and a head with a hook of the user's."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.LSTM(4, 8), nn.Linear(8, 2)
        self.head.register_forward_hook(unchanged)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x)[0])


def unchanged(_module: nn.Module, _args: Any, result: torch.Tensor) -> torch.Tensor:
    return result


def test_a_model_that_a_script_saves_or_copies_whole_knows_nothing_of_who_watches(tmp_path: Path) -> None:
    net, kinds = Tagger(), (nn.Module, nn.RNNBase)
    before = [dict(vars(kind)) for kind in kinds]
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    x = torch.randn(5, 3, 4)
    recorder, tracer = bw.Recorder(net, out=tmp_path / "recording"), bw.trace_nonfinite(net, optimizer)
    with bw.Guard(net, optimizer), recorder, tracer:
        net(x).square().mean().backward()
        torch.save(net, tmp_path / "net.pt")
        twin = copy.deepcopy(net)
        result = net(x)
        optimizer.step()
    assert b"bitwitness" not in (tmp_path / "net.pt").read_bytes()
    allowed = [Tagger, nn.LSTM, nn.Linear, unchanged]
    with torch.serialization.safe_globals(allowed):
        saved = torch.load(tmp_path / "net.pt", weights_only=True)
    for other in (saved, twin):
        assert torch.equal(other(x), result)
        assert [len(part._forward_hooks) + len(part._forward_pre_hooks) for part in other.modules()] == [0, 0, 1]
    assert [dict(vars(kind)) for kind in kinds] == before
