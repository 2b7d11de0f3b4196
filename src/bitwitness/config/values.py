"""One setting's value: whether it is of its declared kind, and what a text means as that kind.

The kinds are type hints: ``bool``, ``int``, ``float``, ``str | None``, ``Literal[...]`` and tuples of these.
"""

from __future__ import annotations

import difflib
import math
import types
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal, Union, get_args, get_origin

_TRUE = ("1", "true", "yes", "on")
_NOTHING = ("", "none")
_FALSE = ("0", "false", "no", "off")
_LARGEST = 1 << 53  # of an integer: above, it is no count of anything, and floats round it
_LONGEST_KEY = 80  # characters of a name that are compared with the known ones


@dataclass(frozen=True, slots=True)
class SettingType:
    """What a setting may hold: a type hint, and for numbers the least value (``above``: excluding it)."""

    hint: Any
    minimum: float | None = None
    above: bool = False

    def __str__(self) -> str:
        if get_origin(self.hint) in (Union, types.UnionType):
            return f"{_describe(_only(get_args(self.hint)))}{self._limit} or nothing"
        return _describe(self.hint) + self._limit

    @property
    def _limit(self) -> str:
        if self.minimum is None:
            return ""
        return f" {'>' if self.above else '>='} {self.minimum:g}"

    def check(self, value: Any) -> Any:
        """Return ``value`` in its declared type: an int as a float, a list as a tuple.

        Raises
        ------
        ValueError
            If it is none of that type.

        """
        return self._limited(_coerce(self.hint, value))

    def parse(self, text: str) -> Any:
        """Return what a text from the environment means; raise `ValueError` if nothing."""
        return self._limited(_parse(self.hint, text.strip()))

    def _limited(self, value: Any) -> Any:
        for number in value if isinstance(value, tuple) else (value,):
            if self.minimum is None or not isinstance(number, int | float):
                continue
            if not (number > self.minimum if self.above else number >= self.minimum):
                raise ValueError
        return value


def _describe(hint: Any) -> str:
    origin, inner = get_origin(hint), get_args(hint)
    if origin is Literal:
        return "one of " + ", ".join(repr(choice) for choice in inner)
    if origin is tuple:
        if inner[-1] is Ellipsis:
            return f"a list, each item {_describe(inner[0])}"
        return f"{len(inner)} values, each {_describe(inner[0])}"
    names = {
        bool: "true or false",
        int: "an integer",
        float: "a finite number",
        str: "a text",
    }
    return names[hint]


def _coerce(hint: Any, value: Any) -> Any:
    origin, inner = get_origin(hint), get_args(hint)
    if origin is Literal:
        fits = isinstance(value, str) and value in inner
    elif origin is tuple:
        return _coerce_tuple(inner, value)
    elif origin in (Union, types.UnionType):
        return None if value is None else _coerce(_only(inner), value)
    elif hint is float:
        fits = isinstance(value, int | float) and not isinstance(value, bool) and _is_finite(value)
        value = float(value) if fits else value
    else:
        fits = isinstance(value, hint) and (hint is bool or not isinstance(value, bool))
        fits = fits and (hint is not int or abs(value) <= _LARGEST)
    if not fits:
        raise ValueError
    return value


def _is_finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer of hundreds of digits
        return False


def _only(inner: tuple[Any, ...]) -> Any:
    """Return the one kind of a union that is not nothing."""
    return next(part for part in inner if part is not types.NoneType)


def _coerce_tuple(inner: tuple[Any, ...], value: Any) -> tuple[Any, ...]:
    if not isinstance(value, list | tuple) or (inner[-1] is not Ellipsis and len(value) != len(inner)):
        raise ValueError
    return tuple(_coerce(inner[0], item) for item in value)


def _parse(hint: Any, text: str) -> Any:
    origin, inner = get_origin(hint), get_args(hint)
    if origin is tuple:
        return _coerce(hint, [_parse(inner[0], part.strip()) for part in text.split(",") if part.strip()])
    if origin in (Union, types.UnionType):
        return None if text.lower() in _NOTHING else _parse(_only(inner), text)
    if hint is bool:
        if text.lower() not in _TRUE + _FALSE:
            raise ValueError
        return text.lower() in _TRUE
    return _coerce(hint, hint(text) if hint in (int, float) else text)


def nearest(name: str, known: Iterable[str]) -> str:
    """Return ``; the nearest known key is …``, or nothing where none is near."""
    close = difflib.get_close_matches(name[:_LONGEST_KEY], list(known), n=1, cutoff=0.5)
    return f"; the nearest known key is {close[0]!r}" if close else ""
