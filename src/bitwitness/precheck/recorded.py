"""Cases of a recording of ours: every operator call, forward and backward, those alike once."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any

import torch

from bitwitness.errors import UsageError
from bitwitness.oracle.defined import defined_count
from bitwitness.oracle.eligible import functional_operator
from bitwitness.oracle.recorded import argument, arguments
from bitwitness.precheck.case import Case, Damaged, NotJudged, Prepared, counted, first_floating, shapes_text, too_large
from bitwitness.precheck.literals import call_source
from bitwitness.precheck.made import made
from bitwitness.store.opening import open_source
from bitwitness.store.source import Source
from bitwitness.trial.call import Call

KIND = "recorded"
_SEEN = ("nan", "pos_inf", "neg_inf", "zeros", "min", "max", "mean", "l2")


def recorded_cases(source: Source, *, site: str = "", alike: bool = True) -> Iterator[Case]:
    """Yield the cases of a recording, in the order of execution.

    Parameters
    ----------
    source
        A recording of ours.
    site
        Only the call of this printed site (without its slot); all by default.
    alike
        Calls of one operator with inputs of the same dtypes, shapes and layouts, and the same other arguments, are one case:
        the first of them.

    """

    def cases() -> Iterator[tuple[str, Case]]:
        for rank, step in ((r, s) for r in source.ranks() for s in source.steps(r)):
            for rows in _calls(source, rank, step):
                case = _case(source.path, rank, step, rows)
                if case.name.startswith(site):
                    yield _key(rows) if alike else f"{rank} {step} {rows[0]['node']}", case

    yield from counted(cases())
    for number, problem in enumerate(source.problems):
        yield Case(
            f"a part of {source.path}#{number}", "a part of the recording", "", "", refused=problem, damaged=True
        )


def _calls(source: Source, rank: int, step: int) -> Iterator[list[dict[str, Any]]]:
    """Yield the rows of each operator call."""
    rows: list[dict[str, Any]] = []
    for row in source.table(rank, step).to_pylist():
        if rows and row["node"] != rows[0]["node"]:
            yield rows
            rows = []
        if row["kind"] == "op":
            rows.append(row)
    if rows:
        yield rows


def _case(run: str, rank: int, step: int, rows: list[dict[str, Any]]) -> Case:
    first = rows[0]
    inputs = [r for r in rows if r["slot"].startswith("in")]
    text = first["args"] or ""
    name = f"{first['module']}/{first['op']}#{first['call']}:{first['phase']}"
    shown = name + (f" rank {rank}" if rank else "") + (f" step {step}" if step else "")
    operator = str(arguments(text).get("f", "")) or str(first["op"])
    made_of = {
        "kind": KIND,
        "run": run,
        "rank": rank,
        "args": text,
        "inputs": [_value(r) for r in inputs],
        "outputs": {r["slot"]: _value(r) for r in rows if r["slot"].startswith("out")},
    }
    dtype = first_floating(r["dtype"] for r in (*inputs, *rows))
    shapes = shapes_text(r["shape"] for r in inputs)
    return Case(shown, operator, dtype, shapes, made_of, refused=_refusal(text, inputs))


def _value(row: Mapping[str, Any]) -> dict[str, Any]:
    kept = {name: row[name] for name in ("dtype", "shape", "layout", "tensor", *_SEEN) if row.get(name) is not None}
    return {**kept, "shape": list(row["shape"])}


def _refusal(text: str, inputs: list[dict[str, Any]]) -> str:
    if not text:
        return "its arguments were not recorded: they are at the level of operators (--level mix or ops)"
    if _operator(text) is None:
        return "a recording may not have it run again: it draws, reads files, changes its arguments, or is not torch's"
    if large := next(filter(None, (too_large(r["shape"]) for r in inputs)), ""):
        return large
    if all(r["tensor"] is None and r["count"] is None for r in inputs) and inputs:
        return "neither its inputs nor their statistics were recorded (--content stats or tensors)"
    return ""


def _operator(text: str) -> Any:
    """Return the operator that an args column names, in its form that changes nothing."""
    call = arguments(text)
    name = str(call.get("f", ""))
    args, kwargs = call.get("a", []), call.get("k", {})
    if not isinstance(args, list) or not isinstance(kwargs, dict):
        return None
    found = functional_operator(name, args, kwargs, casts=True)
    if found is not None or name.count(".") != 2:
        return found
    space, bare, overload = name.split(".")
    inner = f"{space}.{bare.removesuffix('_')}.{overload}"
    return functional_operator(inner, args, kwargs) if bare.endswith("_") else None


def _key(rows: list[dict[str, Any]]) -> str:
    seen = [(r["dtype"], list(r["shape"]), r["layout"]) for r in rows if r["slot"].startswith("in")]
    return json.dumps([rows[0]["args"], rows[0]["op"], seen])


def prepare(made_of: Mapping[str, Any], device: torch.device) -> Prepared:
    """Return a recorded call with its tensors: those that were kept, else ones like them.

    Raises `NotJudged` where an argument was not written whole.
    """
    generator = torch.Generator().manual_seed(0)
    inputs = [_tensor(made_of, value, generator).to(device) for value in made_of["inputs"]]
    func = _operator(made_of["args"])
    call = arguments(made_of["args"])
    try:
        args = [argument(value, inputs, device) for value in call.get("a", [])]
        kwargs = {name: argument(value, inputs, device) for name, value in call.get("k", {}).items()}
    except IndexError as error:
        raise NotJudged("an argument of it was not recorded: it is no tensor that can be kept") from error
    except (ValueError, AttributeError) as error:
        raise NotJudged(f"an argument of it was not recorded whole: {error}") from error
    source, tensors = call_source(f"torch.ops.{func}", args, kwargs)
    name, returned = func.overloadpacket.__name__, len(func._schema.returns)
    count = defined_count(name, len(made_of["outputs"]))
    called = func if defined_count(name, returned) == returned else lambda *a, **k: func(*a, **k)[:count]
    kept = {}
    if all(value.get("tensor") for value in made_of["inputs"]):  # else the results are not those of these inputs
        there = [(slot, value) for slot, value in made_of["outputs"].items() if value.get("tensor")]
        kept = {slot: _kept(made_of, value) for slot, value in there[:count]}
    return Prepared(Call(called, tuple(args), kwargs, gradients=False), kept, source, tensors)


def _tensor(made_of: Mapping[str, Any], value: Mapping[str, Any], generator: torch.Generator) -> torch.Tensor:
    if value.get("tensor"):
        return _kept(made_of, value)
    layout = [int(n) for n in value["layout"].split(",")] if value.get("layout") else None
    return made(getattr(torch, value["dtype"]), value["shape"], layout, value, generator)


def _kept(made_of: Mapping[str, Any], value: Mapping[str, Any]) -> torch.Tensor:
    try:
        return _opened(made_of["run"]).tensor(
            made_of["rank"], value["tensor"], value["dtype"], tuple(value["shape"]), value.get("layout")
        )
    except UsageError as error:
        raise Damaged(f"a kept value cannot be read: {error}") from error


@lru_cache(maxsize=2)
def _opened(run: str) -> Source:
    return open_source(run)
