"""The report of a campaign, in Markdown."""

from __future__ import annotations

import collections
from collections.abc import Sequence

from innocence.judging import outcome_of, site_of
from innocence.runs import CONVICTIONS, Found


def page(found: Found, scripts: Sequence[str], *, how: str, command: str) -> str:
    """Return the report on the runs of ``scripts``; ``how`` says in which way they were guarded."""
    runs = list(found.guarded.values())
    bad = [key for key, wrong in found.wrong.items() if wrong]

    def count(word: str) -> int:
        return sum(any(word in text for text in wrong) for wrong in found.wrong.values())

    convicted = sum(any(cause in CONVICTIONS for cause in run.causes) for run in runs)
    rows = [
        ("scripts", len(scripts)),
        ("guarded runs", len(runs)),
        ("optimizer steps", sum(found.plain[run.script, run.seed].steps for run in runs)),
        ("steps that the guard held", sum(run.held for run in runs)),
        ("steps run again", sum(run.again for run in runs)),
        ("runs with a device or state convicted", convicted),
        ("runs with other bits", count("other bits") + count("no bits")),
        ("runs with another exit code", count("exit code")),
        ("crashes", count("crash")),
        ("hangs", count("hang")),
        ("runs in which a part of the guard failed, and did without", sum(bool(run.failures) for run in runs)),
        ("scripts that do not repeat themselves", len(found.unsteady)),
    ]
    lines = [
        "# Innocent trainings",
        "",
        f"`{command}`",
        "",
        f"Every script of `tests/zoo`, plain and under `bitwitness run` {how}.",
        "",
        "| | count |",
        "|---|---|",
        *(f"| {name} | {number:,} |" for name, number in rows),
        "",
        "| script | runs | steps | held | run again | verdicts | bits | exit code | seconds, plain / guarded | wrong |",
        "|---|---|---|---|---|---|---|---|---|---|",
        *(_row(found, script) for script in scripts),
    ]
    if found.misjudged:
        lines += ["", *_faults(found)]
    print(
        f"{len(runs)} guarded runs, {len(bad)} of them wrong: {', '.join(sorted({name for name, _ in bad})) or 'none'}"
    )
    return "\n".join(lines) + "\n"


def _row(found: Found, script: str) -> str:
    keys = sorted(key for key in found.guarded if key[0] == script)
    runs = [found.guarded[key] for key in keys]
    plains = [found.plain[key] for key in keys]
    verdicts = collections.Counter(cause for run in runs for cause in run.causes)
    same = sum(run.bits == plain.bits for run, plain in zip(runs, plains, strict=True))
    codes = sum(run.code == plain.code for run, plain in zip(runs, plains, strict=True))
    wrong = sorted({text for key in keys for text in found.wrong[key]})
    if script in found.unsteady:
        wrong.append("two plain runs differ")
    failed = sorted({f"the guard failed in its {part}" for run in runs for part in run.failures})
    seconds = [sum(run.seconds for run in some) / max(1, len(some)) for some in (plains, runs)]
    cells = [
        script,
        len(runs),
        sum(run.steps for run in plains),
        sum(run.held for run in runs),
        sum(run.again for run in runs),
        ", ".join(f"{number} {cause}" for cause, number in sorted(verdicts.items())) or "0",
        "same" if same == len(runs) else f"{len(runs) - same} other",
        "same" if codes == len(runs) else f"{len(runs) - codes} other",
        f"{seconds[0]:.1f} / {seconds[1]:.1f}",
        "; ".join(wrong + failed) or "–",
    ]
    return "| " + " | ".join(str(cell) for cell in cells) + " |"


def _faults(found: Found) -> list[str]:
    outcomes: dict[str, collections.Counter[str]] = {}
    rows = []
    for (script, seed, kind), wrong in sorted(found.misjudged.items()):
        both = [found.faulted[script, seed, kind, how] for how in ("faulted plain", "faulted guarded")]
        outcome = outcome_of(found.free(script, seed), both[0], both[1])
        outcomes.setdefault(kind, collections.Counter())["WRONG" if wrong else outcome] += 1
        site = site_of(found.struck[script, seed, kind][1])
        rows.append(f"| {script} | {seed} | {kind} | `{site}` | {outcome} | {'; '.join(wrong) or '–'} |")
    lines = ["## On a device that computes wrongly", "", "| fault | outcome | runs |", "|---|---|---|"]
    for kind, counter in sorted(outcomes.items()):
        lines += [f"| {kind} | {outcome} | {number} |" for outcome, number in sorted(counter.items())]
    return [
        *lines,
        "",
        "| script | seed | fault | operator | outcome | wrong |",
        "|---|---|---|---|---|---|",
        *rows,
    ]
