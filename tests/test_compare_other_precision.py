"""Behind another precision, as strangers plant it: clipping beside a loss scale, other inputs, followers; what is healthy."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from step_loop import recorded_steps
from torch import Tensor, nn

import bitwitness as bw

STEPS, WIDTH = 3, 16
Edit = Callable[[nn.Module, torch.amp.GradScaler | None, torch.optim.Optimizer], None]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.body = nn.Conv2d(3, 8, 3, padding=1), nn.Linear(8, WIDTH)
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(F.gelu(self.body(F.relu(self.stem(x)).mean((2, 3))))))


def clip(model: nn.Module, scaler: torch.amp.GradScaler | None, optimizer: torch.optim.Optimizer) -> None:
    if scaler is not None:
        scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)


def clip_scaled(model: nn.Module, _scaler: torch.amp.GradScaler | None, _optimizer: torch.optim.Optimizer) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)


def clip_values(model: nn.Module, scaler: torch.amp.GradScaler | None, optimizer: torch.optim.Optimizer) -> None:
    if scaler is not None:
        scaler.unscale_(optimizer)
    nn.utils.clip_grad_value_(model.parameters(), 1e-3)


def divide_twice(model: nn.Module, scaler: torch.amp.GradScaler | None, optimizer: torch.optim.Optimizer) -> None:
    clip(model, scaler, optimizer)
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad /= 1024.0


def zeroed(model: nn.Module, scaler: torch.amp.GradScaler | None, optimizer: torch.optim.Optimizer) -> None:
    if scaler is not None:
        scaler.unscale_(optimizer)
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad.mul_(0.0)


def recorded(
    out: Path,
    dtype: torch.dtype | None = None,
    edit: Edit | None = None,
    batch: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] = lambda x, y: (x, y),
    level: str = "mix",
    wrong: Callable[[Net], None] = lambda _: None,
    content: str = "stats",
) -> Path:
    """Train under autocast, in float16 with a loss scale."""
    torch.manual_seed(0)
    model = Net()
    wrong(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0) if dtype is torch.float16 else None
    with bw.Recorder(model, out=str(out), level=level, content=content):
        for step in range(STEPS):
            generator = torch.Generator().manual_seed(step)
            x, y = batch(torch.rand(6, 3, 8, 8, generator=generator), torch.randn(6, 5, generator=generator))
            with nullcontext() if dtype is None else torch.autocast("cpu", dtype):
                loss = F.mse_loss(model(x).float(), y)
            (loss if scaler is None else scaler.scale(loss)).backward()
            if edit is not None:
                edit(model, scaler, optimizer)
            if scaler is None:
                optimizer.step()
            else:
                scaler.step(optimizer)
                scaler.update()
            optimizer.zero_grad()
    return out


@pytest.mark.parametrize("level", ["mix", "modules"])
@pytest.mark.parametrize("edit", [clip_scaled, clip_values, divide_twice, zeroed])
def test_what_happens_to_gradients_beside_a_loss_scale_is_told_and_not_the_scale(
    tmp_path: Path, edit: Edit, level: str
) -> None:
    a = recorded(tmp_path / "a", edit=clip, level=level)
    report = bw.compare(a, recorded(tmp_path / "b", torch.float16, edit, level=level))
    assert report.status == "findings"
    assert report.conclusion.startswith("the runs part at ./gradients#0:grad.")
    assert "scale" not in report.first.site  # type: ignore[union-attr]
    assert "from the backward on" not in report.conclusion
    assert any("compared as if it were not scaled" in note for note in report.notes)


@pytest.mark.parametrize("edit", [None, clip, clip_values])
def test_a_loss_scale_is_no_finding_however_gradients_are_clipped(tmp_path: Path, edit: Edit | None) -> None:
    report = bw.compare(recorded(tmp_path / "a", None, edit), recorded(tmp_path / "b", torch.float16, edit))
    assert report.status == "fine", report.conclusion


def test_a_loss_scale_that_is_too_large_is_named(tmp_path: Path) -> None:
    def grown(out: Path, dtype: torch.dtype | None) -> Path:
        torch.manual_seed(0)
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**32, enabled=dtype is not None)
        with bw.Recorder(model, out=str(out)):
            for step in range(2):
                with torch.autocast("cpu", dtype or torch.float16, enabled=dtype is not None):
                    output = model(torch.rand(6, 3, 8, 8, generator=torch.Generator().manual_seed(step)))
                scaler.scale(output.float().square().mean()).backward()
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
        return out

    report = bw.compare(grown(tmp_path / "a", None), grown(tmp_path / "b", torch.float16))
    assert "4.295e+09 times as large in run B" in report.conclusion


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_another_input_is_seen_behind_the_cast_that_reads_it(tmp_path: Path, dtype: torch.dtype) -> None:
    a, b = recorded(tmp_path / "a"), recorded(tmp_path / "b", dtype, batch=lambda x, y: (x.flip(1), y))
    assert "input in0 differs: " in bw.compare(a, b).conclusion
    c = recorded(tmp_path / "c", dtype, batch=lambda x, y: (x * 1.05, y))
    assert "input in0 differs: " in bw.compare(a, c).conclusion


def test_other_targets_are_told_behind_another_precision(tmp_path: Path) -> None:
    a = recorded(tmp_path / "a")
    report = bw.compare(a, recorded(tmp_path / "b", torch.bfloat16, batch=lambda x, y: (x, y * 0.5)))
    assert "/mse_loss#0:forward.out0" in report.conclusion
    assert "no recorded operator made it" in report.conclusion


def test_a_wrong_module_is_named_where_modules_alone_were_recorded_in_another_precision(tmp_path: Path) -> None:
    def half(model: Net) -> None:
        model.norm.register_forward_hook(lambda _module, _args, result: 0.5 * result)

    a = recorded(tmp_path / "a", level="modules")
    report = bw.compare(a, recorded(tmp_path / "b", torch.bfloat16, level="modules", wrong=half))
    assert report.conclusion.startswith("the runs part at norm/LayerNorm#0:forward.out0")


def test_an_edit_that_an_update_does_not_show_is_told(tmp_path: Path) -> None:
    class Signs(torch.optim.SGD):
        @torch.no_grad()
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            del closure
            for parameter in self.param_groups[0]["params"]:
                parameter.add_(parameter.grad.sign(), alpha=-1e-3)

    def trained(out: Path, times: float) -> Path:
        torch.manual_seed(0)
        model = Net()
        optimizer = Signs(model.parameters(), lr=1e-3)

        def backward(step: int) -> None:
            model(torch.rand(6, 3, 8, 8, generator=torch.Generator().manual_seed(step))).square().mean().backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1e9)  # from here on gradients count as complete
            assert model.body.weight.grad is not None
            model.body.weight.grad *= times

        return recorded_steps(out, model, optimizer, backward, STEPS)

    report = bw.compare(trained(tmp_path / "a", 1.0), trained(tmp_path / "b", 0.01))
    assert report.status == "findings"
    assert "the gradient of body.weight was changed between the backward and the step" in report.conclusion
    assert "the update is the same" in report.conclusion


def test_a_follower_whose_moves_are_lost_in_bfloat16_is_told(tmp_path: Path) -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.student = nn.Sequential(
                nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 4)
            )
            self.teacher = deepcopy(self.student).requires_grad_(False)
            with torch.no_grad():
                for parameter in self.teacher.parameters():
                    parameter.mul_(1.5)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            with torch.no_grad():
                wanted = self.teacher(x.to(self.teacher[0].weight.dtype))
            return self.student(x), wanted

    def trained(out: Path, dtype: torch.dtype, kept: torch.dtype) -> Path:
        torch.manual_seed(0)
        model = Pair().to(dtype)
        model.teacher.to(kept)
        optimizer = torch.optim.AdamW(model.student.parameters(), lr=1e-2)
        with bw.Recorder(model, out=str(out)):
            for step in range(4):
                x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(step)).to(dtype)
                output, wanted = model(x)
                (F.mse_loss(output.float(), wanted.float()) + output.float().square().mean()).backward()
                optimizer.step()
                optimizer.zero_grad()
                with torch.no_grad():
                    for mine, theirs in zip(model.teacher.parameters(), model.student.parameters(), strict=True):
                        mine.mul_(0.998).add_(theirs.to(kept), alpha=0.002)
        return out

    a = trained(tmp_path / "a", torch.float32, torch.float32)
    healthy = bw.compare(a, trained(tmp_path / "b", torch.bfloat16, torch.float32))
    assert healthy.status == "fine", healthy.conclusion
    report = bw.compare(a, trained(tmp_path / "c", torch.bfloat16, torch.bfloat16))
    assert "the weights that no optimizer updates (of a teacher, an average) were moved otherwise" in report.conclusion


@pytest.mark.parametrize("content", ["stats", "tensors"])
def test_a_sine_of_large_angles_in_bfloat16_is_named(tmp_path: Path, content: str) -> None:
    class Positions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fit, self.head = nn.Linear(12, WIDTH), nn.Linear(WIDTH, 4)

        def forward(self, x: Tensor) -> Tensor:
            angles = torch.arange(1000.0, 1012.0).to(x.dtype)[:, None] * torch.linspace(0.3, 1.0, 12).to(x.dtype)
            return self.head(F.relu(self.fit(x + 2 * angles.sin())))

    def trained(out: Path, dtype: torch.dtype) -> Path:
        torch.manual_seed(0)
        model = Positions().to(dtype)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        with bw.Recorder(model, out=str(out), content=content):
            x = torch.randn(4, 12, 12, generator=torch.Generator().manual_seed(1)).to(dtype)
            F.cross_entropy(model(x).float().mean(1), torch.tensor([0, 1, 2, 3])).backward()
            optimizer.step()
        return out

    report = bw.compare(trained(tmp_path / "a", torch.float32), trained(tmp_path / "b", torch.bfloat16))
    assert report.conclusion.startswith("the runs part at ./sin#0:forward.out0"), report.conclusion


@pytest.mark.parametrize("content", ["stats", "tensors"])
def test_what_cancels_in_a_softmax_backward_is_rounding(tmp_path: Path, content: str) -> None:
    """Of a mean of log-probabilities weighed by themselves next to nothing comes back to each of them."""

    def trained(out: Path, dtype: torch.dtype | None) -> Path:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 4))
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

        def backward(step: int) -> None:
            x = torch.randn(16, 8, generator=torch.Generator().manual_seed(step))
            with nullcontext() if dtype is None else torch.autocast("cpu", dtype):
                logits = model(x).float()
            entropy = (logits.softmax(-1) * logits.log_softmax(-1)).sum(1).mean()
            (logits.square().mean() + 0.01 * entropy).backward()

        return recorded_steps(out, model, optimizer, backward, 2, content=content)

    report = bw.compare(trained(tmp_path / "a", None), trained(tmp_path / "b", torch.bfloat16))
    assert report.status == "fine", report.conclusion


def test_ctc_under_bfloat16_is_rounding(tmp_path: Path) -> None:
    """Its second result holds memory that was never set."""

    def trained(out: Path, dtype: torch.dtype | None) -> Path:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 9))
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        with bw.Recorder(model, out=str(out)):
            x = torch.randn(3, 20, 8, generator=torch.Generator().manual_seed(1))
            with nullcontext() if dtype is None else torch.autocast("cpu", dtype):
                logits = model(x)
            paths, lengths = torch.tensor([[1, 2, 3, 4, 5], [2, 3, 4, 0, 0], [6, 5, 4, 3, 0]]), torch.tensor([5, 3, 4])
            F.ctc_loss(
                logits.float().log_softmax(-1).transpose(0, 1), paths, torch.tensor([20] * 3), lengths
            ).backward()
            optimizer.step()
        return out

    report = bw.compare(trained(tmp_path / "a", None), trained(tmp_path / "b", torch.bfloat16))
    assert report.status == "fine", report.conclusion


def test_float64_is_a_precision_though_much_is_computed_in_float32(tmp_path: Path) -> None:
    class Narrow(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(8, WIDTH), nn.Linear(WIDTH, 4)

        def forward(self, x: Tensor) -> Tensor:
            hidden = self.first(x).float()
            for _ in range(3):  # products in float32 in both runs
                hidden = torch.tanh(hidden.mT @ hidden).mT[: len(x)] + hidden
            return self.last(hidden.to(x.dtype))

    def trained(out: Path, dtype: torch.dtype) -> Path:
        torch.manual_seed(0)
        model = Narrow().to(dtype)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        with bw.Recorder(model, out=str(out)):
            for step in range(2):
                model(
                    torch.randn(WIDTH, 8, generator=torch.Generator().manual_seed(step)).to(dtype)
                ).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        return out

    report = bw.compare(trained(tmp_path / "a", torch.float32), trained(tmp_path / "b", torch.float64))
    assert report.status == "fine", report.conclusion


def test_weights_in_another_dtype_under_one_autocast_are_another_precision(tmp_path: Path) -> None:
    def run(out: Path, dtype: torch.dtype) -> Path:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 4)).to(dtype)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        with bw.Recorder(model, out=str(out)):
            for step in range(STEPS):
                x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(step))
                with torch.autocast("cpu", torch.bfloat16):
                    output = model(x)
                output.float().square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        return out

    report = bw.compare(run(tmp_path / "a", torch.bfloat16), run(tmp_path / "b", torch.float32))
    assert report.status == "fine", report.conclusion
    assert report.conclusion.startswith("rounding of bfloat16")


def test_an_optimizer_of_copies_in_float32_accuses_nobody(tmp_path: Path) -> None:
    def run(out: Path, dtype: torch.dtype) -> Path:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4)).to(dtype)
        masters = [p.detach().float().requires_grad_() for p in model.parameters()]
        half = dtype is not torch.float32
        optimizer = torch.optim.AdamW(masters if half else model.parameters(), lr=1e-3)
        with bw.Recorder(model, out=str(out)):
            for step in range(4):
                x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(step)).to(dtype)
                model(x).float().square().mean().backward()
                if half:
                    for mine, theirs in zip(masters, model.parameters(), strict=True):
                        mine.grad = theirs.grad.float() if theirs.grad is not None else None
                optimizer.step()
                if half:
                    with torch.no_grad():
                        for mine, theirs in zip(masters, model.parameters(), strict=True):
                            theirs.copy_(mine)
                model.zero_grad()
        return out

    report = bw.compare(run(tmp_path / "a", torch.float32), run(tmp_path / "b", torch.bfloat16))
    assert report.status == "fine", report.conclusion


def test_micro_batches_that_share_a_cast_weight_under_autocast_are_added_up(tmp_path: Path) -> None:
    """The copy of a weight in bfloat16 is made once for two forwards: their gradients are added up before the cast back."""

    def run(out: Path, dtype: torch.dtype | None) -> Path:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LeakyReLU(), nn.Linear(WIDTH, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

        def backward(step: int) -> None:
            real, fake = torch.randn(2, 8, WIDTH, generator=torch.Generator().manual_seed(step))
            with nullcontext() if dtype is None else torch.autocast("cpu", dtype):
                loss = F.softplus(-model(real).float()).mean() + F.softplus(model(fake).float()).mean()
            loss.backward()

        return recorded_steps(out, model, optimizer, backward, STEPS)

    report = bw.compare(run(tmp_path / "a", None), run(tmp_path / "b", torch.bfloat16))
    assert report.status == "fine", report.conclusion


def test_what_comes_back_of_another_loss_is_told_at_level_modules(tmp_path: Path) -> None:
    def run(out: Path, dtype: torch.dtype | None, share: float) -> Path:
        torch.manual_seed(0)
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        with bw.Recorder(model, out=str(out), level="modules"):
            for step in range(2):
                x = torch.rand(16, 3, 8, 8, generator=torch.Generator().manual_seed(step))
                with nullcontext() if dtype is None else torch.autocast("cpu", dtype):
                    output = model(x)
                loss = output.float().square().mean()
                (loss.detach() + share * (loss - loss.detach())).backward()  # the same number, and another gradient
                optimizer.step()
                optimizer.zero_grad()
        return out

    a = run(tmp_path / "a", None, 1.0)
    assert bw.compare(a, run(tmp_path / "b", torch.bfloat16, 1.0)).status == "fine"
    report = bw.compare(a, run(tmp_path / "c", torch.bfloat16, 0.9))
    assert report.status == "findings", report.conclusion


def test_a_gradient_that_a_hook_makes_zero_is_no_rounding(tmp_path: Path) -> None:
    """Of two precisions the coarser one's may be noise where the finer one's is nothing, and not the other way round."""

    def zeroed_by_hook(model: Net) -> None:
        model.body.bias.register_hook(torch.zeros_like)

    a = recorded(tmp_path / "a")
    report = bw.compare(a, recorded(tmp_path / "b", torch.bfloat16, wrong=zeroed_by_hook))
    assert report.status == "findings", report.conclusion
    assert "body" in report.conclusion


@pytest.mark.parametrize(("rate", "status"), [(3e-2, "fine"), (1e-6, "findings")])
def test_weights_in_bfloat16_may_be_rounded_but_must_move(tmp_path: Path, rate: float, status: str) -> None:
    def run(out: Path, dtype: torch.dtype) -> Path:
        torch.manual_seed(0)
        layers = [nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 4)]
        model = nn.Sequential(*layers).to(dtype)
        optimizer = torch.optim.SGD(model.parameters(), lr=rate)
        with bw.Recorder(model, out=str(out)):
            for step in range(2):
                x = torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(step)).to(dtype)
                model(x).float().square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        return out

    report = bw.compare(run(tmp_path / "a", torch.float32), run(tmp_path / "b", torch.bfloat16))
    assert report.status == status, report.conclusion
    assert ("is lost in bfloat16" in report.conclusion) == (status == "findings")


def test_losses_of_float64_and_float32_may_be_differences_of_large_numbers(tmp_path: Path) -> None:
    def run(out: Path, dtype: torch.dtype) -> Path:
        torch.manual_seed(0)
        model = nn.Linear(WIDTH, 4).double().to(dtype)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        with bw.Recorder(model, out=str(out)):
            for step in range(2):
                y = model(torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(step)).to(dtype)) + 10.0
                ((y * y).mean() - y.mean() ** 2).backward()  # a variance, of numbers far from zero
                optimizer.step()
                optimizer.zero_grad()
        return out

    report = bw.compare(run(tmp_path / "a", torch.float64), run(tmp_path / "b", torch.float32))
    assert report.status == "fine", report.conclusion


class _Scaled(torch.autograd.Function):
    """A root mean square norm as people write it; ``whole``: with all terms of its backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, whole: bool) -> Tensor:
        root = (x.pow(2).mean(-1, keepdim=True) + 1e-6).rsqrt()
        ctx.save_for_backward(x, root)
        ctx.whole = whole
        return x * root

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        x, root = ctx.saved_tensors
        if not ctx.whole:
            return grad * root, None
        return grad * root - x * root.pow(3) * (grad * x).sum(-1, keepdim=True) / x.size(-1), None


@pytest.mark.parametrize("content", ["stats", "tensors"])
def test_a_backward_of_ones_own_that_lacks_a_term_shows_behind_another_precision(tmp_path: Path, content: str) -> None:
    class Block(nn.Module):
        def __init__(self, *, whole: bool) -> None:
            super().__init__()
            self.up, self.whole = nn.Linear(WIDTH, WIDTH), whole

        def forward(self, x: Tensor) -> Tensor:
            return x + self.up(_Scaled.apply(x, self.whole))

    def run(out: Path, dtype: torch.dtype, *, whole: bool) -> Path:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Block(whole=True), Block(whole=whole), nn.Linear(WIDTH, 1)).to(
            dtype
        )

        def backward(step: int) -> None:
            x = torch.randn(24, WIDTH, generator=torch.Generator().manual_seed(step)).to(dtype)
            (model(x) - x[:, :1]).square().mean().backward()

        optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
        return recorded_steps(out, model, optimizer, backward, STEPS, content=content)

    a = run(tmp_path / "a", torch.float32, whole=True)
    report = bw.compare(a, run(tmp_path / "b", torch.bfloat16, whole=False))
    assert report.status == "findings", report.conclusion
    assert "2/" in report.conclusion
    healthy = bw.compare(a, run(tmp_path / "c", torch.bfloat16, whole=True))
    assert healthy.status == "fine", healthy.conclusion
