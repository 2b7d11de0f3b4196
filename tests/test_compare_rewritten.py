"""The same mathematics written otherwise is no difference, in float32 and in bfloat16; a mistake beside it is named."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from compare_zoo import Case, record
from extent import chosen
from rewritten import MODELS, Model
from torch import nn

import bitwitness as bw

DTYPES = ("float32", "bfloat16")


def case(name: str, dtype: str, *, other: bool, plant: Callable[[Model], None] | None = None) -> Case:
    def make() -> nn.Module:
        model = MODELS[name](other=other)
        if plant is not None:
            plant(model)
        return model

    def loss(model: Any, generator: torch.Generator) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bfloat16"):
            return model.loss(*model.batch(generator))

    return Case(make, loss)


def compared(
    folder: Path, name: str, dtype: str, content: str = "stats", plant: Callable[[Model], None] | None = None
) -> bw.Report:
    a = record(folder / "a", case(name, dtype, other=False), content=content)
    return bw.compare(a, record(folder / "b", case(name, dtype, other=True, plant=plant), content=content))


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
@pytest.mark.parametrize(
    ("dtype", "content"),
    [*((dtype, "stats") for dtype in DTYPES), *((dtype, "tensors") for dtype in chosen(DTYPES, DTYPES[1:]))],
)
@pytest.mark.parametrize("name", MODELS)
def test_the_same_written_otherwise_is_no_difference(tmp_path: Path, name: str, dtype: str, content: str) -> None:
    report = compared(tmp_path, name, dtype, content)
    assert report.status == "fine", report.conclusion
    assert not report.suspects


def steeper(model: Model) -> None:
    model.a.weight.register_hook(lambda grad: grad * 1.1)


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", MODELS)
def test_a_gradient_that_is_too_large_is_named_beside_what_is_written_otherwise(
    tmp_path: Path, name: str, dtype: str
) -> None:
    report = compared(tmp_path, name, dtype, plant=steeper)
    assert report.status == "findings"  # though most of the operators of a Scan have no counterpart: its modules have
    assert "a/weight#0:grad" in report.conclusion, report.conclusion


def larger(model: Model) -> None:
    with torch.no_grad():
        model.a.weight[1] *= 1.5


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["Ode", "Scan", "Logits"])
def test_a_weight_that_differs_is_named_beside_what_is_written_otherwise(tmp_path: Path, name: str, dtype: str) -> None:
    report = compared(tmp_path, name, dtype, plant=larger)
    assert "a.weight differs" in report.conclusion


def test_what_a_norm_makes_up_for_is_said(tmp_path: Path) -> None:
    def scaled(model: Model) -> None:
        model.a.register_forward_hook(lambda _module, _args, out: out * 1.05)

    report = compared(tmp_path, "Norm", "float32", plant=scaled)
    assert report.status == "fine"
    assert "but for a/Linear#0:forward.out0" in report.conclusion
    assert "of which nothing is left in what follows" in report.conclusion


class Activated(nn.Module):
    """Two layers and an activation: torch's own, or the formula by a hyperbolic tangent, as many models write it."""

    def __init__(self, *, other: bool) -> None:
        super().__init__()
        self.a, self.b, self.other = nn.Linear(48, 48), nn.Linear(48, 8), other

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.a(x)
        if not self.other:
            return self.b(nn.functional.gelu(h))
        return self.b(0.5 * h * (1.0 + torch.tanh((2 / torch.pi) ** 0.5 * (h + 0.044715 * torch.pow(h, 3.0)))))


@pytest.mark.parametrize("content", chosen(["stats", "tensors"], ["stats"]))
def test_a_formula_that_coarse_rounding_hides_is_named(tmp_path: Path, content: str) -> None:
    def case(dtype: str, *, other: bool) -> Case:
        def loss(model: Any, generator: torch.Generator) -> torch.Tensor:
            with torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bfloat16"):
                out: torch.Tensor = model(torch.randn(32, 48, generator=generator))
            return out.float().square().mean()

        return Case(lambda: Activated(other=other), loss)

    a = record(tmp_path / "a", case("float32", other=False), content=content)
    hidden = bw.compare(a, record(tmp_path / "b", case("bfloat16", other=True), content=content))
    assert hidden.status == "fine"
    assert "computed by gelu in run A and by mul, pow, …, mul in run B" in hidden.conclusion
    assert "whether these are one formula cannot be told" in hidden.conclusion
    same = bw.compare(a, record(tmp_path / "c", case("bfloat16", other=False), content=content))
    assert "one formula" not in same.conclusion
    shown = bw.compare(a, record(tmp_path / "d", case("float32", other=True), content=content))
    assert shown.status == "findings"
    assert "gelu" in shown.conclusion
