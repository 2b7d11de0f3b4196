"""What a user types, and what they see."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from importlib.metadata import version
from pathlib import Path

import pytest
import ranks

from bitwitness.demo.launch import torchrun

SCRIPT = """
import sys, torch
from torch import nn
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step in range(int(sys.argv[1])):
    loss = model(torch.randn(16, 8)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
print("done", sys.argv[1:], __name__, float(loss))
"""


def call(*arguments: str, **environment: str) -> subprocess.CompletedProcess:
    env = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    return subprocess.run(
        [sys.executable, "-m", "bitwitness", *arguments], capture_output=True, text=True, check=False, env=env
    )


def quick(where: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess:
    """Call from a process that has imported torch and the package already."""
    return ranks.script(["-m", "bitwitness", *arguments], where, environment=environment)


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return path


@pytest.mark.parametrize("verb", [[], ["run"], ["trace"], ["demo"], ["doctor"]])
def test_help_answers_at_once(verb: list[str]) -> None:
    cpu = []
    for _ in range(3):  # the least counts: a busy machine makes any of them dearer
        before = os.times()
        done = call(*verb, "--help")
        spent = os.times()
        cpu.append(spent.children_user + spent.children_system - before.children_user - before.children_system)
        assert done.returncode == 0
        assert "usage: bitwitness" in done.stdout
    assert min(cpu) < 0.3


def test_run_leaves_the_script_as_it_is_and_passes_its_output_on(script: Path, tmp_path: Path) -> None:
    plain = ranks.script([script, "6"], tmp_path)
    done = quick(tmp_path, "run", "--out", str(tmp_path / "run"), str(script), "6")
    assert done.returncode == 0, done.stderr
    assert done.stdout == plain.stdout
    assert "6 steps" in done.stderr
    run = json.loads((tmp_path / "run" / "run.json").read_text())
    assert run["world_size"] == 1
    assert run["config"]["act"] == "observe"
    events = [json.loads(line) for line in (tmp_path / "run" / "rank00000" / "events.jsonl").read_text().splitlines()]
    assert events[-1]["evidence"]["parameters"] == {"watched": 4, "of": 4}


def test_a_scripts_own_exit_code_and_error_pass_through(tmp_path: Path) -> None:
    path = tmp_path / "fails.py"
    path.write_text("import sys; sys.exit(5)")
    assert quick(tmp_path, "run", str(path)).returncode == 5
    path.write_text("def f():\n    raise KeyError('mine')\nf()")
    plain = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, check=False)
    done = call("run", str(path))
    assert (done.returncode, done.stderr) == (1, plain.stderr)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "no/such/script.py"], "there is no script no/such/script.py"),
        (["run", "-m", "no_such_module"], "no module named 'no_such_module'"),
        (["run", "--config", "no.toml", "{script}"], "cannot read the configuration: cannot read no.toml"),
        (["run", "."], "is a folder"),
        (["run"], "the following arguments are required: SCRIPT"),
        (["run", "--act", "heal", "{script}"], "invalid choice: 'heal'"),
        (["walk"], "invalid choice: 'walk'"),
    ],
)
def test_bad_input_is_named_and_exits_with_2(arguments: list[str], message: str, script: Path) -> None:
    done = call(*(part.format(script=script) for part in arguments))
    assert done.returncode == 2, done.stderr
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_bad_input_is_told_before_torch_is_imported() -> None:
    code = "import sys; from bitwitness.cli import main; print(main(['run', 'none.py']), 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "2 False\n"


def test_version_is_the_packages() -> None:
    assert call("--version").stdout == f"bitwitness {version('bitwitness')}\n"


def test_an_unknown_key_names_the_nearest(script: Path, tmp_path: Path) -> None:
    config = tmp_path / "c.toml"
    config.write_text("[trend]\nwarmpu = 3\n")
    done = call("run", "--config", str(config), str(script), "2")
    assert done.returncode == 2
    assert "warmpu" in done.stderr
    assert "warmup" in done.stderr


def test_a_reference_variable_with_a_bad_value_is_a_warning_and_the_job_starts(script: Path, tmp_path: Path) -> None:
    done = quick(tmp_path, "run", str(script), "2", MS_NPU_ASD_CONFIG="enable:true,cooldwn:1,strikes_num:0")
    assert done.returncode == 0, done.stderr
    assert "cooldwn" in done.stderr
    assert "cooldown" in done.stderr
    assert "strikes_num" in done.stderr
    assert "done" in done.stdout


def test_a_folder_that_cannot_be_written_is_said_before_the_training_begins(script: Path, tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    for verb in ("run", "trace", "record"):
        done = quick(tmp_path, verb, "--out", str(blocked / "run"), str(script), "3")
        assert (done.returncode, done.stdout) == (2, ""), done.stderr
        assert f"{blocked} is no folder" in done.stderr


def test_an_earlier_run_is_kept(script: Path, tmp_path: Path) -> None:
    def run(*options: str):
        return quick(tmp_path, "run", "--out", "run", *options, str(script), "2")

    assert run().returncode == 0
    first = (tmp_path / "run" / "run.json").read_text()
    done = run()
    assert (done.returncode, done.stdout) == (2, "")
    assert "--out run holds a run already" in done.stderr
    assert "--overwrite" in done.stderr
    done = run("--number")
    assert done.returncode == 0
    assert f"run holds a run already; this one is recorded in {tmp_path / 'run-2'}" in done.stderr
    assert (tmp_path / "run" / "run.json").read_text() == first
    (tmp_path / "run" / "notes.txt").write_text("mine")
    assert run("--overwrite").returncode == 0
    assert (tmp_path / "run" / "run.json").read_text() != first
    assert (tmp_path / "run" / "notes.txt").read_text() == "mine"
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == ["run", "run-2"]


def test_what_is_overwritten_goes_with_its_other_models(tmp_path: Path) -> None:
    (tmp_path / "one.py").write_text(SCRIPT)
    (tmp_path / "two.py").write_text(SCRIPT + SCRIPT.replace("model", "critic"))
    assert quick(tmp_path, "run", "--out", "run", "two.py", "2").returncode == 0
    assert (tmp_path / "run-2" / "run.json").exists()
    (tmp_path / "run-3").mkdir()
    (tmp_path / "run-3" / "notes.txt").write_text("mine")
    done = quick(tmp_path, "run", "--out", "run", "--overwrite", "one.py", "2")
    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == ["run", "run-3"]
    assert "2 steps" in quick(tmp_path, "status", "run").stdout


@pytest.mark.ranks
def test_run_under_torchrun(script: Path, tmp_path: Path) -> None:
    parallel = SCRIPT.replace("optimizer =", "torch.distributed.init_process_group('gloo')\n"
                              "model = nn.parallel.DistributedDataParallel(model)\noptimizer =")  # fmt: skip
    script.write_text(f"{parallel}\ntorch.distributed.destroy_process_group()")
    command = ["-m", "bitwitness", "run", "--out", str(tmp_path / "run"), str(script), "6", "--", "x"]
    launched = torchrun(2, command, tmp_path / "logs", echo=False)
    told = "\n".join(log.read_text() for log in launched.logs)
    assert launched.code == 0, told
    assert told.count("done ['6', '--', 'x'] __main__") == 2
    assert "6 steps" in told
    assert json.loads((tmp_path / "run" / "run.json").read_text())["world_size"] == 2
    assert {path.name for path in (tmp_path / "run").glob("rank*")} == {"rank00000", "rank00001"}


def test_run_trace_and_record_give_status_answer_at_the_end_and_are_quiet(script: Path, tmp_path: Path) -> None:
    for verb in ("run", "trace", "record"):
        done = quick(tmp_path, verb, "-q", "--out", verb, "--json", f"{verb}.json", "train.py", "5")
        assert (done.returncode, "bitwitness" in done.stderr) == (0, False), (verb, done.stderr)
        assert done.stdout.startswith("done ['5'] __main__")
        found = json.loads((tmp_path / f"{verb}.json").read_text())
        assert (found["status"], found["state"]) == ("fine", "finished"), found
        asked = quick(tmp_path, "status", verb, "--json")
        assert json.loads(asked.stdout) == found
    printed = quick(tmp_path, "trace", "--out", "again", "--json", "-", "train.py", "5")
    assert json.loads(printed.stdout.partition("\n")[2])["sentence"] == "healthy: NaN and Inf: 5 steps looked at"
    (tmp_path / "bad.py").write_text(script.read_text().replace("torch.randn(16, 8)", "torch.full((16, 8), torch.inf)"))
    done = quick(tmp_path, "trace", "-q", "--out", "bad", "--json", "bad.json", "bad.py", "2")
    assert "not finite" in done.stderr or "inf" in done.stderr.lower()
    assert json.loads((tmp_path / "bad.json").read_text())["status"] == "findings"


def test_an_answer_that_cannot_be_given_is_said_before_the_script_runs(script: Path, tmp_path: Path) -> None:
    done = quick(tmp_path, "run", "--json", "x.json", "train.py", "5")
    assert (done.returncode, done.stdout) == (2, "")
    assert "--json tells what the run folder holds at the end; give --out DIR, too" in done.stderr
    done = quick(tmp_path, "record", "--json", "/dev/null", "train.py", "5")
    assert (done.returncode, done.stdout) == (2, "")
    assert "is a device" in done.stderr


def test_a_fault_declared_in_the_environment_is_found(script: Path, tmp_path: Path) -> None:
    faults = tmp_path / "faults.toml"
    faults.write_text(
        textwrap.dedent("""
        [[fault]]
        site = "2/mm:backward"
        from_step = 30
        kind = "multiply"
        factor = 1e6
        pattern = "row"
        element = 0
        [[fault]]
        site = "7/mm:backward"
        kind = "nullify"
        """)
    )
    done = quick(tmp_path, "run", "--act", "protect", str(script), "40", BITWITNESS_INJECT=str(faults))
    assert done.returncode == 17, done.stderr
    assert "persistent_hardware" in done.stderr
    assert "2/mm#" in done.stderr
    assert done.stderr.count("never struck") == 1
    assert "fault 0 (multiply at 2/mm:backward) struck" in done.stderr
    assert "[faults are injected here: 2 declared, multiply at 2/mm:backward" in done.stderr
    assert "at 7/mm:backward) never struck on rank 0: nothing of that site was computed" in done.stderr


def test_a_recording_is_of_the_declared_device_too(script: Path, tmp_path: Path) -> None:
    faults = tmp_path / "faults.toml"
    faults.write_text(
        '[[fault]]\nsite = "2/addmm:forward"\nfrom_step = 2\nkind = "multiply"\nfactor = 1e3\npattern = "row"\n'
    )
    quick(tmp_path, "record", "--out", "a", str(script), "4")
    done = quick(tmp_path, "record", "--out", "b", str(script), "4", BITWITNESS_INJECT=str(faults))
    assert "fault 0 (multiply at 2/addmm:forward) struck" in done.stderr
    said = quick(tmp_path, "compare", "a", "b").stdout
    assert said.startswith("the runs part at 2/addmm#0:forward.out0 (rank 0, step 2): its inputs agree"), said


def test_doctor_proves_every_sensor(tmp_path: Path) -> None:
    done = quick(tmp_path, "doctor", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert set(found["proven"].values()) == {"sees"}
