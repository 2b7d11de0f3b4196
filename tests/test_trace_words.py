"""What is said of an operator, and what to do, for every dtype and every way of making NaN or Inf: a table."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import bitwitness as bw

HALF, BRAIN, SINGLE, DOUBLE = torch.float16, torch.bfloat16, torch.float32, torch.float64
INF, NAN = float("inf"), float("nan")


class Struck(nn.Module):
    """A layer, a cast to the row's dtype, and what the row does with its result."""

    def __init__(self, dtype: torch.dtype, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        nn.init.constant_(self.fc.weight, 0.25)
        nn.init.zeros_(self.fc.bias)
        self.dtype = dtype
        self.change = change

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map ones to about one in the middle."""
        return self.change(self.fc(x).to(self.dtype)).double()


@dataclass(frozen=True)
class Row:
    """``says`` and ``advises``: what the message's claim and its advice must hold; ``op`` and ``making`` as in the evidence."""

    name: str
    dtype: torch.dtype
    change: Callable[[torch.Tensor], torch.Tensor]
    op: str
    making: str
    says: str
    advises: str
    phase: str = "forward"


def big(x: torch.Tensor) -> torch.Tensor:
    """Return something of the dtype's square root times ten."""
    return x * (torch.finfo(x.dtype).max ** 0.5 * 10)


class Loud(torch.autograd.Function):
    """Overflows in its backward."""

    @staticmethod
    def forward(ctx, x: torch.Tensor) -> torch.Tensor:
        return x * 1

    @staticmethod
    def backward(ctx, grad: torch.Tensor) -> torch.Tensor:
        return (grad * 0 + 3e4) * 300


OVER = "it overflows: in float64 it comes to"
FOR_HALF = "run this operator in a wider dtype than float16 (bfloat16 or float32), or make its inputs smaller"
FOR_BRAIN = "of all dtypes only float64 would hold it; float32 has no wider range than bfloat16"
FOR_SINGLE = "of all dtypes only float64 would hold it"
FOR_DOUBLE = "no wider dtype holds the result"

OVERFLOWS: dict[str, tuple[str, Callable[[torch.Tensor], torch.Tensor]]] = {
    "mul": ("mul", lambda x: big(x) * big(x)),
    "square": ("pow", lambda x: big(x).square()),
    "add": ("add", lambda x: x * (torch.finfo(x.dtype).max * 0.7) + x * (torch.finfo(x.dtype).max * 0.7)),
    "sum": ("sum", lambda x: (x * (torch.finfo(x.dtype).max * 0.7)).sum()),
    "cumsum": ("cumsum", lambda x: (x * (torch.finfo(x.dtype).max * 0.7)).cumsum(-1)),
    "div": ("div", lambda x: big(x) / (x / big(x))),
    "prod": ("prod", lambda x: big(x).prod()),
    "matmul": ("mm", lambda x: big(x) @ big(x).mT),
}
ADVICE = {HALF: FOR_HALF, BRAIN: FOR_BRAIN, SINGLE: FOR_SINGLE}
TOO_LARGE = [
    Row(f"{how} in {dtype}", dtype, change, op, "overflow", OVER, ADVICE[dtype])
    for how, (op, change) in OVERFLOWS.items()
    for dtype in (HALF, BRAIN, SINGLE)
    if not (how == "prod" and dtype is HALF)  # in float64 it is beyond float32, too
]
TOO_LARGE += [
    Row("mul in float64", DOUBLE, lambda x: big(x) * big(x), "mul", "overflow", "it overflows", FOR_DOUBLE),
    Row("exp(20) in half", HALF, lambda x: (x * 20).exp(), "exp", "overflow", OVER, "a wider dtype than float16 (bfloat16 or"),
    Row("exp(100) in half", HALF, lambda x: (x * 100).exp(), "exp", "overflow", OVER, "of all dtypes only float64 would hold"),
    Row("exp in float32", SINGLE, lambda x: (x * 100).exp(), "exp", "overflow", OVER, "subtract the largest exponent first"),
    Row("exp(9999)", SINGLE, lambda x: (x * 9999).exp(), "exp", "overflow", "it overflows", FOR_DOUBLE),
    Row("pow in half", HALF, lambda x: (x * 50).pow(3), "pow", "overflow", OVER, FOR_HALF),
    Row("mul_ in half", HALF, lambda x: big(x).mul_(big(x)), "mul_", "overflow", OVER, FOR_HALF),
    Row("norm in half", HALF, lambda x: (x * 6e4).norm(), "linalg_vector_norm", "overflow", OVER, FOR_HALF),
    Row("norm in float32", SINGLE, lambda x: (x * 1e30).norm(), "linalg_vector_norm", "overflow_inside",
        "it overflows on the way to a result that is", FOR_SINGLE),
    Row("var in float32", SINGLE, lambda x: (x * torch.linspace(1e25, 1e30, 4)).var(), "var", "overflow", OVER, FOR_SINGLE),
    Row("layer norm", SINGLE, lambda x: F.layer_norm(x * torch.linspace(1e30, 1e35, 4), (4,)), "native_layer_norm",
        "overflow_inside", "it overflows on the way", "make its inputs smaller"),
    Row("cast to half", SINGLE, lambda x: (x * 1e6).half(), "_to_copy", "overflow", OVER,
        "keep this tensor in a wider dtype than float16 (bfloat16 or float32), or scale or clamp it before the cast"),
    Row("cast of 1e300", DOUBLE, lambda x: (x * 1e300).bfloat16(), "_to_copy", "overflow", OVER,
        "keep this tensor in a wider dtype than bfloat16 (float64), or scale"),
    Row("cast to single", DOUBLE, lambda x: (x * 1e300).float(), "_to_copy", "overflow", OVER,
        "keep this tensor in a wider dtype than float32 (float64)"),
    Row("cast to float8", SINGLE, lambda x: (x * 1e5).to(torch.float8_e5m2), "_to_copy", "overflow", OVER,
        "keep this tensor in a wider dtype than float8_e5m2 (bfloat16 or float32)"),
    Row("cast to fnuz", SINGLE, lambda x: (x * 1e5).to(torch.float8_e4m3fnuz), "_to_copy", "overflow", OVER,
        "keep this tensor in a wider dtype than float8_e4m3fnuz (bfloat16 or float32)"),
    Row("cast to fnuz, small", SINGLE, lambda x: (x * 1e4).to(torch.float8_e4m3fnuz), "_to_copy", "overflow", OVER,
        "than float8_e4m3fnuz (float16, bfloat16 or float32)"),
    Row("backward", HALF, Loud.apply, "mul", "overflow", OVER,
        FOR_HALF, "backward"),
]  # fmt: skip


UNDEFINED = [
    Row("1/0", SINGLE, lambda x: x / (x * 0), "div", "division_by_zero", "it divides by zero", "add an eps to what it divides"),
    Row("x/0.0", SINGLE, lambda x: x / 0.0, "div", "division_by_zero", "it divides by zero", "add an eps"),
    Row("0/0", SINGLE, lambda x: (x * 0) / (x * 0), "div", "zero_by_zero", "it divides zero by zero", "a count or a norm may"),
    Row("1/0 in half", HALF, lambda x: x / (x * 0 + 1e-8), "div", "division_by_zero", "it divides by zero",
        "float16 holds nothing between 0 and 6e-08: what is smaller, an eps too, becomes zero"),
    Row("div_", SINGLE, lambda x: x.clone().div_(x * 0), "div_", "division_by_zero", "it divides by zero", "add an eps"),
    Row("reciprocal", SINGLE, lambda x: (x * 0).reciprocal(), "reciprocal", "division_by_zero", "it divides by zero", "add an"),
    Row("rsqrt", BRAIN, lambda x: (x * 0).rsqrt(), "rsqrt", "division_by_zero", "it divides by zero", "add an eps"),
    Row("rsqrt of -1", SINGLE, lambda x: (-x).rsqrt(), "rsqrt", "root_of_negative", "the root of a negative",
        "clamp its input"),
    Row("inf by inf", SINGLE, lambda x: x.masked_fill(x > 0, INF) / x.masked_fill(x > 0, INF), "div", "inf_by_inf",
        "it divides infinity by infinity", "masked away"),
    Row("0 * inf", SINGLE, lambda x: (x * 0) * x.masked_fill(x > 0, -INF), "mul", "zero_times_inf", "zero times infinity",
        "torch.where or masked_fill"),
    Row("inf - inf", SINGLE, lambda x: x.masked_fill(x > 0, INF) + x.masked_fill(x > 0, -INF), "add", "inf_minus_inf",
        "infinity minus infinity", "a large finite number"),
    Row("inf in mm", SINGLE, lambda x: x.masked_fill(x > 0, INF) @ (x * 0).mT, "mm", "infinity_in_product",
        "it multiplies or adds up infinities that it was given", "mask after it"),
    Row("log 0", SINGLE, lambda x: (x * 0).log(), "log", "log_of_zero", "the logarithm of zero", "clamp its input from below"),
    Row("log 0 in half", HALF, lambda x: (x * 1e-9).log(), "log", "log_of_zero", "the logarithm of zero",
        "between 0 and 6e-08"),
    Row("log -1", BRAIN, lambda x: (-x).log(), "log", "log_of_negative", "logarithm of a negative",
        "make sure that its input is"),
    Row("log1p", SINGLE, lambda x: (-x).round().log1p(), "log1p", "log_of_zero", "the logarithm of zero", "clamp its input"),
    Row("xlogy", SINGLE, lambda x: torch.xlogy(x, x * 0), "xlogy", "log_of_zero", "the logarithm of zero", "clamp its input"),
    Row("sqrt -1", SINGLE, lambda x: (-x).sqrt(), "sqrt", "root_of_negative", "the root of a negative",
        "clamp its input at zero"),
    Row("0 ** -1", SINGLE, lambda x: (x * 0).pow(-1.5), "pow", "zero_to_negative_power", "zero to a negative power",
        "add an eps"),
    Row("-1 ** .5", SINGLE, lambda x: (-x).pow(0.3), "pow", "negative_to_fraction", "that is no integer", "clamp the base"),
    Row("acos 2", SINGLE, lambda x: (x * 2).acos(), "acos", "outside_domain", "ends of its domain", "inside its domain"),
    Row("atanh 1", SINGLE, lambda x: x.round().atanh(), "atanh", "outside_domain", "ends of its domain", "inside its domain"),
    Row("softmax", SINGLE, lambda x: x.masked_fill(x > 0, -INF).softmax(-1), "_softmax", "all_masked",
        "a mask leaves some row nothing to choose from", "each row keeps one entry unmasked"),
    Row("log softmax", BRAIN, lambda x: x.masked_fill(x > 0, -INF).log_softmax(-1), "_log_softmax", "all_masked",
        "a mask leaves some row nothing to choose from", "each row keeps one entry unmasked"),
    Row("softmax of inf", SINGLE, lambda x: x.masked_fill(x > 0, INF).softmax(-1), "_softmax", "inf_minus_inf",
        "infinity minus infinity", "a large finite number"),
    Row("mean of none", SINGLE, lambda x: x[:0].mean(), "mean", "nothing_to_average", "it averages over nothing",
        "skip a batch"),
    Row("no label", DOUBLE, lambda x: F.cross_entropy(x, torch.full((3,), -100)), "nll_loss_forward", "nothing_to_average",
        "every label is ignored or has no weight, so it averages over nothing", "skip a batch"),
    Row("std of one", SINGLE, lambda x: x[:1, :1].std(), "std", "single_value", "a single value has no unbiased",
        "correction=0"),
    Row("var of one", SINGLE, lambda x: x[:1].var(0), "var", "single_value", "a single value has no unbiased", "correction=0"),
    Row("ctc", SINGLE, lambda x: F.ctc_loss(
        x.unsqueeze(1).log_softmax(-1), torch.ones(1, 5, dtype=torch.long), torch.tensor([3]), torch.tensor([5])),
        "_ctc_loss", "no_alignment", "a target is too long for its input", "zero_infinity=True"),
    Row("weight norm", SINGLE, lambda x: torch._weight_norm(x * 0, x[:, :1]), "_weight_norm_interface", "zero_by_zero",
        "it divides zero by zero", "add an eps"),
    Row("number", SINGLE, lambda x: x * NAN, "mul", "number", "the code gives it the number nan", "where the number nan comes"),
    Row("infinite number", HALF, lambda x: x + INF, "add", "number", "the code gives it the number inf", "a schedule"),
]  # fmt: skip

SLOPES = [
    Row("sqrt", SINGLE, lambda x: (x * 0).sqrt(), "div", "slope", "the slope of sqrt is infinite or undefined at zero",
        "add an eps under the root", "backward"),
    Row("pow", SINGLE, lambda x: (x * 0).pow(0.5), "pow", "slope", "the slope of pow is infinite or undefined at zero",
        "add an eps under the root", "backward"),
    Row("acos", SINGLE, lambda x: (x - x.detach() + 1).acos(), "rsqrt", "slope",
        "the slope of acos is infinite or undefined at one",
        "clamp the input of acos away from the ends", "backward"),
    Row("hidden log", SINGLE, lambda x: torch.where(x > 9, (x * 0).log(), x), "div", "slope",
        "the slope of log is infinite or undefined at zero", "clamp the input of the logarithm from below", "backward"),
    Row("hidden log in half", HALF, lambda x: torch.where(x > 9, (x * 0).log(), x), "div", "slope",
        "the slope of log is infinite or undefined at zero", "float16 holds nothing between 0 and 6e-08", "backward"),
    Row("hidden division", SINGLE, lambda x: torch.where(x > 9, x / (x * 0), x), "div", "slope",
        "the slope of div is infinite or undefined where it divides by zero", "add an eps to what it divides by", "backward"),
]  # fmt: skip


CONSTANTS = [
    ("full of NaN", lambda x: x + torch.full((4,), NAN), "constant", "no mask is made of it"),
    ("masked by NaN", lambda x: x.masked_fill(x > 0, NAN), "constant", "no mask is made of it"),
    ("mask of -inf", lambda x: x.masked_fill(x > 0, -INF), "constant", "make sure that something stays unmasked"),
]


@pytest.mark.parametrize(("name", "change", "kind", "advises"), CONSTANTS, ids=[row[0] for row in CONSTANTS])
def test_a_constant_is_a_mask_only_where_it_can_be_one(name, change, kind, advises) -> None:
    finding = told(Row(name, SINGLE, change, "", "", "", ""))
    assert finding.evidence["kind"] == kind, finding.message
    assert advises in finding.message


def told(row: Row) -> bw.Finding:
    net = Struck(row.dtype, row.change)
    with warnings.catch_warnings(), bw.trace_nonfinite(net) as trace:
        warnings.simplefilter("ignore")
        net(torch.ones(3, 4)).mean().backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    assert trace.findings, "nothing was found"
    return trace.findings[0]


@pytest.mark.parametrize("row", [*TOO_LARGE, *UNDEFINED, *SLOPES], ids=lambda row: row.name)
def test_the_claim_and_the_advice_fit_the_operator_and_its_dtype(row: Row) -> None:
    finding = told(row)
    words, _, advice = finding.message.partition("To do: ")
    assert (finding.site.op, finding.site.phase) == (row.op, row.phase), finding.message
    assert finding.evidence["making"] == row.making, finding.message
    assert row.says in words, finding.message
    assert row.advises in advice, finding.message
    assert finding.evidence["advice"] == advice
    if row.making != "zero_times_inf":
        assert "zero times infinity" not in finding.message
    if row.dtype is BRAIN:
        assert "wider dtype than bfloat16 (bfloat16" not in advice
