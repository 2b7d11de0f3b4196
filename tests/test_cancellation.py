"""What float64 says of results that cancelled, or are small: gradients above all, and of operators no CPU has."""

from __future__ import annotations

from itertools import product as each

import pytest
import torch
from extent import chosen

import bitwitness as bw
from bitwitness.oracle import compare_with_float64
from bitwitness.oracle.float64 import run_in_float64
from bitwitness.oracle.limits import parts_roundoff
from bitwitness.oracle.terms import term_sizes
from bitwitness.sense.checksum import ChecksumSensor
from bitwitness.tap.compat import OpOverload
from bitwitness.tap.operators import OpCall
from bitwitness.testing import FaultyDevice, contained, from_mapping

aten = torch.ops.aten
FORWARD = aten._scaled_dot_product_flash_attention_for_cpu.default
BACKWARD = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
LENGTH = 24


def call_of(func: OpOverload, *args: object, **kwargs: object) -> OpCall:
    """Return a call as the tap shows it, with the result of this device."""
    result = func(*args, **kwargs)
    return OpCall(func, args, dict(kwargs), result, func.overloadpacket.__name__, ".", "backward", 0)


def heads(seed: int, dtype: torch.dtype, number: int = 4, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(2, number, LENGTH, 8, generator=torch.Generator().manual_seed(seed)) * scale).to(dtype)


def attention(dtype: torch.dtype, *, grad: float, value: float, mean: float, causal: bool) -> tuple[OpCall, OpCall]:
    """Return a forward's and its backward's call."""
    q, k, v, g = (heads(seed, dtype) for seed in range(4))
    v, g = v * value + mean * value, g * grad
    forward = call_of(FORWARD, q, k, v, 0.0, causal)
    return forward, call_of(BACKWARD, g, q, k, v, *forward.result, 0.0, causal)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_healthy_attention_is_never_outside_however_small_its_gradients(dtype: torch.dtype) -> None:
    every = list(each((1e-5, 1e-2, 1.0), (0.02, 1.0), (0.0, 1.0, 30.0), (False, True)))
    for grad, value, mean, causal in chosen(every, every[::3]):
        for call in attention(dtype, grad=grad, value=value, mean=mean, causal=causal):
            assert not compare_with_float64(call).outside, (grad, value, mean, causal, call.op)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("slot", range(3))
def test_a_wrong_gradient_is_outside_although_it_is_far_smaller_than_the_activations(
    dtype: torch.dtype, slot: int
) -> None:
    _, call = attention(dtype, grad=1e-5, value=1.0, mean=0.0, causal=True)
    call.result[slot][0, 1] *= 64
    found = compare_with_float64(call)
    assert found.outside
    assert call.result[slot].numel() // 8 <= found.at < call.result[slot].numel() // 4  # the second head of eight


def test_terms_of_a_sum_and_of_a_product_are_its_elements_and_products() -> None:
    x = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    (of_sum,) = term_sizes(aten.sum.default, [x], {}, run_in_float64(aten.sum.default, [x], {}))
    assert of_sum == pytest.approx(float(x.norm()), rel=1.0)  # four draws of a normal distribution
    a, b = torch.randn(40, 30), torch.randn(30, 50)
    (of_product,) = term_sizes(aten.mm.default, [a, b], {}, run_in_float64(aten.mm.default, [a, b], {}))
    assert of_product == pytest.approx(float((2 * a.square() @ b.square()).sum().sqrt()), rel=0.2)


def test_a_sum_that_comes_to_nothing_is_not_outside() -> None:
    x = torch.randn(4096, generator=torch.Generator().manual_seed(0))
    assert not compare_with_float64(call_of(aten.sum.default, torch.cat([x, -x]))).outside


def test_a_kernel_that_adds_up_in_bfloat16_is_not_outside() -> None:
    x, grad = torch.randn(4096, 32).bfloat16(), torch.rand(4096, 32).bfloat16()
    weight = torch.ones(32, dtype=torch.bfloat16)
    _, mean, rstd = aten.native_layer_norm(x, [32], weight, weight, 1e-5)
    call = call_of(
        aten.native_layer_norm_backward.default, grad, x, [32], mean, rstd, weight, weight, [True, True, True]
    )
    assert not compare_with_float64(call).outside
    call.result[0][7] *= 8  # of the input's gradient nothing is added up
    assert compare_with_float64(call).outside


def of_an_accelerator(name: str, **named: object) -> tuple[torch.Tensor, ...]:
    """Ask float64 of an operator that a CPU lacks; what is not named does not enter its result."""
    func = getattr(aten, name).default
    return run_in_float64(func, [named.get(a.name) for a in func._schema.arguments if not a.kwarg_only], {})


@pytest.mark.parametrize("name", ["flash", "efficient", "cudnn", "fused"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("shared", [1, 2])
def test_attention_of_accelerators_is_what_the_formula_says(name: str, *, causal: bool, shared: int) -> None:
    kind = "fused_attention_overrideable" if name == "fused" else f"{name}_attention"
    q, k, v, grad = (
        heads(0, torch.float64),
        *(heads(s, torch.float64, 4 // shared) for s in (1, 2)),
        heads(3, torch.float64),
    )
    bias = torch.randn(2, 1, LENGTH, LENGTH).double() if name != "flash" and not causal else None
    leaves = [x.requires_grad_() for x in (q, k, v, *([] if bias is None else [bias]))]
    expected = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, attn_mask=bias, is_causal=causal, enable_gqa=True
    )
    gradients = torch.autograd.grad(expected, leaves, grad)
    given = {"query": q, "key": k, "value": v, "attn_bias": bias, "dropout_p": 0.0, "is_causal": causal}
    (out,) = of_an_accelerator(f"_scaled_dot_product_{kind}", **given)
    torch.testing.assert_close(out, expected.detach(), rtol=1e-12, atol=1e-12)
    mask = [True, True, True, bias is not None]
    found = of_an_accelerator(
        f"_scaled_dot_product_{kind}_backward", **given, grad_out=grad, grad_out_=grad, out=out, grad_input_mask=mask
    )
    for one, other in zip(found, gradients, strict=False):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-11)
    assert len(found) == (4 if bias is not None and name in ("efficient", "fused") else 3)


def test_a_row_that_sees_no_key_has_a_result_of_zero() -> None:
    q = heads(0, torch.float64)
    seen = torch.zeros(LENGTH, LENGTH, dtype=torch.bool)
    seen[1:] = True
    given = {"query": q, "key": q, "value": q, "attn_bias": seen, "dropout_p": 0.0, "is_causal": False}
    (out,) = of_an_accelerator("_scaled_dot_product_efficient_attention", **given)
    assert torch.equal(out[:, :, 0], torch.zeros_like(out[:, :, 0]))
    assert out.isfinite().all()


def test_long_sequences_are_computed_a_part_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = (heads(seed, torch.float64) for seed in range(3))
    given = {"query": q, "key": k, "value": v, "dropout_p": 0.0, "is_causal": True}
    (whole,) = of_an_accelerator("_scaled_dot_product_flash_attention", **given)
    monkeypatch.setattr("bitwitness.oracle.attention._PART", 4 * LENGTH * 5)  # five rows
    (parts,) = of_an_accelerator("_scaled_dot_product_flash_attention", **given)
    torch.testing.assert_close(parts, whole, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("training", [True, False])
def test_batch_norm_of_accelerators_is_torchs(*, training: bool) -> None:
    x, grad = torch.randn(8, 5, 3, 3).double(), torch.randn(8, 5, 3, 3).double()
    weight, bias, mean, var = (
        torch.rand(5).double(),
        torch.rand(5).double(),
        torch.rand(5).double(),
        torch.rand(5).double(),
    )
    given = {"input": x, "weight": weight, "bias": bias, "running_mean": mean, "running_var": var}
    given |= {"epsilon": 1e-5, "exponential_average_factor": 0.1, "training": training}
    before = mean.clone()
    (out,) = of_an_accelerator("cudnn_batch_norm", **given)
    assert torch.equal(mean, before)
    expected, save_mean, save_var = aten.native_batch_norm(
        x, weight, bias, mean.clone(), var.clone(), training, 0.1, 1e-5
    )
    assert torch.equal(out, expected)
    if training:
        found = of_an_accelerator(
            "cudnn_batch_norm_backward", **given, grad_output=grad, save_mean=save_mean, save_var=save_var
        )
        x.requires_grad_()
        weight.requires_grad_()
        bias.requires_grad_()
        result = torch.nn.functional.batch_norm(x, mean, var, weight, bias, training=True, eps=1e-5)
        for one, other in zip(found, torch.autograd.grad(result, (x, weight, bias), grad), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


def test_on_a_cpu_no_product_is_added_up_in_parts() -> None:
    assert parts_roundoff(torch.zeros(64, 64, dtype=torch.bfloat16), 4096) == 0.0


class Attending(torch.nn.Module):
    """One block of attention and a projection, for tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.project, self.head = (
            torch.nn.Embedding(32, 32),
            torch.nn.Linear(32, 96),
            torch.nn.Linear(32, 32),
        )

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        parts = self.project(self.embed(tokens)).unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4)
        out = torch.nn.functional.scaled_dot_product_attention(*parts, is_causal=True)
        logits = self.head(out.transpose(1, 2).flatten(2))
        return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


@pytest.mark.parametrize("slot", ["out0", "out1", "out2"])
def test_an_attention_whose_gradients_are_always_wrong_is_convicted_alone(slot: str) -> None:
    torch.manual_seed(0)
    model = Attending()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(1)
    site = f"./*attention*:backward.{slot}"
    fault = {"site": site, "kind": "multiply", "factor": 64.0, "pattern": "row", "element": 200, "from_step": 11}
    with contained(), FaultyDevice(from_mapping({"fault": [fault]}), rank=0, seed=0):
        guard = bw.Guard(model, optimizer, act="protect", deep_every=10, trend={"warmup": 6}, self_test=False)

        def train() -> None:
            with guard:
                for _ in range(14):
                    model(torch.randint(0, 32, (4, LENGTH), generator=generator)).backward()
                    optimizer.step()
                    optimizer.zero_grad()

        with pytest.raises(bw.TrainingStopped):
            train()
    (verdict,) = guard.verdicts
    assert verdict.cause == "persistent_hardware"
    assert verdict.site is not None
    assert verdict.site.op == "_scaled_dot_product_flash_attention_for_cpu_backward"


@pytest.mark.parametrize("parts", [2, 8, 32])
def test_a_sum_that_a_device_adds_up_in_parts_in_a_half_type_is_not_suspected(
    parts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel is imitated: cuBLAS splits a long sum, and torch lets it add the parts in bfloat16."""
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(*shape, generator=generator) for shape in ((64, 2048), (2048, 128)))
    a = torch.cat([a, -a * (1 + 0.02 * torch.rand(64, 1, generator=generator))], 1)  # nearly nothing comes of it
    a, b = a.bfloat16(), torch.cat([b, b]).bfloat16()
    out = torch.zeros(64, 128, dtype=torch.bfloat16)
    for left, right in zip(a.chunk(parts, 1), b.chunk(parts), strict=True):
        out = (out.float() + left.float() @ right.float()).bfloat16()
    call = OpCall(aten.mm.default, (a, b), {}, out, "mm", ".", "backward", 0)

    def ratio() -> float:
        sensor = ChecksumSensor(deferred=True)
        sensor(call)
        return max([f.evidence["ratio"] for f in sensor.drain(0, 0)], default=sensor.largest_ratio)

    assert ratio() > 1
    monkeypatch.setattr("bitwitness.sense.checksum_product.parts_roundoff", lambda *_: parts**0.5 * 2.0**-8)
    assert ratio() < 1
    out[3] = (a[3, :2048].float() @ b[:2048].float()).bfloat16()  # a part that was lost
    assert ratio() > 1
