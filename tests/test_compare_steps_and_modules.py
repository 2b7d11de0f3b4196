"""Steps that one run leaves out, parts that only one run draws in, and modules that both compute in their own ways."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import bitwitness as bw
from bitwitness.comparison.report import Report

CONTENTS = pytest.mark.parametrize("content", ["stats", "tensors"])
Step = Callable[[nn.Module, torch.optim.Optimizer, int], None]


class Experts(nn.Module):
    """Two of four experts for each token: one expert after the other, or all at once; ``normed``: weights add up to one."""

    def __init__(self, *, dense: bool, normed: bool) -> None:
        super().__init__()
        self.router = nn.Linear(16, 4, bias=False)
        self.inner, self.outer = nn.Parameter(torch.randn(4, 16, 24) / 4), nn.Parameter(torch.randn(4, 24, 16) / 5)
        self.dense, self.normed = dense, normed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.reshape(-1, 16)
        kept, chosen = self.router(flat).softmax(-1).topk(2, -1)
        if self.normed:
            kept = kept / kept.sum(-1, keepdim=True)
        if self.dense:
            full = torch.zeros(len(flat), 4).scatter(1, chosen, kept)
            hidden = F.silu(torch.einsum("nd,edf->nef", flat, self.inner))
            return torch.einsum("nef,efd,ne->nd", hidden, self.outer, full).view_as(x)
        out = torch.zeros_like(flat)
        for number in range(4):
            token, place = torch.where(chosen == number)
            out = out.index_add(
                0, token, F.silu(flat[token] @ self.inner[number]) @ self.outer[number] * kept[token, place, None]
            )
        return out.view_as(x)


class Model(nn.Module):
    """An embedding, a part, dropout and a head; returns the loss of the next token."""

    def __init__(self, part: nn.Module, dropout: float = 0.0) -> None:
        super().__init__()
        self.tok, self.part, self.drop, self.head = nn.Embedding(31, 16), part, nn.Dropout(dropout), nn.Linear(16, 31)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tok(tokens)
        logits = self.head(self.drop(x + self.part(x)))
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def usual(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    optimizer.zero_grad()
    model(tokens_of(step)).backward()
    optimizer.step()


def tokens_of(step: int) -> torch.Tensor:
    return torch.randint(0, 31, (4, 9), generator=torch.Generator().manual_seed(step))


@pytest.fixture
def compared(tmp_path: Path) -> Callable[..., Report]:
    """Record two trainings of five steps and compare them."""

    def compare(content: str, *runs: tuple[Callable[[], nn.Module], Step]) -> Report:
        for name, (make, step) in zip("ab", runs, strict=True):
            torch.manual_seed(0)
            model = make()
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
            with bw.Recorder(model, out=tmp_path / name, content=content):
                for number in range(5):
                    step(model, optimizer, number)
        return bw.compare(tmp_path / "a", tmp_path / "b")

    return compare


def experts(*, dense: bool, normed: bool) -> Callable[[], nn.Module]:
    return lambda: Model(Experts(dense=dense, normed=normed))


@CONTENTS
def test_experts_computed_together_are_no_difference(compared: Callable[..., Report], content: str) -> None:
    report = compared(content, (experts(dense=False, normed=True), usual), (experts(dense=True, normed=True), usual))
    assert report.status == "fine", report.conclusion


@CONTENTS
def test_what_is_wrong_behind_a_rewrite_is_told_of_the_module(compared: Callable[..., Report], content: str) -> None:
    report = compared(content, (experts(dense=False, normed=True), usual), (experts(dense=True, normed=False), usual))
    assert report.first is not None
    assert report.first.site.startswith("part/")
    assert report.first.step == 0
    said = f"{report.first.site}: {report.first.text}"
    assert "part/Experts" in said
    assert "its inputs agree and its result does not; inside, the runs compute with other operators" in said


@CONTENTS
@pytest.mark.parametrize("clipped", [False, True])
def test_a_step_that_is_left_out_is_named(compared: Callable[..., Report], content: str, *, clipped: bool) -> None:
    def missing(model: nn.Module, optimizer: torch.optim.Optimizer, step: int, left_out: int = 2) -> None:
        optimizer.zero_grad()
        model(tokens_of(step)).backward()
        if clipped:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if step != left_out:
            optimizer.step()
        optimizer.zero_grad()

    make = experts(dense=True, normed=True)
    report = compared(content, (make, lambda *args: missing(*args, left_out=-1)), (make, missing))
    assert report.first is not None
    assert report.first.step == 2
    assert report.first.text in (
        "run B takes no optimizer step in this step: its gradients are not used",
        (
            "run B computes 2 batches in this step, and run A 1: both computed 1 in the step before, so that run B leaves an "
            "optimizer step out between them, or accumulates gradients"
        ),
    )


@CONTENTS
def test_dropout_in_one_run_alone_is_told_as_that(compared: Callable[..., Report], content: str) -> None:
    report = compared(content, *((lambda p=p: Model(nn.Linear(16, 16), p), usual) for p in (0.0, 0.1)))
    assert report.first is not None
    assert report.first.site.startswith("drop/Dropout")
    assert report.first.text == "it draws random numbers in run B alone"


@CONTENTS
def test_a_discriminator_that_is_given_both_halves_at_once_is_not_accused(tmp_path: Path, content: str) -> None:
    for name in "ab":
        torch.manual_seed(0)
        critic = nn.Sequential(nn.Linear(10, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))
        maker = nn.Linear(4, 10)
        of_critic, of_maker = (torch.optim.Adam(m.parameters(), lr=1e-3) for m in (critic, maker))
        with bw.Recorder(critic, out=tmp_path / name, content=content):
            for step in range(3):
                real, noise = (
                    torch.randn(8, 10, generator=(g := torch.Generator().manual_seed(step))),
                    torch.randn(8, 4, generator=g),
                )
                made = maker(noise).detach()
                good, bad = (critic(real), critic(made)) if name == "a" else critic(torch.cat([real, made])).chunk(2)
                of_critic.zero_grad()
                (F.softplus(-good).mean() + F.softplus(bad).mean()).backward()
                of_critic.step()
                of_maker.zero_grad()
                F.softplus(-critic(maker(noise))).mean().backward()
                of_maker.step()
    report = bw.compare(tmp_path / "a", tmp_path / "b")
    assert report.suspects == []
    assert report.status != "findings"


@CONTENTS
@pytest.mark.parametrize("shared", [False, True])
def test_inputs_that_share_memory_are_all_given(tmp_path: Path, content: str, *, shared: bool) -> None:
    """A text and what follows in it are parts of one tensor, until they are copied to a device."""

    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tok, self.head = nn.Embedding(31, 16), nn.Linear(16, 31)

        def forward(self, text: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
            return F.cross_entropy(self.head(self.tok(text)).flatten(0, 1), following.flatten())

    for name, copied in (("a", shared), ("b", not shared)):
        torch.manual_seed(0)
        model = Pair()
        if name == "b":
            with torch.no_grad():
                model.head.weight[3] *= 1.5
        with bw.Recorder(model, out=tmp_path / name, content=content):
            text = tokens_of(0)
            parts = text[:, :-1], text[:, 1:]
            model(*(part.clone() for part in parts) if copied else parts).backward()
    report = bw.compare(tmp_path / "a", tmp_path / "b")
    assert "is given" not in report.conclusion
    assert "head.weight" in report.conclusion


class Cells(nn.Module):
    """An LSTM of torch's, or written out; ``exchanged``: input and forget gates are."""

    def __init__(self, *, written: bool, exchanged: bool) -> None:
        super().__init__()
        self.tok, self.lstm, self.head = nn.Embedding(31, 8), nn.LSTM(8, 12, batch_first=True), nn.Linear(12, 31)
        self.written, self.exchanged = written, exchanged

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tok(tokens)
        hidden = self.written_out(x) if self.written else self.lstm(x)[0]
        return F.cross_entropy(self.head(hidden)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())

    def written_out(self, x: torch.Tensor) -> torch.Tensor:
        of = self.lstm
        h = c = torch.zeros(len(x), 12)
        found = []
        for step in range(x.shape[1]):
            gates = F.linear(x[:, step], of.weight_ih_l0, of.bias_ih_l0) + F.linear(h, of.weight_hh_l0, of.bias_hh_l0)
            i, f, g, o = gates.chunk(4, -1)
            if self.exchanged:
                i, f = f, i
            c = f.sigmoid() * c + i.sigmoid() * g.tanh()
            h = o.sigmoid() * c.tanh()
            found.append(h)
        return torch.stack(found, 1)


@CONTENTS
@pytest.mark.parametrize("exchanged", [False, True])
def test_a_layer_written_out_wrongly_does_not_accuse_what_reads_it(
    compared: Callable[..., Report], content: str, *, exchanged: bool
) -> None:
    runs = ((lambda w=w: Cells(written=w, exchanged=w and exchanged), usual) for w in (False, True))
    report = compared(content, *runs)
    if not exchanged:
        assert report.suspects == [], report.conclusion
        return
    assert report.first is not None
    assert report.first.site == "head/Linear#0:forward.in0"
    assert "by mkldnn_rnn_layer of lstm in run A and by stack of the model itself in run B" in report.first.text


class Padded(nn.Module):
    """Attention over tokens of which 0 is padding; a key's bias has a gradient of rounding errors alone."""

    def __init__(self) -> None:
        super().__init__()
        self.tok, self.qkv, self.head = nn.Embedding(31, 16), nn.Linear(16, 48), nn.Linear(16, 31)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        there = tokens != 0
        q, k, v = self.qkv(self.tok(tokens)).unsqueeze(1).chunk(3, -1)
        x = F.scaled_dot_product_attention(q, k, v, attn_mask=there[:, None, None, :]).squeeze(1)
        return F.cross_entropy(self.head(x).flatten(0, 1), torch.where(there, tokens, -100).flatten())


@CONTENTS
def test_batches_that_are_padded_further_agree_by_their_updates(compared: Callable[..., Report], content: str) -> None:
    def step(by: int) -> Step:
        def train(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
            optimizer.zero_grad()
            model(F.pad(tokens_of(number).clamp_min(1), (0, by))).backward()
            optimizer.step()

        return train

    report = compared(content, (Padded, step(0)), (Padded, step(7)))
    assert report.status == "fine", report.conclusion
    assert any("parameters, gradients and updates were compared, and nothing else" in note for note in report.notes)
