"""The public names, and what importing them costs."""

from __future__ import annotations

import ast
import json
import re
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
from torch import nn

import bitwitness as bw
from bitwitness.store.seal import sealed
from bitwitness.testing import FaultyDevice, from_mapping

WIDE = {"trend": {"warmup": 4}, "self_test": False, "deep_every": 2}
TRANSIENT = {"site": "2/mm:backward", "steps": [12], "times": 1, "kind": "multiply", "factor": 1e6, "pattern": "row"}


def train(steps: int, around) -> nn.Module:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    batches = torch.Generator().manual_seed(1)
    with around(net, optimizer):
        for _ in range(steps):
            optimizer.zero_grad()
            net(torch.randn(8, 16, generator=batches)).square().mean().backward()
            optimizer.step()
    return net


def test_public_names_are_sorted_and_there() -> None:
    assert bw.__all__ == sorted(bw.__all__)
    assert dir(bw) == bw.__all__
    for name in bw.__all__:
        thing = getattr(bw, name)
        assert name == "__version__" or (thing.__name__.removeprefix("bitwitness.") == name and thing.__doc__)


def test_the_documentation_names_them_all() -> None:
    page = (Path(__file__).parents[1] / "docs" / "python.md").read_text()
    table = page.partition("| name |")[2].partition("\n\n")[0]
    named = {name for row in table.splitlines()[2:] for name in re.findall(r"`(\w+)`", row.split("|")[1])}
    assert named == set(bw.__all__)


def test_tests_and_benches_take_public_names_from_where_users_find_them() -> None:
    public = dict.fromkeys(bw.__all__, "bitwitness") | dict.fromkeys(bw.testing.__all__, "bitwitness.testing")
    root = Path(__file__).parents[1]
    files = [*root.glob("tests/**/*.py"), *root.glob("bench/**/*.py")]
    imports = (
        (file, node) for file in files for node in ast.walk(ast.parse(file.read_text())) if hasattr(node, "module")
    )
    own = [(file, node) for file, node in imports if (node.module or "").partition(".")[0] == "bitwitness"]
    assert len(own) > 100
    elsewhere = [
        (file.name, name.name)
        for file, node in own
        for name in node.names
        if public.get(name.name, node.module) != node.module
    ]
    assert not elsewhere


def test_the_version_is_the_packages() -> None:
    assert bw.__version__ == version("bitwitness")


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(AttributeError, match="Guard"):
        bw.Gard  # noqa: B018 - asking is the test


def test_importing_the_package_or_asking_for_help_imports_no_torch() -> None:
    code = "import sys, bitwitness, bitwitness.cli; bitwitness.cli.parsers(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# -- a guard's events ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def healed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, bw.Guard, list]:
    """Return the folder, the guard and the events of a training whose device computed wrongly once."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    events, guards = [], []

    def around(net: nn.Module, optimizer: torch.optim.Optimizer) -> bw.Guard:
        guards.append(bw.Guard(net, optimizer, out=folder, act="protect", on_event=events.append, **WIDE))
        return guards[0]

    with FaultyDevice(from_mapping({"fault": [TRANSIENT]})):
        train(20, around)
    return folder, guards[0], events


def test_a_guard_has_its_findings_and_verdicts(healed: tuple[Path, bw.Guard, list]) -> None:
    _, guard, events = healed
    (verdict,) = guard.verdicts
    assert (verdict.cause, verdict.step, verdict.action) == (bw.Cause.TRANSIENT_HARDWARE, 12, "healed")
    assert any(finding.step == 12 for finding in guard.findings)
    assert [event for event in events if isinstance(event, bw.Verdict)] == guard.verdicts
    assert [event for event in events if isinstance(event, bw.Finding)] == guard.findings


def test_a_verdict_of_what_happened_once_names_the_operator_that_a_deep_step_saw() -> None:
    fault = {**TRANSIENT, "site": "2/addmm:forward", "pattern": "tile", "factor": 50.0}
    guards = []

    def around(net: nn.Module, optimizer: torch.optim.Optimizer) -> bw.Guard:
        guards.append(bw.Guard(net, optimizer, act="protect", deep_every=1))
        return guards[0]

    with FaultyDevice(from_mapping({"fault": [fault]})):
        train(20, around)
    (verdict,) = guards[0].verdicts
    assert verdict.cause is bw.Cause.TRANSIENT_HARDWARE
    assert verdict.site is not None
    assert verdict.site.short == "2/addmm#0:forward.out0"
    assert "computed step 12 wrongly once in 2/addmm#0:forward.out0; repeated executions agree" in verdict.message
    assert verdict.evidence["operator"]["checksum"]["kind"] == "residual"


def test_a_guard_that_is_not_on_has_found_nothing() -> None:
    guard = bw.Guard(nn.Linear(2, 2))
    assert (guard.findings, guard.verdicts) == ([], [])


def test_a_callback_that_fails_is_said_once_and_harms_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    calls = []

    def fail(event: object) -> None:
        calls.append(event)
        raise KeyError("mine")

    with FaultyDevice(from_mapping({"fault": [TRANSIENT]})):
        train(16, lambda net, optimizer: bw.Guard(net, optimizer, act="protect", on_event=fail, **WIDE))
    assert len(calls) == 1
    said = capsys.readouterr().err
    assert said.count("the guard failed in its on_event callback and does without it") == 1
    assert "VERDICT step 12: transient_hardware, action healed" in said


# -- run folders ---------------------------------------------------------------------------------------------------------


def test_a_run_folder_gives_back_what_the_guard_said(healed: tuple[Path, bw.Guard, list]) -> None:
    folder, guard, _ = healed
    run = bw.Run(folder)
    (verdict,) = run.verdicts()
    assert (verdict.cause, verdict.step, verdict.site, verdict.devices, verdict.message) == (
        guard.verdicts[0].cause,
        12,
        guard.verdicts[0].site,
        guard.verdicts[0].devices,
        guard.verdicts[0].message,
    )
    assert [(f.sensor, f.step, f.site) for f in run.findings()] == [(f.sensor, f.step, f.site) for f in guard.findings]
    assert run.notes()[-1].evidence["parameters"] == {"watched": 4, "of": 4}
    assert (run.ranks(), run.steps(), run.problems) == ([0], [], [])
    assert run.description["world_size"] == 1
    with pytest.raises(bw.UsageError, match="no recorded rows"):
        run.rows()


def test_what_is_damaged_in_a_run_folder_is_named_and_the_rest_is_read(tmp_path: Path) -> None:
    note = bw.Guard.__module__ and {
        "type": "note", "step": 3, "rank": 0, "sensor": "guard", "site": None, "severity": "info", "message": "m",
        "evidence": {},
    }  # fmt: skip
    gossip = json.dumps(sealed({**note, "type": "gossip"}))
    flipped = json.dumps({**sealed(note), "message": "l"})
    lines = [json.dumps(sealed(note)), '{"type": "note", "step"', gossip, flipped, json.dumps(sealed(note))]
    (tmp_path / "rank00000").mkdir()
    (tmp_path / "rank00000" / "events.jsonl").write_text("\n".join(lines))
    run = bw.Run(tmp_path)
    assert [event.message for event in run.events(0)] == ["m", "m"]
    assert [problem.partition(": ")[2] for problem in run.problems] == [
        "half-written or damaged, left out",
        "damaged (its checksum differs), left out",
        "event 2 was left out: not an event: KeyError: 'gossip'; expected what bitwitness writes",
    ]
    assert (list(run.events()), run.verdicts()) == ([], [])


def test_a_folder_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(bw.UsageError, match=r"none does not exist .*; expected a run folder"):
        bw.Run(tmp_path / "none")


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return two recordings of one training, the second on a device that computes wrongly at step 2."""
    folder = tmp_path_factory.mktemp("recordings")
    config = {"content": "tensors", "level": "mix"}
    train(4, lambda net, _: bw.Recorder(net, out=folder / "a", **config))
    with FaultyDevice(from_mapping({"fault": [{**TRANSIENT, "steps": [2]}]})):
        train(4, lambda net, _: bw.Recorder(net, out=folder / "b", **config))
    return folder / "a", folder / "b"


def test_a_recordings_rows_and_tensors_are_read_a_piece_at_a_time(recorded: tuple[Path, Path]) -> None:
    run = bw.Run(recorded[0])
    assert (run.ranks(), run.steps(), run.steps(0)) == ([0], [0, 1, 2, 3], [0, 1, 2, 3])
    table = run.rows(step=2)
    assert set(table["step"].to_pylist()) == {2}
    assert run.rows().num_rows == sum(run.rows(step=step).num_rows for step in run.steps())
    row = next(row for row in table.to_pylist() if row["op"] == "addmm" and row["slot"] == "out0")
    value = run.tensor(row)
    assert list(value.shape) == row["shape"]
    assert float(value.double().norm()) == pytest.approx(row["l2"], rel=1e-6)
    assert run.rows(rank=5).num_rows == 0


def test_a_value_that_was_not_kept_is_said_so(recorded: tuple[Path, Path]) -> None:
    run = bw.Run(recorded[0])
    row = {**run.rows(step=0).to_pylist()[0], "tensor": None}
    with pytest.raises(bw.UsageError, match="content='tensors'"):
        run.tensor(row)


def test_a_run_folder_is_read_without_torch(recorded: tuple[Path, Path], healed: tuple[Path, bw.Guard, list]) -> None:
    code = """
import sys
sys.modules["torch"] = None  # as where it is not installed
import bitwitness as bw
guarded, recorded = map(bw.Run, sys.argv[1:])
assert [str(verdict.cause) for verdict in guarded.verdicts()] == ["transient_hardware"]
assert guarded.findings() and guarded.notes() and guarded.description
assert recorded.rows(step=2).num_rows and recorded.steps() == [0, 1, 2, 3] and recorded.stacks(0)
"""
    command = [sys.executable, "-c", code, str(healed[0]), str(recorded[0])]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_compare_says_what_the_command_line_says(recorded: tuple[Path, Path], tmp_path: Path) -> None:
    report = bw.compare(*recorded)
    command = [sys.executable, "-m", "bitwitness", "compare", *map(str, recorded), "--json", "-"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    assert json.loads(done.stdout) == json.loads(json.dumps(report.to_dict()))
    assert report.first is not None
    assert report.first.step == 2
    assert bw.compare(bw.Run(recorded[0]), recorded[0]).first is None
    assert [bw.compare(*recorded, steps=some).steps for some in (1, [0, 1], "0-1,3")] == [1, 2, 3]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"steps": [1.5]}, r"steps = \[1.5\]; expected a number"),
        ({"ranks": object()}, "ranks = .*; expected a number"),
        ({"steps": "one"}, "steps = 'one': expected numbers and ranges"),
        ({"b": None}, "b is NoneType; expected a path or a Run"),
    ],
)
def test_what_cannot_be_compared_is_named(recorded: tuple[Path, Path], arguments: dict, message: str) -> None:
    with pytest.raises(bw.UsageError, match=message):
        bw.compare(**{"a": recorded[0], "b": recorded[1], **arguments})


def test_folders_that_are_no_runs_are_refused_and_damage_is_named(recorded: tuple[Path, Path], tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "run.json").write_text("[1, 2]")
    for name in ("empty", "foreign"):
        with pytest.raises(bw.UsageError, match="expected"):
            bw.Run(tmp_path / name)
    shutil.copytree(recorded[0], tmp_path / "damaged")
    for file in (tmp_path / "damaged" / "rank00000").glob("stats-*"):
        file.write_bytes(b"no parquet")
    damaged = bw.Run(tmp_path / "damaged")
    assert damaged.steps() == []
    assert any("stats-000001.parquet is damaged" in problem for problem in damaged.problems)


# -- testing -------------------------------------------------------------------------------------------------------------


def test_a_training_that_a_guard_leaves_alone_is_said_to_be_untouched() -> None:
    found = bw.testing.run_twice(lambda watch: train(8, watch), act="protect")
    assert found.untouched
    assert found.coverage["verdicts"] == []


def test_a_training_that_differs_from_itself_is_named() -> None:
    runs = []

    def differs(watch) -> nn.Module:
        net = train(4, watch)
        with torch.no_grad():
            net[2].bias[0] += len(runs)
        runs.append(torch.rand(1 + len(runs)))
        return net

    found = bw.testing.run_twice(differs)
    assert (found.differing, found.verdicts, found.untouched) == (("2.bias", "random states"), (), False)
    assert not found.repeats


def test_a_training_that_is_stopped_stops_no_other(capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(2):
        with FaultyDevice(from_mapping({"fault": [{**TRANSIENT, "steps": None, "times": None, "from_step": 30}]})):
            found = bw.testing.run_twice(lambda watch: train(24, watch), act="protect", trend={"warmup": 4})
        assert [verdict.cause for verdict in found.verdicts] == ["persistent_hardware"]
        assert found.stopped is not None
        assert "computes step 6 wrongly every time" in found.stopped
    assert "suspicion" not in capsys.readouterr().err
    with bw.testing.contained(), pytest.raises(bw.TrainingStopped):
        raise bw.TrainingStopped(17, "mine")


@pytest.mark.parametrize(
    ("training", "message"),
    [
        (lambda watch: train(0, watch), "the guard saw no step"),
        (lambda _watch: nn.Linear(2, 2), r"entered watch\(model, optimizer\) 0 times; expected once"),
        (lambda _watch: 7, "returned int; expected the trained module"),
    ],
)
def test_a_training_that_is_none_is_named(training, message: str) -> None:
    with pytest.raises(bw.UsageError, match=message):
        bw.testing.run_twice(training)
