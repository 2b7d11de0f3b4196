"""Functions as others write them: right ones pass however they are written, wrong ones fail in whatever dtype they return."""

from __future__ import annotations

import math
import random

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import bitwitness as bw
from bitwitness.cli import main

FLOATS = [torch.float32, torch.bfloat16, torch.float16]


def normal(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype).requires_grad_()


def quick(*args: object) -> bw.Verification:
    return bw.verify_op(*args, variations=False)


# -- right ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", FLOATS)
def test_a_norm_has_the_epsilon_that_the_device_takes(dtype: torch.dtype) -> None:
    found = bw.verify_op(lambda x: F.rms_norm(x, (16,)), normal(8, 16, dtype=dtype))
    assert found.verdict in ("pass", "warn"), found
    assert bw.verify_op(nn.RMSNorm(16, dtype=dtype), normal(8, 16, dtype=dtype)).verdict in ("pass", "warn")


@pytest.mark.parametrize("dtype", FLOATS)
def test_a_module_in_a_closure_is_taken_in_its_own_dtype(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(32, 16), nn.LayerNorm(16), nn.Linear(16, 8), nn.BatchNorm1d(8)).to(dtype)
    before = {name: t.clone() for name, t in model.state_dict().items()}
    for fn in (lambda i: model[:3](i).mul(1), model[:3].forward):
        found = quick(fn, (torch.arange(12),))
        assert found.verdict == "pass", found
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_code_that_is_not_fused_is_no_failure_beside_fused_code(dtype: torch.dtype) -> None:
    x, w, b = normal(32, 24, dtype=dtype), normal(40, 24, dtype=dtype, seed=1), normal(40, dtype=dtype, seed=2)
    found = quick(lambda x, w, b: x @ w.t() + b, (x, w, b), F.linear)
    assert (found.verdict, "its own formula rounds intermediate results" in found.reason) == ("warn", True), found
    scores = normal(16, 64, dtype=dtype)
    assert quick(lambda x: x - x.logsumexp(-1, keepdim=True), scores, lambda x: x.log_softmax(-1)).verdict == "warn"
    small = (normal(16, 64, dtype=dtype) * 2**-6).detach()
    assert quick(lambda x: (1 + x.exp()).log(), small, F.softplus).verdict == "warn"


def by_fft(x: Tensor, k: Tensor) -> Tensor:
    n = 2 * x.shape[-1]
    return torch.fft.irfft(torch.fft.rfft(x, n=n) * torch.fft.rfft(k, n=n), n=n)[..., : x.shape[-1]]


def by_sums(x: Tensor, k: Tensor) -> Tensor:
    return torch.stack([(x[..., : t + 1] * k[..., : t + 1].flip(-1)).sum(-1) for t in range(x.shape[-1])], -1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_another_algorithm_is_held_against_its_own_rounding(dtype: torch.dtype) -> None:
    found = quick(by_fft, (normal(3, 4, 24, dtype=dtype), normal(4, 24, dtype=dtype, seed=1)), by_sums)
    assert found.verdict in ("pass", "warn"), found
    wrong = quick(lambda x, k: by_fft(x, k) * (1 + 1e-4), (normal(3, 24), normal(24, seed=1)), by_sums)
    assert wrong.verdict == "fail"


def test_special_numbers_are_notes() -> None:
    found = bw.verify_op(
        lambda a, b, c: torch.einsum("bij,bjk,kl->bil", a, b, c), (normal(3, 8, 9), normal(3, 9, 10), normal(10, 7))
    )
    assert found.verdict == "pass", found
    assert "note" in {check.verdict for check in found.checks}, found


def test_what_an_operator_refuses_is_no_warning() -> None:
    found = bw.verify_op(lambda x: torch.view_as_complex(x.unflatten(-1, (-1, 2))).abs(), normal(4, 16))
    assert found.verdict == "pass", found
    assert any("it refuses" in check.reason for check in found.checks)


def test_a_dictionary_is_compared_by_its_keys() -> None:
    found = quick(lambda x: {"s": x.sin(), "c": x.cos()}, normal(64), lambda x: {"c": x.cos(), "s": x.sin()})
    assert found.verdict == "pass", found


def test_a_mixture_of_experts_is_multiplied_by_groups() -> None:
    x, w = normal(24, 16, dtype=torch.bfloat16), normal(3, 16, 32, dtype=torch.bfloat16, seed=1)
    ends = torch.tensor([8, 8, 24], dtype=torch.int32)
    found = quick(torch._grouped_mm, (x.detach(), w.detach(), ends))
    assert found.verdict == "pass", found
    wrong = quick(
        lambda x, w, e: torch._grouped_mm(x, w.roll(1, 0), e), (x.detach(), w.detach(), ends), torch._grouped_mm
    )
    assert wrong.verdict == "fail"


def test_sparse_inputs_are_taken() -> None:
    assert bw.verify_op(torch.sparse.mm, (torch.eye(8).to_sparse(), normal(8, 4).detach())).judged


# -- wrong ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        (lambda x, y: F.cross_entropy(x.float(), y) * 1.02, F.cross_entropy),
        (lambda x, y: F.cross_entropy(x.float(), y, reduction="sum") / 50, F.cross_entropy),
    ],
)
def test_a_wider_result_is_not_judged_as_if_it_were_rounded(wrong: object, right: object) -> None:
    inputs = (normal(48, 100, dtype=torch.bfloat16), torch.arange(48))
    assert quick(wrong, inputs, right).verdict == "fail"
    assert quick(lambda x, y: F.cross_entropy(x.float(), y), inputs, right).verdict == "pass"  # as a loss should be
    found = quick(lambda x: x.float().softmax(-1), inputs[0], lambda x: x.softmax(-1))
    assert (found.verdict, found.reason) == ("warn", "out0: float32 was returned where the reference gives bfloat16")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_factor_that_no_single_number_shows_is_found(dtype: torch.dtype) -> None:
    inputs = (normal(64, 64, dtype=dtype), normal(64, 64, dtype=dtype, seed=1))
    found = quick(lambda a, b: ((a.double() @ b.double()) * 0.9985).to(a.dtype), inputs, torch.matmul)
    assert found.verdict == "fail", found
    assert quick(lambda a, b: (a.double() @ b.double()).to(a.dtype), inputs, torch.matmul).verdict == "pass"


def test_a_range_that_is_left_on_the_way_is_told() -> None:
    large, small = (normal(8, 32) * s for s in (1e20, 1e-30))
    for x, got in ((large, "inf"), (small, "0")):
        found = quick(lambda x: x.pow(2).sum(-1).sqrt(), x.detach())
        assert found.verdict == "warn", found
        assert f"its formula leaves the range of float32 on its way: {got} where" in found.reason


def test_what_changes_from_call_to_call_is_not_judged() -> None:
    calls = iter(range(1, 1000))
    for fn in (lambda x: x * random.random(), lambda x: x * next(calls)):
        found = bw.verify_op(fn, normal(32).detach())
        assert found.verdict == "warn", found
        assert not found.judged
        assert "it depends on more than its inputs" in found.reason


def test_what_varies_by_itself_is_not_taken_for_rounding() -> None:
    calls = iter(range(10_000))

    def now_and_then(a: Tensor, b: Tensor) -> Tensor:
        return (a @ b) * (1.01 if next(calls) % 10 == 1 else 1.0)

    inputs = (normal(32, 16).detach(), normal(16, 16, seed=1).detach())
    assert bw.verify_op(now_and_then, inputs, torch.matmul).verdict == "fail"


def test_a_batch_is_found_among_square_weights() -> None:
    def wrong(x: Tensor, w: Tensor) -> Tensor:
        return (x @ w) * (1.01 if len(x) == 1 else 1.0)

    found = bw.verify_op(wrong, (normal(16, 16).detach(), normal(16, 8, seed=1).detach()), torch.matmul)
    assert found.verdict == "fail", found
    assert found.reason.startswith("row 0 of the batch alone")


def test_what_is_written_after_it_was_made_counts() -> None:
    def scaled(x: Tensor, w: Tensor) -> Tensor:
        out = x @ w
        out[:4] *= 3
        return out

    right = quick(scaled, (normal(16, 16).detach(), normal(16, 16, seed=1).detach()))
    assert right.verdict == "pass"
    assert right.checks[0].outputs[0].allowed < 1e-4
    assert quick(scaled, (normal(16, 16).detach(), normal(16, 16, seed=1).detach()), torch.matmul).verdict == "fail"


# -- what is asked wrongly --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("inputs", "options", "said"),
    [(None, {}, "the inputs are None"), (torch.ones(2), {"device": "banana"}, "device 'banana' cannot be used here")],
)
def test_it_is_told(inputs: object, options: dict[str, str], said: str) -> None:
    with pytest.raises(bw.UsageError, match=said):
        bw.verify_op(torch.exp, inputs, **options)


def test_a_reference_without_gradients_is_told() -> None:
    found = quick(torch.exp, normal(64), lambda x: x.detach().exp())
    assert (found.verdict, found.reason) == ("warn", "out0: the reference gives no gradients: they were not judged")


def test_a_kernel_that_prints_does_not_break_the_answer(tmp_path, capsys, monkeypatch) -> None:
    (tmp_path / "kernels.py").write_text("def loud(x):\n    print('hello')\n    return x.exp()\n")
    monkeypatch.chdir(tmp_path)
    assert main(["verify-op", "kernels.py:loud", "--shapes", "8", "--json"]) == 0
    assert capsys.readouterr().out.startswith("{")


def test_mistakes_leave_no_folder(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["precheck", "--suite", "opinfo", "--only", "nosuchop", "-o", "out"]) == 2
    assert not (tmp_path / "out").exists()


def test_nan_stays_nan() -> None:
    assert math.isnan(float(quick(lambda x: x * math.nan, torch.ones(1)).checks[0].outputs[0].value))
