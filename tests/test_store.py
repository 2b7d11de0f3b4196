"""The run folder: what is written at once, what a full or damaged one does."""

from __future__ import annotations

import json
import resource
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import bitwitness.store
from bitwitness import Cause, Finding, Note, Site, UsageError, Verdict
from bitwitness.finding import Action, Severity
from bitwitness.store import RunWriter
from bitwitness.store.claim import claim_folder
from bitwitness.store.reader import read_events
from bitwitness.store.redact import HIDDEN, redacted
from bitwitness.store.seal import sealed

NEED_TORCH = {
    "ascend.source": "rows carry the bit hash, which torch computes",
    "checkpoints": "a checkpoint's tensors are torch's",
    "dcp": "same",
    "dcp_metadata": "it names torch's dtypes",
    "torchfile": "what torch.save wrote",
    "environment": "torch's own switches and random state",
}

VERDICT = Verdict(Cause.PERSISTENT_HARDWARE, 3, (2,), (), Action.STOPPED, "bad", fault_code="80818C00")


def test_only_what_reads_torchs_own_files_needs_torch() -> None:
    folder = Path(bitwitness.store.__file__).parent
    parts = {".".join(path.relative_to(folder).with_suffix("").parts) for path in folder.rglob("[a-z]*.py")}
    assert NEED_TORCH.keys() <= parts
    free = sorted(f"bitwitness.store.{part}" for part in parts - NEED_TORCH.keys())
    code = f"import sys; sys.modules['torch'] = None; import importlib; [importlib.import_module(n) for n in {free}]"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert all("torch" in (folder / f"{part.replace('.', '/')}.py").read_text().splitlines()[0] for part in NEED_TORCH)


def test_events_are_standard_json_written_at_once(tmp_path: Path) -> None:
    writer = RunWriter(tmp_path / "run", 0, 1)
    evidence = {"value": float("nan"), "limit": float("inf"), "low": -float("inf"), "n": 3}
    writer.event(Finding("trend", Site("a.b", "mm"), Severity.WARNING, "odd", evidence, 4, 0))
    events, problems = read_events(tmp_path / "run" / "rank00000" / "events.jsonl")
    assert not problems
    assert events[0]["evidence"] == {"value": "NaN", "limit": "Infinity", "low": "-Infinity", "n": 3}
    assert (events[0]["type"], events[0]["site"]) == ("finding", "a.b/mm#0:forward.out0")


def test_a_verdict_carries_the_alerts_fault_code_and_shows_in_run_json(tmp_path: Path) -> None:
    writer = RunWriter(tmp_path / "run", 0, 4)
    writer.describe(config={"act": "protect"})
    writer.shared_event(VERDICT)
    event = read_events(tmp_path / "run" / "events.jsonl")[0][0]
    assert (event["cause"], event["ranks"], event["fault_code"]) == ("persistent_hardware", [2], "80818C00")
    run = json.loads((tmp_path / "run" / "run.json").read_text())
    assert (run["verdict"]["cause"], run["config"]) == ("persistent_hardware", {"act": "protect"})


def test_times_are_utc_and_in_order(tmp_path: Path) -> None:
    writer = RunWriter(tmp_path, 3, 4)
    for _ in range(3):
        writer.event(Note("hello"))
    times = [event["time"] for event in read_events(tmp_path / "rank00003" / "events.jsonl")[0]]
    assert times == sorted(times)
    assert all(time.endswith("+00:00") for time in times)


def test_the_lowest_living_rank_keeps_the_file_of_all_ranks(tmp_path: Path) -> None:
    writers = [RunWriter(tmp_path, rank, 4) for rank in range(4)]
    for writer in writers:
        writer.shared_event(VERDICT)
    assert len(read_events(tmp_path / "events.jsonl")[0]) == 1
    for writer in writers[2:]:  # 0 and 1 are gone
        writer.take_over([0, 1])
        writer.shared_event(Note("0 and 1 are gone", rank=writer.rank))
    events = read_events(tmp_path / "events.jsonl")[0]
    assert [(event["type"], event["rank"]) for event in events] == [("verdict", 2), ("note", 2)]


def test_only_the_owner_may_look(tmp_path: Path) -> None:
    writer = RunWriter(tmp_path / "a" / "run", 0, 1)
    writer.describe()
    writer.event(Note("hello"))
    modes = {str(path.relative_to(tmp_path / "a")): path.stat().st_mode & 0o777 for path in (tmp_path / "a").rglob("*")}
    assert modes == {"run": 0o700, "run/run.json": 0o600, "run/rank00000": 0o700, "run/rank00000/events.jsonl": 0o600}


def test_a_folder_that_was_there_keeps_its_permissions(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    RunWriter(tmp_path, 0, 1).describe()
    assert tmp_path.stat().st_mode & 0o777 == 0o755


def test_a_half_written_line_is_named_and_the_rest_is_read(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    note = json.dumps(sealed({"type": "note"})).encode()
    path.write_bytes(note + b'\n[1]\n\xff\xfe\n{"type": "no')
    events, problems = read_events(path)
    assert events == [{"type": "note"}]
    assert [problem.split(": ")[0].rsplit(":")[-1] for problem in problems] == ["2", "3", "4"]


@settings(max_examples=30, deadline=None)
@given(cut=st.integers(0, 400), junk=st.binary(max_size=40))
def test_whatever_damages_the_end_the_lines_before_are_read(
    cut: int, junk: bytes, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("damaged") / "events.jsonl"
    lines = [json.dumps(sealed({"type": "note", "n": n + 10})).encode() + b"\n" for n in range(12)]
    path.write_bytes(b"".join(lines)[:cut] + b"\n" + junk.replace(b"\n", b"") + b"[" * 100_000)
    whole = min(cut // len(lines[0]), 10)
    events, problems = read_events(path)
    assert [event["n"] for event in events[:whole]] == [n + 10 for n in range(whole)]
    assert problems


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="events.jsonl of a run folder"):
        read_events(tmp_path / "none")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full, a device that is always full")
def test_a_full_disk_is_said_once_and_counted(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    writer = RunWriter(tmp_path / "run", 0, 1)
    (tmp_path / "run" / "rank00000" / "events.jsonl").symlink_to("/dev/full")
    for _ in range(3):
        writer.event(Note("hello"))
    writer.close()
    told = capsys.readouterr().err
    assert told.count("cannot write to the run folder") == 1
    assert "No space left on device" in told
    assert "The training goes on" in told
    assert "3 events were not recorded" in told


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full, a device that is always full")
def test_recording_goes_on_once_there_is_space(tmp_path: Path) -> None:
    writer = RunWriter(tmp_path, 0, 1)
    path = tmp_path / "rank00000" / "events.jsonl"
    path.symlink_to("/dev/full")
    writer.event(Note("lost"))
    path.unlink()
    path.write_text('{"type": "no')  # what a full disk leaves of a line
    writer.event(Note("kept"))
    events, problems = read_events(path)
    assert [event["message"] for event in events] == ["kept"]
    assert len(problems) == writer.dropped == 1


def test_a_file_in_the_way_is_said_and_every_event_is_counted(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    (tmp_path / "run").write_text("mine")
    assert claim_folder(tmp_path / "run") == tmp_path / "run"
    writer = RunWriter(tmp_path / "run", 0, 1)
    writer.describe(devices=[])
    writer.event(Note("a"))
    writer.shared_event(VERDICT)
    writer.close()
    told = capsys.readouterr().err
    assert told.count("cannot write to the run folder") == 1
    assert "2 events were not recorded" in told
    assert (tmp_path / "run").read_text() == "mine"


def test_a_file_size_limit_in_the_middle_of_a_line(tmp_path: Path) -> None:
    code = """
import sys
from bitwitness.finding import Note
from bitwitness.store import RunWriter
from bitwitness.store.claim import claim_folder
writer = RunWriter(sys.argv[1], 0, 1)
for n in range(20):
    writer.event(Note("x" * 100))
writer.close()
print("trained to the end")
"""

    def limit() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))

    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], preexec_fn=limit, capture_output=True, text=True, check=True
    )
    assert done.stdout == "trained to the end\n"
    assert done.stderr.count("cannot write to the run folder") == 1
    assert "File too large" in done.stderr
    events, problems = read_events(tmp_path / "rank00000" / "events.jsonl")
    assert (len(events), len(problems)) == (3, 1)
    assert "17 events were not recorded" in done.stderr


def test_a_taken_folder_is_kept(tmp_path: Path) -> None:
    first = claim_folder(tmp_path / "run")
    assert first == tmp_path / "run"
    RunWriter(first, 0, 1).describe(world_size=1)
    assert claim_folder(tmp_path / "run") == tmp_path / "run-2"
    assert claim_folder(tmp_path / "run") == tmp_path / "run-3"
    assert json.loads((first / "run.json").read_text())["world_size"] == 1


def test_trainings_that_start_together_never_share_a_folder(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        folders = list(pool.map(lambda _: claim_folder(tmp_path / "run"), range(24)))
    assert len(set(folders)) == 24


def test_a_folder_may_be_given_as_a_dot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert [claim_folder("."), claim_folder(".")] == [tmp_path / "here", tmp_path / "here-2"]


def test_of_a_command_line_only_what_is_harmless_is_recorded(tmp_path: Path) -> None:
    data = tmp_path / "data.bin"
    data.touch()
    line = f"train.py --lr 1e-4 -v --bf16=true --model=org/gpt2 --data {data} trainer.max_steps=10 -- 0.5"
    assert redacted(line.split()) == line.split()


@pytest.mark.parametrize(
    ("line", "kept"),
    [
        ("train.py --api-key abc --lr 0.1", "train.py --api-key *** --lr 0.1"),
        ("train.py --wandb_token=hf_x --steps=3", "train.py --wandb_token=*** --steps=3"),
        ("train.py --password 1234 5678", "train.py --password *** ***"),
        ("train.py hf_AbCdEf db.password=3", "train.py *** db.password=***"),
        ("train.py --note s3cr3t -pS3cret", "train.py --note *** ***"),
        ("train.py --dataset s3://user:pw@host/d https://h/?t=4", "train.py --dataset *** ***"),
        ("train.py --model gpt2 hunter2", "train.py --model gpt2 ***"),
    ],
)
def test_the_rest_is_left_out(line: str, kept: str) -> None:
    assert redacted(line.split()) == kept.replace("***", HIDDEN).split()


@settings(max_examples=100, deadline=None)
@given(
    secret=st.from_regex(r"(hf_|sk-|ghp_|eyJ|)[A-Z][A-Za-z0-9+/]{20,40}={0,2}", fullmatch=True),
    before=st.sampled_from(["", "--token ", "--x ", "--token=", "-k ", "run.key=", "--lr 3 "]),
)
def test_a_token_never_gets_through(secret: str, before: str) -> None:
    assert secret not in " ".join(redacted(["train.py", *f"{before}{secret}".split()]))
