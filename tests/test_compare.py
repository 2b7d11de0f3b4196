"""Two runs that differ in one thing: the operator that made the difference is named, and nothing where there is none."""

from __future__ import annotations

from pathlib import Path

import pytest
from compare_zoo import CASES, record

from bitwitness.compare.runs import Report, compare
from bitwitness.store.opening import open_source

# Which module, and which operator in it, is the first that differs; None: any operator of it.
ANSWERS = {
    "epsilon": ("blocks.1.ln2", None),
    "mask": ("blocks.1.attn", ("masked_fill", "eq", "Attention")),
    "scale": ("blocks.1.attn", ("mul", "Attention")),
    "seed": ("blocks.0.attn.drop", None),
    "bf16": ("blocks.1.fc2", ("mm", "addmm", "Linear")),
    "gelu": ("blocks.1.act", None),
    "residual": ("blocks.1", ("add", "Block", "LlamaBlock", "Residual")),
    "rate": ("blocks.1.", ("AdamW",)),
}
BUFFER = {"llama": "rope", "conv": "blocks.1.ln1"}
SWAPPED = {"conv": "blocks.1.conv1"}
PLANTED = {
    "gpt": ("epsilon", "mask", "scale", "seed", "bf16", "gelu", "residual", "rate", "swap"),
    "llama": ("epsilon", "mask", "scale", "bf16", "buffer", "residual", "rate", "swap"),
    "vit": ("epsilon", "scale", "bf16", "gelu", "residual", "rate", "swap"),
    "conv": ("epsilon", "buffer", "residual", "rate", "swap"),
    "encdec": ("epsilon", "mask", "scale", "bf16", "gelu", "residual", "rate", "swap"),
}
MODES = [("mix", "stats"), ("ops", "stats"), ("modules", "stats"), ("mix", "tensors"), ("mix", "hash")]


Clean = dict[tuple[str, str, str], Path]


@pytest.fixture(scope="module")
def clean() -> Clean:
    """Recordings without a difference, made when they are first asked for."""
    return {}


def run(
    folder: Path,
    clean: dict[tuple[str, str, str], Path],
    name: str,
    mode: tuple[str, str],
    difference: str | None,
    **other: int,
) -> Report:
    level, content = mode
    if (name, *mode) not in clean:
        clean[name, level, content] = record(folder / "a", CASES[name], level=level, content=content)
    b = record(folder / "b", CASES[name], difference, level=level, content=content, **other)
    return compare(open_source(clean[name, level, content]), open_source(b))


def expected(name: str, difference: str) -> tuple[str, tuple[str, ...] | None]:
    if difference == "buffer":
        return BUFFER[name], None
    if difference == "swap":
        return SWAPPED.get(name, "blocks.1.attn.q"), None
    return ANSWERS[difference]


@pytest.mark.parametrize("mode", MODES, ids="-".join)
@pytest.mark.parametrize(("name", "difference"), [(n, d) for n, ds in PLANTED.items() for d in ds])
def test_the_first_wrong_operator_is_named(
    tmp_path: Path, clean: Clean, name: str, difference: str, mode: tuple[str, str]
) -> None:
    report = run(tmp_path, clean, name, mode, difference)
    assert report.first is not None, report.conclusion
    module, _, rest = report.first.site.partition("/")
    wanted, operators = expected(name, difference)
    assert module.startswith(wanted) if wanted.endswith(".") else module == wanted, report.conclusion
    assert operators is None or rest.partition("#")[0] in operators, report.conclusion
    assert report.first.step == 0


@pytest.mark.parametrize("mode", MODES[:4], ids="-".join)
@pytest.mark.parametrize("name", PLANTED)
def test_reordering_is_no_error(tmp_path: Path, clean: Clean, name: str, mode: tuple[str, str]) -> None:
    same = run(tmp_path, clean, name, mode, None)
    assert same.first is None
    assert same.conclusion == "no difference: everything that was compared is equal"
    other = run(tmp_path, clean, name, mode, None, threads=2)
    assert other.first is None, other.conclusion
    assert other.differing == 0 or "reordering-level differences" in other.conclusion
