"""The L2 norms of a recording: as exact for large tensors as for small ones, whatever the dtype."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import bitwitness as bw
from bitwitness.stats import quick_l2


@pytest.mark.parametrize("count", [0, 1, 4095, 1 << 18, (1 << 18) + 1, (1 << 20) + 77, (1 << 24) + 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_long_tensors_norm_is_right(count: int, dtype: torch.dtype) -> None:
    values = torch.rand(count, dtype=dtype) + 0.5
    assert quick_l2(values) == pytest.approx(float(values.double().norm()), rel=1e-4 if count <= 1 << 18 else 1e-6)


def test_what_is_not_finite_is_not_finite() -> None:
    values = torch.ones(1 << 19)
    values[-1] = torch.inf
    assert quick_l2(values) == torch.inf
    values[3] = torch.nan
    assert quick_l2(values) != quick_l2(values)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_evaluations_and_trainings_are_recorded_alike(dtype: torch.dtype, tmp_path: Path) -> None:
    # memory for half types is made in whichever comes first
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 700), nn.Tanh(), nn.Linear(700, 3)).to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(3, 64).to(dtype)
    seen: dict[str, torch.Tensor] = {}
    model[1].register_forward_hook(lambda _m, _a, out: seen.update(out=out.detach().clone()))
    with bw.Recorder(model, out=tmp_path / "run", level="modules"):
        with torch.inference_mode():
            model(x)
        for _ in range(2):
            model(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    rows = bw.Run(tmp_path / "run").rows().to_pylist()
    (last,) = [
        r for r in rows if r["module"] == "1" and r["slot"] == "out0" and r["step"] == 1 and r["phase"] == "forward"
    ]
    for row in rows:
        assert row["l2"] is not None, row
    assert last["l2"] == pytest.approx(float(seen["out"].double().norm()), rel=1e-5)
    assert (last["min"], last["max"]) == (float(seen["out"].min()), float(seen["out"].max()))
