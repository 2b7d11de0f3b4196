"""Pairs of strangers: what is healthy and was accused, and what was planted and passed for the rounding of a coarse dtype."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import bitwitness as bw
from bitwitness.testing import FaultyDevice, from_mapping

STEPS, VOCABULARY, WIDTH = 3, 64, 32


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Tokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.layers = nn.Embedding(VOCABULARY, WIDTH), nn.ModuleList(Layer() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Pictures(nn.Module):
    """Its first convolution has a bias, which the batch norm behind it takes out again."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm, self.head = nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.norm(self.stem(x))).mean((2, 3)))


Loss = Callable[[nn.Module, Tensor], Tensor]
Between = Callable[[nn.Module, int], None]


def next_token(model: nn.Module, tokens: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def tempered(model: nn.Module, tokens: Tensor) -> Tensor:
    return F.cross_entropy((model(tokens[:, :-1]) / 1.2).flatten(0, 1), tokens[:, 1:].flatten())


def trained(
    out: Path, model: nn.Module, optimizer: torch.optim.Optimizer, backward: Callable[[int], None],
    written: Between | None = None, **settings: Any,
) -> Path:  # fmt: skip
    with bw.Recorder(model, out=str(out), **settings):
        for step in range(STEPS):
            optimizer.zero_grad()
            backward(step)
            optimizer.step()
            if written is not None:
                written(model, step)
    return out


def token_model() -> tuple[Tokens, torch.optim.Optimizer]:
    torch.manual_seed(1)
    model = Tokens()
    return model, torch.optim.AdamW(model.parameters(), 1e-3)


def tokens_of(step: int) -> Tensor:
    return torch.randint(0, VOCABULARY, (8, 17), generator=torch.Generator().manual_seed(step))


def recorded(
    out: Path, *, loss: Loss = next_token, dtype: torch.dtype | None = None, edited: Between | None = None,
    written: Between | None = None, level: str = "mix", content: str = "stats",
) -> Path:  # fmt: skip
    model, optimizer = token_model()

    def backward(step: int) -> None:
        with nullcontext() if dtype is None else torch.autocast("cpu", dtype):
            value = loss(model, tokens_of(step))
        value.backward()
        if edited is not None:
            edited(model, step)

    return trained(out, model, optimizer, backward, written, level=level, content=content)


# -- healthy -----------------------------------------------------------------------------------------------------------------


def in_micro_batches(
    out: Path, *, afterwards: bool = False, order: list[int] | None = None, content: str = "stats"
) -> Path:
    model, optimizer = token_model()

    def backward(step: int) -> None:
        for part in tokens_of(step)[order or list(range(8))].split(4):
            (next_token(model, part) / (1 if afterwards else 2)).backward()
        for parameter in model.parameters() if afterwards else ():
            parameter.grad /= 2

    return trained(out, model, optimizer, backward, level="mix", content=content)


@pytest.mark.parametrize("content", ["stats", "tensors"])
def test_gradients_may_be_divided_where_another_run_divides_its_losses(tmp_path: Path, content: str) -> None:
    a = in_micro_batches(tmp_path / "a", content=content)
    report = bw.compare(a, in_micro_batches(tmp_path / "b", afterwards=True, content=content))
    assert report.status == "fine", report.conclusion
    assert "the loss is scaled 2 times as much in run B" in report.notes[0]


def test_a_batch_may_be_dealt_to_micro_batches_in_another_order(tmp_path: Path) -> None:
    whole = recorded(tmp_path / "a", content="tensors")
    dealt = in_micro_batches(tmp_path / "b", order=[5, 0, 7, 2, 1, 6, 3, 4], content="tensors")
    report = bw.compare(whole, dealt)
    assert report.status == "fine", report.conclusion
    assert "the same values in another order" in report.conclusion


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_bias_before_a_batch_norm_is_rounding_in_each_precision(tmp_path: Path, dtype: torch.dtype) -> None:
    def pictures(out: Path, *, half: bool) -> Path:
        torch.manual_seed(2)
        model = Pictures()
        optimizer = torch.optim.SGD(model.parameters(), 0.05)

        def backward(_: int) -> None:
            x, y = torch.randn(16, 3, 8, 8), torch.randint(0, 5, (16,))
            with torch.autocast("cpu", dtype) if half else nullcontext():
                loss = F.cross_entropy(model(x), y)
            loss.backward()

        return trained(out, model, optimizer, backward, level="mix")

    report = bw.compare(pictures(tmp_path / "a", half=False), pictures(tmp_path / "b", half=True))
    assert report.status == "fine", report.conclusion
    assert report.conclusion.startswith(f"rounding of {str(dtype).removeprefix('torch.')}"), report.conclusion


def test_a_transposed_square_weight_has_a_transposed_gradient(tmp_path: Path) -> None:
    class Linear(nn.Module):
        def __init__(self, linear: nn.Linear) -> None:
            super().__init__()
            self.weight, self.bias = nn.Parameter(linear.weight.detach().t().contiguous()), linear.bias

        def forward(self, x: Tensor) -> Tensor:
            return x @ self.weight + self.bias

    def port(out: Path, *, turned: bool) -> Path:
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3))
        if turned:
            model[2] = Linear(model[2])
        optimizer = torch.optim.AdamW(model.parameters(), 1e-3)

        def backward(_: int) -> None:
            F.cross_entropy(model(torch.randn(16, 8)), torch.randint(0, 3, (16,))).backward()

        return trained(out, model, optimizer, backward, level="modules")

    report = bw.compare(port(tmp_path / "a", turned=False), port(tmp_path / "b", turned=True))
    assert report.status == "fine", report.conclusion


# -- planted -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", [{"pattern": "row", "factor": 1.5}, {"pattern": "all", "factor": 1.03}])
def test_an_operator_of_equal_inputs_does_not_pass_for_rounding_of_bfloat16(
    tmp_path: Path, fault: dict[str, Any]
) -> None:
    a = recorded(tmp_path / "a", dtype=torch.bfloat16)
    planted = {"kind": "multiply", "site": "layers.1.up/addmm:forward", "element": 7, **fault}
    with FaultyDevice(from_mapping({"fault": [planted]})) as device:
        b = recorded(tmp_path / "b", dtype=torch.bfloat16)
    assert device.fired
    report = bw.compare(a, b)
    assert report.conclusion.startswith("the runs part at layers.1.up/addmm#0:forward.out0 (rank 0, step 0)"), (
        report.conclusion
    )


def test_a_loss_is_named_where_modules_alone_were_recorded(tmp_path: Path) -> None:
    report = bw.compare(
        recorded(tmp_path / "a", level="modules"), recorded(tmp_path / "b", loss=tempered, level="modules")
    )
    assert report.conclusion.startswith("the runs part at ./loss#0:forward.value (rank 0, step 0): the loss differs")
    assert "what the modules return agrees: it is computed otherwise, or of other targets" in report.conclusion


def weaker(model: nn.Module, _: int) -> None:
    model.layers[0].down.weight.grad.data.mul_(0.9)


def written(model: nn.Module, step: int) -> None:
    if step == 0:
        model.layers[1].down.weight.data[5] *= 1.5


@pytest.mark.parametrize(
    ("planted", "said"),
    [
        ({"edited": weaker}, "changed between the backward and the step: run A leaves it; run B multiplies it by 0.9"),
        ({"written": written}, "layers.1.down.weight was written between the step before and this one in run B (by "),
        ({"loss": tempered}, "by none of these in run A and by div in run B"),
    ],
)  # fmt: skip
def test_what_is_exact_within_a_run_is_seen_behind_another_precision(tmp_path: Path, planted: Any, said: str) -> None:
    report = bw.compare(recorded(tmp_path / "a"), recorded(tmp_path / "b", dtype=torch.bfloat16, **planted))
    assert report.status == "findings", report.conclusion
    assert said in report.conclusion, report.conclusion


def test_kept_values_tell_which_operator_is_wrong_behind_another_precision(tmp_path: Path) -> None:
    a = recorded(tmp_path / "a", content="tensors")
    fault = {"kind": "multiply", "site": "layers.1.up/addmm:forward", "pattern": "all", "factor": 1.1}
    with FaultyDevice(from_mapping({"fault": [fault]})) as device:
        b = recorded(tmp_path / "b", dtype=torch.bfloat16, content="tensors")
    assert device.fired
    report = bw.compare(a, b)
    assert report.conclusion.startswith("the runs part at layers.1.up/addmm#0:forward.out0 (rank 0, step 0)"), (
        report.conclusion
    )
    assert "run B computed it wrongly" in report.conclusion


def test_another_precision_alone_is_rounding(tmp_path: Path) -> None:
    report = bw.compare(recorded(tmp_path / "a"), recorded(tmp_path / "b", dtype=torch.bfloat16))
    assert report.status == "fine", report.conclusion
    assert "by none of these" not in report.conclusion
