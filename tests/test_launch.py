"""Jobs that are relaunched: with torch's own agent and processes that end as ranks do, and once with a real training.

What ranks end with is written by hand where the guard itself is not the question, and they are shell scripts: an import of
torch in each of them would take most of the time.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

import pytest

from bitwitness import Cause, Finding, Note, Site, UsageError, Verdict
from bitwitness.cli import main
from bitwitness.cli.torchrun import FLAGS, OURS, REFUSED, VALUED
from bitwitness.device import this_device
from bitwitness.finding import Action, Device, Severity
from bitwitness.launch.child import children_of
from bitwitness.launch.decide import Limits, Policy
from bitwitness.launch.ended import End, Ended, ended_of, first_trace
from bitwitness.launch.nodes import Elsewhere, together
from bitwitness.launch.order import Report
from bitwitness.launch.quarantine import Entry, Quarantine
from bitwitness.launch.slots import Slot, environment_for, healthy, slots_here
from bitwitness.store import RunWriter

HOST = socket.gethostname()
JOBS = Path(__file__).parent / "jobs"
SITE = Site.parse("0/addmm#0:forward.out0")


def device(slot: int) -> Device:
    return Device(HOST, slot, this_device("cpu").uuid, "cpu")


def verdict(step: int, slot: int = 1, cause: Cause = Cause.PERSISTENT_HARDWARE) -> Verdict:
    return Verdict(cause, step, (slot,), (device(slot),), Action.STOPPED, f"slot {slot} computes wrongly")


def finding(step: int, rank: int = 1) -> Finding:
    return Finding("trend", SITE, Severity.WARNING, "odd", {}, step, rank)


def stopped_run(path: Path, *events: object) -> Path:
    """Write the run folder that a stop leaves."""
    writer = RunWriter(str(path), 0, 2)
    for event in events:
        writer.event(event)
        writer.shared_event(event)
    writer.ended("stopped", "bitwitness", 5, final=True)
    return path


def launch(folder: Path, script: str, *options: str, **variables: str) -> tuple[int, str, dict]:
    """Launch a shell script as ranks; return the exit code, what was said, and the history."""
    path = folder / "rank.sh"
    path.write_text(
        f"#!/bin/sh\nSLOT=$(echo $BITWITNESS_SLOTS | cut -d, -f$((LOCAL_RANK + 1)))\ncd {folder}\n{script}\n"
    )
    path.chmod(0o755)
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "bitwitness",
            "launch",
            "--no-python",
            "--out",
            str(folder / "out"),
            *options,
            str(path),
        ],
        env={**os.environ, "BITWITNESS_QUARANTINE": str(folder / "q.json"), **variables},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    history = folder / "out" / "launch.json"
    return done.returncode, done.stderr, json.loads(history.read_text()) if history.exists() else {}


def test_each_end_of_a_rank_has_its_consequence(tmp_path: Path) -> None:
    script = """
echo "rank $RANK of $WORLD_SIZE on slot $SLOT" >> told
[ -e killed_agent ] || { touch killed_agent; kill -9 $PPID; sleep 60; }
[ -e killed_rank ] || { touch killed_rank; kill -9 $$; }
exit 5
"""
    Quarantine(tmp_path / "q.json").add(device(1), "convicted yesterday")
    started = time.monotonic()
    code, said, history = launch(tmp_path, script, "--nproc-per-node", "2", "--max-relaunches", "2")
    assert code == 5, said
    assert (tmp_path / "told").read_text() == "rank 0 of 1 on slot 0\n" * 3
    assert [attempt["end"] for attempt in history["attempts"]] == ["lost", "lost", "failed"]
    assert history["attempts"][0]["message"] == "the agent was ended by SIGKILL"
    assert time.monotonic() - started < 180
    assert "rank 0 was ended by SIGKILL; attempt 3 begins (0 more relaunches are allowed)" in said
    assert "rank 0 ended with exit code 5" in said
    assert "no device is to blame, and the job is not begun again (no restart allowed by --max-restarts)" in said
    assert (history["state"], history["exit_code"]) == ("stopped", 5)
    assert [row["slot"] for row in history["attempts"][0]["left_out"]] == [1]


def test_with_too_few_devices_nothing_begins(tmp_path: Path) -> None:
    Quarantine(tmp_path / "q.json").add(device(1), "convicted yesterday")
    code, said, _ = launch(tmp_path, "touch begun", "--nproc-per-node", "2", "--min-nproc", "2")
    assert code == 17
    assert f"1 devices of this node are fit, too few (in quarantine: cpu:{HOST}:1)" in said
    assert not (tmp_path / "begun").exists()


def test_sigterm_ends_the_ranks_also_those_that_do_not_hear_it_and_is_written_down(tmp_path: Path) -> None:
    path = tmp_path / "rank.sh"
    path.write_text("#!/bin/sh\ntrap '' TERM\ntouch up.$RANK\nwhile :; do sleep 0.2; done\n")
    path.chmod(0o755)
    options = ["--nproc-per-node", "2", "--shutdown-timeout", "1", "--out", str(tmp_path / "out"), "--no-python"]
    launcher = subprocess.Popen(
        [sys.executable, "-m", "bitwitness", "launch", *options, str(path)],
        env={**os.environ, "BITWITNESS_QUARANTINE": str(tmp_path / "q.json")},
        cwd=tmp_path,
        stderr=subprocess.DEVNULL,
    )
    until = time.monotonic() + 120
    while len(list(tmp_path.glob("up.*"))) < 2 and time.monotonic() < until:
        time.sleep(0.05)
    ranks = [pid for agent in children_of(launcher.pid) for pid in children_of(agent)]
    assert len(ranks) == 2
    launcher.send_signal(signal.SIGTERM)
    assert launcher.wait(60) == 143
    assert not any(Path(f"/proc/{pid}").exists() for pid in ranks)
    told = json.loads((tmp_path / "out" / "launch.json").read_text())
    assert (told["state"], told["exit_code"]) == ("terminated", 143)


@pytest.mark.ranks
def test_a_training_on_a_bad_device_is_relaunched_without_it_and_finishes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    faults = tmp_path / "faults.toml"
    faults.write_text(
        '[[fault]]\nsite = "*/addmm:forward"\nslot = 1\nfrom_step = 5\nkind = "multiply"\nfactor = 64.0\n'
        'pattern = "column"\nelement = 1\n'
    )
    out = tmp_path / "out"
    options = ["--nproc-per-node", "2", "--spares", "1", "--quarantine", str(tmp_path / "q.json"), "--out", str(out)]
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "bitwitness",
            "launch",
            *options,
            str(JOBS / "launched.py"),
            str(tmp_path),
            "--steps",
            "8",
        ],
        env={**os.environ, "BITWITNESS_INJECT": str(faults)},
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    said = done.stderr
    assert done.returncode == 0, said
    assert done.stdout.splitlines() == ["world 2 begins at step 0", "world 2 begins at step 4"]
    assert (tmp_path / "done").exists()
    (entry,) = Quarantine(tmp_path / "q.json").entries()
    assert (entry.device, entry.step) == (device(1), 5)
    assert entry.run == str(out / "attempt-1")
    assert f"cpu:{HOST}:1 (cpu slot 1 on {HOST}) is in quarantine: step 5: persistent hardware" in said
    assert f"the training finished after 1 relaunch, without cpu:{HOST}:1" in said
    first, second = json.loads((out / "launch.json").read_text())["attempts"]
    assert (first["end"], first["step"], first["first_trace"], first["resume_before"]) == ("convicted", 5, 5, None)
    assert (second["end"], second["resume_before"], [row["slot"] for row in second["slots"]]) == ("finished", 5, [0, 2])
    assert main(["status", str(out)]) == 0
    assert "the training finished after 1 relaunch" in capsys.readouterr().out


# -- what follows from an end ------------------------------------------------------------------------------------------


def convicted(step: int, slot: int = 1, trace: int | None = None, end: End = End.CONVICTED) -> Ended:
    return Ended(end, 17, f"slot {slot}", (device(slot),), step, step if trace is None else trace)


def test_a_state_that_is_corrupt_once_blames_no_device_and_twice_on_the_same_does() -> None:
    policy = Policy(Limits())
    once, twice = (policy.after(convicted(step, end=End.CORRUPT)) for step in (10, 20))
    assert (once.again, once.quarantine) == (True, ())
    assert (twice.again, twice.quarantine) == (True, (device(1),))
    nobody = Policy(Limits()).after(Ended(End.CORRUPT, 17, "who of two is not known", (), 4, 4))
    assert (nobody.again, nobody.quarantine) == (True, ())


def test_what_is_convicted_at_the_same_step_again_and_again_ends_as_a_replay_loop() -> None:
    policy = Policy(Limits(relaunches=10))
    assert policy.after(convicted(20, 0, 18)).again
    assert policy.after(convicted(30, 1)).again  # it came further
    assert policy.after(convicted(30, 2)).again
    last = policy.after(convicted(30, 3))
    assert (last.again, last.code) == (False, 17)
    assert last.why.startswith("replay loop: 3 attempts in a row were stopped, the last at step 30")
    assert policy.resume_before == 18  # nothing since the first trace of all is trusted


def test_relaunches_and_restarts_are_counted_apart() -> None:
    policy = Policy(Limits(relaunches=1, restarts=1))
    error = Ended(End.FAILED, 1, "rank 0 ended with exit code 1")
    assert policy.after(error).again
    assert policy.after(convicted(3)).again
    assert not policy.after(error).again
    stopped = policy.after(convicted(30, 2))
    assert (stopped.again, stopped.code, stopped.quarantine) == (False, 17, (device(2),))


def test_the_first_trace_is_the_first_suspicion_that_was_not_dismissed() -> None:
    dismissed = Note("dismissed: …", 3, 0, "judge", evidence={"cause": "dismissed"})
    healed = Verdict(Cause.TRANSIENT_HARDWARE, 8, (1,), (device(1),), Action.HEALED, "once")
    events = [finding(3), dismissed, finding(5, rank=0), healed, finding(9), verdict(12)]
    assert first_trace(verdict(12), events, alone=False) == 8
    assert first_trace(verdict(12), events, alone=True) == 3  # nobody else was asked


def test_why_an_attempt_ended_is_told_from_verdicts_first_and_then_from_the_ranks_codes() -> None:
    def end(*codes: int, **told: object) -> tuple[End, int]:
        ended = ended_of(Report("failed", failures=dict(enumerate(codes)), world_size=4, **told), 1, [])
        return ended.end, ended.code

    assert end(1, -9) == (End.LOST, 18)  # the killed rank's peers die of errors
    assert end(-15, 18) == (End.LOST, 18)
    assert end(18, 3) == (End.FAILED, 3)
    assert end(2) == (End.USAGE, 2)
    assert end(-15, 16) == (End.UNPROVEN, 16)
    assert end(17) == (End.UNPROVEN, 17)  # no verdict is there to be read: no device is known
    assert ended_of(None, -9, []).end is End.LOST


def test_nodes_come_to_the_same_conclusion() -> None:
    broken, lost = Ended(End.FAILED, 1, "a connection broke"), Ended(End.LOST, 18, "rank 2 was ended by SIGKILL")
    missed = Ended(End.LOST, 18, "a rank was lost", certain=False)

    def elsewhere(ended: Ended) -> Elsewhere:
        return Elsewhere("node b", ended.end, ended.message, ended.certain, ended.code, ended.trace)

    assert together(broken, [elsewhere(lost)]).end is together(lost, [elsewhere(broken)]).end is End.LOST
    assert together(missed, [elsewhere(broken)]).end is together(broken, [elsewhere(missed)]).end is End.FAILED
    assert together(missed, [elsewhere(broken)]).code == 1
    assert together(broken, [Elsewhere("node b", None, "it does not tell", certain=False, code=18)]).end is End.LOST
    assert together(broken, [elsewhere(Ended(End.FINISHED, 0, ""))]).end is End.APART
    assert together(convicted(9, trace=7), [elsewhere(convicted(9, trace=5))]).trace == 5
    assert (
        together(missed, [elsewhere(convicted(9, trace=5))]).trace == 5
    )  # whatever this node read: all go back as far
    assert (
        together(broken, [elsewhere(Ended(End.NO_SLOTS, 17, "")), elsewhere(Ended(End.FINISHED, 0, ""))]).end
        is End.APART
    )


def test_slots_are_the_visible_devices_without_those_in_quarantine() -> None:
    slots = [Slot(number, Device(HOST, number, f"uuid-{number}", "cuda"), f"{number}") for number in (4, 5, 6, 7)]
    now = datetime.now(UTC)
    held = [Entry(bad, "", "", None, now, now) for bad in (Device("elsewhere", 0, "UUID-5", "cuda"), device(6))]
    fit = healthy(slots, held)
    assert [slot.number for slot in fit] == [4, 7]
    assert environment_for(fit) == {"BITWITNESS_SLOTS": "4,7", "CUDA_VISIBLE_DEVICES": "4,7"}
    assert environment_for([Slot(1, Device(HOST, 1, "Ascend910B#1", "npu"), "1")])["ASCEND_RT_VISIBLE_DEVICES"] == "1"
    labels = slots_here(2, {"BITWITNESS_SLOTS": "3,5,8"})
    if labels[0].device.kind == "cpu":
        assert [slot.number for slot in labels] == [3, 5]
        with pytest.raises(UsageError, match="names 3 slots; expected 4"):
            slots_here(4, {"BITWITNESS_SLOTS": "3,5,8"})


# -- the command line --------------------------------------------------------------------------------------------------


def test_torchruns_options_are_those_that_torch_has() -> None:
    from torch.distributed.run import get_args_parser

    theirs = {
        max(action.option_strings, key=len): action for action in get_args_parser()._actions if action.option_strings
    }
    names = {name.replace("_", "-") if name.startswith("--") else name for name in theirs} - {"--help"}
    assert names == {*VALUED, *FLAGS, *OURS, *REFUSED}
    flags = {name.replace("_", "-") for name, action in theirs.items() if action.nargs == 0} - {"--help"}
    assert flags == {*FLAGS, *REFUSED}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ([], "name one with --out DIR"),
        (["--out", "o", "--spares", "-1"], "--spares -1: expected 0 or more"),
        (["--out", "o", "--nproc-per-node", "many"], "expected a number, auto, gpu, cpu or xpu"),
        (["--out", "o", "--min-nproc", "3"], "--min-nproc 3: expected 1 to --nproc-per-node, 1"),
        (["--out", "o", "--run-path"], "leave it out"),
        (["--out", "o", "-m", "--no-python"], "contradict each other"),
        (["--out", "o", "--expires", "never"], "--expires never: expected a number with s, m, h or d"),
        (["--out", "o", "--nnodes", "2", "--number"], "share one folder"),
        (["--out", "taken"], "holds a run already"),
        (["--out", "o"], "BITWITNESS_RESUME_BEFORE = later in the environment; expected a step"),
        (["--out", "o", "--quarantine", "damaged.json"], "damaged.json is damaged"),
    ],
)
def test_what_is_wrong_is_said_before_anything_is_started(
    options: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    stopped_run(tmp_path / "taken", verdict(3))
    (tmp_path / "damaged.json").write_text("{")
    (tmp_path / "train.py").write_text("")
    monkeypatch.setenv("BITWITNESS_RESUME_BEFORE", "later" if options == ["--out", "o"] else "")
    try:
        code = main(["launch", *options, "train.py"])
    except SystemExit as error:  # argparse's own
        code = int(str(error.code))
    assert code in (2, 3)
    assert said in capsys.readouterr().err
    assert not (tmp_path / "o" / "attempt-1").exists()
