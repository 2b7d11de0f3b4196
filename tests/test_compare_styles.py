"""One training written in two ways, which accuses nobody; and what only looks like a style: a mask, a lost batch."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from step_loop import recorded_steps
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence

import bitwitness as bw

STEPS, WIDTH = 3, 12
Compute = Callable[[nn.Module, int], Tensor]


def noise(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def trained(
    out: Path,
    make: Callable[[], nn.Module],
    loss: Compute,
    held: Callable[[nn.Module], list[nn.Parameter]] | None = None,
    **settings: str,
) -> Path:
    """Train with SGD, which also takes sparse gradients."""
    torch.manual_seed(0)
    model = make()
    optimizer = torch.optim.SGD(list(model.parameters()) if held is None else held(model), lr=0.05)
    return recorded_steps(out, model, optimizer, lambda step: loss(model, step).backward(), STEPS, **settings)


@pytest.mark.parametrize("content", ["stats", "tensors"])
def test_sparse_gradients_are_a_way_of_writing(tmp_path: Path, content: str) -> None:
    class Bags(nn.Module):
        def __init__(self, *, sparse: bool) -> None:
            super().__init__()
            self.bags = nn.EmbeddingBag(40, WIDTH, mode="sum", sparse=sparse)
            self.head = nn.Linear(WIDTH, 1)

        def forward(self, ids: Tensor) -> Tensor:
            return self.head(self.bags(ids))

    def loss(model: nn.Module, step: int) -> Tensor:
        ids = torch.randint(0, 40, (8, 5), generator=torch.Generator().manual_seed(step))
        return model(ids).square().mean()

    a = trained(tmp_path / "a", lambda: Bags(sparse=False), loss, content=content)
    report = bw.compare(a, trained(tmp_path / "b", lambda: Bags(sparse=True), loss, content=content))
    assert report.status == "fine", report.conclusion
    assert not report.problems


def test_frozen_parameters_may_be_given_to_the_optimizer(tmp_path: Path) -> None:
    def make() -> nn.Module:
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 2))
        model[0].requires_grad_(requires_grad=False)
        return model

    def loss(model: nn.Module, step: int) -> Tensor:
        return model(noise(4, WIDTH, seed=step)).square().mean()

    def trainable(model: nn.Module) -> list[nn.Parameter]:
        return [parameter for parameter in model.parameters() if parameter.requires_grad]

    report = bw.compare(trained(tmp_path / "a", make, loss, trainable), trained(tmp_path / "b", make, loss))
    assert report.status == "fine", report.conclusion


def test_what_memory_held_before_it_is_set_accuses_nobody(tmp_path: Path) -> None:
    class Sorted(nn.Module):
        """Sorts its rows, computes, and puts them back through an inverse that is written into memory of any content."""

        def __init__(self, before: int) -> None:
            super().__init__()
            self.before, self.fit = before, nn.Linear(WIDTH, 4)

        def forward(self, x: Tensor) -> Tensor:
            order = x[:, 0].argsort()
            back = torch.full_like(order, self.before).numpy() * 1
            inverse = torch.from_numpy(back)
            inverse[order] = torch.arange(len(order))
            return self.fit(x[order])[inverse]

    def loss(model: nn.Module, step: int) -> Tensor:
        return model(noise(8, WIDTH, seed=step)).square().mean()

    a = trained(tmp_path / "a", lambda: Sorted(-7), loss)
    report = bw.compare(a, trained(tmp_path / "b", lambda: Sorted(93), loss))
    assert report.status == "fine", report.conclusion


def test_a_transform_over_other_dimensions_is_named_and_not_the_cast_before_it(tmp_path: Path) -> None:
    class Mixing(nn.Module):
        def __init__(self, *, one: bool) -> None:
            super().__init__()
            self.one, self.head = one, nn.Linear(WIDTH, 2)

        def forward(self, x: Tensor) -> Tensor:
            mixed = torch.fft.fft(x, dim=-1) if self.one else torch.fft.fft2(x.to(torch.complex64))
            return self.head(mixed.real)

    def loss(model: nn.Module, step: int) -> Tensor:
        return model(noise(4, 6, WIDTH, seed=step)).square().mean()

    a = trained(tmp_path / "a", lambda: Mixing(one=False), loss)
    report = bw.compare(a, trained(tmp_path / "b", lambda: Mixing(one=True), loss))
    assert report.status == "findings"
    assert "_fft_" in report.conclusion


def test_a_parameter_of_ones_own_is_told_of_a_module_that_is_not_called(tmp_path: Path) -> None:
    class Tied(nn.Module):
        def __init__(self, *, tied: bool) -> None:
            super().__init__()
            self.enc, self.dec = nn.Linear(WIDTH, 4), nn.Linear(4, WIDTH)
            own = nn.Parameter(self.enc.weight.detach().T.clone())
            del self.dec.weight
            if not tied:
                self.dec.weight = own

        def forward(self, x: Tensor) -> Tensor:
            weight = self.dec._parameters.get("weight")
            return F.linear(self.enc(x).tanh(), self.enc.weight.T if weight is None else weight, self.dec.bias)

    def loss(model: nn.Module, step: int) -> Tensor:
        x = noise(8, WIDTH, seed=step)
        return F.mse_loss(model(x), x)

    a = trained(tmp_path / "a", lambda: Tied(tied=True), loss)
    report = bw.compare(a, trained(tmp_path / "b", lambda: Tied(tied=False), loss))
    assert "dec.weight is a parameter of its own in run B, and not in run A" in report.conclusion


def test_a_padded_sequence_for_a_packed_one_is_said_of_the_module(tmp_path: Path) -> None:
    class Reads(nn.Module):
        def __init__(self, *, packs: bool) -> None:
            super().__init__()
            self.packs, self.gru, self.head = packs, nn.GRU(WIDTH, 8, batch_first=True), nn.Linear(8, 2)

        def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
            given = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False) if self.packs else x
            return self.head(self.gru(given)[1][-1])

    def loss(model: nn.Module, step: int) -> Tensor:
        lengths = torch.tensor([6, 3, 4, 2])
        x = noise(4, 6, WIDTH, seed=step) * (torch.arange(6)[None, :, None] < lengths[:, None, None])
        return model(x, lengths).square().mean()

    a = trained(tmp_path / "a", lambda: Reads(packs=True), loss)
    report = bw.compare(a, trained(tmp_path / "b", lambda: Reads(packs=False), loss))
    said = (
        "gru/GRU: called with other arguments: in0 is 4 tensors in run A (a packed sequence, a tuple) and one in run B"
    )
    assert said in report.conclusion


def test_a_mask_that_one_run_alone_gives_is_said_of_the_operators_inside(tmp_path: Path) -> None:
    class Attends(nn.Module):
        def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
            scores = x @ x.mT / WIDTH**0.5
            return (scores if mask is None else scores + mask).softmax(-1) @ x

    class Reads(nn.Module):
        def __init__(self, *, masks: bool) -> None:
            super().__init__()
            self.masks, self.fit, self.attends = masks, nn.Linear(WIDTH, WIDTH), Attends()

        def forward(self, x: Tensor) -> Tensor:
            mask = torch.full((x.shape[1],) * 2, -1e9).triu(1)
            return self.attends(self.fit(x), mask) if self.masks else self.attends(self.fit(x))

    def loss(model: nn.Module, step: int) -> Tensor:
        return model(noise(4, 6, WIDTH, seed=step)).square().mean()

    a = trained(tmp_path / "a", lambda: Reads(masks=True), loss)
    report = bw.compare(a, trained(tmp_path / "b", lambda: Reads(masks=False), loss))
    assert "attends/Attends: called with other arguments: in1 in run A alone; inside, the first" in report.conclusion


def test_a_micro_batch_that_is_lost_is_told_as_that(tmp_path: Path) -> None:
    def accumulated(out: Path, micros: int) -> Path:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

        def backward(step: int) -> None:
            for micro in range(micros):
                (model(noise(4, WIDTH, seed=10 * step + micro)).square().mean() / 2).backward()

        return recorded_steps(out, model, optimizer, backward, STEPS)

    report = bw.compare(accumulated(tmp_path / "a", 2), accumulated(tmp_path / "b", 1))
    assert report.status == "findings"
    assert "run A computes 2 batches in this step, and run B 1" in report.conclusion
    assert "or run B loses batches" in report.conclusion


@pytest.mark.parametrize("foreach", [False, True])
def test_a_step_count_that_was_set_back_is_not_called_no_state(tmp_path: Path, *, foreach: bool) -> None:
    def resumed(out: Path, *, forgets: bool) -> Path:
        torch.manual_seed(0)
        model = nn.Linear(WIDTH, 2)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, foreach=foreach)
        for step in range(2 * STEPS):
            if step == STEPS:
                for state in optimizer.state.values() if forgets else ():
                    state["step"].zero_()
                recorder = bw.Recorder(model, out=str(out))
                recorder.start()
            model(noise(4, WIDTH, seed=step)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        recorder.close()
        return out

    report = bw.compare(resumed(tmp_path / "a", forgets=False), resumed(tmp_path / "b", forgets=True))
    assert "state of 3 steps against of 0 steps" in report.conclusion, report.conclusion


def test_what_a_compiled_criterion_computes_is_named(tmp_path: Path) -> None:
    """It is no module of the model's, and runs eagerly in steps that are recorded."""

    def loss(criterion: Callable[[Tensor, Tensor], Tensor]) -> Compute:
        compiled = torch.compile(criterion, backend="eager")
        return lambda model, step: compiled(model(noise(4, WIDTH, seed=step)), noise(4, 2, seed=99 + step))

    a = trained(tmp_path / "a", lambda: nn.Linear(WIDTH, 2), loss(F.mse_loss))
    report = bw.compare(a, trained(tmp_path / "b", lambda: nn.Linear(WIDTH, 2), loss(F.l1_loss)))
    assert "is computed by mse_loss in run A and by sub, abs, mean in run B" in report.conclusion


def test_a_module_of_many_operators_is_no_other_structure(tmp_path: Path) -> None:
    """A loss that is added up number by number has many operators, in a model that is the same."""

    def one_by_one(model: nn.Module, step: int) -> Tensor:
        parts = model(noise(32, WIDTH, seed=step)).square().flatten()
        return sum(parts.unbind(), torch.zeros(())) / len(parts) * 1.5

    def at_once(model: nn.Module, step: int) -> Tensor:
        return model(noise(32, WIDTH, seed=step)).square().mean()

    a = trained(tmp_path / "a", lambda: nn.Linear(WIDTH, 4), at_once)
    report = bw.compare(a, trained(tmp_path / "b", lambda: nn.Linear(WIDTH, 4), one_by_one))
    assert report.status == "findings", report.conclusion
    assert "too many to be sure" not in report.conclusion


def test_a_backward_that_is_differentiated_once_more_is_no_recomputation(tmp_path: Path) -> None:
    def loss(factor: float) -> Compute:
        def penalised(model: nn.Module, step: int) -> Tensor:
            x = noise(4, WIDTH, seed=step).requires_grad_()
            output = model(x).tanh().sum()
            (slope,) = torch.autograd.grad(output, x, create_graph=True)
            return output.square() + factor * (slope * slope).sum()

        return penalised

    a = trained(tmp_path / "a", lambda: nn.Linear(WIDTH, 4), loss(1.0))
    report = bw.compare(a, trained(tmp_path / "b", lambda: nn.Linear(WIDTH, 4), loss(2.0)))
    assert report.status == "findings"
    assert "recomputation" not in " ".join([report.conclusion, *(one.text for one in report.suspects)])


def test_of_a_model_inside_a_compiled_wrapper_the_backward_is_recorded(tmp_path: Path) -> None:
    """The wrapper undoes what was switched on inside its call, with the mode still on torch's stack."""
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, 2))
    compiled = torch.compile(model, backend="eager")
    with bw.Recorder(model, out=str(tmp_path / "run")):
        compiled(noise(4, WIDTH, seed=1)).square().mean().backward()
    rows = bw.Run(tmp_path / "run").rows().to_pylist()
    backward = {(row["module"], row["op"]) for row in rows if (row["kind"], row["phase"]) == ("op", "backward")}
    assert backward >= {("1", "gelu_backward"), ("2", "mm")}


def test_a_resume_is_found_where_most_weights_are_frozen(tmp_path: Path) -> None:
    saved: dict[str, dict[str, Tensor]] = {}

    def run(out: Path, steps: range) -> Path:
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 2)
        )
        model[:4].requires_grad_(requires_grad=False)
        if steps.start:
            model.load_state_dict(saved["weights"])
        optimizer = torch.optim.SGD(model[4].parameters(), lr=0.1)

        def backward(step: int) -> None:
            if steps.start + step == 2:
                saved["weights"] = {name: value.clone() for name, value in model.state_dict().items()}
            model(noise(6, WIDTH, seed=steps.start + step)).square().mean().backward()

        return recorded_steps(out, model, optimizer, backward, len(steps))

    report = bw.compare(run(tmp_path / "a", range(4)), run(tmp_path / "b", range(2, 4)))
    assert report.status == "fine", report.conclusion
    assert report.shifted == "step 0 of run B starts from the weights of step 2 of run A"


def test_a_weight_as_long_as_a_micro_batch_is_no_part_of_one(tmp_path: Path) -> None:
    def run(out: Path, micros: int) -> Path:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 4))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

        def backward(step: int) -> None:
            for part in noise(16, WIDTH, seed=step).chunk(micros):
                (F.cross_entropy(model(part), part[:, :4].argmax(1), reduction="sum") / 16).backward()

        return recorded_steps(out, model, optimizer, backward, STEPS)

    report = bw.compare(run(tmp_path / "a", 4), run(tmp_path / "b", 2))
    assert report.status == "fine", report.conclusion
