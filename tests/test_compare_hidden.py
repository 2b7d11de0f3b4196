"""Differences that a comparison took for rounding: their own size allowed for them, or little of them was left at once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tokenmodel import TokenModel
from torch import Tensor, nn
from torch.nn import functional as F

import bitwitness as bw
from bitwitness.cli import main
from bitwitness.testing import FaultyDevice, from_mapping


class Attention(nn.Module):
    """Attends evenly to all places at first, so that next to nothing comes of what queries and keys are."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(16, 16) for _ in range(3))
        for part in (self.query, self.key):
            nn.init.normal_(part.weight, std=1e-3)

    def forward(self, x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(self.query(x), self.key(x), self.value(x)) + x


class Model(TokenModel):
    def __init__(self) -> None:
        super().__init__(lambda: nn.Sequential(Attention(), nn.Linear(16, 16), nn.GELU()), 3)


Edit = Callable[[int, Model], None]


def recorded(out: Path, edit: Edit = lambda _step, _model: None, *, content: str = "stats") -> Path:
    """Train five steps; ``edit`` is called before each."""
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    generator = torch.Generator().manual_seed(1)
    with bw.Recorder(model, out=out, content=content):
        for step in range(5):
            edit(step, model)
            tokens = torch.randint(0, 32, (4, 9), generator=generator)
            loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            optimizer.step()
            optimizer.zero_grad()
    return out


@torch.no_grad()
def halved(step: int, model: Model) -> None:
    """Change most weights between two steps, as loading a checkpoint does."""
    if step == 2:
        for p in model.parameters():
            p.mul_(0.5)


@pytest.mark.parametrize("content", ["stats", "tensors"])
def test_weights_that_all_changed_between_two_steps_do_not_explain_themselves(
    tmp_path: Path, content: str, capsys: pytest.CaptureFixture[str]
) -> None:
    a, b = recorded(tmp_path / "a", content=content), recorded(tmp_path / "b", halved, content=content)
    said = []
    for option in ([], ["--json", str(tmp_path / "x.json")], ["--csv", str(tmp_path / "x.csv")], ["--json", "-"]):
        assert main(["compare", *option, str(a), str(b)]) == 1, option  # whatever is written beside
        said.append(capsys.readouterr().out)
    first = said[0].splitlines()[0]
    assert first.startswith(
        "the runs part at tokens/embedding#0:forward.out0 (rank 0, step 2): its tokens.weight differs: 0.5"
    )
    assert first.endswith("so it was changed between these two steps (and so 26 other parameters)")
    assert [one.splitlines()[0] for one in said[1:3]] == [first] * 2


@pytest.mark.parametrize(("taken_out", "status"), [(True, "fine"), (False, "findings")])
def test_an_own_loss_scale_before_clipping_is_told_from_one_that_stays(
    tmp_path: Path, taken_out: bool, status: str
) -> None:
    def run(name: str, scale: float) -> Path:
        torch.manual_seed(0)
        model = Model()
        optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
        generator = torch.Generator().manual_seed(1)
        with bw.Recorder(model, out=tmp_path / name):
            for _ in range(3):
                tokens = torch.randint(0, 32, (4, 9), generator=generator)
                loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
                (loss * scale).backward()
                if taken_out:
                    for p in model.parameters():
                        p.grad.div_(scale)
                nn.utils.clip_grad_norm_(model.parameters(), 0.05)
                optimizer.step()
                optimizer.zero_grad()
        return tmp_path / name

    report = bw.compare(run("a", 1.0), run("b", 1024.0))
    assert report.status == status, report.conclusion
    if taken_out:
        assert any("the loss is scaled 1024 times as much in run B" in note for note in report.notes)
    else:
        assert "every gradient (" in report.conclusion
        assert "1024 times as large in run B" in report.conclusion


def test_a_query_that_is_wrong_once_is_seen_in_its_keys_gradients(tmp_path: Path) -> None:
    fault = {"site": "layers.1.0.query/addmm:forward", "steps": [1], "times": 1, "kind": "multiply", "factor": 1.1,
             "pattern": "all"}  # fmt: skip
    a = recorded(tmp_path / "a")
    with FaultyDevice(from_mapping({"fault": [fault]})) as device:
        b = recorded(tmp_path / "b")
    assert len(device.fired) == 1
    report = bw.compare(a, b)
    assert report.status == "findings", report.conclusion
    assert report.conclusion.startswith("the runs part at layers.1.0.query/addmm#0:forward.out0 (rank 0, step 1)")
