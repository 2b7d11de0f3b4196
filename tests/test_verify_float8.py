"""Float8 and block-scaled numbers on trial: what the quantisation takes is told from what the kernel does wrong."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.testing._internal.common_quantized import (
    _bfloat16_to_float4_e2m1fn_x2,
    _floatx_unpacked_to_f32,
    to_blocked,
    to_mxfp,
)

import bitwitness as bw
from bitwitness.precheck.attempt import Terms, attempt
from bitwitness.precheck.sources import run_cases

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def quantised(x: Tensor, dtype: torch.dtype = E4M3) -> tuple[Tensor, Tensor]:
    scale = x.abs().amax().float() / torch.finfo(dtype).max
    return (x.float() / scale).to(dtype), scale


def product(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor) -> Tensor:
    return torch._scaled_mm(a, b.t(), scale_a, scale_b, out_dtype=torch.bfloat16)


def written_out(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor) -> Tensor:
    return ((a.float() * scale_a) @ (b.float() * scale_b).t()).bfloat16()


def linear(x: Tensor, w: Tensor) -> Tensor:
    (a, scale_a), (b, scale_b) = quantised(x), quantised(w)
    return product(a, b, scale_a, scale_b)


def eager(x: Tensor, w: Tensor) -> Tensor:
    return x @ w.t()


def stored() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    (a, scale_a), (b, scale_b) = quantised(normal(32, 64)), quantised(normal(48, 64, seed=1))
    return a, b, scale_a, scale_b


# -- right ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("out", [torch.bfloat16, torch.float16, torch.float32, None])
def test_a_scaled_product_of_torch_passes(out: torch.dtype | None) -> None:
    def call(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor) -> Tensor:
        return torch._scaled_mm(a, b.t(), scale_a, scale_b, out_dtype=out)

    assert bw.verify_op(call, stored()).verdict == "pass"


def test_scales_of_rows_and_a_bias_belong_to_it() -> None:
    x, w = normal(32, 64), normal(48, 64, seed=1)
    scales = [t.abs().amax(1, keepdim=True).float() / 448 for t in (x, w)]
    a, b = ((t.float() / s).to(E4M3) for t, s in zip((x, w), scales, strict=True))

    def call(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, bias: Tensor) -> Tensor:
        return torch._scaled_mm(a, b.t(), scale_a, scale_b.t(), bias=bias, out_dtype=torch.bfloat16)

    found = bw.verify_op(call, (a, b, *scales, normal(48, seed=2)), variations=False)
    assert found.verdict == "pass", found


def fake(x: Tensor) -> Tensor:
    scale = x.abs().amax() / 448
    return (x / scale).to(E4M3).to(x.dtype) * scale


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_function_that_quantises_is_judged_by_what_it_quantises(dtype: torch.dtype) -> None:
    assert bw.verify_op(fake, normal(400, 300).to(dtype), variations=False).verdict == "pass"
    through = normal(32, 64).to(dtype).requires_grad_()
    assert bw.verify_op(lambda x: x + (fake(x) - x).detach(), through).verdict == "pass"


def test_gradients_pass_through_the_cast_as_autograd_casts_them() -> None:
    x = normal(32, 64).float().requires_grad_()
    found = bw.verify_op(lambda x: x.to(E5M2).float() * 3, x, variations=False)
    assert found.verdict == "pass", found


# -- wrong ------------------------------------------------------------------------------------------------------------


def _tile(*given: Tensor) -> Tensor:
    found = product(*given)
    found[:16, :16] *= 1.02
    return found


def _adds_in_bfloat16(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor) -> Tensor:
    found = torch.zeros(len(a), len(b), dtype=torch.bfloat16)
    for k in range(0, a.shape[1], 8):
        found += (a[:, k : k + 8].float() @ b[:, k : k + 8].float().t() * scale_a * scale_b).bfloat16()
    return found


def _last_tile_dropped(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor) -> Tensor:
    return product(a[:, :48].contiguous(), b[:, :48].contiguous(), scale_a, scale_b)


def _scale_in_bfloat16(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor) -> Tensor:
    return (a.float() @ b.float().t() * (scale_a * scale_b).bfloat16().float()).bfloat16()


def _scale_of_the_other(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor) -> Tensor:
    return product(a, b, scale_a, scale_a)


WRONG = [_tile, _adds_in_bfloat16, _last_tile_dropped, _scale_in_bfloat16, _scale_of_the_other]


@pytest.mark.parametrize("wrong", WRONG, ids=lambda f: f.__name__)
def test_a_wrong_kernel_fails(wrong: Callable[..., Tensor]) -> None:
    assert bw.verify_op(wrong, stored(), written_out, variations=False).verdict == "fail"
    assert bw.verify_op(wrong, stored(), product, variations=False).verdict == "fail"


def _cut(x: Tensor) -> Tensor:
    scale = x.abs().amax() / 448
    bits = (x / scale).float().view(torch.int32) & -(1 << 20)
    return bits.view(torch.float32).to(E4M3).to(x.dtype) * scale


def _one_code(x: Tensor) -> Tensor:
    found = fake(x).clone()
    found[3, 5] *= 1.125
    return found


@pytest.mark.parametrize("wrong", [_cut, _one_code], ids=lambda f: f.__name__)
def test_a_wrong_cast_fails(wrong: Callable[..., Tensor]) -> None:
    assert bw.verify_op(wrong, normal(32, 64), fake, variations=False).verdict == "fail"


# -- quantisation, told from the kernel -------------------------------------------------------------------------------


def test_quantisation_error_is_told_from_kernel_error() -> None:
    found = bw.verify_op(linear, (normal(32, 64), normal(48, 64, seed=1)), eager)
    assert found.verdict == "warn", found
    assert found.reason.startswith("quantised to float8_e4m3fn, which takes out0 0.03"), found.reason
    assert "the kernel is within rounding of what it quantises" in found.reason


def test_what_quantisation_does_not_explain_fails() -> None:
    def wrong(x: Tensor, w: Tensor) -> Tensor:
        (a, scale_a), (b, _) = quantised(x), quantised(w)
        return product(a, b, scale_a, scale_a)

    found = bw.verify_op(wrong, (normal(32, 64), 3 * normal(48, 64, seed=1)), eager, variations=False)
    assert found.verdict == "fail"


class Float8Linear(torch.autograd.Function):
    """As training in float8 does it: gradients in E5M2."""

    factor = 1.0

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return linear(x, w)

    @classmethod
    def backward(cls, ctx, g):
        x, w = ctx.saved_tensors
        for_x = product(*_both(g, w.t().contiguous()))
        return cls.factor * for_x, product(*_both(g.t().contiguous(), x.t().contiguous()))


class WrongGradient(Float8Linear):
    factor = 1.3


def _both(g: Tensor, other: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    (a, scale_a), (b, scale_b) = quantised(g, E5M2), quantised(other)
    return a, b, scale_a, scale_b


def test_gradients_in_float8_are_judged_too() -> None:
    inputs = (normal(32, 64).requires_grad_(), normal(48, 64, seed=1).requires_grad_())
    assert bw.verify_op(Float8Linear.apply, inputs, variations=False).verdict == "pass"
    found = bw.verify_op(Float8Linear.apply, inputs, eager, variations=False)
    assert (found.verdict, found.reason[:42]) == ("warn", "quantised to float8_e4m3fn and float8_e5m2")
    wrong = bw.verify_op(WrongGradient.apply, inputs, eager, variations=False)
    assert wrong.verdict == "fail"
    assert wrong.reason.startswith("grad0: ")


# -- block-scaled formats: their kernels need a GPU; what they should give does not -------------------------------------


def _mx(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor) -> Tensor:
    """Multiply as a kernel would, from scales that are not in tiles."""
    wide = [
        t.float() * s.float().repeat_interleave(t.shape[1] // s.shape[1], 1) for t, s in ((a, scale_a), (b, scale_b))
    ]
    return (wide[0] @ wide[1].t()).bfloat16()


@pytest.mark.parametrize(("rows", "columns", "depth"), [(128, 256, 128), (96, 40, 160), (7, 130, 64)])
def test_microscaled_products_are_judged(rows: int, columns: int, depth: int) -> None:
    (scale_a, a), (scale_b, b) = to_mxfp(normal(rows, depth)), to_mxfp(normal(columns, depth, seed=1))

    def kernel(a: Tensor, b: Tensor, *_: Tensor) -> Tensor:
        return _mx(a, b, scale_a, scale_b)

    def reference(a: Tensor, b: Tensor, tiles_a: Tensor, tiles_b: Tensor) -> Tensor:
        return torch._scaled_mm(a, b.t(), tiles_a, tiles_b, out_dtype=torch.bfloat16)

    inputs = (a, b, to_blocked(scale_a), to_blocked(scale_b))
    found = bw.verify_op(kernel, inputs, reference, variations=False)
    assert found.verdict == "pass", found
    wrong = bw.verify_op(lambda *t: kernel(*t).roll(1, 0), inputs, reference, variations=False)
    assert wrong.verdict == "fail"


def test_numbers_of_four_bits_are_unpacked() -> None:
    rows, columns, depth = 32, 48, 64
    x, w = (normal(n, depth, seed=n).clamp(-6, 6) for n in (rows, columns))
    codes = [_bfloat16_to_float4_e2m1fn_x2(t) for t in (x, w)]
    scales = [(torch.rand(n, depth // 16, generator=torch.Generator().manual_seed(n)) + 0.5).to(E4M3) for n in (32, 48)]

    def values(packed: Tensor) -> Tensor:
        both = packed.view(torch.uint8)
        return _floatx_unpacked_to_f32(torch.stack([both & 15, both >> 4], -1).flatten(1), 2, 1)

    def kernel(a: Tensor, b: Tensor, *_: Tensor) -> Tensor:
        return _mx(values(a), values(b), *scales)

    def reference(a: Tensor, b: Tensor, tiles_a: Tensor, tiles_b: Tensor) -> Tensor:
        return torch._scaled_mm(a, b.t(), tiles_a, tiles_b, out_dtype=torch.bfloat16)

    found = bw.verify_op(kernel, (*codes, *map(to_blocked, scales)), reference, variations=False)
    assert found.verdict == "pass", found


def test_scales_that_fit_nothing_are_told() -> None:
    a, b, scale_a, _ = stored()
    inputs = (a, b, scale_a, torch.ones(5))

    def reference(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor) -> Tensor:
        return torch._scaled_mm(a, b.t(), scale_a, scale_b, out_dtype=torch.bfloat16)

    found = bw.verify_op(lambda a, b, *_: product(a, b, scale_a, scale_a), inputs, reference, variations=False)
    assert not found.judged
    assert "scales [5] fit no known way of scaling numbers [48, 64]" in found.reason


# -- a recording ------------------------------------------------------------------------------------------------------


class Float8Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(normal(48, 64).float())

    def forward(self, x: Tensor) -> Tensor:
        exact = x @ self.weight.t()
        return exact + (linear(x, self.weight.detach()).float() - exact).detach()


@pytest.mark.parametrize("content", ["tensors", "stats"])
def test_float8_of_a_recording_is_tried(tmp_path: Path, content: str) -> None:
    model = Float8Model()
    with bw.Recorder(model, out=str(tmp_path / "run"), level="mix", content=content):
        model(normal(32, 64).float()).square().mean().backward()
        torch.optim.SGD(model.parameters(), 0.1).step()
    found = {case.operator: attempt(case, Terms()).verdict for case in run_cases(str(tmp_path / "run"))}
    assert found["aten._scaled_mm.default"] == found["aten._to_copy.default"] == "pass", found
