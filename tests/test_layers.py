"""The house's floors: a file imports from its own floor or from those above it, never from below."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import bitwitness

SOURCE = Path(bitwitness.__file__).parent
FILES = sorted(SOURCE.rglob("*.py"))

# docs/architecture.md shows the same table.
LAYERS = {
    "vocabulary": ("version", "errors", "files", "site", "finding", "config"),
    "numbers": ("numerics", "stats"),
    "torch": ("tap", "capture", "replay", "ranks", "liveness", "device"),
    "storage": ("store", "checkpoint"),
    "session": ("session",),
    "reference": ("oracle", "trial"),
    "instruments": ("sense", "nonfinite", "record", "monitor", "comparison", "inject", "precheck", "stress"),
    "decision": ("judge", "respond"),
    "face": ("guard", "ascend", "testing", "demo", "report", "view", "launch", "cli"),
}
FLOOR = {part: number for number, parts in enumerate(LAYERS.values()) for part in parts}

# What begins with an underscore in torch and is used outside the torch layer, and why.
INNER_NAMES = {
    ("stats", "torch._foreach_norm"): "all norms in one fused call; there is no public one",
    ("stats", "torch._foreach_max"): "same",
    ("stats", "torch._foreach_copy_"): "same",
    ("stats", "torch._foreach_sub_"): "same",
    ("inject", "torch.ops._c10d_functional"): "an operator's registered name",
}


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def part_of(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def name_of(path: Path) -> str:
    parts = path.relative_to(SOURCE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(nodes: Iterator[ast.AST] | list[ast.stmt]) -> list[str]:
    """Return the full names that are imported: ``a.b`` for ``import a.b``, ``a.b.c`` for ``from a.b import c``."""
    names: list[str] = []
    for node in nodes:
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names += [f"{'.' * node.level}{node.module or ''}.{alias.name}" for alias in node.names]
    return names


def inner_names(tree: ast.AST) -> Iterator[str]:
    """Yield every name of torch's with a part that begins with an underscore, as imported or reached by attributes."""
    known = {"torch": "torch"}  # what a file calls it, and its full name
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            for alias, full in zip(node.names, imports([node]), strict=True):
                if full.startswith("torch."):
                    yield from [full] if is_inner(full) else []
                    if alias.asname or isinstance(node, ast.ImportFrom):
                        known[alias.asname or alias.name] = full
    inside = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and id(node) not in inside:
            root, *rest = chain(node)
            if root in known and is_inner(".".join(rest)):
                yield ".".join([known[root], *rest])


def chain(node: ast.expr) -> list[str]:
    """Return ``["a", "b", "c"]`` for ``a.b.c``; the first is empty where it is no plain name."""
    if isinstance(node, ast.Attribute):
        return [*chain(node.value), node.attr]
    return [node.id if isinstance(node, ast.Name) else ""]


def is_inner(name: str) -> bool:
    return re.search(r"(^|\.)_(?!_)", name) is not None


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SOURCE)))
def test_a_file_imports_only_from_above(path: Path) -> None:
    part = part_of(path)
    if part in ("__init__", "__main__"):
        return
    assert part in FLOOR, f"{part} is on no floor; add it to LAYERS and to docs/architecture.md"
    for name in imports(ast.walk(tree(path))):
        assert not name.startswith("."), f"{path.name} imports {name}; write the whole name"
        package, other, *_ = [*name.split("."), ""]
        if package != "bitwitness":
            continue
        assert other in FLOOR, f"{path.name} imports {name} from the package's face; import it from where it lives"
        assert FLOOR[other] <= FLOOR[part], f"{path.name} imports {name} from a floor below its own"
        if part in LAYERS["instruments"]:
            assert other == part or other not in LAYERS["instruments"], f"instruments do not import one another: {name}"


def test_no_file_imports_itself_over_others() -> None:
    graph: dict[str, set[str]] = {name_of(path): set() for path in FILES}
    for path in FILES:
        for name in imports(tree(path).body):
            target = name if name in graph else name.rpartition(".")[0]
            if target in graph and target != name_of(path):
                graph[name_of(path)].add(target)
    TopologicalSorter(graph).prepare()  # raises CycleError, which names the cycle


def test_no_two_parts_need_each_other() -> None:
    graph: dict[str, set[str]] = {part: set() for part in FLOOR}
    for path in FILES:
        for name in imports(ast.walk(tree(path))):  # those inside functions, too
            package, other, *_ = [*name.split("."), ""]
            if package == "bitwitness" and other != part_of(path) and part_of(path) in FLOOR:
                graph[part_of(path)].add(other)
    TopologicalSorter(graph).prepare()


def test_the_vocabulary_imports_no_torch() -> None:
    for path in FILES:
        if part_of(path) in LAYERS["vocabulary"]:
            heavy = [name for name in imports(ast.walk(tree(path))) if name.split(".")[0] in ("torch", "numpy")]
            assert not heavy, path


def test_only_the_torch_layer_touches_torchs_inner_names() -> None:
    seen = {
        (part_of(path), name)
        for path in FILES
        if part_of(path) not in LAYERS["torch"]
        for name in inner_names(tree(path))
    }
    extra = [
        pair for pair in seen if not any(pair[0] == part and pair[1].startswith(name) for part, name in INNER_NAMES)
    ]
    assert not extra, "outside the torch layer; reach them through tap, or give the reason in INNER_NAMES"
    stale = [known for known in INNER_NAMES if not any(known[0] == p and n.startswith(known[1]) for p, n in seen)]
    assert not stale, "no longer used: take them out of INNER_NAMES"


@pytest.mark.parametrize(
    ("code", "names"),
    [
        ("import torch\ntorch._C._x(1)", {"torch._C._x"}),
        ("import torch.nn as nn\nnn._a", {"torch.nn._a"}),
        ("from torch.utils import _pytree as p\np.tree_map", {"torch.utils._pytree"}),
        ("import torch._dynamo", {"torch._dynamo"}),
        ("import torch\nx._base\ntorch.Tensor.__add__\ntorch.nn.Linear", set()),
    ],
)
def test_inner_names_are_found_however_they_are_written(code: str, names: set[str]) -> None:
    assert set(inner_names(ast.parse(code))) == names


def test_every_file_has_one_idea_and_fits() -> None:
    for path in FILES:
        assert len(path.read_text().splitlines()) <= 300, f"{path} is too long"


def test_the_architecture_shows_this_table() -> None:
    text = (SOURCE.parents[1] / "docs" / "architecture.md").read_text()
    table = text.partition("| layer |")[2].partition("\n\n")[0].splitlines()[2:]
    rows = [[cell.strip() for cell in row.strip("|").split("|")] for row in table]
    assert {row[0]: tuple(re.findall(r"`(\w+)`", row[1])) for row in rows} == LAYERS
