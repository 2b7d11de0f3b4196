"""A recording and a trace in one run folder: neither writes over the other's tensors, and both are checked."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import bitwitness as bw
from bitwitness.cli import main


def test_evidence_lies_beside_recorded_tensors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    out = tmp_path / "run"
    with bw.Recorder(net, out=out, content="tensors"), bw.NonfiniteTracer(net, out=out):
        for number in range(3):
            (net(torch.rand(2, 4)).abs() - 1e6 * (number == 0)).log().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    run = bw.Run(out)
    run.check()
    assert run.problems == []
    kept = [row for row in run.rows(step=0).to_pylist() if row["tensor"] is not None]
    assert kept
    for row in kept:
        run.tensor(row)
    (evidence,) = {finding.evidence["tensors"] for finding in run.findings() if "tensors" in (finding.evidence or {})}
    assert all(name.startswith("origin") for name in load_file(out / evidence))
    assert main(["status", str(out)]) == 1
    assert "not known" not in capsys.readouterr().out
