"""An operator on trial: what is right passes, however it rounds; what is wrong fails, however small its numbers are."""

from __future__ import annotations

import math
import sys

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import bitwitness as bw

HALF = [torch.bfloat16, torch.float16]
FLOATS = [torch.float32, *HALF]


def normal(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def wanting(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return normal(*shape, dtype=dtype, seed=seed).requires_grad_()


def as_given(found: bw.Verification) -> str:
    return found.checks[0].verdict


# -- the blind spots of other tools -----------------------------------------------------------------------------------


def test_small_numbers_are_judged_as_strictly_as_others() -> None:
    small = normal(64, 64) * 1e-4
    assert bw.verify_op(lambda x: x * 1.5, small, lambda x: x + 0).verdict == "fail"
    tiny = normal(64, 64) * 1e-5
    assert bw.verify_op(lambda x: x * 10, tiny, lambda x: x + 0).verdict == "fail"


def test_one_element_of_many_is_enough() -> None:
    def wrong(a: Tensor, b: Tensor) -> Tensor:
        out = a @ b
        out[3, 5] *= 4
        return out

    found = bw.verify_op(wrong, (normal(128, 64), normal(64, 128)), torch.matmul)
    assert found.verdict == "fail"
    assert "1 of 16384 elements are outside: at [3, 5]" in found.reason


def test_a_nan_is_no_number() -> None:
    def wrong(x: Tensor) -> Tensor:
        return x.exp().index_put((torch.tensor(2),), torch.tensor(math.nan, dtype=x.dtype))

    found = bw.verify_op(wrong, normal(16, dtype=torch.float16), torch.exp)
    assert found.verdict == "fail"
    assert "nan" in found.reason


@pytest.mark.parametrize("dtype", HALF)
def test_what_is_correctly_rounded_passes(dtype: torch.dtype) -> None:
    def right(a: Tensor, b: Tensor) -> Tensor:
        return (a.double() @ b.double()).to(a.dtype)

    assert (
        as_given(bw.verify_op(right, (normal(64, 300, dtype=dtype), normal(300, 32, dtype=dtype)), torch.matmul))
        == "pass"
    )


def test_a_mask_of_minus_infinity_is_no_error() -> None:
    mask = torch.full((16, 16), -math.inf).triu(1)
    found = bw.verify_op(lambda s, m: (s + m).softmax(-1), (wanting(4, 16, 16), mask))
    assert as_given(found) == "pass"


# -- right ones ---------------------------------------------------------------------------------------------------------

RIGHT = {
    "layer_norm": (lambda x, w: F.layer_norm(x, x.shape[-1:], w), [(64, 128), (128,)]),
    "rms_norm": (
        lambda x, w: x * x.float().pow(2).mean(-1, keepdim=True).add(1e-6).rsqrt().to(x.dtype) * w,
        [(64, 128), (128,)],
    ),
    "attention": (lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True), [(2, 4, 32, 16)] * 3),
    "swiglu": (lambda x, a, b: F.silu(x @ a) * (x @ b), [(32, 64), (64, 96), (64, 96)]),
    "cross entropy": (lambda x: F.cross_entropy(x, torch.arange(32) % 10, label_smoothing=0.1), [(32, 10)]),
    "cumsum": (lambda x: x.cumsum(-1), [(16, 500)]),
    "views": (lambda x: x.unflatten(1, (4, -1)).transpose(0, 1)[1:], [(16, 32)]),
    "sort": (lambda x: x.sort(-1), [(16, 32)]),
    "in place": (lambda x: x.clone().mul_(3).add_(1), [(16, 32)]),
    "einsum": (lambda a, b: torch.einsum("bij,bkj->bik", a, b), [(4, 16, 32), (4, 8, 32)]),
}


@pytest.mark.parametrize("name", RIGHT)
@pytest.mark.parametrize("dtype", FLOATS)
def test_what_is_right_does_not_fail(name: str, dtype: torch.dtype) -> None:
    fn, shapes = RIGHT[name]
    inputs = [wanting(*s, dtype=dtype, seed=i) for i, s in enumerate(shapes)]
    found = bw.verify_op(fn, inputs, variations=dtype is torch.bfloat16)
    assert found.verdict in ("pass", "warn"), str(found)
    assert as_given(found) in ("pass", "warn")
    if dtype is torch.float32:
        assert as_given(found) == "pass", str(found)


def test_a_module_is_judged_with_its_parameters_and_left_as_it_was() -> None:
    module = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 4))
    before = {name: t.clone() for name, t in module.state_dict().items()}
    found = bw.verify_op(module, normal(64, 16))
    assert as_given(found) == "pass", str(found)
    slots = [one.slot for one in found.checks[0].outputs]
    assert sum(slot.startswith("grad") for slot in slots) == len(list(module.parameters()))
    assert sum(slot.startswith("in") for slot in slots) == 3  # running mean, variance and count
    assert all(torch.equal(before[name], t) for name, t in module.state_dict().items())


def test_factorisations_are_judged_by_what_they_multiply_to() -> None:
    def other_signs(a: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        u, s, v = torch.linalg.svd(a, full_matrices=False)
        return -u, s, -v

    a = normal(12, 8)
    assert as_given(bw.verify_op(other_signs, a, lambda x: torch.linalg.svd(x, full_matrices=False))) == "pass"

    def wrong(a: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        u, s, v = other_signs(a)
        return u, s * 1.0001, v

    found = bw.verify_op(wrong, a, lambda x: torch.linalg.svd(x, full_matrices=False))
    assert found.verdict == "fail"
    assert "the singular values is off by" in found.reason or "U S V^H is off by" in found.reason


# -- wrong ones ---------------------------------------------------------------------------------------------------------


class SwappedBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(a, b)
        return a * b

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, grad: Tensor) -> tuple[Tensor, Tensor]:
        a, b = ctx.saved_tensors
        return grad * a, grad * b


def serial(a: Tensor, b: Tensor) -> Tensor:
    """Add products up one by one in their own dtype."""
    out = torch.zeros(a.shape[0], b.shape[1], dtype=a.dtype)
    for k in range(a.shape[1]):
        out = out + a[:, k : k + 1] * b[k : k + 1]
    return out


def cut(x: Tensor) -> Tensor:
    """Return tanh with its result cut instead of rounded."""
    exact = x.double().tanh()
    near = exact.to(x.dtype)
    return torch.where(near.double().abs() > exact.abs(), torch.nextafter(near, torch.zeros_like(near)), near)


WRONG = {
    "an epsilon": (
        lambda x: F.layer_norm(x, (128,), eps=1e-6),
        lambda x: F.layer_norm(x, (128,)),
        [(64, 128)],
        torch.float32,
    ),
    "one term less": (lambda x: x[:, :-1].sum(-1), lambda x: x.sum(-1), [(64, 300)], torch.float32),
    "added up in bfloat16": (serial, torch.matmul, [(32, 256), (256, 32)], torch.bfloat16),
    "rounded factors": (lambda a, b: a.bfloat16().float() @ b, torch.matmul, [(32, 64), (64, 32)], torch.float32),
    "operands swapped in backward": (SwappedBackward.apply, torch.mul, [(16, 16), (16, 16)], torch.float32),
    "a store that cuts": (cut, torch.tanh, [(64, 64)], torch.bfloat16),
    "a mask one off": (
        lambda s: s.masked_fill(torch.ones(16, 16).triu(0).bool(), -1e4).softmax(-1),
        lambda s: s.masked_fill(torch.ones(16, 16).triu(1).bool(), -math.inf).softmax(-1),
        [(4, 16, 16)],
        torch.float32,
    ),
    "a gradient by 1.01": (lambda x: x + 0.01 * (x - x.detach()), lambda x: x + 0, [(16, 16)], torch.float32),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_fails(name: str) -> None:
    wrong, right, shapes, dtype = WRONG[name]
    inputs = [wanting(*s, dtype=dtype, seed=i) for i, s in enumerate(shapes)]
    found = bw.verify_op(wrong, inputs, right)
    assert found.verdict == "fail", str(found)
    assert as_given(bw.verify_op(right, inputs, right)) in ("pass", "warn")


def test_subnormal_results_that_are_flushed_fail() -> None:
    def flushed(x: Tensor) -> Tensor:
        out = x * 0.5
        return out.masked_fill(out.abs() < torch.finfo(x.dtype).smallest_normal, 0.0)

    assert bw.verify_op(flushed, normal(64, 64), lambda x: x * 0.5).verdict == "fail"


def test_only_in_one_layout_is_found() -> None:
    def wrong(x: Tensor) -> Tensor:
        return x.exp() if x.is_contiguous() else x.exp().roll(1)

    found = bw.verify_op(wrong, normal(8, 8), torch.exp)
    assert found.verdict == "fail"
    assert "in memory" in found.reason


def test_other_bits_each_time_are_told() -> None:
    count = [0]

    def unsteady(x: Tensor) -> Tensor:
        count[0] += 1
        return (x.double().sum(-1) * (1 + 1e-8 * (count[0] % 3))).to(x.dtype)

    found = bw.verify_op(unsteady, normal(64, 64), lambda x: x.sum(-1))
    assert not found.deterministic
    assert found.verdict == "warn"
    assert "other bits than before" in str(found)


def test_a_row_alone_is_compared_with_the_row_in_its_batch() -> None:
    assert bw.verify_op(lambda x: x.softmax(-1), normal(16, 64)).batch_invariant is True
    assert bw.verify_op(lambda x: x.sum(0), normal(16, 64)).batch_invariant is None


# -- what cannot be judged is never passed ----------------------------------------------------------------------------


def test_what_draws_is_a_warning_with_its_reason() -> None:
    found = bw.verify_op(F.dropout, normal(16, 16))
    assert found.verdict == "warn"
    assert not found.judged
    assert "draws random numbers" in found.reason


def test_inputs_that_are_none_are_refused_with_what_was_expected() -> None:
    with pytest.raises(bw.UsageError, match="there is no tensor among the inputs; expected a tensor"):
        bw.verify_op(torch.exp, [1.0])
    with pytest.raises(bw.UsageError, match="the operator raises on its inputs: RuntimeError"):
        bw.verify_op(torch.matmul, (normal(2, 3), normal(2, 3)))
    with pytest.raises(bw.UsageError, match="returned no tensor"):
        bw.verify_op(lambda x: x.shape, normal(2, 3))


def test_an_operator_that_ends_the_process_is_refused_like_one_that_raises() -> None:
    with pytest.raises(bw.UsageError, match="the operator raises on its inputs: SystemExit: 5"):
        bw.verify_op(lambda _: sys.exit(5), normal(4))


def test_a_reference_that_does_not_fit_is_told() -> None:
    found = bw.verify_op(torch.exp, normal(4), lambda x, y: x)
    assert not found.judged
    assert "the reference cannot be run in float64" in found.reason


@settings(max_examples=12, deadline=None)
@given(
    st.sampled_from(["add", "mul", "div", "exp", "tanh", "sigmoid", "sum", "softmax", "matmul", "relu", "abs"]),
    st.sampled_from(FLOATS),
    st.integers(1, 40),
    st.integers(1, 70),
    st.floats(-20, 10),
    st.integers(0, 1000),
)
def test_no_healthy_operator_fails_whatever_its_numbers(
    name: str, dtype: torch.dtype, rows: int, columns: int, power: float, seed: int
) -> None:
    scale = 2.0 ** (power if dtype is not torch.float16 else power / 4)
    x = (normal(rows, columns, seed=seed) * scale).to(dtype).requires_grad_()
    y = normal(rows, columns, seed=seed + 1).to(dtype).requires_grad_()
    fn = {
        "sum": lambda a, b: (a + b).sum(-1),
        "softmax": lambda a, b: (a * b).softmax(-1),
        "matmul": lambda a, b: a @ b.mT,
        "add": torch.add,
        "mul": torch.mul,
        "div": torch.div,
    }.get(name) or (lambda a, b: getattr(torch, name)(a) + b)
    found = bw.verify_op(fn, (x, y), variations=False)
    assert found.verdict != "fail", str(found)
