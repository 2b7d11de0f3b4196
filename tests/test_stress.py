"""The device's own test from the command line: the faulty one of several is named, and nothing else ever is."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import bitwitness as bw
from bitwitness.cli import main
from bitwitness.stress.answer import Answer
from bitwitness.stress.ascend_dmi import Diagnosis, diagnosed
from bitwitness.stress.catalogue import Outside, Plan
from bitwitness.stress.course import Progress, run_test

SMALL = ("--time", "0s", "--repeats", "2")

FAULTS = """
[[fault]]  # a transient: one bit of one number, once in a few calls
kind = "bitflip"
bit = 3
site = "*/mm:forward"
rank = 0
probability = 0.3

[[fault]]  # a defect: a tile, each time
kind = "multiply"
factor = 1.5
pattern = "tile"
element = 0
site = "*/native_layer_norm:forward.out0"
rank = 1

[[fault]]  # a cell of memory
kind = "bitflip"
bit = 5
site = "*/clone:*"
rank = 2
probability = 0.2

[[fault]]  # what it sends
kind = "bitflip"
site = "*:comm.in0"
rank = 3
probability = 0.5
"""


def stress(*arguments: str, out: Path) -> tuple[int, dict[str, Any]]:
    code = main(["stress", "--device", "cpu", "--deadline", "60", *arguments, "--json", str(out)])
    return code, json.loads(out.read_text())


@pytest.fixture
def faults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    def declared(text: str) -> None:
        (tmp_path / "faults.toml").write_text(text)
        monkeypatch.setenv("BITWITNESS_INJECT", str(tmp_path / "faults.toml"))

    return declared


def test_each_faulty_one_of_four_is_named_with_what_it_did(
    tmp_path: Path, faults: Callable[[str], None], capsys: pytest.CaptureFixture[str]
) -> None:
    faults(FAULTS)
    only = [f"--only={name}" for name in ("matmul", "layer_norm", "checkerboard", "all_gather", "broadcast", "sin")]
    code, found = stress("--devices", "4", "--dtypes", "float32,bfloat16", *only, *SMALL, out=tmp_path / "o.json")
    assert code == 1
    assert found["status"] == "findings"
    assert found["injected"].startswith("4 declared, bitflip at */mm:forward")
    wrong = {one["slot"]: {fault["workload"] for fault in one["faults"]} for one in found["devices"]}
    assert wrong[0] == {"matmul"}
    assert wrong[1] == {"layer_norm"}
    assert wrong[2] == {"checkerboard"}
    assert wrong[3] <= {"all_gather", "broadcast"}
    assert wrong[3]
    assert [one["verdict"] for one in found["devices"]] == ["faulty"] * 4
    tile = found["devices"][1]["faults"][0]
    assert tile["wrong"] == tile["runs"]
    assert tile["difference"]["elements"] == 256
    assert tile["difference"]["at"][0] == [0, 0]
    flip = found["devices"][0]["faults"][0]["difference"]
    assert int(flip["seen"][0], 16) ^ int(flip["expected"][0], 16) == 8
    assert found["devices"][0]["device"]["kind"] == "cpu"
    assert found["devices"][2]["device"]["index"] == 2
    told = capsys.readouterr().out
    assert "faults are injected here: 4 declared" in told
    assert "replace device 1, cpu:1 (" in told
    assert "it computed layer_norm float32 64x256 wrongly" in told
    assert "float64 finds it outside of what the dtype allows" in told
    assert "suspect software" not in told


def test_healthy_devices_are_healthy_and_the_software_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, found = stress("--devices", "3", *SMALL, out=tmp_path / "o.json")
    assert code == 0, found["problems"]
    assert found["status"] == "fine"
    assert [one["verdict"] for one in found["devices"]] == ["healthy"] * 3
    assert not found["remarks"]
    assert found["passes"] == 1
    out = capsys.readouterr()
    assert (
        "all devices healthy: so suspect software (an overflow, say): look at the script and its operators" in out.out
    )
    assert "3 devices are ready" in out.err


def test_one_device_alone_is_held_against_float64(tmp_path: Path, faults: Callable[[str], None]) -> None:
    only = ("--devices", "1", "--dtypes", "float32,float8_e4m3fn", "--only", "gelu", "--only", "cast", "--only", "sum")
    code, found = stress(*only, *SMALL, out=tmp_path / "o.json")
    assert code == 0, found["problems"]
    faults('[[fault]]\nkind = "multiply"\nfactor = 3.0\nsite = "*/gelu:forward"\nelement = 5\n')
    code, found = stress(*only, *SMALL, out=tmp_path / "o.json")
    assert code == 1
    assert found["devices"][0]["verdict"] == "suspect"
    assert (
        "its hardware or its kernels are to blame; a second device of its model beside it, or --golden"
        in found["problems"][0]
    )


def test_of_two_float64_tells_which_and_else_they_differ(
    tmp_path: Path, faults: Callable[[str], None], capsys: pytest.CaptureFixture[str]
) -> None:
    fault = '[[fault]]\nkind = "bitflip"\nbit = {bit}\nsite = "*/exp:forward"\nelement = 3\nrank = 1\n'
    only = ("--devices", "2", "--dtypes", "float32", "--only", "exp", *SMALL)
    faults(fault.format(bit=20))
    code, found = stress(*only, out=tmp_path / "o.json")
    assert (code, [one["verdict"] for one in found["devices"]]) == (1, ["healthy", "faulty"])
    assert found["devices"][1]["faults"][0]["proof"] == "float64"
    faults(fault.format(bit=0))
    code, found = stress(*only, out=tmp_path / "o.json")
    assert (code, [one["verdict"] for one in found["devices"]]) == (3, ["undecided", "undecided"])
    assert "they differ, and each lies within what rounding allows" in capsys.readouterr().out


def test_a_golden_file_tells_of_a_single_device(
    tmp_path: Path, faults: Callable[[str], None], capsys: pytest.CaptureFixture[str]
) -> None:
    golden = tmp_path / "golden.json"
    only = ("--devices", "1", "--dtypes", "float32", "--only", "exp", "--only", "sin", "--only", "gelu", *SMALL)
    assert stress(*only, "--golden-out", str(golden), out=tmp_path / "o.json")[0] == 0
    assert len(json.loads(golden.read_text())["fingerprints"]) == 6
    assert stress(*only, "--golden", str(golden), out=tmp_path / "o.json")[0] == 0
    faults('[[fault]]\nkind = "bitflip"\nbit = 0\nsite = "*/exp:forward"\nelement = 3\n')
    code, found = stress(*only, "--golden", str(golden), "--golden-out", f"{golden}.2", out=tmp_path / "o.json")
    assert code == 1
    assert {fault["proof"] for fault in found["devices"][0]["faults"]} == {"golden"}
    assert not Path(f"{golden}.2").exists()
    assert (
        "golden.json.2 was not written: only a device on which all was tested and found well" in capsys.readouterr().err
    )


def test_a_golden_file_of_another_torch_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    golden = tmp_path / "golden.json"
    only = ("--device", "cpu", "--devices", "1", "--dtypes", "float32", "--only", "exp", *SMALL)
    assert main(["stress", *only, "-q", "--golden-out", str(golden)]) == 0
    told = json.loads(golden.read_text())
    told["device"]["torch"] = "1.9.0"
    golden.write_text(json.dumps(told))
    assert main(["stress", *only, "--golden", str(golden)]) == 2
    said = capsys.readouterr().err
    assert "it has torch 1.9.0, and here is torch " + torch.__version__ in said
    golden.write_text("{}")
    assert main(["stress", *only, "--golden", str(golden)]) == 3
    assert "holds no such fingerprints" in capsys.readouterr().err


def test_a_recorded_step_is_the_workload(tmp_path: Path, faults: Callable[[str], None]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 24), nn.LayerNorm(24), nn.GELU(), nn.Linear(24, 4))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with bw.Recorder(model, out=str(tmp_path / "run"), level="mix", content="tensors", steps="0"):
        model(torch.randn(8, 16)).square().mean().backward()
        optimizer.step()
    replay = ("--devices", "3", "--replay", str(tmp_path / "run"), *SMALL)
    code, found = stress(*replay, out=tmp_path / "o.json")
    assert code == 0, found["problems"]
    assert found["workloads"] > 8
    faults('[[fault]]\nkind = "bitflip"\nbit = 1\nelement = 9\nsite = "*/gelu:*"\nrank = 2\n')
    code, found = stress(*replay, out=tmp_path / "o.json")
    assert code == 1
    assert [one["verdict"] for one in found["devices"]] == ["healthy", "healthy", "faulty"]
    [fault] = found["devices"][2]["faults"]
    assert (fault["workload"], fault["proof"]) == ("2/gelu#0:forward", "majority")


def test_a_device_that_hangs_and_one_that_dies_are_told_and_the_test_goes_on() -> None:
    def struck(progress: Progress) -> None:
        if "are ready" in progress.text:
            pids = {one.name: one.pid for one in multiprocessing.active_children()}
            os.kill(int(pids["device-1"] or 0), signal.SIGSTOP)
            os.kill(int(pids["device-2"] or 0), signal.SIGKILL)

    plan = Plan(devices=(0, 1, 2, 3), dtypes=("float32",), only=("exp", "broadcast"), seconds=0, deadline=2.0)
    outcome = run_test(plan, Outside(), heard=struck)
    found = Answer(outcome)
    assert found.exit_code == 3
    assert [found.verdict(one) for one in outcome.devices] == ["healthy", "lost", "lost", "healthy"]
    assert "it did not answer within 2 seconds, and was ended" in outcome.devices[1].lost
    assert "its process died (signal 9)" in outcome.devices[2].lost
    assert any("broadcast" in problem and "a device was lost" in problem for problem in found.problems())
    assert sum(seen.counts[0].total() for seen in outcome.seen) == 8, "the others went on"
    assert not any(one.process.is_alive() for one in outcome.devices)


def test_ctrl_c_ends_it_with_what_was_found(faults: Callable[[str], None]) -> None:
    def interrupted(progress: Progress) -> None:
        if progress.passes == 1:
            raise KeyboardInterrupt

    plan = Plan(devices=(0, 1, 2), dtypes=("int32",), only=("sum",), seconds=600, deadline=60)
    found = Answer(run_test(plan, Outside(), heard=interrupted))
    assert found.exit_code == 130
    assert "interrupted" in found.told()[0]
    assert found.told()[-1].startswith("nothing wrong was found until it was interrupted")
    assert found.as_dict()["devices"][0]["runs"] > 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--time", "soon"], "--time 'soon' is no time; expected seconds, minutes or hours: 60s, 10m, 2h"),
        (["--devices", "x"], "--devices 'x' is neither a number of devices nor a list of them"),
        (["--devices", "0"], "--devices 0 tests none"),
        (["--dtypes", "float31"], "there is no workload in float31; expected some of float64, float32"),
        (["--only", "nothing"], "no workload is nothing; there are addresses, all_gather"),
        (["--device", "cuda"], "the device 'cuda' cannot be used here"),
        (["--replay", "nowhere"], "nowhere does not exist"),
        (["--golden", "nowhere"], "nowhere"),
        (["--repeats", "0"], "--repeats 0 is too little; expected 1 or more"),
    ],
)
def test_bad_input_is_named(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    given = arguments if "--device" in arguments else ["--device", "cpu", *arguments]
    if not {"--devices"} & set(given):
        given += ["--devices", "2"]
    assert main(["stress", *given]) == 2
    assert said in capsys.readouterr().err


def test_ascends_own_diagnosis_is_run_where_it_is_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert diagnosed((0, 1), 5.0) is None
    tool = tmp_path / "ascend-dmi"

    def says(script: str) -> Diagnosis:
        tool.write_text(f"#!/bin/sh\n{script}\n")
        tool.chmod(0o700)
        found = diagnosed((0, 1), 1.0)
        assert found is not None
        return found

    good = says('echo "Hardware:"; echo "    aicore:"; echo "        PASS"; echo "$@" >&2')
    assert (good.state, good.faulty, good.undecided) == ("PASS", False, False)
    assert "--dg -i aicore -d 0,1 -q" in good.text
    assert says("echo EMERGENCY_WARN").faulty
    assert says("echo SKIP").undecided
    assert says("exec sleep 20").text == "it had not ended after 1 seconds, and was ended"
