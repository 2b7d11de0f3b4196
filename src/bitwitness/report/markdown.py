"""The story as Markdown, for a ticket: no charts, and nothing that a tracker would take for a command."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from bitwitness.report.build import Report
from bitwitness.report.evidence import Block
from bitwitness.report.story import RunStory, Told

_SPECIAL = re.compile(r"([\\`*_{}\[\]<>()#+!|~&$])")
_MENTION = re.compile(r"@(?=\w)")
_ROWS = 12  # of a table of evidence: a ticket is read, not searched
_SIGN = {"fine": "✅", "findings": "❌", "unread": "❓"}


def to_markdown(report: Report) -> str:
    """Return a report as Markdown."""
    return "\n".join(_document(report)).rstrip() + "\n"


def escaped(words: str) -> str:
    """Return a text that Markdown and the trackers that read it show as it is: no link, no tag, no mention."""
    one_line = " ".join(words.split())
    shown = _SPECIAL.sub(r"\\\1", one_line).replace("://", "\\://").replace("www.", "www\\.")
    return _MENTION.sub("@ ", shown)


def _document(report: Report) -> Iterator[str]:
    story = report.story
    yield f"# {'❗' if story.attention else _SIGN[story.status]} {escaped(story.headline)}"
    yield ""
    yield escaped(story.conclusion)
    yield ""
    yield "## What to do"
    yield ""
    yield from _listed(story.to_do)
    if story.doubts:
        yield from ("## What is not known", "")
        yield from _listed(story.doubts)
    if report.beside:
        yield from ("## The two beside each other", "")
        yield from _listed(report.beside)
    for run in story.runs:
        yield from _run(run, named=len(story.runs) > 1)


def _run(run: RunStory, *, named: bool) -> Iterator[str]:
    level = "###" if named else "##"
    if named:
        yield from (f"## {escaped(run.path)}", "", escaped(run.sentence), "")
    for title, lines in (
        ("Why it may be believed", run.believed),
        ("Why not everything is known", run.doubts),
    ):
        if lines:
            yield from (f"{level} {title}", "")
            yield from _listed(lines)
    if run.events:
        yield from (f"{level} The evidence", "")
        for event in run.events:
            yield from _event(event, f"{level}#")
    if run.coverage:
        yield from (f"{level} What was covered", "")
        for block in run.coverage:
            yield from _block(block, rows=len(block.rows))
    for title, lines in (("Not covered", run.gaps), ("What it cost", run.price)):
        if lines:
            yield from (f"{level} {title}", "")
            yield from _listed(lines)
    yield from (f"{level} The run", "")
    yield from _listed([f"{key}: {value}" for key, value in [("folder", run.path), *run.facts]])


def _event(event: Told, level: str) -> Iterator[str]:
    yield from (f"{level} {escaped(event.title)}", "", escaped(event.message), "")
    for block in event.blocks:
        yield from _block(block)


def _block(block: Block, rows: int = _ROWS) -> Iterator[str]:
    yield f"**{escaped(block.title)}.** {escaped(block.note)}".rstrip()
    yield ""
    marks = bool(block.marked)
    yield _cells([*block.columns, *([""] if marks else [])])
    yield "|" + "---|" * (len(block.columns) + marks)
    for number, row in enumerate(block.rows[:rows]):
        yield _cells([*row, *(["← wrong" if number in block.marked else ""] if marks else [])])
    if len(block.rows) > rows:
        yield _cells([f"… {len(block.rows) - rows} more", *[""] * (len(block.columns) - 1 + marks)])
    yield ""


def _cells(cells: Sequence[str]) -> str:
    return "| " + " | ".join(escaped(cell) for cell in cells) + " |"


def _listed(lines: Sequence[str]) -> Iterator[str]:
    yield from (f"- {escaped(line)}" for line in lines)
    yield ""
