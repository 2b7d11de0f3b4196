"""The house's floors: a file imports from its own layer's own part or from the layers above it, never from below."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import bitwitness

SOURCE = Path(bitwitness.__file__).parent

LAYERS = (
    ("vocabulary", ("errors", "site", "finding", "config")),
    ("numbers", ("numerics", "stats")),
    ("torch", ("tap", "replay", "ranks", "device")),
    ("storage", ("store",)),
    ("instruments", ("sense", "inject")),
    ("decision", ("judge", "respond")),
    ("face", ("asd", "guard", "demo", "cli")),
)
FLOOR = {part: number for number, (_, parts) in enumerate(LAYERS) for part in parts}
# asd is a face that only reaches the tap's collector; tap.capture describes what replay runs.
INSTRUMENTS = dict(LAYERS)["instruments"]
FILES = sorted(SOURCE.rglob("*.py"))


def part_of(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def imports(path: Path, *, top_level: bool = False) -> list[str]:
    tree = ast.parse(path.read_text())
    nodes = tree.body if top_level else ast.walk(tree)
    names: list[str] = []
    for node in nodes:
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.append(node.module)
    return names


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SOURCE)))
def test_a_file_imports_only_from_above(path: Path) -> None:
    part = part_of(path)
    if part in ("__init__", "__main__"):
        return
    assert part in FLOOR, f"{part} is on no layer; add it to LAYERS and to docs/architecture.md"
    for name in imports(path):
        if not name.startswith("bitwitness."):
            continue
        other = name.split(".")[1]
        assert FLOOR[other] <= FLOOR[part], f"{path.name} imports {name} from a layer below its own"
        if part in INSTRUMENTS:
            assert other == part or other not in INSTRUMENTS, f"instruments do not import one another: {name}"


def test_the_vocabulary_imports_no_torch() -> None:
    for path in FILES:
        if FLOOR.get(part_of(path)) == 0:
            assert not [name for name in imports(path) if name.split(".")[0] in ("torch", "numpy")], path


def test_only_the_torch_layer_touches_torchs_inner_names() -> None:
    for path in FILES:
        if part_of(path) in ("tap", "replay", "ranks", "device"):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and node.attr in ("_C", "_engine_run_backward", "_version"):
                pytest.fail(f"{path.name}:{node.lineno} reaches for torch's inner {node.attr}")


def test_every_file_has_one_idea_and_fits() -> None:
    for path in FILES:
        assert len(path.read_text().splitlines()) <= 400, f"{path} is too long"


def test_architecture_names_every_part() -> None:
    text = (SOURCE.parents[1] / "docs" / "architecture.md").read_text()
    for part in FLOOR:
        assert f"`{part}" in text, f"docs/architecture.md does not name {part}"
