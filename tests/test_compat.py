"""Torch's private names: one file has them all, and ``doctor`` names those that a release of torch does not have."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from test_layers import FILES, LAYERS, SOURCE, inner_names, part_of, tree

from bitwitness.cli import main
from bitwitness.guard import doctor
from bitwitness.tap import lacking


def test_this_torch_has_all_that_bitwitness_stands_on() -> None:
    assert lacking.lacking() == []


@pytest.mark.parametrize(
    "name", ["torch._no_such_module", "torch.autograd._no_such_function", "torch.nn.no_such.module._at_all"]
)
def test_what_a_release_lacks_is_named(name: str) -> None:
    assert lacking.lacking(["torch.autograd._engine_run_backward", name]) == [name]


def test_doctor_names_it_and_fails(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(lacking.ATTRIBUTES, "torch.Tensor", (lambda: torch.empty(0), ("_no_such_version",)))
    found = doctor.examine()
    assert found["lacking"] == ["torch.Tensor._no_such_version"]
    monkeypatch.setattr(doctor, "examine", lambda: found)
    assert main(["doctor"]) == 1
    assert "this torch has no torch.Tensor._no_such_version, which bitwitness stands on" in capsys.readouterr().out


def test_nothing_else_in_the_torch_layer_has_private_names() -> None:
    others = {
        (path.relative_to(SOURCE).as_posix(), name)
        for path in FILES
        if part_of(path) in LAYERS["torch"] and path.name not in ("compat.py", "lacking.py")
        for name in inner_names(tree(path))
    }
    assert not others, "they belong into tap/compat.py or lacking.py, with the reason"


@pytest.fixture
def poorer(tmp_path: Path) -> dict[str, str]:
    """Return an environment whose torch has lost a name, as a later release may."""
    (tmp_path / "sitecustomize.py").write_text("import torch.autograd.function as f\ndel f._HookMixin\n")
    return {**os.environ, "PYTHONPATH": str(tmp_path)}


def test_a_script_runs_where_no_guard_can_be(tmp_path: Path, poorer: dict[str, str]) -> None:
    script = tmp_path / "train.py"
    script.write_text("import sys, torch\nprint('trained', float(torch.ones(3).sum()))\nsys.exit(5)\n")
    command = [sys.executable, "-m", "bitwitness", "run", str(script)]
    done = subprocess.run(command, env=poorer, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (5, "trained 3.0\n")
    assert f"bitwitness: torch {torch.__version__.partition('+')[0]}" in done.stderr
    assert "lacks a name that bitwitness stands on: " in done.stderr
    assert "cannot import name '_HookMixin'" in done.stderr
    assert "SCRIPT RUNS UNGUARDED" in done.stderr


def test_other_verbs_say_what_is_missing_and_end(tmp_path: Path, poorer: dict[str, str]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "bitwitness", "doctor"], env=poorer, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "cannot import name '_HookMixin'" in done.stderr
    assert "Traceback" not in done.stderr
    assert not any(tmp_path.glob("recording*"))
