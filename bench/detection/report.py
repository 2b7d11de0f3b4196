"""The trial's tables and figure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from detection.collect import BAND, HARMFUL
from detection.evaluate import COLUMNS, shares, wilson
from detection.faults import PLACES, SORTS
from detection.persistent import LIMIT

Results = Sequence[dict[str, Any]]
_PLURAL = {"flip": "Single flips", "pattern": "Patterns"}


def percent(hits: int, count: int) -> str:
    """Return a share with its interval."""
    if not count:
        return "–"
    low, high = wilson(hits, count)
    return f"{100 * hits / count:.1f} % ({100 * low:.1f}–{100 * high:.1f})"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table."""
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])


def by_class(results: Results, low: float, high: float) -> str:
    """Return detection by class, for relative errors above ``low`` up to ``high``."""
    rows = []
    for sort in SORTS:
        chosen = [r for r in results if r["sort"] == sort and low < r["harm"] <= high]
        for place in (*PLACES, None):
            these = [r for r in chosen if place in (None, r["place"])]
            name = f"**{_PLURAL[sort]}, all places equally**" if place is None else f"{sort}, {place}"
            cells = _balanced(chosen) if place is None else shares(these)
            rows.append([name, str(len(these)), *(percent(*cells[column]) for column in COLUMNS)])
    return table(["class", "faults", *COLUMNS], rows)


def _balanced(results: Results) -> dict[str, tuple[int, int]]:
    """Return shares in which every place counts the same, though more faults were tried in some."""
    groups = [shares([r for r in results if r["place"] == place]) for place in PLACES]
    groups = [group for group in groups if next(iter(group.values()))[1]]
    if not groups:
        return shares([])
    fewest = min(count for group in groups for _, count in group.values())
    return {
        name: (round(sum(group[name][0] / group[name][1] for group in groups) * fewest), fewest * len(groups))
        for name in COLUMNS
    }


def products(results: Results) -> str:
    """Return what the checksums of a deep step saw of harmful faults in matrix products and attention."""
    rows = []
    for sort in SORTS:
        these = [r for r in results if r["sort"] == sort and r.get("product") and r["harm"] > HARMFUL]
        count = len(these)
        cells = [percent(sum(r[name] for r in these), count) for name in ("checksum", "reference checksum")]
        rows.append([_PLURAL[sort], str(count), *cells])
    return table(["in a product or attention", "faults", "checksum (deep step)", "reference CheckSum"], rows)


def by_subject(results: Results) -> str:
    """Return detection by training."""
    rows = []
    for subject in sorted({r["subject"] for r in results}):
        for sort in SORTS:
            these = [r for r in results if r["subject"] == subject and r["sort"] == sort and r["harm"] > HARMFUL]
            cells = shares(these)
            names = ("one process", "four ranks", "best reference")
            rows.append([subject, sort, str(len(these)), *(percent(*cells[name]) for name in names)])
    return table(["training", "sort", "faults", "one process", "four ranks", "best reference"], rows)


def false_alarms(alarms: dict[str, int]) -> str:
    """Return alarms per thousand clean steps of a rank."""
    steps = alarms["steps"]
    rows = [[name, f"{1000 * count / steps:.2f}"] for name, count in alarms.items() if name != "steps"]
    return table(["sensor", f"alarms in 1,000 of {steps:,} clean steps"], rows)


def persistent(results: Results) -> str:
    """Return how many steps persistent faults went unseen under a real guard."""
    if not results:
        return "Not tried in this run."
    rows = []
    for name in [*sorted({r["subject"] for r in results}), None]:
        these = [r for r in results if name in (None, r["subject"])]
        steps = [r["steps"] for r in these if r["steps"] is not None]
        within = [percent(sum(s <= limit for s in steps), len(these)) for limit in (1, 10, LIMIT)]
        hardware = sum(any("hardware" in verdict for verdict in r["verdicts"]) for r in these)
        wrong = sum(any("software" in v or "data" in v for v in r["verdicts"]) for r in these)
        rows.append([name or "**all**", str(len(these)), *within, str(hardware), str(wrong)])
    head = [
        "training",
        "faults",
        "seen in their first step",
        "within 10",
        f"within {LIMIT}",
        "convicted",
        "others blamed",
    ]
    return table(head, rows)


def figure(results: Results) -> str:
    """Return an SVG: harmful faults seen, by class, ours and the best reference scheme's, with their intervals."""
    columns = {"four ranks": "#1b6ca8", "one process": "#6fb1dd", "best reference": "#c9c9c9"}
    names = {"four ranks": "bitwitness, light step, four ranks", "one process": "bitwitness, light step, one process",
             "best reference": "any reference scheme (V1, V2, V3, combined)"}  # fmt: skip
    left, bar, gap, width = 190, 11, 12, 400
    parts, y = [], 46
    for number, (column, colour) in enumerate(columns.items()):
        parts.append(f'<rect x="{left}" y="{4 + 13 * number}" width="10" height="10" fill="{colour}"/>')
        parts.append(f'<text x="{left + 16}" y="{13 + 13 * number}">{names[column]}</text>')
    for sort in SORTS:
        for place in PLACES:
            cells = shares([r for r in results if (r["sort"], r["place"]) == (sort, place) and r["harm"] > HARMFUL])
            parts.append(f'<text x="{left - 8}" y="{y + 1.8 * bar}" text-anchor="end">{sort}, {place}</text>')
            for column, colour in columns.items():
                hits, count = cells[column]
                low, high = wilson(hits, count)
                parts.append(
                    f'<rect x="{left}" y="{y}" width="{width * hits / max(count, 1):.1f}" height="{bar}" fill="{colour}"/>'
                    f'<line x1="{left + width * low:.1f}" x2="{left + width * high:.1f}" y1="{y + bar / 2}" '
                    f'y2="{y + bar / 2}" stroke="#222"/>'
                )
                y += bar
            y += gap
    for tick in range(0, 101, 25):
        x = left + width * tick / 100
        parts.append(f'<text x="{x}" y="{y + 8}" text-anchor="middle">{tick} %</text>')
        parts.append(f'<line x1="{x}" x2="{x}" y1="44" y2="{y - 4}" stroke="#999" stroke-width="0.4"/>')
    size = f'viewBox="0 0 {left + width + 30} {y + 14}" font-family="sans-serif" font-size="11"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size}>'
    return "\n".join([head, '<rect width="100%" height="100%" fill="white"/>', *parts, "</svg>"]) + "\n"


def page(results: Results, alarms: dict[str, int], lasting: Results, command: str) -> str:
    """Return docs/detection.md."""
    harmful = sum(r["harm"] > HARMFUL for r in results)
    return f"""# What the sensors see

`{command}`: {len(results):,} drawn faults, of which {harmful:,} harmful, on four small trainings (GPT in bf16 autocast, a
Llama-style decoder, a convnet, an LSTM), struck while they train. A fault is *harmful* where it changes the local gradient by
more than the gradient's own norm. Operators, parameters and modules are drawn uniformly; flips are of the sign or an exponent
bit of one element, patterns zero, scale, permute, saturate or stick a row, a column, a 16 x 16 tile or every 32nd element.
"four ranks" adds the comparison with three peers. The reference schemes run at their default thresholds on the very same
faults. In brackets: Wilson's 95 % intervals.

![Harmful faults seen on a light step](detection.svg)

## Harmful faults (relative error above {HARMFUL:g}), light steps

{by_class(results, HARMFUL, float("inf"))}

## The same by training

{by_subject(results)}

## Small errors (relative error {BAND:g} to {HARMFUL:g}), light steps

{by_class(results, BAND, HARMFUL)}

## Deep steps

{products(results)}

A checksum sees what an operator computes wrongly from right inputs; a wrong weight or input it cannot see.

## Persistent faults, at the default budget

One process, an operator drawn uniformly, wrong from some step on at the same place; a real guard at its defaults. What it
misses are operators that have no checksum (pooling, element-wise, loss) and change gradients less than batches do.

{persistent(lasting)}

## Alarms on the same trainings without faults

{false_alarms(alarms)}

These are the first steps of trainings, where gradients move fastest; see `bench/results/clean.md` for long runs.
"""
