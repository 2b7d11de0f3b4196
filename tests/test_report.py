"""A report says what status says, to whoever has to decide; hostile names do nothing in it; no spike is lost in it."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import zlib
from contextlib import nullcontext
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
import torch
from extent import chosen
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from monitored_run import COVERAGE, RANK, SPIKE, STEP, modules, watched_run, write_monitored
from torch import nn

import bitwitness as bw
from bitwitness import Cause, Note, Verdict
from bitwitness.cli import main
from bitwitness.finding import Action, Device
from bitwitness.report import build_report
from bitwitness.report.build import Report
from bitwitness.report.heatmap import BAD
from bitwitness.report.markdown import to_markdown
from bitwitness.report.page import embedded, to_html
from bitwitness.report.series import buckets
from bitwitness.report.unusual import unusual
from bitwitness.store.answer import answers
from bitwitness.store.writer import RunWriter
from bitwitness.testing import contained

WRONG = {"site": "0/addmm:forward", "from_step": 3, "kind": "multiply", "factor": 1e4, "pattern": "all"}


def train(net: nn.Module, steps: int, *, log_of_negative: bool = False) -> None:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for step in range(steps):
        out = net(torch.rand(5, 4))
        out = (out.abs() - 1e6 * (step == 1)).log() if log_of_negative else out
        out.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


def faulty(*faults: dict):
    return bw.testing.FaultyDevice(bw.testing.from_mapping({"fault": list(faults)})) if faults else nullcontext()


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of runs: good, transient, persistent, nan, a and b."""
    root = tmp_path_factory.mktemp("runs")
    with contained():
        with bw.Guard(net := model(), out=root / "good", quiet=True):
            train(net, 12)
        for name, more in (("transient", {"times": 1}), ("persistent", {})):
            settings = {"act": "protect", "quiet": True, **bw.testing.EVERY_STEP}
            stops = pytest.raises(bw.TrainingStopped) if name == "persistent" else nullcontext()
            with stops, faulty(WRONG | more), bw.Guard(net := model(), out=root / name, **settings):
                train(net, 6)
        with bw.NonfiniteTracer(net := model(), out=root / "nan"):
            train(net, 3, log_of_negative=True)
        for name, faults in (("a", []), ("b", [WRONG | {"site": "2/addmm:forward", "from_step": 2, "factor": 1.5}])):
            net = model()
            torch.manual_seed(1)
            with faulty(*faults), bw.Recorder(net, out=root / name, content="tensors"):
                train(net, 4)
    return root


@dataclass
class Page(HTMLParser):
    """What a browser finds in a page."""

    text: str
    scripts: list[str] = field(default_factory=list)
    tags: set[str] = field(default_factory=set)
    attributes: list[tuple[str, str | None]] = field(default_factory=list)
    policy: str = ""
    _in: str = ""

    def __post_init__(self) -> None:
        super().__init__()
        self.feed(self.text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes += attrs
        self._in = "data" if tag == "script" and ("type", "application/json") in attrs else tag
        if tag == "script":
            self.scripts.append("")
        if ("http-equiv", "Content-Security-Policy") in attrs:
            self.policy = dict(attrs)["content"] or ""

    def handle_data(self, data: str) -> None:
        if self._in in ("script", "data"):
            self.scripts[-1] += data

    def handle_endtag(self, tag: str) -> None:
        self._in = ""


@pytest.mark.parametrize("name", ["good", "transient", "persistent", "nan", "a"])
def test_a_report_says_what_status_says(
    name: str, runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = str(runs / name)
    code = main(["status", run, "--json"])
    told = json.loads(capsys.readouterr().out)
    assert main(["report", run, "--json", "-"]) == code
    report = json.loads(capsys.readouterr().out)
    assert list(report)[:5] == ["schema", "kind", "status", "headline", "conclusion"]
    assert (report["schema"], report["kind"]) == (1, "run")
    assert (report["status"], report["conclusion"]) == (told["status"], told["sentence"])
    assert report["runs"][0]["sentence"] == told["sentence"]
    assert main(["report", run, "-o", str(tmp_path / "it.html"), "--markdown", str(tmp_path / "it.md")]) == code
    said = capsys.readouterr().out
    assert said == f"{report['headline']}\nwritten: {tmp_path / 'it.html'}, {tmp_path / 'it.md'}\n"
    assert report["headline"] in (tmp_path / "it.html").read_text().replace("&#39;", "'")
    first = (tmp_path / "it.md").read_text().splitlines()[0]
    assert first.replace("\\", "").endswith(report["headline"])


def test_a_healthy_run_says_why_it_may_be_believed(runs: Path) -> None:
    story = build_report([runs / "good"]).story
    assert story.headline == "Nothing is wrong with this run's numbers, as far as they were looked at."
    assert story.to_do == ["Nothing has to be done."]
    (run,) = story.runs
    for words in ("In each of 12 steps the gradients of 4 of 4", "run again as a trial, with equal bits", "self-test",
                  "all its checksums were verified"):  # fmt: skip
        assert any(words in line for line in run.believed), (words, run.believed)
    assert any("one rank" in gap for gap in run.gaps)


def titles(report: Report) -> list[str]:
    return [block.title for run in report.story.runs for event in run.events for block in event.blocks]


def test_the_evidence_of_faults_lies_side_by_side(runs: Path) -> None:
    report = build_report([runs / "transient"])
    done = "it was noticed before the wrong numbers were used, and put right."
    assert report.story.headline == f"The device of rank 0 computed wrongly once, at step 3; {done}"
    assert report.story.to_do[0] == "Note the device; if it strikes again it is a defect."
    executions = next(block for block in report.story.runs[0].events[0].blocks if "run again" in block.title)
    letters = {row[0]: row[3] for row in executions.rows}
    assert letters["replay 1"] == letters["replay 2"] != letters["training"]
    assert executions.marked == [0]
    report = build_report([runs / "persistent"])
    assert "computes wrongly, first seen at step 3; the run was stopped" in report.story.headline
    assert {"The operator", "Checksum", "Rank by rank", "Device"} <= set(titles(report))
    (check,) = (block for block in report.story.runs[0].events[0].blocks if block.title == "Checksum")
    assert check.rows[0][2].endswith("times")
    page = to_html(report)
    assert "← wrong" in page
    assert "← wrong" in to_markdown(report)


def test_a_nan_is_told_with_its_line_and_advice(runs: Path) -> None:
    report = build_report([runs / "nan"])
    assert "NaN or Inf" in report.story.headline
    assert any("clamp it from below" in line for line in report.story.to_do)
    assert {"What went in and what came out", "What it reaches"} <= set(titles(report))


def test_a_pair_is_compared_and_its_conclusion_comes_first(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", str(runs / "a"), str(runs / "b"), "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    report = build_report([runs / "a", runs / "b"])
    assert report.story.kind == "pair"
    assert report.story.conclusion == told["conclusion"]
    assert report.comparison == told
    why = told["first"]["text"]
    assert f"they part in step 2 on rank 0, in 2/addmm#0:forward.out0: {why}." in report.story.headline
    assert why in told["conclusion"]  # compare says it in its first sentence, too
    assert "test_report.py" in report.story.to_do[0]
    states = {node["op"]: node["state"] for node in report.charts["graph"]["nodes"]}
    assert (states["addmm"], states["tanh"]) in (("first", "equal"), ("equal", "equal"))
    assert sum(node["state"] == "first" for node in report.charts["graph"]["nodes"]) == 1
    assert report.charts["graph"]["edges"]
    results = [row[report.charts["table"]["columns"].index("result")] for row in report.charts["table"]["rows"]]
    assert results == sorted(results, key=["differs", "rounding", "equal"].index)
    assert "they part" in to_markdown(report).splitlines()[0]
    same = build_report([runs / "a", runs / "a"])
    assert (same.story.status, same.story.headline) == ("fine", "The two runs are equal in all that was compared.")
    assert (same.story.attention, same.story.word) == (False, "no operator computed wrongly")
    assert "graph" not in same.charts


def test_series_are_drawn_and_nan_in_them_is_told(tmp_path: Path) -> None:
    report = build_report([write_monitored(tmp_path / "run")])
    assert report.story.status == "findings"
    assert report.story.headline == (
        "The series hold NaN or Inf, first in activation/head/out0 at step 197 on rank 0, and no rule was on to say so."
    )
    assert "'bitwitness trace', which names the operator" in report.story.to_do[0]
    assert "the guard: healthy: 12 of 12 parameters" in report.story.conclusion
    lines = {(line["metric"], line["rank"]): line for line in report.charts["timeline"]["lines"]}
    assert set(lines) == {(metric, rank) for metric in ("loss", "grad_norm") for rank in (0, 1)}
    values = np.frombuffer(base64.b64decode(lines["grad_norm", RANK]["values"]), "<f8")
    assert values.max() == 60.0
    heat = report.charts["heat"]
    assert (len(heat["spans"]), heat["ranks"]) == (200, [0, 1])
    layer = next(one for one in heat["layers"] if (one["kind"], one["measure"]) == ("activation", "z"))
    cells = [np.frombuffer(zlib.decompress(base64.b64decode(one)), np.uint8).reshape(50, 200) for one in layer["ranks"]]
    assert cells[RANK][layer["rows"].index(SPIKE), STEP] == cells[RANK][cells[RANK] < BAD].max() == 254
    assert (cells[0][layer["rows"].index("head"), -3:] == BAD).all()
    branch = report.charts["tree"]["root"]
    for part in SPIKE.split("."):
        branch = next(one for one in branch["inside"] if one["name"] == part)
    assert branch["worst"] >= 3
    assert f"step {STEP}, rank {RANK}" in branch["said"]


@given(
    arrays.arrays(np.float64, st.integers(0, 300), elements=st.floats(allow_nan=True, allow_infinity=True, width=64)),
    st.integers(1, 40),
)
def test_thinned_lines_keep_the_least_and_the_largest_of_each_bucket(values: np.ndarray, most: int) -> None:
    steps = np.arange(len(values)) * 3
    kept_steps, kept = buckets(steps, values, most)
    finite = values[np.isfinite(values)]
    assert len(kept) <= 2 * most
    assert (np.diff(kept_steps) > 0).all()
    assert np.array_equal(kept, values[kept_steps // 3])
    width = 1 if len(finite) <= 2 * most else -(-len(finite) // most)
    for first in range(0, len(finite), width):
        bucket, known = finite[first : first + width], set(kept.tolist())
        assert {bucket.min(), bucket.max()} <= known


HOSTILE = (
    "</script><script>alert(1)</script>", '<img src=x onerror="alert(1)">', "{{ 7*7 }}", "'\"`${1}", "a\u202egnp.exe",
    "\ud800 half", "\u2028line\u2029", "<!--", "]]>", "@everyone [x](javascript:alert(1)) | https://example.org", "\x1b[31m",
    "=cmd|' /C calc'!A0",
)  # fmt: skip


@pytest.fixture(scope="session")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hostile") / "<b>run&"
    names = [text.replace("\ud800", "\ufffd") for text in HOSTILE]  # Parquet holds text only
    write_monitored(folder, names=[*names, *(f"layers.{name}" for name in names)], steps=20, ranks=1)
    evidence = {
        "l2_by_execution": {text: text for text in HOSTILE},
        "hash_by_execution": dict.fromkeys(HOSTILE, "x"),
        "whose": HOSTILE[0],
        "ranks": [{f"training = {text}": text for text in HOSTILE}] * 1000,
        "operator": {"site": HOSTILE[1], "rank 0": {"comparable": True, "error": "NaN", "value": 10**400}},
        "suspicions": {text: [{"sensor": text, "message": text}, text, 7] for text in HOSTILE} | {"x": "y"},
        "checksum": {"residual": HOSTILE[0], "threshold": {}},
        **{text: [[[[[[[[[text]]]]]]]]] for text in HOSTILE},
    }
    writer = RunWriter(folder, 0, 1)
    for number, text in enumerate(HOSTILE):
        if number == 1:
            evidence = evidence | {"parameter": "x" * 10_000_000, "reason": "y" * 1_000_000}
        device = Device(text, 0, text, text)
        writer.shared_event(
            Verdict(
                Cause.SOFTWARE,
                3,
                (0,),
                (device,),
                Action.REPORTED,
                text,
                sensor=text,
                evidence=evidence,
                fault_code=text,
            )
        )
        writer.event(Note(text, 3, 0, text))
        evidence = {key: value for key, value in evidence.items() if key not in ("parameter", "reason")}
    writer.event(
        Note("coverage", 19, 0, evidence=COVERAGE | {"not_covered": list(HOSTILE), "steps": {"held": 20, "judged": 20}})
    )
    writer.describe(command=list(HOSTILE), devices=list(HOSTILE), versions=dict.fromkeys(HOSTILE, HOSTILE[0]))
    writer.ended("finished", HOSTILE[0], 20)
    writer.close()
    return folder


def test_hostile_names_and_values_do_nothing(hostile: Path) -> None:
    report = build_report([hostile])
    text = to_html(report)
    assert len(text) < 4_000_000
    assert "\u202e" not in text
    page = Page(text)
    assert not page.tags & {"img", "iframe", "object", "embed", "base", "form", "b"}
    assert not [name for name, _ in page.attributes if name.startswith("on") or name in ("src", "style", "srcdoc")]
    assert {value for name, value in page.attributes if name == "href"} == {"#todo", "data:,"}
    data, *scripts = page.scripts
    assert json.loads(data)["table"]["rows"]
    assert not set("<>&'") & set(data)
    for script in scripts:
        digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        assert f"'sha256-{digest}'" in page.policy
    assert page.policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe" not in page.policy
    assert "http" not in page.policy
    markdown = to_markdown(report)
    assert len(markdown) < 1_000_000
    assert not re.search(r"(?<!\\)[<>]|@\w|(?<!\\)\]\(|(?<!\\)://", markdown)
    assert len(json.dumps(report.to_dict())) < 4_000_000


@settings(max_examples=50)
@given(st.dictionaries(st.text(), st.lists(st.text(), max_size=4), max_size=4))
def test_embedded_data_ends_no_element(data: object) -> None:
    told = embedded(data)
    assert not set("<>&'\u2028\u2029") & set(told)
    assert json.loads(told) == data


SIZES = chosen([(1000, 500, 8), (300, 120, 2)], [(300, 120, 2)])


@pytest.mark.parametrize(("steps", "count", "ranks"), SIZES)
def test_a_large_run_makes_a_small_file(steps: int, count: int, ranks: int, tmp_path: Path) -> None:
    run = write_monitored(tmp_path / "run", steps=steps, names=modules(count), ranks=ranks)
    size = len(to_html(build_report([run])))
    assert size < 15_000_000 * (1 if ranks == 8 else 0.15)


def test_series_that_cannot_be_read_are_told_and_of_several_runs_the_worst(runs: Path, tmp_path: Path) -> None:
    run = write_monitored(tmp_path / "run", steps=10, names=["a"])
    assert (
        build_report([run]).story.headline == "Nothing is wrong with this run's numbers, as far as they were looked at."
    )
    file = run / "rank00001" / "monitor-000001.parquet"
    file.write_bytes(file.read_bytes()[:2000])
    story = build_report([run]).story
    assert story.status == "unread"
    assert sum("monitor-000001.parquet is damaged" in doubt for doubt in story.runs[0].doubts) == 1
    assert not any("checksums" in line for line in story.runs[0].believed)
    only = answers(os.fspath(write_monitored(tmp_path / "only", steps=10, names=["a"], ranks=1, guarded=False)))[
        0
    ].health
    assert (only.status, only.sentence) == (
        "fine", "monitored: 4 series over 10 steps (0 to 9) of 1 rank, which no rules watched; they hold no NaN or Inf",
    )  # fmt: skip
    several = build_report([runs / "good", runs / "nan", runs / "persistent"]).story
    assert (several.kind, several.status, len(several.runs)) == ("runs", "findings", 3)
    assert "persistent: The device of rank 0 computes wrongly" in several.headline


def test_of_very_many_ranks_the_named_are_drawn(tmp_path: Path) -> None:
    run = write_monitored(tmp_path / "run", steps=3, names=["a"], ranks=40)
    RunWriter(run, 0, 40).shared_event(
        Verdict(Cause.PERSISTENT_HARDWARE, 2, (39,), (), Action.STOPPED, "rank 39 is wrong")
    )
    report = build_report([run])
    assert report.charts["heat"]["ranks"] == [*range(31), 39]
    assert any("of 40 ranks 32 are drawn" in doubt for doubt in report.story.runs[0].doubts)


def test_what_is_wrong_with_the_command_is_said_before_the_work(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = str(runs / "good")
    for arguments, words in (
        ([run, "-o", "-"], "name it, or print --markdown - or --json -"),
        ([run, "-o", str(tmp_path / "x"), "--json", str(tmp_path / "x")], "name one file"),
        ([run, "-o", str(tmp_path / "no" / "x")], "there is no folder"),
        ([str(tmp_path / "none"), "--json", "-"], "does not exist"),
        ([run] * 17, "17 runs were named; expected 1 to 16"),
    ):
        assert main(["report", *arguments]) == 2, arguments
        assert words in capsys.readouterr().err
    monkeypatch.setattr("bitwitness.report.page.find_spec", lambda _name: None)
    assert main(["report", run, "-o", str(tmp_path / "x.html")]) == 2
    assert "needs Jinja2: pip install 'bitwitness[report]'" in capsys.readouterr().err
    assert main(["report", run, "--markdown", str(tmp_path / "x.md"), "-q"]) == 0
    assert capsys.readouterr().out == ""


def test_the_report_of_one_run_needs_no_torch() -> None:
    import subprocess
    import sys

    code = "import sys, bitwitness.report.build, bitwitness.report.page; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def branch_of(report: Report, path: str) -> dict:
    branch = report.charts["tree"]["root"]
    for part in path.split("."):
        branch = next(one for one in branch["inside"] if one["name"] == part)
    return branch


def test_the_tree_says_what_the_rules_said_and_the_worst_run_is_first(tmp_path: Path) -> None:
    quiet, broken = watched_run(tmp_path / "quiet"), watched_run(tmp_path / "broken", alerts=True)
    assert build_report([quiet]).charts["tree"]["root"]["worst"] == 0
    report = build_report([broken])
    assert [branch_of(report, name)["level"] for name in ("head", "tokens", "layers.0.mlp")] == [4, 2, 1]
    assert branch_of(report, "layers")["worst"] == 1
    report = build_report([quiet, broken])
    assert [run.path for run in report.story.runs] == [str(broken), str(quiet)]
    assert report.story.headline.startswith(f"{broken}: NaN or Inf came up at step 57")
    for part in ("heat", "tree"):
        assert report.charts[part]["run"] == "broken"
        assert [one["run"] for one in report.charts[f"more_{part}"]] == ["quiet"]
    table = report.charts["table"]
    assert [row[table["columns"].index("run")] for row in table["rows"]] == ["broken", "broken"]


def test_what_learns_is_not_unusual_and_what_breaks_is() -> None:
    random = np.random.default_rng(0)
    when = np.arange(300)
    # All fall by a factor of 20; moments fill from nothing, and each row learns at a pace of its own.
    rows = -3.0 * when / 300 + np.log1p(-np.exp(-0.1 * (when + 1))) + np.linspace(0, 0.5, 40)[:, None] * when / 300
    rows = (rows + random.normal(0, 0.1, (40, 300))).astype(np.float32)
    assert np.median(np.abs(unusual(rows)).max(axis=1)) < 4.5
    rows[7, 150] += np.log(50)
    rows[9, 200:] += np.log(50)
    z = unusual(rows)
    assert z[7].argmax() == 150
    assert z[7, 150] > 20
    assert z[9, 200:210].min() > 15
    assert np.abs(np.delete(z, [7, 9], axis=0)).max() < 9


def test_a_very_long_name_holds_what_is_in_it(tmp_path: Path) -> None:
    long = "x" * 3000
    run = write_monitored(tmp_path / "run", names=[long, f"{long}.weight", f"{long}.bias"], steps=20, ranks=1)
    (module,) = build_report([run]).charts["tree"]["root"]["inside"]
    assert [one["name"] for one in module["inside"]] == ["weight", "bias"]
    assert len(module["name"]) < 300
