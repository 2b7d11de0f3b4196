"""What Triton's kernels find of tensors on an accelerator is what a CPU finds; nothing waits for the device."""

from __future__ import annotations

import math
import warnings
from pathlib import Path

import pytest
import torch

import bitwitness as bw
from bitwitness.stats import figures_of, sketch
from bitwitness.stats.launches import FIGURES, Launches, kernels

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available() or kernels() is None, reason="needs a CUDA device and Triton"),
]
KINDS = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int8, torch.bool]


def found_of(tensors: list[torch.Tensor]) -> dict[int, dict[str, float]]:
    launches = Launches(torch.device("cuda", 0))
    for key, values in enumerate(tensors):
        assert launches.takes(values)
        assert launches.add(key, values, signed=True)
    return {
        key: dict(zip(FIGURES, row, strict=True))
        for joined in launches.join()
        for key, row in zip(joined.keys, joined.figures.tolist(), strict=True)
    }


@pytest.mark.parametrize("dtype", KINDS)
def test_a_device_finds_what_a_cpu_finds(dtype: torch.dtype) -> None:
    counts = (1, 31, 2048, 32_768, 32_769, 500_003, 9_000_001)
    here = [(torch.randn(count) * 9).to(dtype) for count in counts]
    for found, values in zip(found_of([value.cuda() for value in here]).values(), here, strict=True):
        exact = values.double()
        norm = float(exact.norm())
        assert (found["low"], found["high"]) == (exact.min(), exact.max())
        assert found["there"] == (exact != 0).sum()
        assert math.sqrt(found["squares"]) == pytest.approx(norm, rel=1e-6)
        assert found["total"] == pytest.approx(float(exact.sum()), abs=1e-6 * norm * values.numel() ** 0.5)
        assert found["signed"] == pytest.approx(float(sketch(exact)), abs=1e-5 * norm)


def test_what_is_not_finite_is_counted_and_the_rest_measured() -> None:
    values = torch.ones(70_000)
    values[3], values[40_000], values[-1] = math.nan, math.inf, -math.inf
    found = found_of([values.cuda(), torch.full((5,), math.nan).cuda()])
    assert [found[0][name] for name in FIGURES[:8]] == [1, 1, 1, 70_000, 1, 1, 69_997, 69_997]
    (row, other) = figures_of([values.cuda(), torch.full((5,), math.nan).cuda()], zeros=True).tolist()
    assert row[:6] == [1, 2, 0, 1, 1, 69_997]
    assert other[0] == 5
    assert math.isnan(other[3])


def test_the_same_values_give_the_same_bits_on_any_stream() -> None:
    values = torch.randn(3_000_001, device="cuda")
    first = found_of([values, values])
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    launches = Launches(values.device)
    launches.add(0, values, signed=True)
    with torch.cuda.stream(stream):
        launches.add(1, values, signed=True)
    rows = {key: row for one in launches.join() for key, row in zip(one.keys, one.figures.tolist(), strict=True)}
    assert list(first[0].values()) == list(first[1].values()) == rows[0] == rows[1]


def test_a_recording_and_a_monitor_of_a_training_wait_for_nothing(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(300, 300), torch.nn.ReLU(), torch.nn.Linear(300, 3)).cuda()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    batch = torch.randn(64, 300, device="cuda")

    def step() -> None:
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    with bw.Recorder(model, out=tmp_path / "run"), bw.Monitor(model, out=tmp_path / "monitored"):
        step()
        with warnings.catch_warnings(record=True) as heard:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            step()
            torch.cuda.set_sync_debug_mode("default")
        step()
    assert not [one for one in heard if "called a synchronizing" in str(one.message).lower()]
    assert not Launches.broken
