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


class Scaled(torch.optim.Optimizer):
    """Moves each weight by its gradient of norm 1."""

    times = 1.0

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        del closure
        for group in self.param_groups:
            for parameter in group["params"]:
                grad = parameter.grad.float()
                step = grad / grad.norm().clamp(min=1e-6) * self.times
                parameter.add_(step.to(parameter.dtype), alpha=-group["lr"])


class Unscaled(Scaled):
    """Moves it thrice as far; both are called alike."""

    times = 3.0


Unscaled.__name__ = "Scaled"
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


def pictures(
    out: Path, make: Callable[[], nn.Module], *, dtype: torch.dtype | None = None,
    seen: Callable[[Tensor], Tensor] = lambda x: x, content: str = "stats",
) -> Path:  # fmt: skip
    torch.manual_seed(2)
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), 0.05)

    def backward(_: int) -> None:
        x, y = torch.randn(16, 3, 8, 8), torch.randint(0, 5, (16,))
        with nullcontext() if dtype is None else torch.autocast("cpu", dtype):
            loss = F.cross_entropy(model(seen(x)), y)
        loss.backward()

    return trained(out, model, optimizer, backward, level="mix", content=content)


# -- healthy -----------------------------------------------------------------------------------------------------------------


def in_micro_batches(
    out: Path, *, afterwards: bool = False, order: list[int] | None = None, content: str = "stats", level: str = "mix",
    dtype: torch.dtype | None = None,
) -> Path:  # fmt: skip
    model, optimizer = token_model()

    def backward(step: int) -> None:
        for part in tokens_of(step)[order or list(range(8))].split(4):
            with nullcontext() if dtype is None else torch.autocast("cpu", dtype):
                loss = next_token(model, part)
            (loss / (1 if afterwards else 2)).backward()
        for parameter in model.parameters() if afterwards else ():
            parameter.grad /= 2

    return trained(out, model, optimizer, backward, level=level, content=content)


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


@pytest.mark.parametrize("level", ["mix", "modules"])
def test_micro_batches_may_be_dealt_otherwise_in_bfloat16(tmp_path: Path, level: str) -> None:
    a = in_micro_batches(tmp_path / "a", dtype=torch.bfloat16, level=level)
    b = in_micro_batches(tmp_path / "b", order=[5, 0, 7, 2, 1, 6, 3, 4], dtype=torch.bfloat16, level=level)
    report = bw.compare(a, b)
    assert report.status == "fine", report.conclusion


def test_samples_of_other_lengths_are_compared_with_their_padded_batch(tmp_path: Path) -> None:
    lengths = [16, 11, 7, 4]

    def run(out: Path, *, padded: bool) -> Path:
        model, optimizer = token_model()

        def loss(tokens: Tensor, targets: Tensor) -> Tensor:
            summed = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten(), reduction="sum")
            return summed / sum(lengths)

        def backward(step: int) -> None:
            tokens = tokens_of(step)[:4]
            targets = tokens[:, 1:].clone()
            for row, length in enumerate(lengths):
                targets[row, length:] = -100
            if padded:
                loss(tokens[:, :-1], targets).backward()
                return
            for row, length in enumerate(lengths):
                loss(tokens[row : row + 1, :length], targets[row : row + 1, :length]).backward()

        return trained(out, model, optimizer, backward, level="mix", content="tensors")

    report = bw.compare(run(tmp_path / "a", padded=True), run(tmp_path / "b", padded=False))
    assert report.status == "fine", report.conclusion
    assert not report.problems


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_bias_before_a_batch_norm_is_rounding_in_each_precision(tmp_path: Path, dtype: torch.dtype) -> None:
    report = bw.compare(pictures(tmp_path / "a", Pictures), pictures(tmp_path / "b", Pictures, dtype=dtype))
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
        ({"loss": tempered}, "./div#0:forward.out0 (rank 0, step 0): only run B has it"),
    ],
)  # fmt: skip
def test_what_is_exact_within_a_run_is_seen_behind_another_precision(tmp_path: Path, planted: Any, said: str) -> None:
    report = bw.compare(recorded(tmp_path / "a"), recorded(tmp_path / "b", dtype=torch.bfloat16, **planted))
    assert report.status == "findings", report.conclusion
    assert said in report.conclusion, report.conclusion


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("stats", "its inputs agree within rounding, and its result is 1.1 times as large in run B"),
        ("tensors", "run B computed it wrongly"),
    ],
)
def test_an_operator_is_told_to_be_wrong_behind_another_precision(tmp_path: Path, content: str, said: str) -> None:
    a = recorded(tmp_path / "a", content=content)
    fault = {"kind": "multiply", "site": "layers.1.up/addmm:forward", "pattern": "all", "factor": 1.1}
    with FaultyDevice(from_mapping({"fault": [fault]})) as device:
        b = recorded(tmp_path / "b", dtype=torch.bfloat16, content=content)
    assert device.fired
    report = bw.compare(a, b)
    assert report.conclusion.startswith("the runs part at layers.1.up/addmm#0:forward.out0 (rank 0, step 0)"), (
        report.conclusion
    )
    assert said in report.conclusion


def test_a_norm_that_rounding_does_not_explain_is_told_behind_another_precision(tmp_path: Path) -> None:
    a = recorded(tmp_path / "a")
    fault = {"kind": "multiply", "site": "layers.1.up/addmm:forward", "pattern": "all", "factor": 1.012}
    with FaultyDevice(from_mapping({"fault": [fault]})) as device:
        b = recorded(tmp_path / "b", dtype=torch.bfloat16)
    assert device.fired
    report = bw.compare(a, b)
    said = "its inputs agree within rounding, and its result does not: its norm is 1.01"
    assert report.conclusion.startswith("the runs part at layers.1.up/addmm#0:forward.out0 (rank 0, step 0)"), (
        report.conclusion
    )
    assert said in report.conclusion


def test_no_product_alone_is_asked_again_behind_another_precision(tmp_path: Path) -> None:
    a = recorded(tmp_path / "a", content="tensors")
    fault = {"kind": "multiply", "site": "layers.1/gelu:forward", "pattern": "row", "element": 7, "factor": 1.6}
    with FaultyDevice(from_mapping({"fault": [fault]})) as device:
        b = recorded(tmp_path / "b", dtype=torch.bfloat16, content="tensors")
    assert device.fired
    report = bw.compare(a, b)
    assert report.conclusion.startswith("the runs part at layers.1/gelu#0:forward.out0 (rank 0, step 0)"), (
        report.conclusion
    )
    assert "run B computed it wrongly" in report.conclusion


def test_another_precision_alone_is_rounding(tmp_path: Path) -> None:
    report = bw.compare(recorded(tmp_path / "a"), recorded(tmp_path / "b", dtype=torch.bfloat16))
    assert report.status == "fine", report.conclusion
    assert "by none of these" not in report.conclusion


def test_a_hook_is_named_behind_another_precision_and_nothing_beside_it(tmp_path: Path) -> None:
    def hooked(model: nn.Module, tokens: Tensor) -> Tensor:
        if not model.layers[1].up.weight._backward_hooks:
            model.layers[1].up.weight.register_hook(lambda gradient: gradient * 1.5)
        return next_token(model, tokens)

    report = bw.compare(recorded(tmp_path / "a"), recorded(tmp_path / "b", loss=hooked, dtype=torch.bfloat16))
    said = "(rank 0, step 0): only run B has it, and its result matters to layers.1.up/weight#0:grad."
    assert said in report.conclusion, report.conclusion


def test_a_factor_behind_a_wrong_backward_is_not_guessed_at(tmp_path: Path) -> None:
    a = recorded(tmp_path / "a")
    fault = {"kind": "multiply", "site": "head/mm:backward", "pattern": "all", "factor": 1.01}
    with FaultyDevice(from_mapping({"fault": [fault]})) as device:
        b = recorded(tmp_path / "b")
    assert device.fired
    report = bw.compare(a, b)
    assert report.conclusion.startswith("the runs part at head/mm#0:backward.out0 (rank 0, step 0)"), report.conclusion
    assert "its inputs agree and its result does not" in report.conclusion
    assert "a factor of the loss" not in report.conclusion
    assert "every gradient but 1 of 15 (head.bias) is 1.01 times as large in run B" in report.conclusion


def test_another_part_of_a_recurrent_result_is_not_called_an_edit(tmp_path: Path) -> None:
    class Recurrent(nn.Module):
        def __init__(self, place: int) -> None:
            super().__init__()
            self.rnn, self.head, self.place = nn.LSTM(WIDTH, WIDTH, batch_first=True), nn.Linear(WIDTH, 3), place

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.rnn(x)[0][:, self.place])

    def run(out: Path, place: int) -> Path:
        torch.manual_seed(4)
        model = Recurrent(place)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)

        def backward(_: int) -> None:
            F.cross_entropy(model(torch.randn(8, 6, WIDTH)), torch.randint(0, 3, (8,))).backward()

        return trained(out, model, optimizer, backward, level="mix")

    report = bw.compare(run(tmp_path / "a", -1), run(tmp_path / "b", 0))
    assert report.conclusion.startswith("the runs part at head/addmm#0:forward.out0"), report.conclusion
    assert "another view (a transpose, a slice)" in report.conclusion


def test_a_norm_that_is_not_called_is_named_where_the_next_module_computes_otherwise(tmp_path: Path) -> None:
    class Mixed(nn.Module):
        """Reads a transposed sum without its norm: `nn.Linear` computes that by other operators."""

        def __init__(self, *, normed: bool) -> None:
            super().__init__()
            self.mix, self.norm, self.head = nn.Linear(6, 6), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3)
            self.normed = normed

        def forward(self, x: Tensor) -> Tensor:
            x = x + self.mix(x.transpose(1, 2)).transpose(1, 2)
            return self.head(self.norm(x) if self.normed else x).mean(1)

    def run(out: Path, *, normed: bool) -> Path:
        torch.manual_seed(5)
        model = Mixed(normed=normed)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)

        def backward(_: int) -> None:
            x = torch.randn(8, WIDTH, 6).transpose(1, 2)
            F.cross_entropy(model(x), torch.randint(0, 3, (8,))).backward()

        return trained(out, model, optimizer, backward, level="mix")

    report = bw.compare(run(tmp_path / "a", normed=True), run(tmp_path / "b", normed=False))
    assert report.conclusion.startswith("the runs part at norm/native_layer_norm#0:forward.out0"), report.conclusion
    assert "only run A has it, and its result matters to head/Linear#0:forward.in0" in report.conclusion


def test_a_mask_that_one_run_alone_gives_a_module_is_named(tmp_path: Path) -> None:
    class Masked(nn.Module):
        def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
            return x if mask is None else x * mask

    class Model(nn.Module):
        def __init__(self, *, masks: bool) -> None:
            super().__init__()
            self.up, self.masked, self.head, self.masks = nn.Linear(8, WIDTH), Masked(), nn.Linear(WIDTH, 3), masks

        def forward(self, x: Tensor) -> Tensor:
            return self.head(
                self.masked(
                    self.up(x), mask=(torch.ones(WIDTH).index_fill(0, torch.arange(9), 0.0) if self.masks else None)
                )
            )

    def run(out: Path, *, masks: bool) -> Path:
        torch.manual_seed(6)
        model = Model(masks=masks)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)

        def backward(_: int) -> None:
            F.cross_entropy(model(torch.randn(8, 8)), torch.randint(0, 3, (8,))).backward()

        return trained(out, model, optimizer, backward, level="modules")

    report = bw.compare(run(tmp_path / "a", masks=True), run(tmp_path / "b", masks=False))
    assert report.conclusion.startswith("the runs part at masked/Masked#0:forward.out0"), report.conclusion
    assert "called with other arguments: mask in run A alone" in report.conclusion


@pytest.mark.parametrize("scaled", [False, True])
def test_gradients_that_float16_cannot_hold_are_named_where_no_scaler_scales_the_loss(
    tmp_path: Path, scaled: bool
) -> None:
    def run(out: Path, *, half: bool) -> Path:
        model, optimizer = token_model()
        scaler = torch.amp.GradScaler("cpu", enabled=half and scaled)
        with bw.Recorder(model, out=str(out), level="mix"):
            for step in range(STEPS):
                optimizer.zero_grad()
                with torch.autocast("cpu", torch.float16) if half else nullcontext():
                    loss = 1e-4 * next_token(model, tokens_of(step))
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
        return out

    report = bw.compare(run(tmp_path / "a", half=False), run(tmp_path / "b", half=True))
    if scaled:
        assert report.status == "fine", report.conclusion
    else:
        said = "the runs part at ./gradients#0:grad.local (rank 0, step 0): the gradients (15 parameters) of run B are smaller"
        assert report.conclusion.startswith(said), report.conclusion
        assert "its loss is not scaled for the backward (GradScaler)" in report.conclusion


def test_a_loss_that_hardly_differs_is_named_where_its_gradient_does(tmp_path: Path) -> None:
    def smoothed(model: nn.Module, tokens: Tensor) -> Tensor:
        return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten(), label_smoothing=0.01)

    report = bw.compare(
        recorded(tmp_path / "a", level="modules"), recorded(tmp_path / "b", loss=smoothed, level="modules")
    )
    assert report.conclusion.startswith("the runs part at ./loss#0:forward.value (rank 0, step 0): the loss differs"), (
        report.conclusion
    )


def clipped(norm: float, *, but: str = "", factor: float = 1.0) -> Between:
    """Clip all gradients, after one of them was multiplied."""

    def edit(model: nn.Module, _: int) -> None:
        if but:
            model.get_parameter(but).grad.mul_(factor)
        torch.nn.utils.clip_grad_norm_(model.parameters(), norm)

    return edit


def test_one_clipping_of_gradients_that_differ_is_no_cause(tmp_path: Path) -> None:
    a = recorded(tmp_path / "a", edited=clipped(0.5))
    report = bw.compare(a, recorded(tmp_path / "b", loss=tempered, edited=clipped(0.5)))
    assert report.conclusion.startswith("the runs part at ./div#0:forward.out0"), report.conclusion
    assert "clipping" not in report.conclusion


def test_edits_of_some_gradients_are_named_beside_a_clipping(tmp_path: Path) -> None:
    def noised(model: nn.Module, step: int) -> None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        model.layers[0].up.weight.grad += 0.01 * torch.randn(
            2 * WIDTH, WIDTH, generator=torch.Generator().manual_seed(step)
        )

    report = bw.compare(recorded(tmp_path / "a", edited=clipped(0.05)), recorded(tmp_path / "b", edited=noised))
    said = "the gradient of layers.0.up.weight was changed between the backward and the step: run A multiplies it by"
    assert said in report.conclusion, report.conclusion
    assert "run B edits it" in report.conclusion


@pytest.mark.parametrize("precision", [None, torch.bfloat16])
def test_a_gradient_that_is_let_go_of_is_not_called_frozen(tmp_path: Path, precision: torch.dtype | None) -> None:
    def let_go(model: nn.Module, _: int) -> None:
        model.layers[1].up.weight.grad = None

    report = bw.compare(
        recorded(tmp_path / "a", dtype=precision), recorded(tmp_path / "b", dtype=precision, edited=let_go)
    )
    said = "only run A has a gradient of layers.1.up.weight: run B's backward makes it, too, and it is gone before"
    assert said in report.conclusion, report.conclusion


def test_another_input_is_named_behind_another_precision(tmp_path: Path) -> None:
    def model() -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(192, 64), nn.GELU(), nn.Linear(64, 5))

    flipped = pictures(tmp_path / "b", model, dtype=torch.bfloat16, seen=lambda x: x.flip(1))
    report = bw.compare(pictures(tmp_path / "a", model), flipped)
    assert "input in0 differs: the same values in another order" in report.conclusion, report.conclusion


def test_reversed_positions_are_told_of_behind_another_precision_though_the_loss_agrees(tmp_path: Path) -> None:
    class Placed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.place = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(16, WIDTH)
            self.layers, self.head = nn.ModuleList(Layer() for _ in range(2)), nn.Linear(WIDTH, VOCABULARY)

        def forward(self, tokens: Tensor, *, wrong: bool = False) -> Tensor:
            places = torch.arange(tokens.shape[1])
            x = self.embed(tokens) + self.place(places.flip(0) if wrong else places)
            for layer in self.layers:
                x = layer(x)
            return self.head(x)

    def run(out: Path, *, wrong: bool) -> Path:
        torch.manual_seed(1)
        model = Placed()
        optimizer = torch.optim.AdamW(model.parameters(), 1e-3)

        def backward(step: int) -> None:
            tokens = tokens_of(step)
            with torch.autocast("cpu", torch.bfloat16) if wrong else nullcontext():
                logits = model(tokens[:, :-1], wrong=wrong)
                loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
            (1e-3 * loss + 4 * (1 - 1e-3)).backward()  # which is nearly the same number, whatever the model does

        return trained(out, model, optimizer, backward, level="mix")

    report = bw.compare(run(tmp_path / "a", wrong=False), run(tmp_path / "b", wrong=True))
    assert report.status == "findings", report.conclusion
    assert "flip" in report.conclusion, report.conclusion


def test_pieces_of_other_sizes_may_come_in_another_order(tmp_path: Path) -> None:
    def run(out: Path, order: list[int]) -> Path:
        model, optimizer = token_model()

        def backward(step: int) -> None:
            parts = tokens_of(step).split([3, 5])
            for part in (parts[i] for i in order):
                (next_token(model, part) * len(part) / 8).backward()

        return trained(out, model, optimizer, backward, level="mix")

    report = bw.compare(run(tmp_path / "a", [0, 1]), run(tmp_path / "b", [1, 0]))
    assert report.status == "fine", report.conclusion
    assert "input in0 is given in pieces in another order" in report.conclusion


def test_running_statistics_may_be_written_by_a_function_of_a_module_that_is_not_called(tmp_path: Path) -> None:
    class Called(nn.Module):
        def __init__(self, *, function: bool) -> None:
            super().__init__()
            self.stem, self.norm, self.head, self.function = (
                nn.Conv2d(3, 8, 3),
                nn.BatchNorm2d(8),
                nn.Linear(8, 5),
                function,
            )

        def forward(self, x: Tensor) -> Tensor:
            x, norm = self.stem(x), self.norm
            if self.function:
                x = F.batch_norm(x, norm.running_mean, norm.running_var, norm.weight, norm.bias, training=True)
            else:
                x = norm(x)
            return self.head(x.mean((2, 3)))

    def run(out: Path, *, function: bool) -> Path:
        torch.manual_seed(7)
        model = Called(function=function)
        optimizer = torch.optim.SGD(model.parameters(), 0.05)

        def backward(_: int) -> None:
            F.cross_entropy(model(torch.randn(16, 3, 8, 8)), torch.randint(0, 5, (16,))).backward()

        return trained(out, model, optimizer, backward, level="mix")

    report = bw.compare(run(tmp_path / "a", function=False), run(tmp_path / "b", function=True))
    assert report.status == "fine", report.conclusion


def test_a_result_that_differs_by_far_more_than_what_it_is_made_of_is_told_behind_another_precision(
    tmp_path: Path,
) -> None:
    a = recorded(tmp_path / "a")
    fault = {"kind": "multiply", "site": "layers.1/gelu:forward", "pattern": "row", "element": 7, "factor": 6.0}
    with FaultyDevice(from_mapping({"fault": [fault]})) as device:
        b = recorded(tmp_path / "b", dtype=torch.bfloat16)
    assert device.fired
    report = bw.compare(a, b)
    assert report.conclusion.startswith("the runs part at layers.1/gelu#0:forward.out0 (rank 0, step 0)"), (
        report.conclusion
    )


def test_a_scaler_is_not_accused_of_what_else_differs(tmp_path: Path) -> None:
    def run(out: Path, *, half: bool) -> Path:
        model, optimizer = token_model()
        scaler = torch.amp.GradScaler("cpu", init_scale=256.0, enabled=half)
        with bw.Recorder(model, out=str(out), level="mix"):
            for step in range(STEPS):
                optimizer.zero_grad()
                with torch.autocast("cpu", torch.float16) if half else nullcontext():
                    loss = (tempered if half else next_token)(model, tokens_of(step))
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
        return out

    report = bw.compare(run(tmp_path / "a", half=False), run(tmp_path / "b", half=True))
    assert report.conclusion.startswith("the runs part at ./div#0:"), report.conclusion


@pytest.mark.parametrize("level", ["mix", "modules"])
def test_a_bias_that_a_softmax_does_not_see_may_be_moved_by_rounding(tmp_path: Path, level: str) -> None:
    class Pooled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.score, self.head = (
                nn.Embedding(VOCABULARY, WIDTH),
                nn.Linear(WIDTH, 4),
                nn.Linear(WIDTH, 4),
            )

        def forward(self, tokens: Tensor) -> Tensor:
            x = self.embed(tokens)
            return self.head(torch.einsum("bth,btd->bhd", self.score(x).float().softmax(1), x).mean(1))

    def run(out: Path, dtype: torch.dtype | None) -> Path:
        torch.manual_seed(8)
        model = Pooled()
        optimizer = torch.optim.SGD(model.parameters(), 0.5)

        def backward(step: int) -> None:
            tokens = tokens_of(step)
            with nullcontext() if dtype is None else torch.autocast("cpu", dtype):
                loss = F.cross_entropy(model(tokens).float(), tokens[:, 0] % 4)
            loss.backward()

        return trained(out, model, optimizer, backward, level=level)

    report = bw.compare(run(tmp_path / "a", None), run(tmp_path / "b", torch.bfloat16))
    assert report.status == "fine", report.conclusion


def test_what_lies_otherwise_in_memory_may_be_in_another_order(tmp_path: Path) -> None:
    said = {}
    for content in ("stats", "tensors"):
        a = pictures(tmp_path / f"{content} a", Pictures, content=content)
        b = pictures(tmp_path / f"{content} b", Pictures, content=content, seen=lambda x: x.rot90(1, (2, 3)))
        said[content] = bw.compare(a, b).conclusion
    assert (
        "input in0 lies otherwise in memory in each run, and may hold the same values in another order" in said["stats"]
    )
    assert "input in0 differs" in said["tensors"], said["tensors"]


def updated(out: Path, dtype: torch.dtype, rate: float, optimizer: type[torch.optim.Optimizer]) -> Path:
    torch.manual_seed(0)
    model = Tokens()
    model.to(dtype)
    tokens = torch.randint(0, VOCABULARY, (4, 9), generator=torch.Generator().manual_seed(1))
    return trained(
        out, model, optimizer(model.parameters(), lr=rate), lambda _step: next_token(model, tokens).backward()
    )  # fmt: skip


@pytest.mark.parametrize(
    ("rate", "optimizers", "said"),
    [
        (1e-5, (torch.optim.AdamW, torch.optim.AdamW), "its update is lost in bfloat16: all weights together move "),
        (1e-2, (torch.optim.AdamW, torch.optim.AdamW), ""),
        (1e-2, (Scaled, Unscaled), "its update differs by more than the precision of its gradient explains: "),
    ],
)
def test_updates_that_rounding_does_not_explain_are_told_behind_another_precision(
    tmp_path: Path, rate: float, optimizers: tuple[type[torch.optim.Optimizer], type[torch.optim.Optimizer]], said: str
) -> None:
    a = updated(tmp_path / "a", torch.float32, rate, optimizers[0])
    report = bw.compare(a, updated(tmp_path / "b", torch.bfloat16, rate, optimizers[1]))
    assert (said in report.conclusion and bool(report.suspects)) if said else not report.suspects, report.conclusion


def test_weights_that_lie_otherwise_in_memory_are_moved_alike_behind_another_precision(tmp_path: Path) -> None:
    def run(out: Path, layout: torch.memory_format, dtype: torch.dtype | None) -> Path:
        torch.manual_seed(0)
        widths = zip((3, 16, 16, 16), (16, 16, 16, 16), strict=True)
        layers = [layer for i, o in widths for layer in (nn.Conv2d(i, o, 3, padding=1), nn.GELU())]
        model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 5)).to(memory_format=layout)

        def backward(step: int) -> None:
            generator = torch.Generator().manual_seed(step)
            x, y = torch.randn(8, 3, 8, 8, generator=generator), torch.randint(0, 5, (8,), generator=generator)
            with nullcontext() if dtype is None else torch.autocast("cpu", dtype):
                loss = F.cross_entropy(model(x.to(memory_format=layout)), y)
            loss.backward()

        return trained(out, model, torch.optim.AdamW(model.parameters(), lr=1e-2), backward)

    a = run(tmp_path / "a", torch.contiguous_format, None)
    report = bw.compare(a, run(tmp_path / "b", torch.channels_last, torch.bfloat16))
    assert report.status == "fine", report.conclusion


def test_inputs_that_lie_in_one_memory_have_names_of_their_own(tmp_path: Path) -> None:
    class Forecast(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 4)

        def forward(self, past: Tensor, future: Tensor) -> Tensor:
            return F.mse_loss(self.layer(past), future)

    def run(out: Path, *, shifted: bool) -> Path:
        torch.manual_seed(0)
        model = Forecast()

        def backward(step: int) -> None:
            series = torch.randn(6, 12, generator=torch.Generator().manual_seed(step))
            if shifted:
                series[:, 8:] = series[:, 8:].roll(1, 1)
            model(series[:, :8], series[:, 8:]).backward()

        return trained(out, model, torch.optim.SGD(model.parameters(), lr=0.1), backward)

    report = bw.compare(run(tmp_path / "a", shifted=False), run(tmp_path / "b", shifted=True))
    assert "input in1 differs" in report.conclusion, report.conclusion  # the second that is given
