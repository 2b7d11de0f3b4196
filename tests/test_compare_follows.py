"""What follows from one difference is told as one, and by its cause; what rounding makes of nothing is no difference."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from tokenmodel import TokenModel
from torch import Tensor, nn

import bitwitness as bw
from bitwitness.testing import FaultyDevice, from_mapping


class Attention(nn.Module):
    """Computes by hand or by one operator; its key's bias moves nothing, and begins at zero."""

    def __init__(self, *, fused: bool = False) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.query, self.key, self.value = (nn.Linear(16, 16) for _ in range(3))
        nn.init.zeros_(self.key.bias)
        self.fused = fused

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        q, k, v = self.query(y), self.key(y), self.value(y)
        if self.fused:
            return x + F.scaled_dot_product_attention(q, k, v)
        return x + (q @ k.mT / 4).softmax(-1) @ v


class Model(TokenModel):
    def __init__(self, *, fused: bool = False) -> None:
        super().__init__(lambda: Attention(fused=fused), 2)


Step = Callable[[int, Model, Any, Tensor], None]


def lost(model: Model, tokens: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def usual(_number: int, model: Model, optimizer: torch.optim.Optimizer, tokens: Tensor) -> None:
    lost(model, tokens).backward()
    optimizer.step()
    optimizer.zero_grad()


def recorded(out: Path, step: Step = usual, *, fused: bool = False, stepped: bool = True) -> Path:
    """Train four steps; ``stepped``: there is an optimizer, whether or not the script uses it."""
    torch.manual_seed(0)
    model = Model(fused=fused)
    optimizer = torch.optim.SGD(model.parameters(), 0.1) if stepped else None
    generator = torch.Generator().manual_seed(1)
    with bw.Recorder(model, out=out):
        for number in range(4):
            step(number, model, optimizer, torch.randint(0, 32, (4, 9), generator=generator))
    return out


def by_hand(_number: int, model: Model, _optimizer: torch.optim.Optimizer, tokens: Tensor, rate: float = 0.1) -> None:
    model.zero_grad()
    lost(model, tokens).backward()
    with torch.no_grad():
        for p in model.parameters():
            p.sub_(p.grad, alpha=rate)


def test_a_bias_of_rounding_errors_is_no_difference_where_a_script_updates_its_weights_itself(tmp_path: Path) -> None:
    report = bw.compare(recorded(tmp_path / "a", by_hand), recorded(tmp_path / "b", by_hand, fused=True))
    assert report.status == "fine", report.conclusion


def test_another_rate_of_an_own_update_loop_is_told_by_the_weights(tmp_path: Path) -> None:
    slower = partial(by_hand, rate=0.05)
    report = bw.compare(recorded(tmp_path / "a"), recorded(tmp_path / "b", slower, stepped=False))
    assert "(rank 0, step 1): its layers.0.norm.weight differs" in report.conclusion
    assert report.conclusion.endswith("so it was changed between these two steps (and so 15 other parameters)")
    assert sum("was changed between" in one.text for one in report.suspects) == 1
    assert bw.compare(tmp_path / "a", recorded(tmp_path / "c", by_hand, stepped=False)).status == "fine"


def test_batches_of_a_script_whose_optimizer_never_steps_are_not_taken_for_compared(tmp_path: Path) -> None:
    report = bw.compare(recorded(tmp_path / "a"), recorded(tmp_path / "b", by_hand))
    assert report.status == "unread"
    assert "run B changes its weights itself between 4 batches that were recorded as one step" in str(report)


def twice(number: int, model: Model, optimizer: torch.optim.Optimizer, tokens: Tensor) -> None:
    lost(model, tokens).backward()
    for _ in range(2 if number == 1 else 1):
        optimizer.step()
    optimizer.zero_grad()


def test_weights_behind_a_second_update_are_no_suspects(tmp_path: Path) -> None:
    report = bw.compare(recorded(tmp_path / "a"), recorded(tmp_path / "b", twice))
    assert "more often in one step: 2 times against 1" in report.conclusion
    assert not [one for one in report.suspects if "changed between these two steps" in one.text]


def in_parts(dropped: int | None) -> Step:
    def step(number: int, model: Model, optimizer: torch.optim.Optimizer, tokens: Tensor) -> None:
        for i, part in enumerate(tokens.chunk(2)):
            if not (number == dropped and i == 1):
                (lost(model, part) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def test_a_micro_batch_that_is_left_out_is_told_from_a_step_that_is(tmp_path: Path) -> None:
    whole, dropped = recorded(tmp_path / "a", in_parts(None)), recorded(tmp_path / "b", in_parts(2))
    report = bw.compare(whole, dropped)
    assert report.conclusion.startswith("the runs part at tokens/embedding#0:forward.out0 (rank 0, step 2)")
    assert report.conclusion.endswith("both computed 2 in the step before, so that run B leaves one out")
    assert len(report.suspects) == 1

    def skips(number: int, model: Model, optimizer: torch.optim.Optimizer, tokens: Tensor) -> None:
        lost(model, tokens).backward()
        if number != 2:
            optimizer.step()
        optimizer.zero_grad()

    report = bw.compare(recorded(tmp_path / "c"), recorded(tmp_path / "d", skips))
    assert "so that run B leaves an optimizer step out between them" in report.conclusion
    assert len(report.suspects) == 1


def test_one_edit_of_all_gradients_says_of_how_many(tmp_path: Path) -> None:
    def noisy(number: int, model: Model, optimizer: torch.optim.Optimizer, tokens: Tensor) -> None:
        lost(model, tokens).backward()
        generator = torch.Generator().manual_seed(number)
        for p in model.parameters():
            p.grad.add_(torch.randn(p.shape, generator=generator), alpha=0.1)
        optimizer.step()
        optimizer.zero_grad()

    report = bw.compare(recorded(tmp_path / "a"), recorded(tmp_path / "b", noisy))
    count = len([*Model().parameters()]) - 1
    assert report.conclusion.endswith(f"run A leaves it; run B edits it (and so {count} other parameters)")


def test_a_value_that_a_hook_changes_through_numpy_is_blamed_and_not_who_reads_it(tmp_path: Path) -> None:
    def edits(number: int, model: Model, optimizer: torch.optim.Optimizer, tokens: Tensor) -> None:
        def hook(_module: nn.Module, _inputs: object, result: Tensor) -> None:
            result.detach().numpy()[0, 3] *= 1.5

        handle = model.layers[1].norm.register_forward_hook(hook)
        usual(number, model, optimizer, tokens)
        handle.remove()

    report = bw.compare(recorded(tmp_path / "a"), recorded(tmp_path / "b", edits))
    assert report.conclusion.startswith(
        "the runs part at layers.1.norm/native_layer_norm#0:forward.out0 (rank 0, step 0)"
    )
    assert "it was changed in memory after it was made, past torch" in report.conclusion
    assert "layers.1.query/addmm#0:forward, layers.1.key/addmm#0:forward" in report.conclusion


def test_a_run_that_failed_in_a_step_took_no_optimizer_step_for_that(tmp_path: Path) -> None:
    def fails(number: int, model: Model, optimizer: torch.optim.Optimizer, tokens: Tensor) -> None:
        lost(model, tokens).backward()
        if number == 2:
            raise RuntimeError("out of luck")
        optimizer.step()
        optimizer.zero_grad()

    for name in "bc":
        with suppress(RuntimeError):
            recorded(tmp_path / name, fails)
    report = bw.compare(recorded(tmp_path / "a"), tmp_path / "b")
    assert report.conclusion.endswith("run B failed in this step, before its optimizer's step")
    both = bw.compare(tmp_path / "b", tmp_path / "c")
    assert both.status == "fine"
    assert "run A failed and run B failed in the last step that was compared" in str(both)


def test_steps_behind_one_of_another_batch_accuse_nobody(tmp_path: Path) -> None:
    def fewer(number: int, model: Model, optimizer: torch.optim.Optimizer, tokens: Tensor) -> None:
        usual(number, model, optimizer, tokens[:3] if number == 1 else tokens)

    report = bw.compare(recorded(tmp_path / "a"), recorded(tmp_path / "b", fewer))
    assert "the runs were not given the same batch" in report.conclusion
    assert not report.suspects


def struck(out: Path, *, fault: dict[str, object], step: Step = usual) -> Path:
    with FaultyDevice(
        from_mapping({"fault": [{"kind": "multiply", "pattern": "all", "steps": [1], **fault}]})
    ) as device:
        recorded(out, step)
    assert device.fired
    return out


def test_a_small_gradient_is_not_taken_for_rounding(tmp_path: Path) -> None:
    """Where a model attends evenly yet, queries have gradients of a ten-thousandth of the others'."""

    def even(number: int, model: Model, optimizer: torch.optim.Optimizer, tokens: Tensor) -> None:
        if number == 0:
            with torch.no_grad():
                for layer in model.layers:
                    layer.key.weight.mul_(1e-2)
        usual(number, model, optimizer, tokens)

    fault = {"site": "layers.1.query/mm:backward", "factor": 2.0, "times": 2}
    a, b = recorded(tmp_path / "a", even), struck(tmp_path / "b", fault=fault, step=even)
    report = bw.compare(a, b)
    assert report.status == "findings", report.conclusion
    assert report.conclusion.startswith("the runs part at layers.1.query/mm#"), report.conclusion


def test_a_loss_of_another_value_is_named_though_its_gradients_agree(tmp_path: Path) -> None:
    fault = {"site": "*/nll_loss_forward:forward", "factor": 1.1, "pattern": "element", "times": 1}
    report = bw.compare(recorded(tmp_path / "a"), struck(tmp_path / "b", fault=fault))
    assert report.conclusion.startswith("the runs part at ./nll_loss_forward#0:forward.out0 (rank 0, step 1)"), (
        report.conclusion
    )


def test_a_run_that_failed_before_a_step_is_not_all_of_it(tmp_path: Path) -> None:
    def fails(number: int, model: Model, optimizer: torch.optim.Optimizer, tokens: Tensor) -> None:
        if number == 2:
            raise RuntimeError("out of luck")
        usual(number, model, optimizer, tokens)

    with suppress(RuntimeError):
        recorded(tmp_path / "b", fails)
    report = bw.compare(recorded(tmp_path / "a"), tmp_path / "b")
    assert report.status == "unread"
    assert "run B failed" in report.conclusion


def test_values_that_are_not_finite_are_told_as_such(tmp_path: Path) -> None:
    """Statistics are of what is finite alone: a gradient of NaN is not zero, nor is its norm near another."""

    def trained(out: Path, bad: float | None) -> Path:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        with bw.Recorder(model, out=out):
            for number in range(3):
                x = torch.randn(6, 8)
                if bad is not None and number == 1:
                    x[2, 3] = bad
                model(x).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        return out

    a = trained(tmp_path / "a", None)
    for bad, held in ((float("nan"), "NaN"), (float("-inf"), "-inf")):
        report = bw.compare(a, trained(tmp_path / held, bad))
        assert report.conclusion == (
            "the runs part at 0/addmm#0:forward.out0 (rank 0, step 1): input in0 differs: "
            f"run B holds {held}, and the other run none, made before the model is called, of which nothing is recorded"
        )
        assert len(report.suspects) == 1


def test_samples_in_another_order_are_the_same_batch_as_far_as_gradients_say(tmp_path: Path) -> None:
    def otherwise(number: int, model: Model, optimizer: torch.optim.Optimizer, tokens: Tensor, dim: int) -> None:
        usual(number, model, optimizer, tokens.flip(dim))

    a = recorded(tmp_path / "a")
    report = bw.compare(a, recorded(tmp_path / "samples", partial(otherwise, dim=0)))
    assert report.status == "fine", report.conclusion
    assert report.notes[0] == (
        "step 0: input in0 holds the same values in another order; parameters, gradients and updates were compared, and "
        "nothing else"
    )
    report = bw.compare(a, recorded(tmp_path / "times", partial(otherwise, dim=1)))
    assert report.status == "findings"
    assert "input in0 differs" in report.conclusion


def test_a_bias_on_scores_is_told_though_a_mask_hides_it_in_their_sum(tmp_path: Path) -> None:
    """Beside -1e9, sums agree whatever is added: that is no end of a difference."""

    class Sloped(Attention):
        slope = 0.1

        def forward(self, x: Tensor) -> Tensor:
            y, place = self.norm(x), torch.arange(x.shape[1])
            bias = -(place[:, None] - place).clamp(min=0).float() * self.slope
            mask = torch.full((len(place), len(place)), -1e9).triu(1)
            scores = self.query(y) @ self.key(y).mT / 4 + bias + mask
            return x + scores.softmax(-1) @ self.value(y)

    def sloped(slope: float) -> Step:
        def step(number: int, model: Model, optimizer: torch.optim.Optimizer, tokens: Tensor) -> None:
            for layer in model.layers:
                layer.__class__, layer.slope = Sloped, slope
            usual(number, model, optimizer, tokens)

        return step

    report = bw.compare(recorded(tmp_path / "a", sloped(0.1)), recorded(tmp_path / "b", sloped(0.2)))
    assert report.conclusion.startswith(
        "the runs part at layers.0/mul#0:forward.out0 (rank 0, step 0): called with other arguments: other 0.1 against 0.2"
    ), report.conclusion


def test_a_gradient_that_is_not_finite_is_named_and_not_the_clipping_that_spreads_it(tmp_path: Path) -> None:
    def clipped(number: int, model: Model, optimizer: torch.optim.Optimizer, tokens: Tensor, bad: float = 0.0) -> None:
        lost(model, tokens).backward()
        if number == 1 and bad:
            model.layers[1].value.weight.grad[2, 3] = bad
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()

    a = recorded(tmp_path / "a", clipped)
    report = bw.compare(a, recorded(tmp_path / "b", partial(clipped, bad=float("inf"))))
    assert report.conclusion == (
        "the runs part at ./gradients#0:grad.read (rank 0, step 1): the gradient of layers.1.value.weight is not what the "
        "backward leaves, before anything is clipped: run B holds inf, and the other run none; it was written in between, and "
        "a clipping by a norm that is not finite makes zeros of all others"
    )
    report = bw.compare(a, recorded(tmp_path / "c", partial(clipped, bad=0.0)))
    assert report.status == "fine"


def test_a_clipping_of_some_gradients_says_which_are_not_among_them(tmp_path: Path) -> None:
    def clipped(_n: int, model: Model, optimizer: torch.optim.Optimizer, tokens: Tensor, *, every: bool) -> None:
        lost(model, tokens).backward()
        chosen = model.parameters() if every else [p for n, p in model.named_parameters() if n != "tokens.weight"]
        nn.utils.clip_grad_norm_(chosen, 0.1)
        optimizer.step()
        optimizer.zero_grad()

    runs = [recorded(tmp_path / str(every), partial(clipped, every=every)) for every in (True, False)]
    said = bw.compare(*runs).conclusion
    assert "every gradient but 1 of 19 (tokens.weight) is " in said, said


def test_what_is_computed_for_places_that_nobody_reads_is_a_way_of_writing(tmp_path: Path) -> None:
    """Rows that the loss leaves out may hold anything; a running statistic, which is kept, may not."""

    class Padded(TokenModel):
        filled = 0.0

        def __init__(self) -> None:
            super().__init__(lambda: nn.Linear(16, 16), 1)
            self.norm = nn.BatchNorm1d(16)

        def forward(self, tokens: Tensor) -> Tensor:
            x = self.layers[0](self.norm(self.tokens(tokens).mT).mT)
            pad = (torch.arange(x.shape[1]) > 5)[:, None]
            return self.head(x.masked_fill(pad, 0.0) if self.filled == 0.0 else torch.where(pad, x * self.filled, x))

    def trained(out: Path, filled: float, momentum: float = 0.1) -> Path:
        torch.manual_seed(0)
        model = Padded()
        model.filled, model.norm.momentum = filled, momentum
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        generator = torch.Generator().manual_seed(1)
        with bw.Recorder(model, out=out):
            for _ in range(3):
                tokens = torch.randint(0, 32, (4, 9), generator=generator)
                F.cross_entropy(model(tokens)[:, :6].flatten(0, 1), tokens[:, 1:7].flatten()).backward()
                optimizer.step()
                optimizer.zero_grad()
        return out

    a = trained(tmp_path / "a", 0.0)
    report = bw.compare(a, trained(tmp_path / "b", 3.0))
    assert report.status == "fine", report.conclusion
    report = bw.compare(a, trained(tmp_path / "c", 0.0, momentum=0.2))
    assert "called with other arguments: momentum 0.1 against 0.2" in report.conclusion, report.conclusion


def test_padding_that_a_mask_takes_out_may_hold_anything_and_a_value_that_counts_may_not(tmp_path: Path) -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(8, 16)
            self.head = nn.Linear(16, 4)

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            y = self.inner(x).masked_fill(~mask[..., None], 0.0)
            return self.head(y.sum(1))

    def trained(out: Path, padding: float, scaled: float = 1.0) -> Path:
        torch.manual_seed(0)
        model = Masked()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        generator = torch.Generator().manual_seed(1)
        with bw.Recorder(model, out=out):
            for _ in range(3):
                x = torch.randn(4, 6, 8, generator=generator)
                x[:, 4:] = padding
                x[0, 0, 0] *= scaled
                model(x, torch.arange(6).expand(4, 6) < 4).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        return out

    a = trained(tmp_path / "a", 0.0)
    report = bw.compare(a, trained(tmp_path / "b", 7.0))
    assert report.status == "fine"
    assert report.conclusion.endswith(
        "of steps whose batch differs (input in0 holds other values) gradients and updates alone"
    ), report.conclusion
    for scaled in (1.001, 1.5):
        report = bw.compare(a, trained(tmp_path / str(scaled), 0.0, scaled))
        assert "input in0 differs" in report.conclusion, report.conclusion


def test_a_weight_that_is_not_put_back_between_two_evaluations_is_named(tmp_path: Path) -> None:
    """Sharpness-aware minimisation moves the weights, evaluates again, and puts them back."""

    def sharp(_n: int, model: Model, optimizer: torch.optim.Optimizer, tokens: Tensor, *, forgotten: str) -> None:
        lost(model, tokens).backward()
        with torch.no_grad():
            moves = {name: 0.05 * p.grad for name, p in model.named_parameters()}
            for name, p in model.named_parameters():
                p.add_(moves[name])
        optimizer.zero_grad()
        lost(model, tokens).backward()
        with torch.no_grad():
            for name, p in model.named_parameters():
                if name != forgotten:
                    p.sub_(moves[name])
        optimizer.step()
        optimizer.zero_grad()

    a = recorded(tmp_path / "a", partial(sharp, forgotten=""))
    assert bw.compare(a, recorded(tmp_path / "b", partial(sharp, forgotten=""))).status == "fine"
    said = bw.compare(a, recorded(tmp_path / "c", partial(sharp, forgotten="head.weight"))).conclusion
    assert "head.weight is not what the step began with when run B's optimizer updates it, and is in run A" in said, (
        said
    )


def test_optimizers_written_otherwise_are_no_difference(tmp_path: Path) -> None:
    """A rate in a tensor, which is a float32; an optimizer for each parameter, in the backward, which lets go of gradients."""

    def trained(out: Path, how: str) -> Path:
        torch.manual_seed(0)
        model = Model()
        rate = torch.tensor(0.1) if how == "tensor" else 0.1
        own = {p: torch.optim.SGD([p], rate, momentum=0.9) for p in model.parameters()}
        whole = torch.optim.SGD(model.parameters(), rate, momentum=0.9)

        def step(p: Tensor) -> None:
            own[p].step()
            own[p].zero_grad()

        if how == "backward":
            for p in model.parameters():
                p.register_post_accumulate_grad_hook(step)
        generator = torch.Generator().manual_seed(1)
        with bw.Recorder(model, out=out):
            for _ in range(3):
                lost(model, torch.randint(0, 32, (4, 9), generator=generator)).backward()
                if how != "backward":
                    whole.step()
                    whole.zero_grad()
        return out

    a = trained(tmp_path / "a", "usual")
    for how in ("tensor", "backward"):
        report = bw.compare(a, trained(tmp_path / how, how))
        assert report.status == "fine", report.conclusion


def test_a_resume_that_forgot_one_weight_finds_its_step_and_names_the_weight(tmp_path: Path) -> None:
    def trained(out: Path, steps: range, state: dict[str, Tensor] | None = None) -> dict[str, Tensor]:
        torch.manual_seed(0)
        model = Model()
        model.load_state_dict(state or model.state_dict())
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        generator = torch.Generator().manual_seed(1)
        batches = [torch.randint(0, 32, (4, 9), generator=generator) for _ in range(4)]
        begun: dict[str, Tensor] = {}
        with bw.Recorder(model, out=out):
            for number in steps:
                if number == 2:
                    begun = {name: value.clone() for name, value in model.state_dict().items()}
                usual(number, model, optimizer, batches[number])
        return begun

    state = trained(tmp_path / "a", range(4))
    trained(tmp_path / "b", range(2, 4), state)
    assert bw.compare(tmp_path / "a", tmp_path / "b").status == "fine"
    torch.manual_seed(0)
    trained(tmp_path / "c", range(2, 4), state | {"head.weight": Model().head.weight.detach()})
    report = bw.compare(tmp_path / "a", tmp_path / "c")
    assert "(rank 0, step 2): its head.weight differs" in report.conclusion, report.conclusion
    assert report.notes[0].startswith("step 0 of run B starts from the weights (95% of them) of step 2 of run A")
