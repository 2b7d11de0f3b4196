"""Ways of writing that are of another kind in each run, and healthy: masks, an unused result, what was computed before."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from step_loop import recorded_steps
from torch import nn

import bitwitness as bw
from bitwitness.config.recording import RecordConfig
from bitwitness.record.auto import AutoRecorder

STEPS = 3


class Reverser(nn.Module):
    """A transformer whose masks are boolean, or are added."""

    def __init__(self, *, added: bool) -> None:
        super().__init__()
        self.added = added
        self.embedding = nn.Embedding(20, 16)
        self.both = nn.Transformer(16, 2, 1, 1, 24, dropout=0.0, batch_first=True)
        self.head = nn.Linear(16, 20)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        n = tokens.size(1)
        causal, padding = torch.ones(n, n, dtype=torch.bool).triu(1), tokens == 0
        if self.added:
            causal, padding = (torch.zeros(m.shape).masked_fill(m, -math.inf) for m in (causal, padding))
        x = self.embedding(tokens)
        masks = {"tgt_mask": causal, "src_key_padding_mask": padding, "memory_key_padding_mask": padding}
        return self.head(self.both(x, x, **masks))


def test_masks_that_are_added_are_those_that_choose(tmp_path: Path) -> None:
    def run(name: str, *, added: bool) -> Path:
        torch.manual_seed(0)
        model = Reverser(added=added)
        tokens = torch.randint(1, 20, (STEPS, 4, 7))
        tokens[:, 1:, 5:] = 0

        def backward(step: int) -> None:
            nn.functional.cross_entropy(model(tokens[step]).flatten(0, 1), tokens[step].flatten()).backward()

        return recorded_steps(tmp_path / name, model, torch.optim.SGD(model.parameters(), lr=0.1), backward, STEPS)

    report = bw.compare(run("a", added=False), run("b", added=True))
    assert report.status == "fine", report.conclusion


class Cells(nn.Module):
    """An LSTM's layers by hand, which hands back the last one's state alone."""

    def __init__(self, lstm: nn.LSTM) -> None:
        super().__init__()
        for name, parameter in lstm.named_parameters():
            self.register_parameter(name, parameter)
        self.layers, self.hidden = lstm.num_layers, lstm.hidden_size

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
        for layer in range(self.layers):
            names = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
            read, kept, first, second = (getattr(self, f"{name}_l{layer}") for name in names)
            h = c = x.new_zeros(x.size(1), self.hidden)
            out = []
            for now in x:
                i, f, g, o = (now @ read.T + first + h @ kept.T + second).chunk(4, 1)
                c = f.sigmoid() * c + i.sigmoid() * g.tanh()
                h = o.sigmoid() * c.tanh()
                out.append(h)
            x = torch.stack(out)
        return x, (h, c)


def test_results_of_another_class_that_nobody_reads_are_not_held_against_each_other(tmp_path: Path) -> None:
    def run(name: str, *, cells: bool) -> Path:
        torch.manual_seed(0)
        lstm, head = nn.LSTM(6, 8, 2), nn.Linear(8, 3)
        model = nn.ModuleDict({"rnn": Cells(lstm) if cells else lstm, "head": head})
        model.forward = lambda x: model["head"](model["rnn"](x)[0])

        def backward(_step: int) -> None:
            model(torch.randn(5, 4, 6)).square().mean().backward()

        return recorded_steps(tmp_path / name, model, torch.optim.SGD(model.parameters(), lr=0.1), backward, STEPS)

    report = bw.compare(run("a", cells=False), run("b", cells=True))
    assert report.status == "fine", report.conclusion


def variational(out: Path, *, half: bool, wrong: float = 1.0, **settings: str) -> Path:
    """Train parts that a script calls one by one, each a recording of its own: the last is given what the others computed."""
    torch.manual_seed(0)
    encoder, mean, spread = nn.Sequential(nn.Linear(40, 64), nn.SiLU()), nn.Linear(64, 8), nn.Linear(64, 8)
    decoder = nn.Sequential(nn.Linear(8, 64), nn.SiLU(), nn.Linear(64, 40))
    weights = [p for part in (encoder, mean, spread, decoder) for p in part.parameters()]
    optimizer = torch.optim.SGD(weights, lr=0.01)
    with AutoRecorder(RecordConfig(**settings), str(out)):
        for _ in range(STEPS):
            x, noise = torch.randn(32, 40), torch.randn(32, 8)
            with torch.autocast("cpu", torch.bfloat16, enabled=half):
                h = encoder(x)
                m, v = mean(h), spread(h)
                z = m + torch.exp(0.5 * v) * noise * (wrong if half else 1.0)
                made = decoder(z)
                diverged = -0.5 * (1 + v - m**2 - v.exp()).sum(1).mean()
            loss = nn.functional.mse_loss(made.float(), x) + 0.1 * diverged.float()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return out


@pytest.mark.parametrize("settings", [{}, {"content": "tensors"}, {"level": "modules"}], ids=str)
def test_what_was_computed_before_a_model_may_be_rounded_behind_another_precision(
    tmp_path: Path, settings: dict[str, str]
) -> None:
    from bitwitness.comparison.beside import compare_processes

    a = variational(tmp_path / "a", half=False, **settings)
    report, others = compare_processes(a, variational(tmp_path / "b", half=True, **settings))
    assert {report.status, *(one.status for *_, one in others.reports)} == {"fine"}, (report.conclusion, others.lines())
    report, others = compare_processes(a, variational(tmp_path / "c", half=True, wrong=1.1, **settings))
    assert "findings" in {report.status, *(one.status for *_, one in others.reports)}


def test_a_model_that_stays_in_evaluation_mode_is_told_as_that_and_nothing_beside_it(tmp_path: Path) -> None:
    def run(name: str, *, stays: bool) -> Path:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 4))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        images, labels = torch.randn(4, 8, 3, 8, 8), torch.randint(0, 4, (4, 8))
        criterion = nn.CrossEntropyLoss()
        with bw.Recorder(model, out=tmp_path / name):
            for step in range(3):
                optimizer.zero_grad()
                criterion(model(images[step]), labels[step]).backward()
                optimizer.step()
                model.eval()
                with torch.no_grad():
                    model(images[3])
                model.train(not stays)
        return tmp_path / name

    report = bw.compare(run("a", stays=False), run("b", stays=True))
    assert report.conclusion == (
        "run B has the model in evaluation mode; the runs part at ./Sequential#0:forward.out0 (rank 0, step 1): run B has no "
        "forward in training mode in this step: was it in evaluation mode?"
    )


def test_a_scale_before_a_cast_that_only_one_run_has_is_named_behind_another_precision(tmp_path: Path) -> None:
    def run(name: str, *, half: bool, scaled: bool) -> Path:
        torch.manual_seed(0)
        body = nn.Sequential(nn.Embedding(40, 32), nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32), nn.LayerNorm(32))
        head = nn.Linear(32, 40, bias=False)
        model = nn.Sequential(body, head)
        if scaled:
            head.register_forward_pre_hook(lambda _module, args: (args[0] * 32**0.5,))
        tokens = torch.randint(0, 40, (STEPS, 8, 16))

        def backward(step: int) -> None:
            with torch.autocast("cpu", torch.bfloat16, enabled=half):
                out = model(tokens[step])
            nn.functional.cross_entropy(out.float().flatten(0, 1), tokens[step].flatten()).backward()

        return recorded_steps(tmp_path / name, model, torch.optim.SGD(model.parameters(), lr=0.01), backward, STEPS)

    a = run("a", half=False, scaled=False)
    assert bw.compare(a, run("b", half=True, scaled=False)).status == "fine"
    report = bw.compare(a, run("c", half=True, scaled=True))
    assert report.conclusion.startswith("the runs part at 1/mul#0:forward.out0 (rank 0, step 0): only run B has it")


class Mixer(nn.Module):
    """Mixes tokens, whose biases every layer norm behind takes away: their gradients are rounding errors."""

    def __init__(self, tokens: int = 12, width: int = 32) -> None:
        super().__init__()
        self.read, self.told = nn.Linear(8, width), nn.Linear(width, 4)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(3))
        self.mixes = nn.ModuleList(nn.Linear(tokens, tokens) for _ in range(2))
        self.ups = nn.ModuleList(nn.Linear(width, width) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.read(x)
        for norm, mix, up in zip(self.norms, self.mixes, self.ups, strict=False):
            x = x + mix(torch.nn.functional.gelu(norm(x)).mT).mT
            x = x + up(norm(x))
        return self.told(self.norms[2](x).mean(1))


@pytest.mark.parametrize("content", ["stats", "tensors"])
def test_gradients_that_come_to_nothing_are_no_difference_between_two_ways_to_use_bfloat16(
    tmp_path: Path, content: str
) -> None:
    def run(name: str, *, pure: bool) -> Path:
        torch.manual_seed(0)
        model = Mixer()
        x, labels = torch.randn(STEPS, 32, 12, 8), torch.randint(0, 4, (STEPS, 32))
        if pure:
            model.bfloat16()

        def backward(step: int) -> None:
            with torch.autocast("cpu", torch.bfloat16, enabled=not pure):
                out = model(x[step].to(torch.bfloat16 if pure else torch.float32))
            nn.functional.cross_entropy(out.float(), labels[step]).backward()

        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        return recorded_steps(tmp_path / name, model, optimizer, backward, STEPS, content=content)

    report = bw.compare(run("a", pure=False), run("b", pure=True))
    assert report.status == "fine", report.conclusion


class Centres(nn.Module):
    """A loss with parameters of its own: a model beside the one whose results it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.centres = nn.Parameter(torch.randn(5, 16))

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return (x - self.centres[labels]).square().sum(1).mean()


@pytest.mark.parametrize("content", ["stats", "tensors"])
def test_a_loss_with_parameters_is_given_what_the_other_model_rounds(tmp_path: Path, content: str) -> None:
    from bitwitness.comparison.beside import compare_processes

    def run(name: str, *, fused: bool) -> Path:
        torch.manual_seed(0)
        body, centres = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 16)), Centres()
        optimizer = torch.optim.Adam([*body.parameters(), *centres.parameters()], lr=1e-2)
        x, labels = torch.randn(4, 32, 8), torch.randint(0, 5, (4, 32))
        with AutoRecorder(RecordConfig(content=content), str(tmp_path / name)):
            for step in range(4):
                out = body(x[step])
                logits = out if fused else (out.double() * 1.0).float()
                loss = nn.functional.cross_entropy(logits[:, :5], labels[step])
                if not fused:
                    picked = logits[:, :5].gather(1, labels[step, :, None]).squeeze(1)
                    loss = (logits[:, :5].exp().sum(1).log() - picked).mean()
                (loss + 0.1 * centres(out, labels[step])).backward()
                optimizer.step()
                optimizer.zero_grad()
        return tmp_path / name

    report, others = compare_processes(run("a", fused=True), run("b", fused=False))
    assert {report.status, *(one.status for *_, one in others.reports)} == {"fine"}, (report.conclusion, others.lines())


def test_another_term_of_a_loss_is_no_scale_of_it(tmp_path: Path) -> None:
    def run(name: str, weight: float) -> Path:
        torch.manual_seed(0)
        critic, actor = nn.Linear(4, 1), nn.Linear(4, 3)
        optimizer = torch.optim.Adam([*critic.parameters(), *actor.parameters()], lr=1e-3)

        def backward(_step: int) -> None:
            x = torch.randn(16, 4)
            entropy = torch.distributions.Categorical(logits=actor(x), validate_args=False).entropy().mean()
            (critic(x).sub(3.0).square().mean() - weight * entropy).backward()

        return recorded_steps(tmp_path / name, critic, optimizer, backward, STEPS)

    report = bw.compare(run("a", 0.1), run("b", -0.1))
    assert "called with other arguments" in report.conclusion
    assert "0.1 against -0.1" in report.conclusion
    assert not any("scaled" in note for note in report.notes)
