"""``bitwitness status``: healthy is said only of what was looked at, is whole, and is fine."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from pathlib import Path

import pytest
import torch
from ranks import Started, forked, script
from safetensors.torch import load_file
from torch import nn

import bitwitness as bw
from bitwitness import Cause, Note, Verdict
from bitwitness.cli import main
from bitwitness.finding import Action
from bitwitness.store.seal import sealed
from bitwitness.store.writer import RunWriter

TRAIN = """
import sys, time, torch
torch.manual_seed(0)
net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for step in range(int(sys.argv[1])):
    net(torch.randn(5, 4)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    print(step, flush=True)
    time.sleep(float(sys.argv[2]))
"""

TRAIN_RANKS = "import os, signal, torch.distributed as dist\ndist.init_process_group('gloo')\n" + TRAIN.replace(
    "optimizer =", "net = torch.nn.parallel.DistributedDataParallel(net)\noptimizer ="
)


def train(net: nn.Module, steps: int = 4) -> None:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(steps):
        net(torch.randn(5, 4)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


def status(path: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, dict]:
    capsys.readouterr()
    code = main(["status", str(path), "--json"])
    return code, json.loads(capsys.readouterr().out)


def trained(out: Path) -> Path:
    net = model()
    with bw.Guard(net, out=out), bw.Recorder(net, out=out, content="tensors"):
        train(net)
    return out


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(tmp_path_factory.mktemp("healthy") / "run")


def test_a_healthy_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    healthy = trained(tmp_path / "run")
    end = capsys.readouterr().err.splitlines()
    assert len(end) <= 3
    assert end[0].startswith("bitwitness [rank 0] healthy: 4 of 4 parameters, 4 steps")
    code, told = status(healthy, capsys)
    assert (code, told["status"], told["state"], told["problems"]) == (0, "fine", "finished", [])
    assert main(["show", str(healthy), "-v"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("healthy: 4 of 4 parameters, 4 steps")
    assert "recorded: 4 steps (0 to 3) of 1 ranks" in said
    assert main(["status", "--json", str(healthy)]) == 0  # a folder is no file to write into
    assert json.loads(capsys.readouterr().out) == told
    assert main(["status", str(healthy), "--quiet"]) == 0
    assert capsys.readouterr().out == ""


def test_a_verdict_is_told_with_what_to_do(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    net = model()
    table = bw.testing.from_mapping(
        {"fault": [{"site": "0/addmm:forward", "from_step": 3, "kind": "multiply", "factor": 1e4, "pattern": "all"}]}
    )
    with (
        pytest.raises(bw.TrainingStopped),
        bw.testing.FaultyDevice(table),
        bw.Guard(net, out=tmp_path / "run", act="protect", **bw.testing.EVERY_STEP),
    ):
        train(net, 6)
    code, told = status(tmp_path / "run", capsys)
    assert (code, told["status"], told["state"]) == (1, "findings", "stopped")
    assert told["sentence"].startswith("NOT healthy: step 3: persistent hardware, stopped: ")
    assert "take the device out of use" in told["to_do"]
    assert main(["status", "-v", str(tmp_path / "run")]) == 1
    assert "named     0/addmm#0:forward.out0" in capsys.readouterr().out


def test_a_nan_is_a_finding_and_a_training_that_is_not_watched_is_not_healthy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    net = model()
    with bw.trace_nonfinite(net, out=tmp_path / "nan"):
        with torch.no_grad():
            net[0].weight[0, 0] = float("nan")
        train(net, 1)
    code, told = status(tmp_path / "nan", capsys)
    assert (code, told["status"]) == (1, "findings")
    with bw.Guard(net, out=tmp_path / "idle"):
        pass
    code, told = status(tmp_path / "idle", capsys)
    assert (code, told["status"]) == (3, "unread")
    assert "nothing was looked at" in told["sentence"]


ENDS = [(signal.SIGTERM, "terminated", 0), (signal.SIGINT, "interrupted", 0), (signal.SIGKILL, "killed", 3)]


@pytest.mark.parametrize(("number", "state", "code"), ENDS, ids=[state for _, state, _ in ENDS])
def test_the_end_of_a_run_is_told(
    number: int, state: str, code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    for verb in ("run", "record", "monitor"):
        job = Started(["-m", "bitwitness", verb, "--out", verb, "train.py", "100000", "0.005"], tmp_path)
        until = time.monotonic() + 120
        while "\n20\n" not in job.stdout:
            assert time.monotonic() < until, job.stderr
            time.sleep(0.01)
        assert status(tmp_path / verb, capsys)[1]["state"] == "running"
        os.kill(job.pid, number)
        killed = time.monotonic()
        job.wait(120)
        said = job.stderr
        assert time.monotonic() - killed < 30
        assert job.returncode == -number, said
        got, told = status(tmp_path / verb, capsys)
        assert (got, told["state"]) == (code, state), told
        if state != "killed":
            assert f"it was {state}" in told["sentence"], told
            assert verb == "run" or f"bitwitness: {verb}ed in " in said, said  # the closing line, by SIGTERM, too
            assert ("healthy until" in said) == (verb == "run")
            assert "cli/run.py" not in said  # an interrupt's traceback begins at the script, as python's
            # How long python's traceback is says where the signal struck, anywhere in a step.
            assert len(said.partition("Traceback")[0].splitlines()) < 20, said
        assert not list(tmp_path.rglob("*.part")) or state == "killed"


def test_a_script_that_fails_is_no_fault_of_its_numbers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "train.py").write_text(TRAIN + "raise ValueError('own')\n")
    assert script(["-m", "bitwitness", "run", "-o", "run", "train.py", "3", "0"], tmp_path).returncode == 1
    code, told = status(tmp_path / "run", capsys)
    assert (code, told["state"], told["ended_by"]) == (0, "failed", "ValueError: own")


def damages(path: Path) -> dict[str, bytes | None]:
    """Return what a file may become; None: it is gone."""
    data = path.read_bytes()
    middle = bytearray(data)
    middle[len(data) // 2] ^= 4
    lines = data.splitlines(keepends=True)
    found: dict[str, bytes | None] = {
        "gone": None,
        "empty": b"",
        "cut": data[: len(data) // 2],
        "flipped": bytes(middle),
    }
    if len(lines) > 1 and path.suffix == ".jsonl":
        found["its last line gone"] = b"".join(lines[:-1])
        found["its first line gone"] = b"".join(lines[1:])
    return found


def test_damage_is_never_better_than_the_truth(
    healthy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = [path.relative_to(healthy) for path in healthy.rglob("*") if path.is_file()]
    assert len(files) >= 6
    for name in files:
        for how, data in damages(healthy / name).items():
            copy = Path(shutil.copytree(healthy, tmp_path / "copy"))
            (copy / name).unlink()
            if data is not None:
                (copy / name).write_bytes(data)
            code = main(["status", "--json", "-", str(copy)])
            said = capsys.readouterr()
            assert code == 3, (name, how, said)
            if name.name not in ("run.json", "events.jsonl"):  # of those, compare reads nothing
                code = main(["compare", "--quiet", str(copy), str(healthy)])
                assert code == 3, (name, how, capsys.readouterr())
            shutil.rmtree(copy)
            capsys.readouterr()


def test_damaged_evidence_is_named_beside_what_was_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with bw.NonfiniteTracer(net, out=tmp_path / "run"):
        for number in range(3):
            (net(torch.rand(2, 4)).abs() - 1e6 * (number == 1)).log().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    (file,) = (tmp_path / "run").rglob("*.safetensors")
    assert set(load_file(file))  # any reader of the format reads it
    assert main(["status", str(tmp_path / "run")]) == 1
    events = tmp_path / "run" / "rank00000" / "events.jsonl"
    for path in (file, events):
        for how, data in damages(path).items():
            copy = Path(shutil.copytree(tmp_path / "run", tmp_path / "copy"))
            name = path.relative_to(tmp_path / "run")
            (copy / name).unlink()
            if data is not None:
                (copy / name).write_bytes(data)
            capsys.readouterr()
            assert main(["status", "-v", str(copy)]) == 3, (name, how)
            said = capsys.readouterr().out
            assert path is events or name.name in said, (how, said)
            shutil.rmtree(copy)


def test_an_event_that_is_gone_from_the_middle_is_missed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    writer = RunWriter(tmp_path / "run", 0, 1)
    for step in range(4):
        writer.event(Note("remark", step, 0, "judge"))
    events = tmp_path / "run" / "rank00000" / "events.jsonl"
    assert bw.Run(tmp_path / "run").problems == []
    lines = events.read_text().splitlines(keepends=True)
    events.write_text("".join([*lines[:2], lines[3]]))
    run = bw.Run(tmp_path / "run")
    assert [note.step for note in run.notes()] == [0, 1, 3]
    assert "events.jsonl:3: events before this one are missing (it is number 4, after 2)" in "".join(run.problems)


def test_what_has_another_shape_than_ours_is_named_though_its_checksum_is_right(
    healthy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = Path(shutil.copytree(healthy, tmp_path / "copy"))
    forged = 0
    for name in ("run.json", "rank00000/events.jsonl", "rank00000/seal.jsonl"):
        whole = (copy / name).read_text()
        lines = [whole] if name == "run.json" else whole.splitlines()
        for number in {0, len(lines) - 1}:
            fields = json.loads(lines[number])
            within = fields.get("evidence") or {}
            for owner, key in [(fields, key) for key in fields if key != "crc"] + [(within, key) for key in within]:
                for value in ("../x", [{"a": 1}]):
                    kept, owner[key] = owner[key], value
                    forged_line = json.dumps(sealed({name: field for name, field in fields.items() if name != "crc"}))
                    (copy / name).write_text("\n".join([*lines[:number], forged_line, *lines[number + 1 :]]) + "\n")
                    owner[key] = kept
                    forged += 1
                    for command in (["status", "-v", str(copy)], ["diff-env", str(copy), str(copy)]):
                        code = main(command)
                        said = capsys.readouterr()
                        assert code in (0, 1, 2, 3), (command, name, key, value, said)
        (copy / name).write_text(whole)
    assert forged > 75


def test_what_is_no_file_is_not_waited_for(healthy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in [path.relative_to(healthy) for path in healthy.rglob("*") if path.is_file()]:
        copy = Path(shutil.copytree(healthy, tmp_path / "copy"))
        (copy / name).unlink()
        os.mkfifo(copy / name)
        assert main(["status", str(copy)]) == 3, name
        assert main(["compare", "--quiet", str(copy), str(healthy)]) in ((0, 3) if name.suffix == ".jsonl" else (3,)), (
            name
        )
        shutil.rmtree(copy)
        capsys.readouterr()


@pytest.mark.ranks
def test_a_rank_that_left_nothing_is_missed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "train.py").write_text(TRAIN_RANKS + "dist.destroy_process_group()\n")
    launched = forked(2, ["-m", "bitwitness", "run", "--out", str(tmp_path / "run"), str(tmp_path / "train.py"), "3", "0"],
                      tmp_path / "logs")  # fmt: skip
    assert launched.code == 0, [log.read_text() for log in launched.logs]
    assert status(tmp_path / "run", capsys)[0] == 0
    shutil.rmtree(tmp_path / "run" / "rank00001")
    code, told = status(tmp_path / "run", capsys)
    assert code == 3
    assert "1 of 2 ranks left nothing: 1" in told["problems"]


@pytest.mark.ranks
def test_a_rank_that_is_killed_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "train.py").write_text(
        TRAIN_RANKS + "    if step == 4 and dist.get_rank() == 1:\n        os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    job = [str(tmp_path / "train.py"), "9", "0.01"]
    launched = forked(2, ["-m", "bitwitness", "run", "--out", str(tmp_path / "run"), *job], tmp_path / "logs")
    assert launched.code == 1
    code, told = status(tmp_path / "run", capsys)
    assert code == 3
    assert told["state"] in ("terminated", "failed")  # rank 0: by its agent, or by the exchange that the other left
    assert told["problems"] == [
        "what rank 1 looked at is not known: its events.jsonl has no end, as of one that was killed"
    ]


def test_a_disk_that_fills_up_under_a_recording_is_told_and_what_was_written_is_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from bitwitness.store.tensorfile import TensorFile

    write, times = TensorFile.add, iter(range(10_000))

    def full(self: TensorFile, key: str, tensor: torch.Tensor) -> None:
        if next(times) > 60:
            raise OSError(28, "No space left on device")
        write(self, key, tensor)

    monkeypatch.setattr(TensorFile, "add", full)
    net = model()
    with bw.Recorder(net, out=tmp_path / "run", content="tensors") as recorder:
        train(net, 20)
    assert recorder.problem is not None
    code, told = status(tmp_path / "run", capsys)
    assert code == 3
    assert any("No space left on device" in problem for problem in told["problems"]), told
    assert bw.Run(tmp_path / "run").steps()  # rows came with the tensors that they describe
    for row in bw.Run(tmp_path / "run").rows(step=0).to_pylist():
        assert row["tensor"] is None or bw.Run(tmp_path / "run").tensor(row) is not None


BY_HAND = """
import sys, torch, torch.distributed as dist
dist.init_process_group("gloo")
torch.manual_seed(0)
net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
torch.manual_seed(1 + dist.get_rank())
for step in range(3):
    net(torch.randn(5, 4)).square().mean().backward()
    for p in net.parameters():
        dist.all_reduce(p.grad)
        p.grad /= float(sys.argv[1])
    optimizer.step()
    optimizer.zero_grad()
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.ranks
def test_ranks_whose_gradients_are_reduced_by_hand_share_a_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "train.py").write_text(BY_HAND)
    job = [str(tmp_path / "train.py")]
    guarded = forked(2, ["-m", "bitwitness", "run", "--out", str(tmp_path / "run"), *job, "2"], tmp_path / "logs")
    assert guarded.code == 0, [log.read_text() for log in guarded.logs]
    assert sorted(path.name for path in tmp_path.glob("run*")) == ["run"]
    assert sorted(path.name for path in (tmp_path / "run").glob("rank*")) == ["rank00000", "rank00001"]
    assert status(tmp_path / "run", capsys)[1]["status"] == "fine"
    shutil.copytree(tmp_path / "run", tmp_path / "killed")
    (tmp_path / "killed" / "rank00001" / "events.jsonl").unlink()
    code, told = status(tmp_path / "killed", capsys)
    assert code == 3
    assert "what rank 1 looked at" in told["problems"][0]
    for name, by in (("a", "2"), ("b", "1")):
        recorded = forked(
            2, ["-m", "bitwitness", "record", "--out", str(tmp_path / name), *job, by], tmp_path / f"logs-{name}"
        )
        assert recorded.code == 0, [log.read_text() for log in recorded.logs]
    report = bw.compare(tmp_path / "a", tmp_path / "b")
    assert "2 times as large in run B, from the reduction over ranks on" in report.conclusion
    assert bw.compare(tmp_path / "a", tmp_path / "a").status == "fine"


def test_a_processs_other_models_count(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = model(), model()
    with bw.Guard(first, out=tmp_path / "run"), bw.Guard(second, out=tmp_path / "run"):
        train(first)
        train(second)
    assert status(tmp_path / "run", capsys)[0] == 0
    assert len(status(tmp_path / "run", capsys)[1]["beside"]) == 1
    (tmp_path / "run-2" / "run.json").write_text("{}")
    code, told = status(tmp_path / "run", capsys)
    assert code == 3
    assert told["sentence"].startswith("run-2: not known")
    main(["status", str(tmp_path / "run")])
    assert "run: healthy" in capsys.readouterr().out  # the run that was asked for is told all the same
    with bw.Guard(model(), out=tmp_path / "again"), bw.Guard(third := model(), out=tmp_path / "again") as guard:
        train(third)
        guard.reporter.verdict(
            Verdict(Cause.PERSISTENT_HARDWARE, 2, (0,), (), Action.REPORTED, "computes step 2 wrongly"), speak=False
        )
    code, told = status(tmp_path / "again", capsys)
    assert code == 3  # the first of the two was not trained
    assert told["sentence"].startswith("again-2: NOT healthy: step 2")
    assert "take the device out of use" in told["to_do"]


def test_a_recording_without_rows_says_so(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import torch\nnet = torch.nn.Linear(4, 2)\noptimizer = torch.optim.SGD(net.parameters(), 0.1)\n"
        "with torch.no_grad():\n    net.eval()(torch.randn(3, 4))\n"
    )
    done = script(["-m", "bitwitness", "record", "-o", "run", "train.py"], tmp_path)
    assert done.returncode == 4
    assert "holds no rows" in done.stderr


def test_names_of_any_length_and_kind_are_fit_for_a_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    net = nn.Sequential()
    net.add_module("n" * 100_000 + "\x1b[31m", nn.Linear(4, 4))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with bw.NonfiniteTracer(net, optimizer, out=tmp_path / "run"):
        net(torch.full((2, 4), torch.inf)).sum().backward()
        optimizer.step()
    said = capsys.readouterr().err
    assert "characters)" in said
    assert max(map(len, said.splitlines())) < 5000
    assert "\x1b" not in said


def test_what_is_closed_twice_is_told_of_once(capsys: pytest.CaptureFixture[str]) -> None:
    net = nn.Linear(3, 3)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    guard = bw.Guard(net, optimizer, self_test=False).start()
    net(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    guard.close()
    guard.close()
    assert capsys.readouterr().err.count("healthy") == 1


def test_a_model_whose_folder_is_gone_is_missed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "train.py").write_text(TRAIN + TRAIN.replace("net", "other").replace("optimizer", "another"))
    out = str(tmp_path / "run")
    assert script(["-m", "bitwitness", "run", "--out", out, "train.py", "3", "0"], tmp_path).returncode == 0
    assert main(["status", out]) == 0
    # Where ranks share folders any of them may have been the first to claim one: they are of one job, then.
    for name in (out, f"{out}-2"):
        text = json.loads((Path(name) / "run.json").read_text()) | {"job": "one"}
        text["process"] |= {"pid": text["process"]["pid"] + (name != out)}
        (Path(name) / "run.json").write_text(json.dumps(sealed({k: v for k, v in text.items() if k != "crc"})))
    assert main(["status", out]) == 0
    shutil.rmtree(f"{out}-2")
    assert main(["status", out]) == 3
    assert "1 of the run folders beside it, of other models of this process, are missing" in capsys.readouterr().out


def test_events_that_are_no_file_do_not_hide_what_else_is_told(
    healthy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = Path(shutil.copytree(healthy, tmp_path / "copy"))
    events = copy / "rank00000" / "events.jsonl"
    events.unlink()
    events.mkdir()
    assert main(["status", "-v", str(copy)]) == 3
    assert "events.jsonl" in capsys.readouterr().out
