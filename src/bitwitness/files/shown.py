"""Text of unknown origin (names, paths, values, other libraries' errors) made fit for a terminal."""

from __future__ import annotations

import sys
from contextlib import suppress

_LONGEST = 300  # characters of one quoted piece: two lines of a terminal
# Beginnings that make spreadsheets compute a cell; names in a recording may come from somebody else.
_FORMULA = ("=", "+", "-", "@", "\t", "\r")


def shown(text: object, limit: int | None = _LONGEST) -> str:
    """Return a text with everything unprintable written as an escape, and cut where it is longer than ``limit``.

    Control characters, marks that turn the direction of writing and halves of surrogate pairs are not printable; a terminal
    obeys the first, a reader is deceived by the second, and the third cannot be encoded.
    """
    text = str(text)
    if limit is not None and len(text) > limit:
        text = f"{text[:limit]}… ({len(text):,} characters)"
    return text if text.isprintable() else "".join(c if c.isprintable() else escaped(c) for c in text)


def quoted(value: object) -> str:
    """Return a value that was read as Python writes it, fit for a message; one that Python cannot write by its kind."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # a number of thousands of digits; containers nested as deeply
        return f"a {type(value).__name__} too large to show"
    return shown(text)


def shown_lines(text: str) -> str:
    """Return a text of several lines, each as `shown` gives it, uncut; tabs stay."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in "\n\t" else escaped(c) for c in text)


def harmless(text: str) -> str:
    """Return a text, as `shown` gives it and uncut, that no spreadsheet takes for a formula: what begins one is quoted."""
    safe = shown(text, None)
    return f"'{safe}" if text.startswith(_FORMULA) else safe


def escaped(character: str) -> str:
    """Return a character as an escape that Python reads."""
    return character.encode("unicode_escape").decode("ascii")


def say(text: str) -> None:
    """Print one line to stderr, if there is anybody to read it."""
    with suppress(OSError, ValueError, AttributeError):
        sys.stderr.write(f"bitwitness: {shown(text, None)}\n")
        sys.stderr.flush()
