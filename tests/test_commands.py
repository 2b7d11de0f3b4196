"""Commands that a guarded script starts are named where they may train, and run as they would."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bitwitness.guard.commands import commands_named, may_train, words_of


@pytest.mark.parametrize(
    "command",
    [
        "python train.py --lr 1",
        "python3.12 -u -W ignore train.py",
        [sys.executable, "-X", "dev", "train.py"],
        [sys.executable, "-m", "recipes.train"],
        "python -m torch.distributed.run --nproc-per-node 2 train.py",
        "torchrun --nproc-per-node 2 train.py",
        "/usr/bin/accelerate launch train.py",
        [Path("train.py")],
        b"python train.py",
    ],
)
def test_what_may_train(command: object) -> None:
    assert may_train(words_of(command))


@pytest.mark.parametrize(
    "command",
    [
        "git rev-parse HEAD",
        "nvidia-smi -q",
        "python",
        "python -c 'import torch'",
        "python -m pip install x",
        "python -m http.server",
        "python -m bitwitness run train.py",
        "torchrun -m bitwitness run train.py",
        [sys.executable, sysconfig.get_path("purelib") + "/torch/_inductor/compile_worker/__main__.py"],
        "gcc -o train train.c",
        "",
        [],
        None,
    ],
)
def test_what_does_not(command: object) -> None:
    assert not may_train(words_of(command))


@given(st.lists(st.text(max_size=12), max_size=6))
def test_any_words_are_taken(words: list[str]) -> None:
    may_train(words)


def test_each_is_named_once_and_runs(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("import sys; print('trained', *sys.argv[1:])")
    said: list[str] = []
    with commands_named(said.append):
        for _ in range(2):
            done = subprocess.run([sys.executable, script, "1"], capture_output=True, text=True, check=True)
            assert done.stdout == "trained 1\n"
        assert os.system(f"{sys.executable} {script} > {tmp_path / 'out'}") == 0
        assert subprocess.check_output(["echo", "x"]) == b"x\n"
        with pytest.raises(FileNotFoundError):
            subprocess.run(["no-such-program"], check=False)
        with pytest.raises(TypeError):
            subprocess.run(check=False)
    assert len(said) == 2, said
    assert said[0] == (
        f"the script starts `{sys.executable} {script} 1`: what is trained there is not guarded; give that command "
        "`-m bitwitness run` before its script"
    )
    assert subprocess.Popen.__init__.__qualname__ == "Popen.__init__"
