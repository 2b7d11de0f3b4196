"""``bitwitness doctor SCRIPT``: what a user sees of scripts of all kinds, and with which exit code it ends."""

from __future__ import annotations

import json
import random
import subprocess
import textwrap
from pathlib import Path

import pytest
import ranks

from bitwitness.guard.repeats import Repeats

HEAD = """
import torch
from torch import nn
torch.manual_seed(0)
def train(model, batch, steps=20, lr=0.01):
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    for step in range(steps):
        loss = batch(model)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print("step", step, flush=True)
def small():
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
def square(model):
    return model(torch.randn(4, 8)).square().mean()
"""


def doctor(where: Path, code: str, *options: str, head: str = HEAD, **environment: str) -> subprocess.CompletedProcess:
    (where / "train.py").write_text(head + textwrap.dedent(code))
    return ranks.script(
        ["-m", "bitwitness", "doctor", *options, "train.py"],
        where,
        environment={"PYTHONHASHSEED": "0", **environment},
        imported=("bitwitness.guard.prognosis", "bitwitness.guard.tryout", "bitwitness.guard.auto"),
    )


def asked(where: Path, code: str, *options: str, head: str = HEAD, **environment: str) -> tuple[int, dict, str]:
    done = doctor(where, code, "--json", "answer.json", *options, head=head, **environment)
    assert (where / "answer.json").exists(), done.stderr
    return done.returncode, json.loads((where / "answer.json").read_text()), done.stdout


def test_it_ends_the_script_between_two_steps_and_tells_what_is_covered(tmp_path: Path) -> None:
    code = """
    model = small()
    try:
        train(model, square)
        print("went on")
    finally:
        print("cleaned up")
    """
    done = doctor(tmp_path, code)
    assert done.returncode == 0, done.stderr
    steps, _, told = done.stdout.partition("cleaned up")
    assert steps.split() == [
        word for step in range(5) for word in ("step", str(step))
    ]  # the sixth is ended in its step
    assert "went on" not in told
    assert "doctor: 6 steps under guard, ended here" in told
    assert "parameters                4 of 4" in told
    assert "saw their fault" in told
    assert "Nothing was seen that keeps this script from repeating its bits." in told
    assert "2 of its steps were run again, with the same bits." in told
    last = told.partition("not protected: ")[2]
    assert last.startswith("operators of loss code"), last
    assert "1 rank: nobody else to ask" in " ".join(last.split())
    assert max(map(len, told.splitlines())) <= 100
    assert "Traceback" not in done.stderr


def test_a_convnet_is_told_that_its_convolutions_were_checked(tmp_path: Path) -> None:
    code = """
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(72, 2))
    train(model, lambda m: nn.functional.cross_entropy(m(torch.randn(4, 3, 8, 8)), torch.randint(2, (4,))))
    """
    status, found, _ = asked(tmp_path, code)
    kinds = found["coverage"][0]["operators"]["census"]["kinds"]
    assert (status, found["status"]) == (0, "fine")
    assert kinds["convolutions"]["ops"] == {"convolution": 2, "convolution_backward": 2}
    assert (kinds["convolutions"]["checked"], kinds["convolutions"]["again"]) == (4, 0)
    assert kinds["pooling and resampling"]["calls"] == 4
    assert found["not_protected"].startswith(
        "not protected: softmax and losses, reductions, against a fault that repeats itself ("
    )


def test_an_lstm_and_a_transformer(tmp_path: Path) -> None:
    code = """
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm, self.head = nn.LSTM(8, 8, batch_first=True), nn.Linear(8, 2)
        def forward(self, x):
            return self.head(self.lstm(x)[0]).square().mean()
    from transformers import GPT2Config, GPT2LMHeadModel
    model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_head=2, n_embd=16, vocab_size=32, n_positions=16, attn_pdrop=0.0))
    ids = torch.randint(32, (2, 8))
    train(Net(), lambda m: m(torch.randn(2, 4, 8)), steps=3)
    train(model, lambda m: m(input_ids=ids, labels=ids).loss)
    """
    status, found, _ = asked(tmp_path, code)
    assert status == 0, found
    transformer, lstm = found["coverage"]
    assert transformer["steps"]["held"] == 6
    assert transformer["operators"]["census"]["kinds"]["attention"]["checked"] > 0
    assert lstm["steps"]["held"] == 3
    assert lstm["operators"]["census"]["kinds"]["recurrent layers"]["checked"] == 2


def test_a_script_that_fails_keeps_its_error_and_code(tmp_path: Path) -> None:
    done = doctor(tmp_path, "train(small(), square, steps=3)\nraise RuntimeError('mine')\n")
    assert done.returncode == 1
    assert done.stderr.rstrip().endswith("RuntimeError: mine")
    assert "not known: the script failed, with exit code 1; what is told is of the steps before" in done.stdout
    assert "3: 2 light, 1 deep" in done.stdout
    assert doctor(tmp_path, "train(small(), square, steps=3)\nraise SystemExit(5)\n").returncode == 5


def test_a_script_that_never_trains(tmp_path: Path) -> None:
    status, found, told = asked(tmp_path, "print(small()(torch.ones(1, 8)).shape)\n")
    assert (status, found["status"]) == (3, "unread")
    assert "not known: no" in told
    assert found["not_protected"].startswith("not protected: anything")


@pytest.mark.parametrize("caught", ["Exception", "BaseException"])
def test_a_script_that_catches_all_is_ended(tmp_path: Path, caught: str) -> None:
    code = f"""
    model = small()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(1000):
        try:
            square(model).backward()
            optimizer.step()
        except {caught}:
            print("caught")
    print("went on")
    """
    done = doctor(tmp_path, code)
    assert done.returncode == 0, done.stderr
    assert "went on" not in done.stdout
    assert done.stdout.count("caught") == (3 if caught == "BaseException" else 0)
    assert "not protected: " in done.stdout


def test_what_keeps_bits_from_repeating_is_named_with_its_line(tmp_path: Path) -> None:
    head = HEAD.replace("torch.manual_seed(0)\n", "")
    code = """
    import random
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = small()
            self.register_buffer("seen", torch.zeros(8))
        def forward(self, x):
            self.seen.put_(torch.tensor([0, 0]), torch.ones(2))
            return self.inner(x).square().mean() * (1 + random.random())
    train(Net(), lambda m: m(torch.randn(4, 8)))
    """
    status, found, told = asked(tmp_path, code, "--determinism", head=head)
    reasons = {one["what"]: one["line"] for one in found["repeats"]["reasons"] if one["sure"]}
    assert status == 0
    line = 1 + (head + textwrap.dedent(code)).splitlines().index(
        "        self.seen.put_(torch.tensor([0, 0]), torch.ones(2))"
    )
    assert reasons == {
        "put_ has no deterministic kernel here": f"train.py:{line}",
        "torch's generator is used and was never seeded": "",
        "random's generator is used and was never seeded": "",
    }
    assert "This script does not repeat its bits, for 3 reasons:" in told
    assert "torch.manual_seed(0); random.seed(0); numpy.random.seed(0): before the model is made" in told
    _, found, _ = asked(tmp_path, "random.seed(1)\n" + textwrap.dedent(code), head=HEAD + "import random\n")
    whats = [one["what"] for one in found["repeats"]["reasons"]]
    assert whats == ["put_ has no deterministic kernel here"]


def test_the_process_is_put_right_after_it() -> None:
    import warnings

    import torch

    def state() -> tuple[object, ...]:
        ours = [one for one in warnings.filters if "deterministic implementation" in str(one)]
        return torch.are_deterministic_algorithms_enabled(), ours, random.seed, warnings.showwarning

    before = state()
    with Repeats():
        assert torch.is_deterministic_algorithms_warn_only_enabled()
        assert state() != before
    assert state() == before


def test_run_sets_what_makes_a_script_repeat_its_bits(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import os, random, torch\n"
        "print(torch.initial_seed(), random.random(), torch.is_deterministic_algorithms_warn_only_enabled())\n"
        "print(torch.are_deterministic_algorithms_enabled(), os.environ['CUBLAS_WORKSPACE_CONFIG'])\n"
    )
    done = ranks.script(["-m", "bitwitness", "run", "--determinism", "train.py"], tmp_path)
    assert done.stdout == f"0 {random.Random(0).random()} True\nTrue :4096:8\n", done.stderr


def test_a_deadline_ends_what_makes_no_steps(tmp_path: Path) -> None:
    code = "import time\ntrain(small(), square, steps=3)\ntime.sleep(60)\nprint('went on')\n"
    status, found, told = asked(tmp_path, code, "--deadline", "2")
    assert status == 3
    assert "went on" not in told
    assert found["problems"][0] == "the deadline passed before the steps were done"


def test_two_ranks_tell_of_their_collectives_once(tmp_path: Path) -> None:
    code = """
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel
    dist.init_process_group("gloo")
    train(DistributedDataParallel(small()), square)
    """
    (tmp_path / "train.py").write_text(HEAD + textwrap.dedent(code))
    answer = tmp_path / "answer.json"
    done = ranks.forked(
        2,
        ["-m", "bitwitness", "doctor", "--json", str(answer), str(tmp_path / "train.py")],
        tmp_path / "logs",
        imported=("bitwitness.guard.prognosis", "bitwitness.guard.tryout", "bitwitness.guard.auto"),
    )
    text = "".join(log.read_text() for log in done.logs)
    assert done.code == 0, text
    found = json.loads(answer.read_text())
    table = found["coverage"][0]
    assert table["ranks"] == 2
    assert table["collectives"]["on_deep_steps"]["allreduce"] >= 2
    assert table["collectives"]["begun"] >= 6
    assert table["sensors"]["self_tests"]["replicas"] == "seen"
    assert "none checked by itself" not in found["not_protected"]
    assert "nobody else to ask" not in found["not_protected"]
    assert text.count("not protected: ") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--steps", "0", "train.py"], "--steps 0: expected at least 1 step"),
        (["--json", "train.py"], "--json train.py would write the answer over a script"),
        (["--json", "train"], "--json train would write the answer over a script"),
        (["no.py"], "there is no script no.py"),
        (["--deadline", "0", "train.py"], "--deadline 0: expected seconds"),
    ],
)
def test_bad_input_is_named_and_nothing_is_written(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from bitwitness.cli import main

    monkeypatch.chdir(tmp_path)
    for name in ("train", "train.py"):
        (tmp_path / name).write_text("print()")
    assert main(["doctor", *arguments]) == 2
    assert message in capsys.readouterr().err
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == dict.fromkeys(
        ("train", "train.py"), "print()"
    )
