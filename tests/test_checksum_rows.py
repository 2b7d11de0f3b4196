"""Casts, sums, layer norms and softmax: a wrong row is found, and a healthy one never suspected."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from extent import chosen
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from watching import found_in, watched

from bitwitness.sense import checksum_rownorms, checksum_rows
from bitwitness.sense.checksum import ChecksumSensor
from bitwitness.tap.modules import ModuleTracker
from bitwitness.tap.operators import OpCall, OperatorTap

CHECKS = {**checksum_rows.CHECKS, **checksum_rownorms.CHECKS}
CHECKS.pop("_fused_rms_norm")  # an accelerator's
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
ROWS = 66


def numbers(dtype: torch.dtype, columns: int, mean: float, size: float, seed: int) -> list[Tensor]:
    """Return activations, a weight and a bias."""
    g = torch.Generator().manual_seed(seed)
    x = (torch.randn(2, ROWS // 2, columns, generator=g) + mean) * size
    w, b = torch.randn(columns, generator=g) + 1, torch.randn(columns, generator=g)
    return [t.to(dtype).requires_grad_() for t in (x, w, b)]


def block(x: Tensor, w: Tensor, b: Tensor) -> None:
    """Run all of these operators, forward and backward, as a model would."""
    y = F.layer_norm(x, x.shape[-1:], w, b)
    y = (y + x) * w
    y = (y - b) / 1.5
    y = x * y * 0.5
    y = y * y.mean(-1, keepdim=True)
    p, q = torch.ops.aten._safe_softmax(0.01 * y, -1).softmax(-1), y.log_softmax(-1)
    target = torch.arange(ROWS) % x.shape[-1]
    loss = (
        F.cross_entropy(y.flatten(0, 1).float(), target)
        + (p * x.detach()).sum().float()
        + (q.float() * p.detach()).sum()
    )
    loss.backward()
    x.detach().to(torch.bfloat16).float()


@given(
    st.sampled_from(DTYPES), st.integers(16, 700), st.sampled_from([0.0, 3.0, 100.0]),
    st.sampled_from([1.0, 1e-3, 1e-7, 30.0]), st.integers(0, 1 << 20),
)  # fmt: skip
@settings(max_examples=chosen(200, 25), deadline=None)
def test_healthy_rows_are_never_suspected(
    dtype: torch.dtype, columns: int, mean: float, size: float, seed: int
) -> None:
    found, _ = watched(lambda: block(*numbers(dtype, columns, mean, size, seed)))
    assert not [one.message for one in found if one.sensor == "checksum"]


def test_rows_of_equal_numbers_are_not_suspected_though_all_of_them_are_rounded_alike() -> None:
    for dtype in DTYPES:
        for value in (0.1, 1.1, 1 / 3, 0.0):
            x, w, b = (torch.full(shape, value).to(dtype).requires_grad_() for shape in ((2, 33, 640), (640,), (640,)))
            found, _ = watched(lambda x=x, w=w, b=b: block(x, w, b))
            assert not [one.message for one in found if one.sensor == "checksum"]


def test_gradients_of_a_layer_norm_under_autocast_are_not_suspected() -> None:
    """torch's CPU kernel adds gradients of bfloat16 rows up in bfloat16, and gives them to float32 weights."""
    norm, inner = torch.nn.LayerNorm(64), torch.nn.Linear(64, 64)

    def run() -> None:
        with torch.autocast("cpu", torch.bfloat16):
            loss = norm(inner(torch.randn(512, 64))).square().sum()
        loss.backward()

    assert not [one.message for one in watched(run)[0] if one.sensor == "checksum"]


def test_a_deviation_that_a_whole_row_was_divided_by_is_checked() -> None:
    def spoil(call: OpCall) -> None:
        if call.op == "native_layer_norm":
            with torch.no_grad():
                call.outputs[0].view(-1, 96)[7] *= 1.5
                call.outputs[2].view(-1)[7] *= 1.5

    found, _ = watched(lambda: F.layer_norm(torch.randn(64, 96) + 1, (96,)), spoil)
    assert found[0].evidence["row"] == 7


@pytest.mark.parametrize("dtype", DTYPES[:2])
def test_an_accelerator_s_rms_norm_is_checked(dtype: torch.dtype) -> None:
    """The CPU takes it apart; here it is shown a call of it whose results were computed apart."""
    func, sensor = torch.ops.aten._fused_rms_norm.default, ChecksumSensor()
    x, w = (torch.randn(*shape, generator=torch.Generator().manual_seed(1)).to(dtype) for shape in ((64, 96), (96,)))
    for wrong, deviation in ((1.0, 1.0), (-30.0, 1.0), (1.5, 1.5)):
        rstd = (x.float().square().mean(-1, keepdim=True) + 1e-5).rsqrt()
        out = (x.float() * rstd * w.float()).to(dtype)
        out[7] *= wrong
        rstd[7] *= deviation
        sensor(OpCall(func, (x, [96], w, 1e-5), {}, (out, rstd), "_fused_rms_norm", ".", "forward", 0))
        found = sensor.drain(0, 0)
        assert [one.evidence["row"] for one in found] == [7.0] * (wrong != 1)


def test_all_of_these_operators_were_checked() -> None:
    _, checked = watched(lambda: block(*numbers(torch.bfloat16, 64, 0.0, 1.0, 0)))
    assert set(CHECKS) <= set(checked)


@pytest.mark.parametrize(("rows", "each"), [(600, 1), (64, 2)], ids=["large", "small"])
def test_each_large_operator_has_its_turn_and_the_small_are_always_checked(rows, each) -> None:
    sensor = ChecksumSensor()
    x = torch.ones(rows, 600)
    for step in range(1, 3):
        with OperatorTap(ModuleTracker(), sensor, sensor.select):
            _ = x + x
            _ = x - x
        sensor.drain(0, 0)
        assert sum(count for count, _ in sensor.checked_calls.values()) == step * each
    assert {op: count for op, (count, _) in sensor.checked_calls.items()} == {"add": each, "sub": each}


def test_flat_parameters_and_narrow_rows_are_left_alone() -> None:
    flat, narrow = torch.ones(1 << 19), torch.ones(4096, 4)
    found, checked = watched(lambda: (flat + flat, narrow * narrow, flat.bfloat16()))
    assert not found
    assert checked == {}


def test_masked_and_overflowing_rows_are_not_suspected() -> None:
    def run() -> None:
        scores = torch.randn(4, 16, 32)
        scores.masked_fill(torch.ones(16, 32, dtype=torch.bool).triu(1), float("-inf")).softmax(-1)
        scores.masked_fill(torch.ones(16, 32, dtype=torch.bool), float("-inf")).log_softmax(-1)
        large = torch.full((64, 64), 6e4, dtype=torch.float16)
        _ = large + large
        _ = large * large
        torch.full((64, 64), 1e6).half()
        torch.full((64, 64), 1e-7).half()
        x = torch.randn(64, 64)
        torch.add(x, x, out=x)

    assert not watched(run)[0]


def _times_thirty(out: Tensor) -> None:
    out.view(-1, out.shape[-1])[7, 8:40] *= -30.0


def _exchanged(out: Tensor) -> None:
    row = out.view(-1, out.shape[-1])[7]
    row[8:40] = row[8:40].roll(5)


def _one_is_large(out: Tensor) -> None:
    row = out.view(-1, out.shape[-1])[7]
    row[11] = 8 * row.abs().max() + 1


@pytest.mark.parametrize("spoil", [_times_thirty, _exchanged, _one_is_large])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_wrong_rows_are_found_where_they_are(spoil: Callable[[Tensor], None], dtype: torch.dtype) -> None:
    """A softmax whose probabilities change places still sums to one, and gradients to nothing."""
    backwards = {op for op in CHECKS if "backward" in op}
    unseen = {"_softmax", "_safe_softmax", *backwards} if spoil is _exchanged else set[str]()
    for op in sorted(set(CHECKS) - unseen):
        done = []

        def struck(call: OpCall, op: str = op, done: list[str] = done) -> None:
            out = call.outputs[0]
            if call.op == op and not done and out.numel() >= 1024 and out.is_contiguous():
                done.append(str(call.site()).split("@")[0])
                with torch.no_grad():
                    spoil(out.detach())

        found, _ = watched(lambda: block(*numbers(dtype, 96, 0.0, 1.0, 3)), struck)
        first = next((one for one in found if one.sensor == "checksum"), None)
        assert first is not None, done
        assert str(first.site).startswith(done[0])
        assert first.evidence["row"] == 7
        assert "computed a wrong result" in first.message


@pytest.mark.parametrize("slot", [1, 2])
def test_wrong_gradients_of_a_layer_norm_s_weights_are_found(slot: int) -> None:
    def run() -> None:
        block(*numbers(torch.float32, 96, 0.0, 1.0, 3))

    found = found_in(run, "native_layer_norm_backward", slot, lambda out: out[8:12].mul_(-30))
    assert ("dw s" if slot == 1 else "db s") in found.message
