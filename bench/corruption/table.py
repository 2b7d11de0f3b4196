"""The campaign's account: one table, one figure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

from detection.collect import HARMFUL
from detection.evaluate import REFERENCES, wilson
from detection.persistent import LIMIT
from detection.report import percent, table

from corruption.cells import BUDGET, WATCHFUL
from corruption.references import CHECKSUM, is_product
from corruption.strikes import STATE

Accounts = Sequence[dict[str, Any]]
PLACES = (
    "forward", "backward", "recomputed", "weight", "optimizer state", "buffer", "received", "collective", "checkpoint",
)  # fmt: skip
_HARDWARE = {"transient_hardware", "persistent_hardware"}
_STATE_CAUSES = {"corrupt_state"}
_NO_VERDICT = {"inconclusive", "dismissed"}


def judged(account: dict[str, Any]) -> str:
    """Say whether a trial's verdicts are right: right, wrong, inconclusive, or none."""
    results = {_judged(account, verdict) for verdict in account["verdicts"]}
    return next((result for result in ("wrong", "right", "inconclusive") if result in results), "none")


def _judged(account: dict[str, Any], verdict: dict[str, Any]) -> str:
    if verdict["cause"] in _NO_VERDICT:
        return "inconclusive"
    if not account["struck"]:
        return "wrong"
    allowed = _HARDWARE | (
        _STATE_CAUSES if account["place"] in (*STATE, "received", "collective", "checkpoint") else set()
    )
    if account["class"] == "transient" and account["place"] not in (*STATE, "received"):
        allowed = allowed - {"persistent_hardware"}
    if verdict["cause"] not in allowed:
        # a number that overflows because of the fault is told as what it is, too: who made it is named
        return "inconclusive" if verdict["cause"] == "software" and account["place"] in STATE else "wrong"
    blamed = verdict["ranks"]
    if blamed and blamed != [account["rank"]]:
        return "wrong" if account["rank"] not in blamed else "inconclusive"
    return "right"


def seen(account: dict[str, Any], within: int = LIMIT) -> bool:
    """Tell whether somebody suspected within so many steps."""
    return account["steps"] is not None and account["steps"] <= within


def _share(accounts: Iterable[dict[str, Any]], holds: Callable[[dict[str, Any]], bool]) -> str:
    chosen = list(accounts)
    return percent(sum(map(holds, chosen)), len(chosen))


def struck(accounts: Accounts) -> list[dict[str, Any]]:
    """Return the trials in which a bit was changed, and that gave an answer."""
    return [a for a in accounts if a.get("struck") and not a.get("lost")]


def by_place(accounts: Accounts, mode: str | None) -> str:
    """Return detection and verdicts by place and sort, in one mode (None: all that is no mode of one process)."""
    rows = []
    for place in PLACES:
        for sort in ("flip", "pattern"):
            these = [a for a in struck(accounts) if (a["place"], a["sort"]) == (place, sort) and _in_mode(a, mode)]
            if these:
                rows.append(_row(f"{place}, {sort}", these))
    every = [a for a in struck(accounts) if _in_mode(a, mode)]
    rows.append(_row("**all**", every))
    head = ["struck", "faults", "any: seen at once", "any: ≤ 100 steps", "harmful", "harmful: seen at once",
            "harmful: ≤ 100 steps", "verdict right", "open", "wrong", "healed, of which bit-equal",
            "references, any", "references, harmful", CHECKSUM]  # fmt: skip
    return table(head, rows)


def _in_mode(account: dict[str, Any], mode: str | None) -> bool:
    return account["mode"] == mode if mode is not None else account["mode"] not in (WATCHFUL, BUDGET)


def _row(name: str, these: Accounts) -> list[str]:
    harmful = [a for a in these if a["harm"] > HARMFUL]
    results = [judged(a) for a in these]
    healed = [a for a in these if any(v["action"] == "healed" for v in a["verdicts"]) and a["class"] == "transient"]
    asked = [a for a in these if a["references"] is not None]
    loud = [a for a in asked if a["harm"] > HARMFUL]
    products = [a for a in asked if is_product(a)]
    return [
        name, str(len(these)), _share(these, lambda a: seen(a, 1)), _share(these, seen),
        str(len(harmful)), _share(harmful, lambda a: seen(a, 1)), _share(harmful, seen),
        str(results.count("right")), str(results.count("inconclusive")), str(results.count("wrong")),
        f"{len(healed)}, {sum(bool(a['as_clean']) for a in healed)}",
        _share(asked, _any_reference), _share(loud, _any_reference),
        _share(products, lambda a: CHECKSUM in a["references"]),
    ]  # fmt: skip


def _any_reference(account: dict[str, Any]) -> bool:
    return any(name in account["references"] for name in REFERENCES)


def _told_by(name: str, account: dict[str, Any]) -> bool:
    return name in account["references"]


def by_reference(accounts: Accounts) -> str:
    """Return each reference scheme on the very same faults, beside ours."""
    these = [a for a in struck(accounts) if a["references"] is not None and a["place"] != "checkpoint"]
    harmful = [a for a in these if a["harm"] > HARMFUL]
    rows = [["**bitwitness**", _share(these, seen), _share(harmful, seen)]]
    rows += [
        [name, *(_share(some, partial(_told_by, name)) for some in (these, harmful))]
        for name in (*REFERENCES, CHECKSUM)
    ]
    return table(["scheme", f"of {len(these)} that changed a bit", f"of {len(harmful)} harmful"], rows)


def is_wrong(account: dict[str, Any]) -> bool:
    """Tell whether a trial that gave an answer has a wrong verdict."""
    return not account.get("lost") and account.get("verdicts") is not None and judged(account) == "wrong"


def odd(accounts: Accounts) -> list[str]:
    """Return a line for each wrong verdict, lost trial and alarm before a fault."""
    lines = []
    for a in accounts:
        what = "lost" if a.get("lost") else "wrong" if is_wrong(a) else "early alarm" if a.get("early") else ""
        if what:
            lines.append(f"- {what}: {a['cell']}, {a['mode']}, trial {a['number']}: {a['fault']} at {a['where']} "
                         f"(rank {a['rank']}): {a.get('verdicts')}")  # fmt: skip
    return lines


def _about(accounts: Accounts, command: str) -> str:
    parts = sorted({f"{a['parallelism']} ({a['dtype']})" for a in accounts})
    return (
        f"`{command}`: {len(accounts):,} trials, {len(struck(accounts)):,} of which changed a bit; {', '.join(parts)}. "
        "*Harmful*: the gradient of the struck step (of a struck optimizer state, the update) is off by more than its own "
        "norm. References: V1, V2, V3 and the combined scheme at their default thresholds, on the same numbers; their "
        "checksum on the struck product. In brackets: Wilson's 95 % intervals."
    )


def page(accounts: Accounts, command: str) -> str:
    """Return the whole account as Markdown."""
    real = [a for a in accounts if not a.get("lost")]
    idle = [a for a in real if not a["struck"]]
    alarms = sum(bool(a["verdicts"]) for a in idle)
    return "\n".join(
        [
            "# Every kind of silent corruption",
            "",
            _about(accounts, command),
            "",
            f"{len(idle)} trials whose fault changed nothing: {alarms} verdicts.",
            "",
            "![Faults seen](corrupt.svg)",
            "",
            "## Everything on every step",
            "",
            by_place(accounts, WATCHFUL),
            "",
            "## At the default budget (one process)",
            "",
            by_place(accounts, BUDGET),
            "",
            "## Every tenth step deep (several ranks), and checkpoints",
            "",
            by_place(accounts, None),
            "",
            "## The reference schemes on the same faults",
            "",
            by_reference(accounts),
            "",
            "## Wrong verdicts, lost trials",
            "",
            *(odd(accounts) or ["None."]),
            "",
        ]
    )


def figure(accounts: Accounts) -> str:
    """Return an SVG: faults seen within 100 steps by place, of any change and of harm, ours and any reference scheme's."""
    bars = (
        ("harmful, bitwitness", "#1b6ca8", lambda a: a["harm"] > HARMFUL, seen),
        ("any change, bitwitness", "#6fb1dd", lambda _: True, seen),
        ("harmful, any reference scheme", "#8f8f8f", lambda a: a["harm"] > HARMFUL, _any_reference),
    )
    left, bar, gap, width, y = 170, 11, 12, 400, 46
    parts = []
    for number, (name, colour, *_) in enumerate(bars):
        parts.append(f'<rect x="{left}" y="{4 + 13 * number}" width="10" height="10" fill="{colour}"/>')
        parts.append(f'<text x="{left + 16}" y="{13 + 13 * number}">{name}</text>')
    for place in PLACES:
        these = [a for a in struck(accounts) if a["place"] == place]
        parts.append(f'<text x="{left - 8}" y="{y + 1.8 * bar}" text-anchor="end">{place} ({len(these)})</text>')
        for _, colour, chosen, holds in bars:
            some = [a for a in these if chosen(a) and (holds is seen or a["references"] is not None)]
            hits = sum(map(holds, some))
            low, high = wilson(hits, len(some))
            parts.append(
                f'<rect x="{left}" y="{y}" width="{width * hits / max(len(some), 1):.1f}" height="{bar}" fill="{colour}"/>'
                + (f'<line x1="{left + width * low:.1f}" x2="{left + width * high:.1f}" y1="{y + bar / 2}" '
                   f'y2="{y + bar / 2}" stroke="#222"/>' if some else "")
            )  # fmt: skip
            y += bar
        y += gap
    for tick in range(0, 101, 25):
        x = left + width * tick / 100
        parts.append(f'<text x="{x}" y="{y + 8}" text-anchor="middle">{tick} %</text>')
    size = f'viewBox="0 0 {left + width + 30} {y + 14}" font-family="sans-serif" font-size="11"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size}>'
    return "\n".join([head, '<rect width="100%" height="100%" fill="white"/>', *parts, "</svg>"]) + "\n"
