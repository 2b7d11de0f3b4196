"""What a pre-check leaves: tables, JUnit, a summary that clears nothing unseen, reproducers that reproduce, and a page."""

from __future__ import annotations

import base64
import contextlib
import csv
import hashlib
import io
import json
import math
import os
import runpy
import subprocess
import sys
import xml.etree.ElementTree as ET
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch

from bitwitness import UsageError
from bitwitness.errors import UnwrittenError
from bitwitness.precheck.junit import write_junit
from bitwitness.precheck.reproducer import safe_name, write_reproducer
from bitwitness.precheck.summary import exit_code, headline, summarize
from bitwitness.precheck.tables import COLUMNS, write_csv, write_json
from bitwitness.report.prechecked import precheck_page
from bitwitness.trial.result import (
    CRASH,
    ERROR,
    FAIL,
    NOT_JUDGED,
    PASS,
    TIMEOUT,
    WARN,
    CaseResult,
    OutputResult,
)

HOSTILE = '</script><img src=x onerror=alert(1)>\u202e\x00\x1b[2J\ud800\ufffe"&]]>=cmd|'


def output(verdict: str = FAIL, slot: str = "out0", **more: object) -> OutputResult:
    told = {
        "reason": "element [3, 1] is 12 times as far off as it may be",
        "dtype": "float32",
        "shape": (4, 2),
        "ratio": 12.0,
        "at": (3, 1),
        "value": 1.5,
        "expected": 1.25,
        "allowed": 0.02,
        "ulp_max": math.inf,
        "ulp_histogram": {"0": 5, "1": 2, "inf": 1},
        "euclidean": 0.25,
        "relative": 0.1,
    }
    return OutputResult(slot, verdict, **(told | more))


def case(verdict: str, number: int = 0, **more: object) -> CaseResult:
    given = {
        "name": f"nn.functional.gelu[float32]#{number}",
        "operator": "nn.functional.gelu",
        "dtype": "float32",
        "shapes": "[4, 2]",
        "reason": "" if verdict == PASS else f"why {verdict}",
        "outputs": (output(verdict),) if verdict in (FAIL, WARN, PASS) else (),
        "seconds": 0.5,
    }
    return CaseResult(verdict=verdict, **(given | more))


ALL = [case(verdict, n) for n, verdict in enumerate((PASS, WARN, NOT_JUDGED, ERROR, TIMEOUT, CRASH, FAIL))]


def read(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


class TestTables:
    def test_a_row_an_output_and_a_row_without(self, tmp_path: Path) -> None:
        write_csv(tmp_path / "a.csv", ALL)
        rows = read(tmp_path / "a.csv")
        assert len(rows) == len(ALL)
        assert list(rows[0]) == list(COLUMNS)
        assert (rows[6]["case_verdict"], rows[6]["at"], rows[6]["allowed"]) == (FAIL, "[3, 1]", "0.02")
        assert rows[6]["ulp_max"] == "inf"
        assert rows[3]["slot"] == ""

    @pytest.mark.parametrize("start", ["=", "+", "-", "@", "\t", "\r"])
    def test_no_cell_starts_a_formula(self, tmp_path: Path, start: str) -> None:
        bad = f"{start}cmd|' /C calc'!A0"
        one = case(FAIL, name=bad, operator=bad, shapes=bad, reason=bad, outputs=(output(value=-1.0, reason=bad),))
        write_csv(tmp_path / "a.csv", [one])
        (row,) = read(tmp_path / "a.csv")
        for name, cell in row.items():
            assert name == "value" or not cell.startswith(("=", "+", "-", "@", "\t", "\r"))
        assert row["value"] == "-1.0"

    def test_json_holds_what_json_has_no_number_for(self, tmp_path: Path) -> None:
        one = case(FAIL, name=HOSTILE, outputs=(output(value=math.nan, expected=-math.inf, ratio=math.inf),))
        write_json(tmp_path / "a.json", [one])

        def refuse(what: str) -> None:
            raise AssertionError(what)

        told = json.loads((tmp_path / "a.json").read_text(), parse_constant=refuse)
        found = told["results"][0]["outputs"][0]
        assert (found["value"], found["expected"], found["ratio"]) == ("NaN", "-Infinity", "Infinity")
        assert told["counts"][FAIL] == 1
        assert told["exit_code"] == 1
        assert told["results"][0]["name"] == HOSTILE

    def test_what_cannot_be_written_leaves_what_was_there(self, tmp_path: Path) -> None:
        with pytest.raises(UnwrittenError):
            write_csv(tmp_path / "none" / "a.csv", ALL)
        (tmp_path / "a.json").write_text("before")
        with pytest.raises(AttributeError):
            write_json(tmp_path / "a.json", [*ALL, None])
        assert (tmp_path / "a.json").read_text() == "before"
        assert [one.name for one in tmp_path.iterdir()] == ["a.json"]


class TestJunit:
    def test_a_reader_finds_each_case(self, tmp_path: Path) -> None:
        write_junit(tmp_path / "a.xml", ALL)
        root = ET.parse(tmp_path / "a.xml").getroot()
        suite = root.find("testsuite")
        assert {name: suite.get(name) for name in ("tests", "failures", "errors", "skipped")} == {
            "tests": "7", "failures": "1", "errors": "3", "skipped": "1"
        }  # fmt: skip
        assert float(suite.get("time")) == 3.5
        inside = [[child.tag for child in one] for one in suite]
        assert inside == [[], ["system-out"], ["skipped"], ["error"], ["error"], ["error"], ["failure"]]
        failed = suite[6]
        assert failed.get("classname") == "precheck.nn.functional.gelu"
        assert failed[0].get("message") == "why fail"
        assert "worst element [3, 1] is 1.5, expected 1.25, may be off by 0.02" in failed[0].text
        assert suite[2][0].get("message") == "why not judged"

    def test_what_xml_forbids_is_replaced(self, tmp_path: Path) -> None:
        bad = "".join(map(chr, range(0x20))) + HOSTILE + "\U0001f600"
        one = case(FAIL, name=bad, operator=bad, reason=bad, outputs=(output(reason=bad),), seconds=math.nan)
        write_junit(tmp_path / "a.xml", [one, case(WARN, reason=bad), case(NOT_JUDGED, reason=bad)], bad)
        suite = ET.parse(tmp_path / "a.xml").getroot()[0]
        assert "\\x00" in suite[0].get("name")
        assert "\\ud800" in suite[0].get("name")
        assert "\u202e" not in (tmp_path / "a.xml").read_text(encoding="utf-8")
        assert "\U0001f600" in suite[0].get("name")

    def test_ten_megabytes_of_a_name_are_cut(self, tmp_path: Path) -> None:
        write_junit(tmp_path / "a.xml", [case(FAIL, name="x" * 10_000_000, reason="y" * 10_000_000)])
        assert (tmp_path / "a.xml").stat().st_size < 20_000


class TestSummary:
    def test_what_is_wrong_comes_first(self) -> None:
        lines = summarize(ALL)
        assert lines[0] == (
            "Wrong numbers: 1 of 3 judged cases failed, in 1 operator, and 1 passed with a warning; 1 crashed, 1 timed out, "
            "1 raised an error, 1 could not be judged."
        )
        assert lines[1] == "FAIL nn.functional.gelu [float32], 1 case: why fail"
        assert lines[2].endswith("out0[3, 1] is 1.5, expected 1.25, may be off by 0.02 (12 times that)")
        assert lines[-1] == "not judged, 1 case: why not judged (nn.functional.gelu)"

    def test_cases_of_one_reason_are_told_together_and_many_are_counted(self) -> None:
        alike = [case(FAIL, n, reason=f"element [{n}] is {n}.5 off") for n in range(30)]
        others = [case(FAIL, n, operator=f"op_{n}") for n in range(12)]
        lines = summarize([*alike, *others], most=1)
        assert lines[1] == "FAIL nn.functional.gelu [float32], 30 cases: element [0] is 0.5 off"
        assert lines[-1] == "… and 12 more: 12 fail"

    @pytest.mark.parametrize(
        ("results", "said"),
        [
            ([], "No case was judged, so nothing is known of any operator; there was no case."),
            ([case(NOT_JUDGED)] * 2, "No case was judged, so nothing is known of any operator; 2 could not be judged."),
            ([case(CRASH)], "No case was judged, so nothing is known of any operator; 1 crashed."),
            ([case(PASS), case(TIMEOUT)], "Not everything is known: 1 judged case passed; 1 timed out."),
        ],
    )
    def test_nothing_that_was_not_looked_at_is_cleared(self, results: list[CaseResult], said: str) -> None:
        assert summarize(results)[0] == headline(results) == said
        assert exit_code(results) == 3
        assert "not known" in precheck_page(results, "x")
        assert "✔" not in precheck_page(results, "x")

    @pytest.mark.parametrize(
        ("verdicts", "code"),
        [([PASS], 0), ([PASS, WARN, NOT_JUDGED], 0), ([FAIL, CRASH], 1), ([PASS, ERROR], 3), ([PASS, CRASH], 3)],
    )
    def test_the_exit_code(self, verdicts: list[str], code: int) -> None:
        assert exit_code([case(one) for one in verdicts]) == code

    def test_a_terminal_obeys_no_name(self) -> None:
        lines = summarize([case(FAIL, name=HOSTILE, operator=HOSTILE, reason=HOSTILE * 1000, reproducer=HOSTILE)])
        assert all(line.isprintable() and len(line) < 2000 for line in lines)


def reproduce(path: Path) -> subprocess.CompletedProcess[str]:
    """Run a reproducer here, for a fresh process takes seconds to import torch; `alone` runs it in one."""
    out, err, code = io.StringIO(), io.StringIO(), 0
    argv, dtype = sys.argv, torch.get_default_dtype()
    sys.argv = [str(path)]
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            runpy.run_path(str(path), run_name="__main__")
        except SystemExit as ended:
            code = int(ended.code or 0)
        finally:
            sys.argv = argv
            torch.set_default_dtype(dtype)
    return subprocess.CompletedProcess([str(path)], code, out.getvalue(), err.getvalue())


def alone(path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    return subprocess.run(
        [sys.executable, "-I", str(path), *arguments], capture_output=True, text=True, check=False, env=environment,
        cwd="/", timeout=300,
    )  # fmt: skip


class TestReproducer:
    def test_it_says_while_the_number_is_wrong_and_when_it_is_right(self, tmp_path: Path) -> None:
        x = torch.linspace(-3, 3, 12).reshape(4, 3).to(torch.bfloat16)
        call = {"call_source": 'torch.nn.functional.gelu(tensors["x"], approximate="tanh")', "tensors": {"x": x.t()}}
        wrong = write_reproducer(tmp_path, case(FAIL, outputs=(output(at=(0, 3), allowed=0.0),)), **call)
        ran = alone(wrong)
        assert ran.returncode == 1, ran.stderr
        assert "element [0, 3]: value " in ran.stdout
        assert "still wrong" in ran.stdout
        assert "when the case failed: value 1.5, expected 1.25" in ran.stdout
        moved = tmp_path / "elsewhere"
        moved.mkdir()
        for kind in (".py", ".safetensors"):
            wrong.with_suffix(kind).rename(moved / f"{wrong.stem}{kind}")
        assert alone(moved / wrong.name).returncode == 1
        right = write_reproducer(tmp_path, case(FAIL, outputs=(output(at=(0, 3), allowed=0.02),)), **call)
        ran = reproduce(right)
        assert ran.returncode == 0, ran.stdout + ran.stderr
        assert "bitwitness" not in right.read_text()

    def test_gradients_dtypes_and_allowances_of_each_element(self, tmp_path: Path) -> None:
        x, w = torch.randn(3, 4, dtype=torch.float16), torch.randn(4, dtype=torch.float16)
        one = case(FAIL, 1, outputs=(output(shape=(4,), slot="grad1", at=(2,)),))
        call = 'torch.sum(torch.mul(tensors["x"], tensors["w"]), dim=-1, dtype=torch.float32)'
        allowed = torch.ones(4)
        given = {"call_source": call, "tensors": {"x": x, "w": w}, "requires_grad": ("x", "w")}
        ran = reproduce(write_reproducer(tmp_path, one, allowed=allowed, **given))
        assert ran.returncode == 0, ran.stdout + ran.stderr
        allowed[1] = 1e-9
        ran = reproduce(write_reproducer(tmp_path, one, allowed=allowed, **given))
        assert ran.returncode == 1, ran.stdout + ran.stderr
        assert "element [1]" in ran.stdout
        assert "grad1: torch.float16 [4]" in ran.stdout

    def test_complex_expanded_and_single_tensors_and_a_nan(self, tmp_path: Path) -> None:
        z = torch.randn(3, dtype=torch.complex64).expand(2, 3)
        one = case(FAIL, 2, outputs=(output(shape=(2, 3), at=(1, 2), allowed=1e-3),))
        path = write_reproducer(
            tmp_path, one, call_source='torch.mul(tensors["z"], tensors["s"])', tensors={"z": z, "s": torch.tensor(2.0)}
        )
        ran = reproduce(path)
        assert ran.returncode == 0, ran.stdout + ran.stderr
        one = case(FAIL, 3, outputs=(output(shape=(2,), at=(0,), allowed=math.inf),))
        x = torch.tensor([70000.0, 1.0])
        path = write_reproducer(tmp_path, one, call_source='torch.Tensor.half(tensors["x"])', tensors={"x": x})
        assert reproduce(path).returncode == 0  # Inf is what float16 has in the place of 70000
        path = write_reproducer(
            tmp_path, one, call_source='torch.sub(torch.square(tensors["x"]), torch.square(tensors["x"]))',
            tensors={"x": torch.tensor([1e30, 1.0])},
        )  # fmt: skip
        ran = reproduce(path)
        assert ran.returncode == 1, ran.stdout + ran.stderr
        assert "value nan, expected 0.0" in ran.stdout

    def test_a_call_that_fails_is_no_right_number(self, tmp_path: Path) -> None:
        path = write_reproducer(
            tmp_path, case(FAIL), call_source='torch.mm(tensors["x"], tensors["x"])', tensors={"x": torch.ones(3)}
        )
        ran = alone(path)
        assert ran.returncode == 2
        assert "RuntimeError" in ran.stderr

    @pytest.mark.parametrize(
        "call",
        [
            "__import__('os').system('x')",
            "torch.add(open('/etc/passwd'), 1)",
            'torch._C._x(tensors["x"])',
            'torch.Tensor.__class__.__subclasses__(tensors["x"])',
            'torch.add(tensors["y"], 1)',
            "torch.add(*tensors)",
            "torch.add([x for x in tensors])",
            "(lambda: 1)()",
            'torch.add(f"{1}")',
            "torch.add(1)\nimport os",
            "torch.add(1); 2",
            'torch.add(tensors["x"], \u00e9=1)',
            "1",
            "",
            "(" * 5000,
        ],
    )
    def test_nothing_but_literals_gets_into_the_code(self, tmp_path: Path, call: str) -> None:
        with pytest.raises(UsageError, match="expected one call such as"):
            write_reproducer(tmp_path, case(FAIL), call_source=call, tensors={"x": torch.ones(2)})
        assert not list(tmp_path.iterdir())

    def test_hostile_names_are_names(self, tmp_path: Path) -> None:
        bad = f'"""\nimport os; os.abort()\n"""\\\r\u2028{HOSTILE}/../../x'
        one = case(FAIL, name=bad, outputs=(output(at=(1,), shape=(2,), allowed=1.0),))
        call = f"torch.einsum({'i,i->i'!r}, tensors[{bad!r}], tensors[{'x'!r}])"
        path = write_reproducer(tmp_path, one, call_source=call, tensors={bad: torch.ones(2), "x": torch.ones(2)})
        assert path.parent == tmp_path
        assert path.read_bytes().isascii()
        ran = reproduce(path)
        assert ran.returncode == 0, ran.stderr
        assert ran.stdout.replace("\n", "").isprintable()
        assert (
            safe_name("../../etc/passwd") == "repro_etc_passwd_" + hashlib.sha256(b"../../etc/passwd").hexdigest()[:8]
        )
        assert safe_name("A") != safe_name("a")
        assert len(safe_name("x" * 10_000_000)) < 120

    def test_a_case_without_outputs_has_none(self, tmp_path: Path) -> None:
        with pytest.raises(UsageError, match="no output"):
            write_reproducer(tmp_path, case(CRASH), call_source="torch.ones(2)", tensors={})


class Page(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.tag = ""
        self.attributes: list[tuple[str, str | None]] = []
        self.inside: dict[str, str] = {}
        self.feed(text)

    def handle_starttag(self, tag, attrs) -> None:
        self.tags.append(tag)
        self.tag = tag
        self.attributes += attrs

    def handle_data(self, data: str) -> None:
        self.inside[self.tag] = self.inside.get(self.tag, "") + data

    def handle_endtag(self, tag: str) -> None:
        self.tag = ""


class TestPage:
    def test_the_verdict_comes_first_and_the_worst_element_has_numbers(self) -> None:
        text = precheck_page([*ALL[:6], case(FAIL, 6, reproducer="repro_gelu.py")], "GPT on npu:0")
        page = Page(text)
        assert page.inside["h1"].startswith("Wrong numbers: 1 of 3 judged cases failed")
        for said in ("1.25", "repro_gelu.py", "GPT on npu:0", "why not judged", "[3, 1]"):
            assert said in text
        assert page.tags.count("svg") == 2  # of the failed case and the one with a warning
        assert "✘</span> wrong</p>" in text
        assert page.tags.count("details") == 5
        assert ("aria-label", "5 at 0 ULP; 2 at 1 ULP; 1 at inf ULP") in page.attributes

    def test_it_asks_nobody_and_hostile_names_do_nothing(self) -> None:
        huge = "x" * 10_000_000
        bad = [
            case(verdict, name=HOSTILE, operator=HOSTILE, dtype=HOSTILE, shapes=huge, reason=HOSTILE + huge,
                 reproducer=HOSTILE, outputs=(output(reason=huge, dtype=HOSTILE, ulp_histogram={HOSTILE: 3, "1": 10**30}),))
            for verdict in (FAIL, CRASH, NOT_JUDGED, WARN)
        ]  # fmt: skip
        text = precheck_page(bad, HOSTILE + huge)
        text.encode()
        assert len(text) < 100_000
        assert "\u202e" not in text
        page = Page(text)
        assert not set(page.tags) & {"img", "iframe", "object", "embed", "base", "form"}
        assert not [name for name, _ in page.attributes if name.startswith("on") or name in ("src", "style", "srcdoc")]
        assert {value for name, value in page.attributes if name == "href"} == {"#cases", "data:,"}
        policy = next(value for name, value in page.attributes if name == "content" and "default-src" in value)
        for tag in ("script", "style"):
            digest = base64.b64encode(hashlib.sha256(page.inside[tag].encode()).digest()).decode()
            assert f"'sha256-{digest}'" in policy
        assert policy.startswith("default-src 'none'; ")
        assert "unsafe" not in policy

    def test_very_many_cases_make_a_page_that_opens(self) -> None:
        results = [case(PASS, n) for n in range(20_000)] + [case(FAIL, n) for n in range(500)]
        text = precheck_page(results, "many")
        assert len(text) < 4_000_000
        assert "20500 cases, the worst first; 3000 are on this page" in text
        assert "400 more are in the table" in text
        assert text.count("<tr>") == 3001
