"""What a plain machine needs to build, check and test the project is pinned, and said once."""

from __future__ import annotations

import os
import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]


def names(requirements: list[str]) -> set[str]:
    return {re.split(r"[^\w.-]", line, maxsplit=1)[0].lower().replace("_", "-") for line in requirements}


def test_every_requirement_is_pinned_exactly_and_without_a_builds_own_tag() -> None:
    pins = (ROOT / "constraints.txt").read_text().split()
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+", pin) for pin in pins)
    assert pins == sorted(pins, key=lambda pin: pin.lower().partition("==")[0].replace("_", "-"))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert "torch==2.13.0" in pins
    assert names(project["project"]["dependencies"]) <= names(pins)
    assert names(project["build-system"]["requires"]) <= names(pins)


def test_the_makefile_installs_what_the_development_group_names() -> None:
    group = tomllib.loads((ROOT / "pyproject.toml").read_text())["dependency-groups"]["dev"]
    wanted = names((ROOT / "requirements-dev.txt").read_text().split())
    assert names(group) <= wanted <= names((ROOT / "constraints.txt").read_text().split())


def test_the_wheel_holds_what_a_report_is_made_of() -> None:
    from hatchling.builders.wheel import WheelBuilder

    builder = WheelBuilder(str(ROOT))
    packed = {file.distribution_path for file in builder.recurse_included_files()}
    folder = ROOT / "src" / "bitwitness" / "report"
    made_of = [path for path in folder.rglob("*") if path.is_file() and path.suffix != ".pyc"]
    assert {f"bitwitness/report/{path.relative_to(folder)}" for path in made_of} <= packed
    names = {path.name for path in made_of}
    assert {
        "echarts.min.js",
        "echarts.LICENSE",
        "echarts.NOTICE",
        "echarts.LICENSE-d3",
        "dagre.min.js",
        "dagre.LICENSE",
    } <= names


def test_ci_runs_the_tests_as_anybody_would() -> None:
    run = ROOT / ".ci" / "run"
    assert os.access(run, os.X_OK)
    assert run.read_text().splitlines()[-1] == "make test"
