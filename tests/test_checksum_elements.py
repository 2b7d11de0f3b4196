"""Activation functions, powers, copies and constants: a wrong element is found, and a healthy one never suspected."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from extent import chosen
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from watching import found_in, suspected, watched

from bitwitness.sense import checksum
from bitwitness.sense.checksum import ChecksumSensor
from bitwitness.sense.checksum_moves import CHECKS as MOVES
from bitwitness.sense.checksum_wider import CHECKS as WIDER
from bitwitness.tap.modules import ModuleTracker
from bitwitness.tap.operators import OpCall, OperatorTap

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
ACTIVATIONS = (
    F.gelu, lambda x: F.gelu(x, approximate="tanh"), F.silu, F.mish, F.relu, F.leaky_relu, F.elu, F.softplus, F.hardswish,
    F.hardsigmoid, torch.tanh, torch.sigmoid, F.logsigmoid, torch.exp, torch.erf, torch.sin, torch.cos, torch.neg, torch.abs,
    torch.square, lambda x: x.pow(3), lambda x: x.abs().pow(0.3), lambda x: (x.abs() + 1e-6).pow(-2.2), lambda x: 2.0**x,
    lambda x: 1.1**x, lambda x: F.softplus(x, 1.7, 3.3), lambda x: F.threshold(x, 0.1, 0.3), lambda x: F.elu(x, 0.3),
)  # fmt: skip
POSITIVE = (torch.log, torch.log1p, torch.sqrt, torch.rsqrt, torch.reciprocal)


def computed(dtype: torch.dtype, size: float, mean: float, seed: int) -> None:
    """Run everything forward and backward."""
    g = torch.Generator().manual_seed(seed)
    x = (torch.randn(6, 33, generator=g) * size + mean).to(dtype).requires_grad_()
    given = torch.randn(6, 33, generator=g).to(dtype)
    for function in (*ACTIVATIONS, *((lambda x, f=f: f(x.abs() + 1e-3)) for f in POSITIVE)):
        function(x).backward(given)
        x.grad = None
    (x / given / 3.0 / x.detach().abs().sum(-1, keepdim=True) / given[0]).sum().backward()


def moved() -> None:
    g = torch.Generator().manual_seed(3)
    x, y = (torch.randn(4, 9, 16, generator=g) for _ in range(2))
    _ = x.transpose(0, 1).contiguous(), torch.cat([x, y[:2]]), torch.cat([x, y], -1), torch.stack([x, y], 1), x.clone()
    _ = torch.zeros(3, 9), torch.zeros_like(x), x.new_zeros(4), torch.ones(3, 9), torch.ones_like(x), x.new_ones(4)
    _ = torch.full((3, 9), math.pi, dtype=torch.bfloat16), torch.full_like(x, -math.inf), x.new_full((3, 9), math.nan)
    _ = (
        torch.arange(6).view(2, 3).t().contiguous(),
        (x > 0).clone(),
        torch.zeros(0, 3),
        torch.zeros((), dtype=torch.long),
    )
    _ = torch.ones(3, 9).zero_(), torch.ones(3, 9).fill_(0.1)
    queue = torch.zeros(16, 40)
    queue[:, 8:13] = y[0, :5, :].t()
    queue.copy_(torch.arange(40.0)), queue.copy_(torch.arange(640).view(16, 40)), queue[:3].copy_(queue[5:8].bfloat16())
    _ = torch.complex(x, y).clone(), torch.complex(x.double(), y.double()).clone(), torch.cat([x, y.double()])


@given(
    st.sampled_from(DTYPES), st.sampled_from([1.0, 1e-4, 30.0, 0.0, 1e4]), st.sampled_from([0.0, 1.0, -3.0]),
    st.integers(0, 1 << 20),
)  # fmt: skip
@settings(max_examples=chosen(200, 20), deadline=None)
def test_healthy_elements_are_never_suspected(dtype, size, mean, seed) -> None:
    assert not suspected(lambda: computed(dtype, size, mean, seed))


def test_what_is_moved_is_never_suspected() -> None:
    assert not suspected(moved)


def test_all_of_these_operators_were_checked() -> None:
    checked = watched(lambda: computed(torch.float32, 1.0, 0.0, 0))[1]
    assert set(WIDER) <= set(checked)
    assert set(MOVES) <= set(watched(moved)[1])


@pytest.mark.parametrize("op", sorted(WIDER))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_wrong_element_is_found(op, dtype) -> None:
    def spoil(out: Tensor) -> None:
        out[3, 5] = out[3, 5] * 30 + 20

    found = found_in(lambda: computed(dtype, 1.0, 0.0, 3), op, 0, spoil)
    assert found.evidence["row"] == 3
    assert "computed a wrong result" in found.message


@pytest.mark.parametrize("op", sorted(MOVES))
def test_one_bit_that_is_not_where_it_was_sent_is_found(op) -> None:
    def spoil(out: Tensor) -> None:
        if out.dtype.is_floating_point and out.dtype.itemsize == 4:
            out.view(torch.int32)[-1] ^= 1
        else:
            out[0, 1] += 1

    found_in(moved, op, 0, spoil)


def test_of_large_activations_other_rows_are_computed_again_on_each_step() -> None:
    x, sensor, rows = torch.randn(1500, 1000), ChecksumSensor(), []

    def spoil(call: OpCall) -> None:
        call.outputs[0][700:, 7] += 1
        sensor(call)

    for step in range(128):
        with OperatorTap(ModuleTracker(), spoil, sensor.select):
            F.gelu(x)
        rows += [one.evidence["row"] for one in sensor.drain(step, 0)]
    assert len(rows) == len(set(rows)) == 128
    assert min(rows) >= 700
    assert not suspected(lambda: F.gelu(x.t()))


def _sparse() -> None:
    sparse, compressed = torch.eye(8).to_sparse(), torch.eye(8).to_sparse_csr()
    _ = (
        sparse.clone(),
        torch.tanh(sparse),
        sparse + sparse,
        torch.cat([sparse, sparse]),
        compressed.clone(),
        compressed * 2,
    )
    F.embedding(torch.tensor([[1, 2]]), torch.randn(5, 9, requires_grad=True), sparse=True).sum().backward()


def _nested() -> None:
    parts = [torch.randn(3, 16), torch.randn(5, 16)]
    F.gelu(torch.nested.nested_tensor(parts, layout=torch.jagged, requires_grad=True)).clone().values().sum().backward()
    F.relu(torch.nested.nested_tensor(parts)).clone()


def _complex() -> None:
    x = torch.complex(torch.randn(4, 16), torch.randn(4, 16))
    _ = x.conj().clone(), x.imag.clone(), x.conj().imag.clone(), torch.exp(x), torch.full((3, 9), 1 + 2j)


def _others() -> None:
    torch.quantize_per_tensor(torch.randn(4, 16), 0.1, 0, torch.qint8).clone()
    torch.randn(4, 16).to_mkldnn().relu().to_dense()
    torch.randn(4, 16).to(torch.float8_e4m3fn).clone()
    _ = (
        torch.ones(9, dtype=torch.bool) / 3,
        torch.arange(9.0).pow(torch.arange(9)),
        torch.full((3, 9), torch.tensor(2.0)),
    )
    _ = torch.randn(4, 16) / torch.zeros(4, 1), torch.randn(4, 16) / 0.0, torch.randn(1, 16).expand(8, 16).clone()
    F.nll_loss(torch.randn(4, 9, requires_grad=True), torch.tensor([1, 2, 3, 0], dtype=torch.uint8)).backward()
    F.cross_entropy(torch.randn(4, 9), torch.rand(4, 9))
    F.gelu(torch.zeros(4, 0)), torch.cat([torch.zeros(0), torch.ones(4, 9)])
    torch.func.vmap(lambda x: F.gelu(x).sum() + torch.cat([x, x]).sum())(torch.randn(5, 16))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("run", [_sparse, _nested, _complex, _others])
@pytest.mark.parametrize("deferred", [True, False])
def test_tensors_of_other_kinds_are_left_alone(run, deferred) -> None:
    sensor = ChecksumSensor(rows_one_in=1, deferred=deferred)
    with OperatorTap(ModuleTracker(), sensor, sensor.select):
        run()
    assert sensor.drain(0, 0) == []
    assert sensor.failed == {}


def test_an_operator_whose_check_fails_is_left_out_and_the_others_are_not(monkeypatch) -> None:
    def broken(call: OpCall, signs: object) -> None:
        if call.op == "gelu":
            raise RuntimeError("no such strides")
        return checked(call, signs)

    checked = checksum.check_between
    monkeypatch.setattr(checksum, "check_between", broken)
    sensor = ChecksumSensor()
    with OperatorTap(ModuleTracker(), sensor, sensor.select):
        F.gelu(torch.randn(4, 16)) + 1
        F.gelu(torch.randn(4, 16)) + 1
    assert sensor.failed == {"gelu": "RuntimeError: no such strides"}
    assert sensor.checked_calls["add"][0] == 2
