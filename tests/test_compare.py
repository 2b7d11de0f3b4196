"""Two runs that differ in one thing: the operator that made the difference is named, and nothing where there is none."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from compare_zoo import CASES, Case, record
from extent import chosen
from torch import nn

import bitwitness as bw
from bitwitness import UsageError
from bitwitness.comparison.matching.renamed import Mapping, proposed, read_map
from bitwitness.comparison.report import Report
from bitwitness.store.opening import open_source
from bitwitness.tap.modules import ModuleTracker
from bitwitness.tap.operators import OpCall, OperatorTap

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
PLANTED_IN_ALL_MODES = [(n, d, mode) for n, ds in PLANTED.items() for d in ds for mode in MODES]
# All of one architecture in statistics of everything; of the other modes every fourth difference, in an architecture by
# turns. `make campaign` goes through all of them.
BY_TURNS = [
    (names[(i + turn) % len(names)], difference, mode)
    for turn, mode in enumerate(MODES[1:])
    for i, difference in enumerate(sorted({d for ds in PLANTED.values() for d in ds}))
    if i % 4 == turn and (names := [n for n, ds in PLANTED.items() if difference in ds])
]
SHORT = [case for case in PLANTED_IN_ALL_MODES if (case[0] == "gpt" and case[2] == MODES[0]) or case in BY_TURNS]
CHOSEN = chosen(PLANTED_IN_ALL_MODES, SHORT)


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
    a = recorded(folder, clean, name, mode)
    b = record(folder / "b", CASES[name], difference, level=level, content=content, **other)
    return bw.compare(a, b)


def recorded(folder: Path, clean: Clean, name: str, mode: tuple[str, str]) -> Path:
    """Return a recording of a model without a difference; ``folder``: where it is made the first time."""
    level, content = mode
    if (name, *mode) not in clean:
        clean[name, level, content] = record(folder / "a", CASES[name], level=level, content=content)
    return clean[name, level, content]


def expected(name: str, difference: str) -> tuple[str, tuple[str, ...] | None]:
    if difference == "buffer":
        return BUFFER[name], None
    if difference == "swap":
        return SWAPPED.get(name, "blocks.1.attn.q"), None
    return ANSWERS[difference]


@pytest.mark.parametrize(
    ("name", "difference", "mode"), CHOSEN, ids=lambda part: "-".join(part) if isinstance(part, tuple) else part
)
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


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        *((name, MODES[0]) for name in chosen(PLANTED, ["llama", "vit"])),
        *((name, MODES[3]) for name in chosen(PLANTED, ["conv"])),
    ],
    ids=str,
)
def test_reordering_is_no_error(tmp_path: Path, clean: Clean, name: str, mode: tuple[str, str]) -> None:
    same = run(tmp_path, clean, name, mode, None)
    assert same.first is None
    assert same.conclusion == "no difference: everything that was compared is equal"
    other = run(tmp_path, clean, name, mode, None, threads=2)
    assert other.first is None, other.conclusion
    assert other.differing == 0 or "reordering-level differences" in other.conclusion


def planted(folder: Path, name: str, change: Callable[[nn.Module], None] | None, **settings: Any) -> Path:
    """Record two steps of a model that was changed first."""
    case = CASES[name]

    def make() -> nn.Module:
        model = case.make()
        with torch.no_grad():
            if change is not None:
                change(model)
        return model

    return record(folder, replace(case, make=make), **settings)


def larger_row(model: Any) -> None:
    model.blocks[2].fc1.weight[7] *= 1.5


@pytest.mark.parametrize(
    ("mode", "threads"),
    [*((mode, 1) for mode in chosen(MODES, [])), *((mode, 2) for mode in chosen(MODES, MODES[:4]))],
    ids=str,
)
def test_one_row_of_a_weight(tmp_path: Path, clean: Clean, mode: tuple[str, str], threads: int) -> None:
    level, content = mode
    a = recorded(tmp_path, clean, "vit", mode)
    b = planted(tmp_path / "b", "vit", larger_row, level=level, content=content, threads=threads)
    report = bw.compare(a, b)
    assert report.first is not None
    assert report.first.site == f"blocks.2.fc1/{'Linear' if level == 'modules' else 'addmm'}#0:forward.out0"
    assert "its blocks.2.fc1.weight differs" in report.first.text


def test_hashes_with_statistics_tell_reordering_from_errors(tmp_path: Path) -> None:
    a = record(tmp_path / "a", CASES["vit"], content="hash")
    b = record(tmp_path / "b", CASES["vit"], content="hash", threads=2)
    report = bw.compare(a, b)
    assert report.first is None
    assert report.differing > 100


@pytest.mark.parametrize("factor", [1.0, 1.01])
def test_one_operator_more_is_told_and_shifts_nothing(tmp_path: Path, clean: Clean, factor: float) -> None:
    def more(model: Any) -> None:
        head = model.ln
        head.register_forward_hook(lambda _module, _args, out: out * factor)

    a, b = recorded(tmp_path, clean, "vit", MODES[0]), planted(tmp_path / "b", "vit", more)
    report = bw.compare(a, b)
    assert report.only_a == []
    assert [site for site in report.only_b if ":forward" in site] == [
        "./mul#0:forward"
    ]  # torch calls a module's own hooks when it has left it
    if factor == 1.0:
        assert report.first is None
    else:
        assert report.first is not None
        assert (report.first.site, report.first.side) == ("./mul#0:forward.out0", "b")


def test_renamed_modules_are_matched_and_the_map_can_be_written_and_read(tmp_path: Path, clean: Clean) -> None:
    class Wrapper(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.core = inner

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.core(x)

    a = recorded(tmp_path, clean, "vit", MODES[0])
    case = CASES["vit"]
    b = record(tmp_path / "b", replace(case, make=lambda: Wrapper(case.make())))
    found = proposed(open_source(a), open_source(b))
    assert found["blocks.1.fc1"] == "core.blocks.1.fc1"
    report = bw.compare(a, b, modules=found)
    assert report.first is None
    assert report.rows > 1000
    path = tmp_path / "map.json"
    path.write_text(json.dumps({"blocks.*": "core.blocks.*", "ln": "core.ln"}))
    assert Mapping(read_map(path)).get("blocks.1.fc1") == "core.blocks.1.fc1"
    for wrong, said in (("[]", "expected an object of texts"), ("{", "is damaged"), ('{"a": 1}', "expected an object")):
        path.write_text(wrong)
        with pytest.raises(UsageError, match=said):
            read_map(path)


def test_a_fused_kernel_against_its_parts(tmp_path: Path) -> None:
    class Net(nn.Module):
        def __init__(self, *, fused: bool) -> None:
            super().__init__()
            self.q, self.fused = nn.Linear(16, 16), fused

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q = self.q(x)
            if self.fused:
                return F.scaled_dot_product_attention(q, x, x)
            return (q @ x.mT * 0.25).softmax(-1) @ x

    def loss(model: nn.Module, generator: torch.Generator) -> torch.Tensor:
        return model(torch.randn(2, 1, 8, 16, generator=generator)).square().mean()

    runs = [
        record(tmp_path / str(fused), Case(lambda fused=fused: Net(fused=fused), loss))
        for fused in (False, True)  # type: ignore[misc]
    ]
    report = bw.compare(runs[0], runs[1])
    assert report.first is None, report.conclusion
    assert any(len(parts) > 3 and "attention" in fused[0] for parts, fused in report.groups)


@pytest.mark.parametrize("threads", chosen([1, 2], [2]))
def test_an_operator_that_computes_wrongly_is_convicted_by_float64(tmp_path: Path, threads: int) -> None:
    """A device that returns one element of one product wrong, too small a fault for statistics."""
    a = record(tmp_path / "a", CASES["encdec"], content="tensors", threads=threads)

    def wrong(call: OpCall) -> Any:
        if (call.module, call.op, call.phase, call.call) == ("blocks.1.fc2", "addmm", "forward", 0):
            call.result.view(-1)[5] += 0.01

    with OperatorTap(ModuleTracker(), wrong):
        b = record(tmp_path / "b", CASES["encdec"], content="tensors")
    report = bw.compare(a, b)
    assert report.first is not None
    assert report.first.site == "blocks.1.fc2/addmm#0:forward.out0"
    assert "run B computed it wrongly" in report.first.text
    assert "at element 5" in report.first.text
    assert "run A is within rounding" in report.first.text


class OfParts(nn.Linear):
    """A linear layer whose backward makes the weight's gradient before the input's, where torch's own makes it after."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.mm(x, self.weight.t()) + self.bias


@pytest.mark.parametrize("content", ["stats", "tensors"])
def test_a_backward_in_another_order_is_no_difference(tmp_path: Path, content: str) -> None:
    def run_of(linear: type[nn.Linear]) -> Path:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.LayerNorm(32), linear(32, 4))
        with bw.Recorder(net, out=tmp_path / linear.__name__, content=content) as recorder:
            for _ in range(2):
                F.cross_entropy(net(torch.randn(8, 16)), torch.arange(8) % 4).backward()
        return recorder.folder

    report = bw.compare(run_of(nn.Linear), run_of(OfParts))
    assert report.first is None
    assert report.conclusion == "no difference: everything that was compared is equal"
    assert (report.only_a, report.only_b) == ([], [])


def test_runs_that_share_no_step_are_an_error(tmp_path: Path) -> None:
    a = record(tmp_path / "a", CASES["conv"], steps=1)
    b = record(tmp_path / "b", CASES["conv"], steps=2, level="modules")
    with pytest.raises(UsageError, match=r"has steps 0, .* has steps 0, 1; expected one in common"):
        bw.compare(a, b, steps=[1])
    with pytest.raises(UsageError, match="expected one in common"):
        bw.compare(a, b, ranks=[7])
