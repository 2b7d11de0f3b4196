"""The evidence of a verdict or a finding as small tables, which every form of the report shows in its own way."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from bitwitness.finding import Finding, Verdict, to_jsonable
from bitwitness.report.clean import clean, mapping, name, number, text
from bitwitness.store.covered import tables_of

_SUSPICIONS = 5  # of one rank: the strongest come first
_COLUMNS = 12  # of a table of steps
_RANKS = 64  # rows of a table of ranks
_KNOWN = frozenset({
    "whose", "parameter", "l2_by_execution", "hash_by_execution", "ranks", "operator", "checksum", "suspicions", "alert",
    "residual", "threshold", "invariant", "inputs", "outputs", "reaches", "line", "tensors", "suspected_by",
    "wrong_executions", "reason", "injected", "last_modules", "steps", "series", "also", "also_count",
})  # fmt: skip
"""Fields that have a table of their own, or say the same as one that has."""


@dataclass(slots=True)
class Block:
    """A table of evidence.

    Attributes
    ----------
    title, note
        What it is of; what it tells, in a sentence.
    columns, rows
        All as texts.
    marked
        Rows that are the wrong ones: they bear a sign, and not a colour alone.

    """

    title: str
    note: str
    columns: list[str]
    rows: list[list[str]]
    marked: list[int] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """Return it ready for JSON."""
        return asdict(self)


def blocks_of(event: Verdict | Finding) -> list[Block]:
    """Return what an event's evidence holds, the strongest proof first."""
    evidence = mapping(clean(to_jsonable(event.evidence)))
    makers = (_executions, _ranks, _operator, _checksum, _values, _suspicions, _steps, _rest)
    blocks = [block for maker in makers for block in maker(evidence)]
    if isinstance(event, Verdict) and event.devices:
        rows = [[f"{name(d.kind)}:{d.index}", name(d.uuid), name(d.host)] for d in event.devices[:_RANKS]]
        blocks.append(Block("Device", "What computed wrongly.", ["device", "identity", "host"], rows))
    return blocks


def coverage_blocks(table: Mapping[str, Any]) -> list[Block]:
    """Return what a table of coverage says, as the terminal shows it."""
    try:
        tables = tables_of(table)
    except (AttributeError, KeyError, TypeError, ValueError):  # of another shape than what is written here
        return []
    return [
        Block(one.title, text(one.note), one.columns, [[text(cell, 300) for cell in row] for row in one.rows])
        for one in tables
    ]


def _executions(evidence: Mapping[str, Any]) -> Iterator[Block]:
    """Each execution's bits side by side: equal bits have equal letters."""
    sizes, hashes = mapping(evidence.get("l2_by_execution")), mapping(evidence.get("hash_by_execution"))
    if not sizes and not hashes:
        return
    letters: dict[str, str] = {}
    rows: list[list[str]] = []
    marked: list[int] = []
    wrong = _wrong_executions(evidence)
    for execution in dict.fromkeys([*sizes, *hashes]):
        bits = str(hashes.get(execution, "?"))
        letter = letters.setdefault(bits, chr(ord("A") + min(len(letters), 25)))
        if execution in wrong:
            marked.append(len(rows))
        rows.append([name(execution), number(sizes.get(execution)), name(bits), letter])
    note = (
        f"Gradient of {evidence.get('parameter', '?')} in {evidence.get('whose', 'this step')}. The same step was run again: "
        "replay is on the same device, elsewhere on another one. Results with the same letter are equal in every bit."
    )
    yield Block("The same computation, run again", note, ["execution", "L2 norm", "bits", "result"], rows, marked)


def _wrong_executions(evidence: Mapping[str, Any]) -> set[str]:
    whose = f" of {evidence.get('whose')}"
    told = [
        one for items in mapping(evidence.get("wrong_executions")).values() if isinstance(items, list) for one in items
    ]
    return {str(one).removesuffix(whose) for one in told if str(one).endswith(whose)}


def _ranks(evidence: Mapping[str, Any]) -> Iterator[Block]:
    """Who agrees with the training's own result, rank by rank."""
    ranks = evidence.get("ranks")
    if not isinstance(ranks, list) or not ranks or not all(isinstance(row, Mapping) for row in ranks):
        return
    keys = [key for key in dict.fromkeys(key for row in ranks for key in row) if key.startswith("training =")]
    if not keys:
        return
    rows = [[f"rank {rank}", *(name(row.get(key, "")) for key in keys)] for rank, row in enumerate(ranks[:_RANKS])]
    wrong = mapping(evidence.get("wrong_executions"))
    marked = [rank for rank in range(len(rows)) if str(rank) in wrong]
    note = (
        "Is each execution equal to what the training itself computed? equal: in every bit; far: by more than rounding."
    )
    yield Block("Rank by rank", note, ["step of", *(key.removeprefix("training = ") for key in keys)], rows, marked)


def _operator(evidence: Mapping[str, Any]) -> Iterator[Block]:
    """The named operator: what each device computed, and what float64 says."""
    operator = mapping(evidence.get("operator"))
    if not operator:
        return
    rows: list[list[str]] = []
    marked: list[int] = []
    for who, found in operator.items():
        if not isinstance(found, Mapping) or not found.get("comparable"):
            continue
        error, allowed = found.get("error"), found.get("allowed")
        if not (isinstance(error, int | float) and isinstance(allowed, int | float) and error <= allowed):
            marked.append(len(rows))
        numbers = [number(found.get(key)) for key in ("value", "expected", "error", "allowed")]
        rows.append([name(who), *numbers])
    note = f"{operator.get('site', '?')}" + (f", called at {operator['line']}" if operator.get("line") else "") + "."
    if rows:
        note += " The worst element, beside float64's answer from the same inputs."
    yield Block(
        "The operator",
        text(note),
        ["on", "it computed", "float64 says", "error of the whole", "error allowed"],
        rows,
        marked,
    )


def _checksum(evidence: Mapping[str, Any]) -> Iterator[Block]:
    """The identity that a product must satisfy, and by how much it does not."""
    check = mapping(evidence.get("checksum")) or (evidence if {"residual", "threshold"} <= evidence.keys() else {})
    if not check:
        return
    residual, threshold = check.get("residual"), check.get("threshold")
    times = ""
    if isinstance(residual, int | float) and isinstance(threshold, int | float) and threshold > 0:
        times = f"{residual / threshold:.3g} times"
    note = f"The identity {check.get('invariant', 'of this operator')} must hold within rounding at {check.get('site', '?')}."
    rows = [[number(residual), number(threshold), times or "more than"]]
    yield Block("Checksum", text(note), ["off by", "rounding explains", "that is"], rows, [0])


def _values(evidence: Mapping[str, Any]) -> Iterator[Block]:
    """What an operator that made NaN or Inf was given, and what it made."""
    rows: list[list[str]] = []
    marked: list[int] = []
    for key in ("inputs", "outputs"):
        for value in evidence.get(key) or () if isinstance(evidence.get(key), list) else ():
            found = mapping(value)
            if found.get("nan") or found.get("inf"):
                marked.append(len(rows))
            told = [name(found.get("slot")), name(found.get("dtype")), name(found.get("shape"))]
            rows.append(told + [number(found.get(one)) for one in ("min", "max", "nan", "inf", "count")])
    if not rows:
        return
    columns = ["value", "dtype", "shape", "least", "largest", "NaN", "Inf", "elements"]
    line = f" Its line: {evidence['line']}." if evidence.get("line") else ""
    yield Block(
        "What went in and what came out", text(f"The operator that made the first.{line}"), columns, rows, marked
    )
    reaches = evidence.get("reaches")
    if isinstance(reaches, list) and reaches:
        yield Block("What it reaches", "", ["value"], [[name(one)] for one in reaches[:20]])


def _suspicions(evidence: Mapping[str, Any]) -> Iterator[Block]:
    """What made the guard ask at all."""
    rows: list[list[str]] = []
    for rank, items in mapping(evidence.get("suspicions")).items():
        for item in items[:_SUSPICIONS] if isinstance(items, list) else ():
            found = mapping(item)
            rows.append([name(rank), name(found.get("sensor")), text(found.get("message", ""), 400)])
    if rows:
        yield Block("What was sensed first", "Suspicions, which are no proof.", ["rank", "sensor", "it said"], rows)


def _steps(evidence: Mapping[str, Any]) -> Iterator[Block]:
    """What a monitor saw of the last steps, and of what else moved."""
    steps = evidence.get("steps")
    told = [mapping(step) for step in steps[-_SUSPICIONS:]] if isinstance(steps, list) else []
    if told:
        columns = list(dict.fromkeys(key for step in told for key in step))[:_COLUMNS]
        rows = [[_told_in(step.get(key)) for key in columns] for step in told]
        yield Block("The last steps", "The numbers of each, and what was beyond its usual.", columns, rows)
    also = evidence.get("also")
    if isinstance(also, list) and also:
        note = f"{name(evidence.get('also_count'))} series moved with {name(evidence.get('series'))}, in the order of the step."
        yield Block("What moved with it", text(note, 400), ["series"], [[name(one)] for one in also[:20]])


def _told_in(value: object) -> str:
    if isinstance(value, list):
        return ", ".join(name(one) for one in value[:_SUSPICIONS])
    return "" if value is None else number(value)


def _rest(evidence: Mapping[str, Any]) -> Iterator[Block]:
    """All else that a reader may want to check, as it was written."""
    rows = [
        [name(key), text(value, 400)]
        for key, value in evidence.items()
        if key not in _KNOWN and value not in ("", None)
    ]
    rows += [[key, text(evidence[key], 400)] for key in ("reason", "injected") if evidence.get(key)]
    if rows:
        yield Block("Also noted", "", ["what", "value"], rows)
