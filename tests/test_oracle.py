"""The float64 truth of an operator: which may be asked, how arguments are taken there, and what each dtype allows."""

from __future__ import annotations

import math

import pytest
import torch

from bitwitness.oracle import (
    Discrepancy,
    compare_recorded_with_float64,
    compare_row_with_float64,
    compare_with_float64,
    product_of,
)
from bitwitness.oracle.eligible import draws, functional_operator, is_torchs, is_unique
from bitwitness.oracle.float64 import run_in_float64, to_float64
from bitwitness.oracle.limits import LIMIT, accumulation_roundoff, limit_of, may_overflow
from bitwitness.oracle.worst import gaps, worst_element
from bitwitness.record.operators import arguments_text
from bitwitness.tap.compat import OpOverload
from bitwitness.tap.modules import ModuleTracker
from bitwitness.tap.operators import OpCall, OperatorTap

aten = torch.ops.aten
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def call_of(func: OpOverload, *args: object, **kwargs: object) -> OpCall:
    """Return a call as the tap shows it, with the result of this device."""
    result = func(*args, **kwargs)
    return OpCall(func, args, dict(kwargs), result, func.overloadpacket.__name__, ".", "forward", 0)


def matrices(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    return torch.randn(24, 64, generator=g).to(dtype), torch.randn(64, 40, generator=g).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_three_ways_to_ask_agree_on_a_right_and_on_a_wrong_result(dtype: torch.dtype) -> None:
    a, b = matrices(dtype)
    call = call_of(aten.mm.default, a, b)
    text = arguments_text(call.func, call.args, call.kwargs)

    def judged() -> tuple[bool, bool, bool]:
        product, recorded = product_of(call), compare_recorded_with_float64(text, [a, b], call.result, 0)
        assert product is not None
        assert recorded is not None
        return compare_with_float64(call).outside, recorded.wrong, compare_row_with_float64(product, 7).wrong

    assert judged() == (False, False, False)
    call.result[7, 3] += 50.0
    assert judged() == (True, True, True)
    product, recorded = product_of(call), compare_recorded_with_float64(text, [a, b], call.result, 0)
    assert product is not None
    assert recorded is not None
    exact = float(a[7].double() @ b[:, 3].double())
    row = compare_row_with_float64(product, 7)
    live = compare_with_float64(call)
    assert (row.at, recorded.at, live.at) == (3, 7 * 40 + 3, 7 * 40 + 3)
    assert row.expected == pytest.approx(exact)
    assert recorded.expected == pytest.approx(exact)
    assert live.expected == pytest.approx(exact)


def test_arguments_go_to_float64_whatever_holds_them() -> None:
    given = [torch.ones(2, dtype=torch.bfloat16), (torch.ones(1, dtype=torch.int32), {"x": torch.float16}), 3, None]
    floats, (integers, named), *rest = to_float64(given)
    assert floats.dtype is torch.float64
    assert integers.dtype is torch.int32
    assert named == {"x": torch.float64}
    assert to_float64(torch.int64) is torch.int64
    assert rest == [3, None]


def test_a_cast_inside_an_operator_does_not_leave_float64() -> None:
    (found,) = run_in_float64(aten._to_copy.default, [torch.tensor([1 / 3])], {"dtype": torch.bfloat16})
    assert found.dtype is torch.float64
    assert float(found) == float(torch.tensor(1 / 3))


def test_what_draws_or_has_several_right_results_is_not_compared() -> None:
    x = torch.randn(4, 4)
    assert draws(aten.bernoulli.p, (x, 0.5), {})
    assert not draws(aten.mm.default, (x, x), {})
    attention = aten._scaled_dot_product_flash_attention_for_cpu.default
    q = x[None, None]
    assert not draws(attention, (q, q, q), {})
    assert draws(attention, (q, q, q, 0.5), {})
    assert is_unique(aten.mm.default)
    assert not is_unique(aten._linalg_svd.default)
    assert is_torchs(aten.mm.default)
    for call in (call_of(aten.bernoulli.p, x, 0.5), call_of(aten._linalg_svd.default, x)):
        found = compare_with_float64(call)
        assert not found.comparable
        assert not found.outside
        assert "not recomputed" in found.reason


@pytest.mark.parametrize("name", ["aten.mm.default", "aten.native_layer_norm.default", "aten._softmax.default"])
def test_a_recording_may_have_a_functional_operator_run(name: str) -> None:
    func = functional_operator(name)
    assert func is not None
    assert str(func) == name


@pytest.mark.parametrize(
    "name",
    [
        "aten.add_.Tensor",  # changes an argument
        "aten.bernoulli.p",
        "aten.from_file.default",
        "aten.full.default",
        "aten.mm.nothing",
        "prims.add.default",
        "aten.mm",
        "os.system.default",
        "",
    ],
)
def test_nothing_else_is_run_for_a_recording(name: str) -> None:
    assert functional_operator(name) is None


def test_gaps_of_infinities_and_nans() -> None:
    inf, nan = math.inf, math.nan
    value = torch.tensor([inf, inf, nan, 1.0, nan], dtype=torch.float64)
    expected = torch.tensor([inf, -inf, 1.0, 1.5, nan], dtype=torch.float64)
    assert gaps(value, expected).tolist() == [0.0, inf, inf, 0.5, inf]
    defined = torch.tensor([True, True, False, True, False])
    assert gaps(value, expected, defined).tolist() == [0.0, inf, 0.0, 0.5, 0.0]


def test_the_worst_element_is_the_one_furthest_beyond_its_own_bound() -> None:
    expected = torch.tensor([100.0, 1.0, math.nan], dtype=torch.float64)
    value = torch.tensor([101.0, 1.1, math.nan], dtype=torch.float64)
    worst = worst_element(value, expected, torch.tensor([10.0, 0.01, 0.0], dtype=torch.float64))
    assert (worst.at, worst.value, worst.expected) == (1, 1.1, 1.0)
    assert worst.ratio == pytest.approx(10.0)
    assert worst.wrong
    empty = torch.zeros(0, dtype=torch.float64)
    assert not worst_element(empty, empty, empty).wrong
    assert worst_element(value * 0 + math.nan, expected, expected).ratio == math.inf


def test_limits_follow_the_coarsest_dtype_and_sums_the_accumulator() -> None:
    low, full = torch.ones(1, dtype=torch.bfloat16), torch.ones(1)
    assert limit_of([full, low]) == LIMIT[torch.bfloat16]
    assert limit_of([full.double()]) == LIMIT[torch.float64] == LIMIT[torch.float32]  # accelerators may compute in that
    assert limit_of([full.int()]) == 0.0
    assert accumulation_roundoff(torch.bfloat16) == accumulation_roundoff(torch.float32) == 2.0**-24
    assert accumulation_roundoff(torch.float64) == 2.0**-53


def test_inputs_that_may_overflow_convict_nobody() -> None:
    large = torch.full((4, 4), 3e38)
    call = call_of(aten.mm.default, large, large)
    assert may_overflow(call.outputs, [large])
    assert not may_overflow(call.outputs, [torch.ones(4)])
    assert compare_with_float64(call).reason == "its inputs are large enough to overflow"


def test_an_operator_that_changes_its_arguments_leaves_them_alone_when_it_is_asked_about() -> None:
    before = torch.tensor([1.0, 2.0])
    changed = before.clone().mul_(3)
    call = OpCall(aten.mul_.Scalar, (before, 3), {}, changed, "mul_", ".", "forward", 0)
    assert compare_with_float64(call) == Discrepancy(
        comparable=True, allowed=LIMIT[torch.float32], value=3.0, expected=3.0
    )
    assert before.tolist() == [1.0, 2.0]


@pytest.mark.parametrize("kind", [{}, {"bidirectional": True, "batch_first": True}, {"bias": False}, {"num_layers": 2}])
@pytest.mark.parametrize("read", ["all", "last", "cell"])
def test_float64_is_asked_of_lstm_layers_too(kind: dict[str, object], read: str) -> None:
    found: list[tuple[str, Discrepancy, Discrepancy]] = []

    def look(call: OpCall) -> None:
        right = compare_with_float64(call)
        flat = call.outputs[0].view(-1)
        was = flat[3].item()
        flat[3] = was + 1
        found.append((call.op, right, compare_with_float64(call)))
        flat[3] = was

    torch.manual_seed(0)
    layer, x = torch.nn.LSTM(12, 16, **kind), torch.randn(5, 7, 12, requires_grad=True)
    with OperatorTap(ModuleTracker(), look, lambda func: "rnn_layer" in str(func)):
        y, (h, c) = layer(x)
        {"all": y, "last": h, "cell": c}[read].square().sum().backward()
    assert {op for op, _, _ in found} == {"mkldnn_rnn_layer", "mkldnn_rnn_layer_backward"}
    for op, right, wrong in found:
        assert right.comparable, right.reason
        assert right.repeats, op
        assert right.error < 1e-5
        assert wrong.outside
        assert wrong.at == 3
