"""What a user types to find who made the first NaN, and what they see: modes, scalers, ranges, scripts, kept tensors."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import nonfinite_zoo as zoo
import pytest
import torch
from ranks import script
from safetensors.torch import load_file
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import bitwitness as bw
from bitwitness.nonfinite.saturation import overflow_mode


class Mlp(nn.Module):
    """Two layers; ``change`` is applied between them."""

    def __init__(self, change=lambda h: h) -> None:
        super().__init__()
        self.up = nn.Linear(8, 32)
        self.down = nn.Linear(32, 4)
        self.change = change

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.change(self.up(x)))


def train(net: nn.Module, steps: int = 3, *, half: bool = False, scaler=None, **settings) -> list:
    """Train; return the findings."""
    torch.manual_seed(0)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    with bw.trace_nonfinite(net, optimizer, **settings) as trace:
        for _ in range(steps):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.float16, enabled=half):
                loss = net(torch.randn(6, 8)).float().square().mean()
            if scaler is None:
                loss.backward()
                optimizer.step()
            else:
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
    return trace.findings


# -- modes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("how", "mode", "seen"),
    [
        ("index_add", "accumulate", True),
        ("index_add", "atomic_overflow", True),
        ("index_add", "compute", False),
        ("exp", "compute", True),
        ("exp", "aicore_overflow", True),
        ("exp", "accumulate", False),
        ("exp", "all", True),
    ],
)
def test_a_mode_names_the_operators_of_its_kind(how: str, mode: str, seen: bool, capsys) -> None:
    net = zoo.Net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    with bw.trace_nonfinite(net, optimizer, mode=mode) as trace:
        zoo.train(net, optimizer, how)
    assert [finding.site.op for finding in trace.findings] == ([how] if seen else [])
    if not seen:
        assert f"by operators that mode '{mode}' does not look at" in capsys.readouterr().err


def test_an_unknown_mode_is_refused() -> None:
    with pytest.raises(bw.ConfigError, match="expected one of 'compute', 'accumulate', 'all'"):
        bw.trace_nonfinite(nn.Linear(2, 2), mode="computation")


def test_an_overflow_in_gradient_accumulation_is_named() -> None:
    net = nn.Linear(4, 4).half()
    with bw.trace_nonfinite(net, mode="accumulate") as trace:
        for _ in range(2):
            (net(torch.full((1, 4), 200.0).half()).sum() * 200).backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    (finding,) = [f for f in trace.findings if f.evidence["kind"] == "operator"]
    assert (finding.site.op, finding.site.phase) == ("add_", "grad")
    assert finding.evidence["reaches"] == ["gradient of weight"]


def test_steps_that_a_script_takes_by_hand_are_not_called_healthy(capsys: pytest.CaptureFixture[str]) -> None:
    net = nn.Linear(4, 1)
    with bw.trace_nonfinite(net):
        for _ in range(5):
            net(torch.randn(3, 4)).square().mean().backward()
            with torch.no_grad():
                for parameter in net.parameters():
                    parameter.sub_(0.1 * parameter.grad)
                    parameter.grad = None
    assert "not known: no optimizer stepped: of what 5 forwards led to" in capsys.readouterr().err


# -- gradient scalers ------------------------------------------------------------------------------------------------


def test_an_overflow_under_a_scaler_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    findings = train(Mlp(), 4, half=True, scaler=torch.amp.GradScaler("cpu", init_scale=2.0**24))
    assert findings, "the first scale is too large for half precision"
    told = [line for line in capsys.readouterr().err.splitlines() if "closing" not in line]
    assert [line for line in told if "FIRST NON-FINITE" in line]
    assert not [line for line in told if "the last modules" in line], "the scaler sees to it: frames are in the events"


def test_drops_of_the_loss_scale_are_told_with_who_overflowed(capsys) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**22)
    findings = train(Mlp(), 9, half=True, scaler=scaler)
    (drops,) = [f for f in findings if f.evidence["kind"] == "loss_scale_drops"][:1]
    assert drops.evidence["steps"] == [0, 1, 2]
    assert drops.evidence["scales"] == [2.0**22, 2.0**21, 2.0**20]
    assert drops.evidence["origins"][0].endswith("on rank 0")
    assert "the loss scale dropped 3 times in a row (steps 0 to 2, scales 4.1943e+06 to 1.04858e+06)" in drops.message
    origins = [f for f in findings if f.evidence["kind"] == "loss_scale"]
    assert origins
    assert all(f.severity == "info" and f.site.phase == "backward" for f in origins)
    assert "use a smaller loss scale" in origins[0].message
    assert "loss scale: dropped on" in capsys.readouterr().err


def test_a_scale_by_hand_is_told_from_the_models_own_overflow() -> None:
    net = Mlp()
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    with bw.trace_nonfinite(net, optimizer) as trace:
        with torch.autocast("cpu", torch.float16):
            loss = net(torch.randn(6, 8)).float().square().mean()
        (loss * 2**30).backward()
        optimizer.step()
    (finding,) = trace.findings
    assert finding.evidence["kind"] == "loss_scale"


# -- the ends of a dtype ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("value", "kind"), [(38400.0, "extreme"), (51200.0, "extreme"), (65500.0, "saturated")])
def test_extreme_results_from_ordinary_inputs_count_as_overflow(value: float, kind: str) -> None:
    def change(h: torch.Tensor) -> torch.Tensor:
        fours = (h * 0).half() + 4
        return h + (fours * (value / 4)).float() * 1e-6

    findings = train(Mlp(change))
    assert [f.evidence["kind"] for f in findings] == [kind]
    assert findings[0].site.op == "mul"
    assert "from ordinary inputs" in findings[0].message
    assert "test_trace_faces.py:" in findings[0].message


def test_the_threshold_can_be_set() -> None:
    def change(h: torch.Tensor) -> torch.Tensor:
        return h + (((h * 0).half() + 4) * 9600).float() * 1e-6

    assert train(Mlp(change), nonfinite={"extreme": 0.7}) == []


class Saturating(TorchDispatchMode):
    """Stands for a device in saturation mode: Inf becomes the largest float16, NaN becomes 0."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.dtype == torch.float16 and "aten::" in func.name():
            with torch.utils._python_dispatch._disable_current_modes():
                return result.nan_to_num(0.0, 65504.0, -65504.0) if not result.isfinite().all() else result
        return result


def test_saturation_is_seen_although_everything_is_finite() -> None:
    with Saturating():
        findings = train(Mlp(lambda h: (h.half() * 1e4 * 1000).float() * 1e-5))
    assert [(f.site.op, f.evidence["kind"]) for f in findings] == [("mul", "saturated")]
    assert "is saturated at float16's largest number: 65504 of 65504" in findings[0].message


def test_a_rise_to_the_end_is_foretold() -> None:
    size = [1.0]
    net = Mlp(lambda h: h + (((h * 0).half() + 3) * (200 * size[0])).float() * 1e-7)
    with bw.trace_nonfinite(net, deep_every=1) as trace:
        for _ in range(5):
            size[0] *= 2.2
            net(torch.randn(6, 8)).square().mean().backward()
            torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            net.zero_grad()
    (finding,) = trace.findings
    assert finding.evidence["kind"] == "approach"
    assert finding.evidence["steps_left"] in (1, 2, 3)
    assert "at this pace it overflows in about" in finding.message


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("0", "INF_NAN_MODE_ENABLE = 0 (saturation) concerns an NPU; on cpu Inf and NaN stay visible"),
        ("1", "INF_NAN_MODE_ENABLE = 1: an overflow shows as Inf"),
        ("yes", "INF_NAN_MODE_ENABLE = 'yes': expected 0 (saturation) or 1"),
    ],
)
def test_the_overflow_mode_is_shown_first(value: str, words: str, capsys, monkeypatch) -> None:
    monkeypatch.setenv("INF_NAN_MODE_ENABLE", value)
    train(Mlp(), 1)
    assert words in capsys.readouterr().err.splitlines()[0]


def test_on_an_npu_saturation_is_a_warning() -> None:
    """The device is a mock: its name is all that is asked for."""
    text, loud = overflow_mode({"INF_NAN_MODE_ENABLE": "0"}, "npu")
    assert loud
    assert "looking for NaN and Inf sees nothing" in text
    assert overflow_mode({}, "npu") == (
        "INF_NAN_MODE_ENABLE is not set (1 by default): an overflow shows as Inf, an undefined result as NaN",
        False,
    )
    assert overflow_mode({}, "cpu") is None


# -- scripts ---------------------------------------------------------------------------------------------------------

SCRIPT = """
import sys
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(8, 4)

    def forward(self, x):
        return self.fc(x) / x.abs().sum(-1, keepdim=True)

torch.manual_seed(0)
net = Net()
optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
for step in range(3):
    x = torch.randn(5, 8)
    if step == int(sys.argv[1]):
        x[2] = 0
        with torch.no_grad():
            net.fc.bias.zero_()
    loss = nn.functional.cross_entropy(net(x), torch.zeros(5, dtype=torch.long))
    if "guard" in sys.argv and not torch.isfinite(loss):
        print("Loss is nan, stopping training")
        sys.exit(1)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


def run(
    tmp_path: Path, *arguments: str, verb: tuple[str, ...] = ("trace",)
) -> tuple[subprocess.CompletedProcess, list[dict]]:
    """Run the script under ``bitwitness trace``; return its findings."""
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    command = ["-m", "bitwitness", *verb, "--out", str(tmp_path / "run"), str(path), *arguments, *arguments]
    done = script(command, tmp_path)
    lines = (tmp_path / "run" / "rank00000" / "events.jsonl").read_text().splitlines()
    events = [json.loads(line) for line in lines]
    return done, [event for event in events if event["type"] == "finding"]


@pytest.mark.parametrize(("step", "verb"), [("0", ("run", "--nonfinite")), ("1", ("trace",))])
def test_a_script_is_traced_from_its_first_step_on(tmp_path: Path, step: str, verb: tuple[str, ...]) -> None:
    done, findings = run(tmp_path, step, verb=verb)
    assert done.returncode == 0, done.stderr
    (finding,) = findings
    assert (finding["sensor"], finding["step"], finding["site"]) == (
        "nonfinite",
        int(step),
        f"./div#0:forward.out0@r0.s{step}.m0",
    )
    assert f"{tmp_path / 'train.py'}:12 in forward" in finding["message"]
    assert f"step {step}: FIRST NON-FINITE VALUE: div made 4 NaN of 20 values (float32)" in done.stderr
    assert "abs min  abs max  metadata" in done.stderr
    kept = load_file(tmp_path / "run" / finding["evidence"]["tensors"])
    again = kept["origin0.in0"] / kept["origin0.in1"]  # the operator can be verified alone
    assert torch.equal(again.isnan(), kept["origin0.out0"].isnan())
    assert any(name.startswith("origin0.backward.div.in") for name in kept)


def test_a_script_that_stops_at_a_bad_loss_is_traced_before_it_ends(tmp_path: Path) -> None:
    done, findings = run(tmp_path, "1", "guard")
    assert done.returncode == 1
    assert "Loss is nan, stopping training" in done.stdout
    assert [finding["site"] for finding in findings] == ["./div#0:forward.out0@r0.s1.m0"]


def test_gradients_that_nothing_used_are_looked_at_in_the_end() -> None:
    net = zoo.Net()
    with bw.trace_nonfinite(net) as trace:
        x, y = zoo.batch(0)
        net.inner.how = "log"
        torch.nn.functional.cross_entropy(net(x), y).backward()
    assert [finding.site.op for finding in trace.findings] == ["log"]


@pytest.mark.filterwarnings("ignore:Using backward")
def test_a_step_that_cannot_be_run_again_says_why() -> None:
    net = zoo.Net()
    net.inner.how = "log"
    with bw.trace_nonfinite(net) as trace:
        x, y = zoo.batch(0)
        torch.nn.functional.cross_entropy(net(x), y).backward(create_graph=True)
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    (finding,) = trace.findings
    assert "cannot be run again: backward ran with create_graph" in finding.message
    net.zero_grad(set_to_none=True)  # let go of the cycle between gradients and graph
