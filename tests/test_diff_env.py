"""What differs between two runs before their numbers are compared."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import bitwitness as bw
from bitwitness.cli import main
from bitwitness.store.environment import variables
from bitwitness.store.seal import sealed


def record(out: Path, *, seed: int = 0, data: int = 1, lr: float = 0.1, given: bool = True) -> Path:
    """Train three steps under a guard; return the run folder."""
    torch.manual_seed(seed)
    net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
    optimizer = torch.optim.SGD(net.parameters(), lr=lr)
    generator = torch.Generator().manual_seed(data)
    with bw.Guard(net, optimizer if given else None, out=out):
        for _ in range(3):
            net(torch.randn(5, 4, generator=generator)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return out


def compared(a: Path, b: Path, capsys: pytest.CaptureFixture) -> tuple[int, dict]:
    code = main(["diff-env", str(a), str(b), "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_equal_runs_differ_in_nothing(tmp_path: Path, capsys) -> None:
    code, told = compared(record(tmp_path / "a"), record(tmp_path / "b", given=False), capsys)
    assert (code, told["differences"]) == (0, [])
    assert main(["diff-env", str(tmp_path / "a"), str(tmp_path / "b")]) == 0
    assert "nothing differs of what both runs recorded" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("change", "part", "name"),
    [
        ({"seed": 5}, "weights", "0.weight"),
        ({"data": 2}, "data", "step 0"),
        ({"lr": 0.2}, "optimizers", "[0].groups[0].lr"),
    ],
)
def test_what_differs_is_named_and_explained(tmp_path: Path, capsys, change: dict, part: str, name: str) -> None:
    code, told = compared(record(tmp_path / "a"), record(tmp_path / "b", **change), capsys)
    assert code == 1
    assert (part, name) in [(one["part"], one["name"]) for one in told["differences"]]
    assert main(["diff-env", str(tmp_path / "a"), str(tmp_path / "b")]) == 1
    assert f"{part}: " in capsys.readouterr().out


def test_switches_and_variables_are_compared(tmp_path: Path, capsys, monkeypatch) -> None:
    a = record(tmp_path / "a")
    monkeypatch.setenv("NCCL_ALGO", "Ring")
    torch.use_deterministic_algorithms(True)
    try:
        b = record(tmp_path / "b")
    finally:
        torch.use_deterministic_algorithms(False)
    _, told = compared(a, b, capsys)
    found = {(one["part"], one["name"]): (one["a"], one["b"]) for one in told["differences"]}
    assert found["switches", "deterministic_algorithms"] == (False, True)
    assert found["variables", "NCCL_ALGO"] == ("(not there)", "Ring")


def test_only_known_variables_are_recorded_and_no_secret() -> None:
    given = {"HOME": "/root", "OMP_NUM_THREADS": "1", "TORCH_API_TOKEN": "abc", "INF_NAN_MODE_ENABLE": "1"}
    assert variables(given) == {"INF_NAN_MODE_ENABLE": "1", "OMP_NUM_THREADS": "1", "TORCH_API_TOKEN": "***"}


@pytest.mark.parametrize("text", [None, "{", "[]"])
def test_a_folder_that_is_no_run_is_an_error(tmp_path: Path, capsys, text: str | None) -> None:
    if text is not None:
        (tmp_path / "run.json").write_text(text)
    assert main(["diff-env", str(tmp_path), str(tmp_path)]) == (2 if text is None else 3)
    assert "run.json" in capsys.readouterr().err


def test_what_an_older_run_did_not_record_is_said(tmp_path: Path, capsys) -> None:
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "run.json").write_text(
        json.dumps(sealed({"schema": 1, "world_size": 1, "command": ["pytest"]}))
    )
    code, told = compared(tmp_path / "old", tmp_path / "old", capsys)
    assert code == 0
    assert "weights" in told["not_recorded"]
