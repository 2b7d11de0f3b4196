"""What half types hide and float64 shows: other formulas; what only looks wrong: equal numbers, masks, tables held twice."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import bitwitness as bw
from bitwitness.cli import main

HALVES = [torch.bfloat16, torch.float16]
FLOATS = [torch.float32, *HALVES]


def normal(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype).requires_grad_()


def in_float32(formula: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a function that casts up, computes, and casts down once, as fused kernels do."""
    return lambda x, *rest: formula(x.float(), *rest).to(x.dtype)


# -- right ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [13, 26])
def test_equal_numbers_are_rounded_the_same_way(tokens: int) -> None:
    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (q @ k.transpose(-1, -2) / 4).softmax(-1, dtype=torch.float32).to(q.dtype) @ v

    q, k, v = (normal(2, 4, tokens, 16, dtype=torch.bfloat16, seed=i) for i in range(3))
    for fn, reference in ((attention, None), (F.scaled_dot_product_attention, attention)):
        found = bw.verify_op(fn, ((q * 1e-3).detach().requires_grad_(), k, v), reference)
        assert found.verdict in ("pass", "warn"), found  # all probabilities are 1 / 13


@pytest.mark.parametrize("dtype", FLOATS)
def test_gradients_of_numbers_that_are_clamped_to_the_same_do_not_average(dtype: torch.dtype) -> None:
    x = normal(300, 100, dtype=dtype).detach().clamp(-0.99, 0.99).requires_grad_()
    assert bw.verify_op(torch.acos, x).verdict == "pass"


@pytest.mark.parametrize("fn", [torch.mul, torch.div, lambda a, _: a.reciprocal(), lambda a, _: a * a.conj()])
@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_complex_numbers_round_on_their_way(fn: Callable[..., Tensor], dtype: torch.dtype) -> None:
    a, b = (torch.complex(normal(9, 40, seed=s).detach(), normal(9, 40, seed=s + 1).detach()).to(dtype) for s in (0, 2))
    assert bw.verify_op(fn, (a, b)).verdict == "pass"


@pytest.mark.parametrize("dtype", FLOATS)
def test_masks_and_tables_that_are_held_twice_stay_what_they_are(dtype: torch.dtype) -> None:
    angle = torch.arange(11.0)[:, None] * 100 ** -(torch.arange(8.0) / 8)
    cos, sin = (torch.cat((t, t), -1).to(dtype) for t in (angle.cos(), angle.sin()))

    def whole(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        a, b = x.float().chunk(2, -1)
        return (x.float() * cos.float() + torch.cat((-b, a), -1) * sin.float()).to(x.dtype)

    def halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        (a, b), c, s = x.chunk(2, -1), cos.chunk(2, -1)[0], sin.chunk(2, -1)[0]
        return torch.cat((a * c - b * s, b * c + a * s), -1)

    found = bw.verify_op(whole, (normal(2, 3, 11, 16, dtype=dtype), cos, sin), halves)
    assert found.verdict in ("pass", "warn"), found
    mask = (torch.arange(48) % 3 != 0).reshape(6, 8).to(dtype)
    kept = bw.verify_op(lambda x, m: x.masked_fill(m == 0, 0), (normal(6, 8, dtype=dtype), mask), torch.mul)
    assert kept.verdict == "pass", kept


def test_a_state_that_is_zero_need_not_be_multiplied() -> None:
    def by_steps(a: Tensor, b: Tensor) -> Tensor:
        state, found = torch.zeros_like(b[:, 0]), []
        for t in range(b.shape[1]):
            state = a[:, t] * state + b[:, t]
            found.append(state)
        return torch.stack(found, 1)

    def by_doubling(a: Tensor, b: Tensor) -> Tensor:
        width = 1
        while width < b.shape[1]:
            b = torch.cat((b[:, :width], a[:, width:] * b[:, :-width] + b[:, width:]), 1)
            a = torch.cat((a[:, :width], a[:, width:] * a[:, :-width]), 1)
            width *= 2
        return b

    inputs = (normal(40, 8).sigmoid().detach(), normal(8, 40, seed=1))
    found = bw.verify_op(lambda a, b: by_doubling(a, b.t()), inputs, lambda a, b: by_steps(a, b.t()))
    assert found.verdict in ("pass", "warn"), found
    assert any("zero times what is no number" in check.reason for check in found.checks), found


def test_what_reads_bits_is_not_judged_without_a_reference() -> None:
    def magnitude(x: Tensor) -> Tensor:
        return (x.view(torch.int32) & 0x7FFFFFFF).view(torch.float32)

    x = normal(9, 16).detach()
    found = bw.verify_op(magnitude, x)
    assert not found.judged
    assert "reads bits; give it a reference" in found.reason
    assert bw.verify_op(magnitude, x, torch.abs).verdict == "pass"


# -- wrong ------------------------------------------------------------------------------------------------------------


def one_percent_more() -> Callable[..., Tensor]:
    class Loss(torch.autograd.Function):
        @staticmethod
        def forward(ctx, logits: Tensor, target: Tensor) -> Tensor:
            ctx.save_for_backward(logits, target)
            return F.cross_entropy(logits.float(), target)

        @staticmethod
        def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
            logits, target = ctx.saved_tensors
            due = (logits.float().softmax(-1) - F.one_hot(target, logits.shape[-1])) / len(target)
            return (gradient * due * 1.01).to(logits.dtype), None

    return Loss.apply


def gelu_by_tanh(x: Tensor, factor: float = (2 / torch.pi) ** 0.5) -> Tensor:
    return 0.5 * x * (1 + torch.tanh(factor * (x + 0.044715 * x**3)))


def norm(x: Tensor, over: int = 67) -> Tensor:
    return x * (x.square().sum(-1, keepdim=True) / over + 1e-6).rsqrt()


def layer_norm(x: Tensor, *, unbiased: bool = False) -> Tensor:
    return (x - x.mean(-1, keepdim=True)) / (x.var(-1, keepdim=True, unbiased=unbiased) + 1e-5).sqrt()


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        (F.gelu, gelu_by_tanh),
        (lambda x: gelu_by_tanh(x, 0.8), gelu_by_tanh),
        (lambda x: norm(x, 66), norm),
        (lambda x: layer_norm(x, unbiased=True), layer_norm),
    ],
)
def test_another_formula_is_not_excused_by_rounding(dtype: torch.dtype, wrong: object, right: object) -> None:
    assert bw.verify_op(in_float32(wrong), normal(13, 67, dtype=dtype), right).verdict == "fail"
    assert bw.verify_op(in_float32(right), normal(13, 67, dtype=dtype), right).verdict in ("pass", "warn")


@pytest.mark.parametrize("dtype", HALVES)
def test_a_gradient_that_is_one_percent_too_large_is_found(dtype: torch.dtype) -> None:
    inputs = (normal(23, 101, dtype=dtype), torch.arange(23))
    found = bw.verify_op(one_percent_more(), inputs, lambda x, y: F.cross_entropy(x.float(), y))
    assert found.verdict == "fail", found


@pytest.mark.parametrize("dtype", FLOATS)
def test_a_zero_has_no_room_of_its_own(dtype: torch.dtype) -> None:
    def sparse(x: Tensor, low: float = 0.0) -> Tensor:
        return torch.where(x > 0, x * 3, low)

    x = normal(32, 32, dtype=dtype)
    assert bw.verify_op(sparse, x, sparse, variations=False).verdict == "pass"
    found = bw.verify_op(lambda x: sparse(x, torch.finfo(dtype).eps / 8), x, sparse, variations=False)
    assert found.verdict == "fail", found


def test_what_a_half_type_hardly_shows_is_told() -> None:
    inputs = normal(5, 64, dtype=torch.bfloat16)
    found = bw.verify_op(in_float32(lambda x: gelu_by_tanh(x, 0.7982)), inputs, gelu_by_tanh, variations=False)
    assert found.verdict == "warn", found
    assert "another formula than the reference's" in found.reason
    assert "bfloat16 hardly show it" in found.reason


@pytest.mark.parametrize("naive", [(lambda x: (1 + x).log(), torch.log1p), (lambda x: x.exp() - 1, torch.expm1)])
def test_an_unstable_formula_of_an_elementary_function_fails(naive: tuple[Callable[..., Tensor], ...]) -> None:
    found = bw.verify_op(naive[0], (normal(40, 50) * 1e-4).detach().abs(), naive[1], variations=False)
    assert found.verdict == "fail"
    assert "an unstable formula: rounding takes" in found.reason


@pytest.mark.parametrize("dtype", HALVES)
def test_a_norm_whose_store_cuts_is_found(dtype: torch.dtype) -> None:
    def cut(x: Tensor, w: Tensor) -> Tensor:
        y = F.rms_norm(x.float(), (64,), w.float(), 1e-6)
        lost = 16 if dtype is torch.bfloat16 else 13
        return (y.view(torch.int32) >> lost << lost).view(torch.float32).to(dtype)

    inputs = (normal(31, 64, dtype=dtype).detach(), normal(64, dtype=dtype, seed=1).detach())
    found = bw.verify_op(cut, inputs, lambda x, w: x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * w)
    assert found.verdict == "fail"
    assert "towards zero" in found.reason


def test_a_root_in_fewer_bits_and_a_tie_that_goes_up_are_found() -> None:
    def root(x: Tensor) -> Tensor:
        mantissa, exponent = x.double().sqrt().frexp()
        return torch.ldexp((mantissa * 2**19).round() / 2**19, exponent).float()

    assert bw.verify_op(root, normal(100, 100).detach().abs(), torch.sqrt).verdict == "fail"
    eighths = (normal(31, 33).detach() * 8).round() / 8
    assert bw.verify_op(lambda x: (x * 4 + 0.5).floor(), eighths, lambda x: (x * 4).round()).verdict == "fail"


def test_a_detached_result_is_told() -> None:
    x = normal(9, 9)
    lost = bw.verify_op(lambda x: x.sin().detach(), x, torch.sin)
    assert lost.verdict == "fail"
    assert "there is no gradient" in lost.reason
    assert bw.verify_op(lambda x: x.sin().detach(), x, torch.sin, gradients=False).verdict == "pass"
    partly = bw.verify_op(lambda x: (x.sin(), x.cos().detach()), x, lambda x: (x.sin(), x.cos()))
    assert (partly.verdict, partly.reason) == (
        "warn",
        "out1: no gradient flows through it, as it does in the reference",
    )


# -- what is said -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fn", "inputs", "reference", "said"),
    [
        ("torch.sin", normal(3), None, "the operator is str 'torch.sin'; expected a function or a module"),
        (torch.sin, normal(3), 7, "the reference is int '7'; expected a function or a module"),
        (torch.sin, 5, None, "the inputs are int 5; expected a tensor, a sequence of arguments or a mapping"),
        (torch.sin, torch.empty(3, device="meta"), None, "is on the meta device, which holds no numbers"),
        (
            lambda x: checkpoint(torch.sin, x, use_reentrant=True),
            normal(3),
            None,
            "checkpoint with use_reentrant=False",
        ),
    ],
)
def test_what_cannot_be_tried_is_named(fn: object, inputs: object, reference: object, said: str) -> None:
    with pytest.raises(bw.UsageError, match=said.replace("(", r"\(")):
        bw.verify_op(fn, inputs, reference)


def test_an_argument_that_only_the_function_writes_into_is_named() -> None:
    found = bw.verify_op(lambda x: x.mul_(2), normal(5, 7).detach(), lambda x: x * 2)
    assert found.verdict == "fail"
    assert "in0: an argument was written into that the reference leaves" in found.reason


def test_names_that_are_far_off_are_not_offered(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify-op", "torch:nope", "--shapes", "3"]) == 2
    assert "did you mean" not in capsys.readouterr().err
    assert main(["verify-op", "torch:sofmax", "--shapes", "3"]) == 2
    assert "did you mean softmax?" in capsys.readouterr().err


@pytest.mark.parametrize("transform", [torch.fft.fft, torch.fft.rfft, torch.fft.ihfft, torch.fft.irfft, torch.fft.fft2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bool])
def test_transform_of_zeros_and_ones_passes(transform: Callable[..., Tensor], dtype: torch.dtype) -> None:
    x = torch.zeros(3, 10, dtype=dtype)
    x[0, 3] = x[1] = 1
    x[2, ::2] = 1
    assert bw.verify_op(transform, (x,)).verdict == "pass"
