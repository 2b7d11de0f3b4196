"""The L2 norms of a recording: as exact for large tensors as for small ones, whatever the dtype."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

import bitwitness as bw
from bitwitness.stats import read, reader, sketch, sketch_of
from bitwitness.stats.parts import PART


@pytest.fixture(params=["compiled", "torch"], autouse=True)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Read with the compiled reader, and as where the package was built without one."""
    if request.param == "torch":
        monkeypatch.setattr("bitwitness.stats.reader.built", lambda: None)
    elif reader.built() is None:
        pytest.skip("needs a C compiler where the package was built")


@pytest.mark.parametrize("count", [1, 4095, PART, PART + 1, (1 << 20) + 77, (1 << 24) + 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_long_tensors_figures_are_right(count: int, dtype: torch.dtype) -> None:
    values = (torch.rand(count, dtype=dtype) + 0.5).to(dtype)
    values[count // 2] = -7.0
    found, exact = read(values, signed=True, zeros=True), values.double()
    assert (found.low, found.high, found.there) == (exact.min(), exact.max(), count)
    rel = {torch.float64: 1e-12, torch.float32: 1e-6, torch.bfloat16: 1e-5}[dtype]  # few bits: sums all round one way
    rel = max(rel, 1e-4) if count <= PART and dtype != torch.float64 else rel
    assert math.sqrt(found.squares) == pytest.approx(float(exact.norm()), rel=rel)
    assert found.total == pytest.approx(float(exact.sum()), rel=rel)
    assert found.signed == pytest.approx(float(sketch(exact)), abs=1e-5 * float(exact.norm()))


@given(
    st.integers(1, 3 * PART), st.sampled_from([torch.float32, torch.bfloat16, torch.float16]), st.integers(0, 1 << 30)
)
@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_sketch_that_is_taken_alone_is_the_one_that_was_read(count: int, dtype: torch.dtype, seed: int) -> None:
    values = torch.randn(count, generator=torch.Generator().manual_seed(seed)).to(dtype)
    assert sketch_of(values) == read(values, signed=True).signed


def test_what_is_not_finite_is_not_finite() -> None:
    values = torch.ones(1 << 19)
    values[-1] = torch.inf
    found = read(values, signed=True)
    assert found.squares == found.total == torch.inf
    assert found.signed is not None
    assert not math.isfinite(found.signed)
    values[3] = torch.nan
    assert math.isnan(read(values).squares)
    assert math.isnan(read(values).total)


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
