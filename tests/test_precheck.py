"""A pre-check from the command line: recordings of ours and of msprobe, torch's samples; what cannot be judged never passes."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import bitwitness as bw
from bitwitness.cli import main
from bitwitness.precheck.attempt import Terms, attempt
from bitwitness.precheck.made import made
from bitwitness.precheck.runner import run_groups
from bitwitness.precheck.sources import run_cases
from bitwitness.precheck.suite import cases_of, groups

CPU = torch.device("cpu")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(32, 16), nn.LayerNorm(16)
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 32)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.embed(tokens))
        q, k, v = (t.unflatten(-1, (2, 8)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        return self.out(F.gelu(x + mixed))


class Tampered(TorchDispatchMode):
    """A device whose matrix products are off by a thousandth."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        return found * 1.001 if func is torch.ops.aten.mm.default else found


def recorded(folder: Path, content: str, *, tampered: bool = False) -> Path:
    torch.manual_seed(0)
    model = Block()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with bw.Recorder(model, out=str(folder), level="mix", content=content, steps="0"):
        tokens = torch.randint(0, 32, (2, 8))
        mode = Tampered() if tampered else torch.enable_grad()
        with mode:
            F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return folder


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return recorded(tmp_path_factory.mktemp("tensors") / "run", "tensors")


def verdicts(path: Path, device: str = "cpu") -> dict[str, str]:
    return {case.name: attempt(case, Terms(device)).verdict for case in run_cases(str(path))}


def test_every_operator_of_a_healthy_recording_passes_forward_and_backward(run: Path) -> None:
    found = verdicts(run)
    assert set(found.values()) == {"pass"}, found
    assert any("_scaled_dot_product" in name and ":forward" in name for name in found)
    assert any("native_layer_norm_backward" in name for name in found)


def test_what_was_recorded_is_judged_too(tmp_path: Path) -> None:
    path = recorded(tmp_path / "run", "tensors", tampered=True)
    results = [attempt(case, Terms()) for case in run_cases(str(path), only=["mm"])]
    assert {r.verdict for r in results} == {"fail"}
    assert all(r.reason.startswith("recorded out0:") for r in results)
    assert {r.verdict for r in (attempt(c, Terms()) for c in run_cases(str(path), only=["gelu"]))} == {"pass"}


def test_the_layers_of_an_lstm_are_judged_though_float64_has_no_kernel_of_them(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = nn.LSTM(6, 8, 2, bidirectional=True), torch.randn(5, 3, 6)
    with bw.Recorder(model, out=str(tmp_path / "run"), level="mix", content="tensors", steps="0"):
        model(x)[0].sum().backward()
        torch.optim.SGD(model.parameters(), 0.1).step()
    results = [attempt(case, Terms()) for case in run_cases(str(tmp_path / "run"), only=["*rnn_layer*"])]
    assert [(r.verdict, r.reason) for r in results if ":forward" in r.name] == [("pass", "")] * 4
    backward = [r for r in results if ":backward" in r.name]
    assert {r.verdict for r in backward} == {"not judged"}
    assert all("an argument of it was not recorded" in r.reason for r in backward)


def test_statistics_are_enough_for_inputs_of_like_distribution(tmp_path: Path) -> None:
    path = recorded(tmp_path / "run", "stats")
    assert set(verdicts(path).values()) == {"pass"}


def test_made_inputs_have_the_recorded_statistics() -> None:
    seen = {"min": -3.0, "max": 7.0, "mean": 1.0, "l2": 450.0, "neg_inf": 100, "nan": 2, "zeros": 10}
    x = made(torch.float32, (100, 200), None, seen, torch.Generator().manual_seed(0))
    finite = x[x.isfinite()]
    assert (float(finite.min()), float(finite.max())) == (-3.0, 7.0)
    assert (int(x.isnan().sum()), int((x == -torch.inf).sum())) == (2, 100)
    assert abs(float(finite.mean()) - 1.0) < 0.1
    indices = made(torch.int64, (50,), None, {"min": 3, "max": 9}, torch.Generator().manual_seed(0))
    assert (int(indices.min()), int(indices.max())) == (3, 9)


def test_calls_that_are_alike_are_one_case(run: Path) -> None:
    once, each = list(run_cases(str(run))), list(run_cases(str(run), alike=False))
    assert len(once) < len(each)
    assert sum(case.calls for case in once) == len(each)


def test_the_command_writes_what_it_says_and_goes_on_where_it_was(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "checked"
    assert main(["precheck", str(run), "-o", str(out), "--only", "mm", "--jobs", "1"]) == 0
    assert "judged case" in capsys.readouterr().out
    assert {"results.csv", "results.json", "junit.xml", "report.html"} <= {p.name for p in out.iterdir()}
    told = json.loads((out / "results.json").read_text())
    assert {one["verdict"] for one in told["results"]} == {"pass"}
    tried = (out / "results.jsonl").read_text()
    assert main(["precheck", str(run), "-o", str(out), "--only", "mm", "--jobs", "1", "-q"]) == 0
    assert (out / "results.jsonl").read_text() == tried
    with pytest.raises(SystemExit) as refused:
        sys.exit(main(["precheck", str(run), "-o", str(out), "--only", "gelu"]))
    assert refused.value.code == 2
    assert "holds a pre-check of something else" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["precheck"], "expected a RUN to take operators from, or --suite opinfo"),
        (["precheck", "no/such/run"], "does not exist"),
        (["precheck", "--suite", "opinfo", "--only", "nn.functional.gelo"], "did you mean nn.functional.gelu?"),
        (["precheck", "--suite", "opinfo", "--dtypes", "float33"], "'float33' is no dtype of torch's"),
        (["precheck", "--suite", "opinfo", "--standard", "none"], "there is no standard 'none'"),
        (["precheck", "--suite", "opinfo", "--device", "nosuch"], "cannot be used here"),
        (["verify-op"], "expected an OP to verify"),
        (["verify-op", "torch:exp"], "expected --inputs FILE.py:NAME or --shapes"),
        (["verify-op", "torch:exq", "--shapes", "3"], "torch has no exq; did you mean"),
        (["verify-op", "torch:exp", "--shapes", "3y4"], "'3y4' is no shape"),
        (["verify-op", "torch:exp", "--shapes", "3", "--device", "nosuch"], "cannot be used here"),
    ],
)
def test_what_is_asked_wrongly_is_told(
    arguments: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    assert said in capsys.readouterr().err


def test_a_damaged_recording_is_no_success(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    kept = max(copy.rglob("*.safetensors"), key=lambda path: path.stat().st_size)
    kept.write_bytes(kept.read_bytes()[: kept.stat().st_size // 2])
    assert main(["precheck", str(copy), "-o", str(tmp_path / "out")]) == 3
    assert kept.name in capsys.readouterr().out
    (tmp_path / "file").touch()
    assert main(["precheck", str(run), "-o", str(tmp_path / "file" / "out")]) == 2
    assert "cannot be made" in capsys.readouterr().err


def test_a_recorded_call_beside_a_benchmarks(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    site = next(c.name.split(" ")[0] for c in run_cases(str(run), only=["gelu"]))
    assert main(["verify-op", "--run", str(run), "--site", site, "--benchmark", str(run)]) == 0
    assert "ratio 1" in capsys.readouterr().out
    assert main(["verify-op", "--run", str(run), "--site", "nowhere/mm#0:forward"]) == 2


# -- torch's samples ------------------------------------------------------------------------------------------------------


def suite(*operators: str, dtypes: tuple[str, ...] = ("float32",), most: int = 4) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for group in groups(operators, dtypes, CPU):
        cases = list(cases_of(group, CPU))[:most]
        found[f"{group['operator']}[{group['dtype']}]"] = [attempt(case, Terms()).verdict for case in cases]
    return found


def test_torchs_operators_pass_on_a_cpu() -> None:
    found = suite(
        "exp", "add", "matmul", "nn.functional.layer_norm", "sort", "linalg.svd", "index_add", "nn.functional.conv2d"
    )
    assert {v for verdicts in found.values() for v in verdicts} == {"pass"}, found


def test_known_defects_of_torch_are_found() -> None:
    found = suite("matrix_exp", "addbmm", dtypes=("bfloat16",))
    assert all("fail" in verdicts for verdicts in found.values()), found


def test_what_cannot_be_judged_is_not_passed() -> None:
    found = suite("nn.functional.dropout", "empty", "randn")
    assert all(v in ("not judged", "pass") for verdicts in found.values() for v in verdicts)
    assert all("not judged" in verdicts for verdicts in found.values())
    refused = suite("linalg.svd", dtypes=("bfloat16",))
    assert list(refused.values()) == [["not judged"]]


# -- processes that hang or die -------------------------------------------------------------------------------------------


def test_a_case_that_dies_or_hangs_is_told_and_the_rest_goes_on(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # the device is a mock: in the processes of the pre-check one operator kills its process, another never ends
    (tmp_path / "sitecustomize.py").write_text(
        "import builtins, os, time\n"
        "real = builtins.__import__\n"
        "def tried(before, case, terms):\n"
        "    if 'gelu' in case.operator: os.kill(os.getpid(), 9)\n"
        "    if 'embedding' in case.operator: time.sleep(600)\n"
        "    return before(case, terms)\n"
        "def found(name, *args, **kwargs):\n"
        "    module = real(name, *args, **kwargs)\n"
        "    if name == 'bitwitness.precheck.attempt' and not hasattr(builtins, 'armed'):\n"
        "        builtins.armed = True\n"
        "        from bitwitness.precheck import attempt\n"
        "        before = attempt.attempt\n"
        "        attempt.attempt = lambda case, terms: tried(before, case, terms)\n"
        "    return module\n"
        "builtins.__import__ = found\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    wanted = ["gelu", "embedding", "native_layer_norm"]
    cases = [c.as_dict() for c in run_cases(str(run), only=wanted)]
    heads = ("name", "operator", "dtype", "shapes")
    asked = [{"key": c["name"], "kind": "cases", "cases": [c], **{h: c[h] for h in heads}} for c in cases]
    results = run_groups(asked, Terms(), done=tmp_path / "done.jsonl", processes=1, seconds=25)
    by = {r.operator.split(".")[1]: r for r in results}
    assert by["gelu"].verdict == "crash"
    assert "signal 9" in by["gelu"].reason
    assert by["embedding"].verdict == "timeout"
    assert by["native_layer_norm"].verdict == "pass"


def test_an_interrupted_pre_check_ends_and_can_go_on(run: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "bitwitness", "precheck", str(run), "-o", "out", "--jobs", "1"]
    command += [part for name in ("mm", "gelu", "embedding", "native_layer_norm") for part in ("--only", name)]
    going = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    while not (tmp_path / "out" / "results.jsonl").exists() and going.poll() is None:
        time.sleep(0.1)
    os.kill(going.pid, signal.SIGINT)
    _, errors = going.communicate(timeout=120)
    assert going.returncode == 130, errors
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
