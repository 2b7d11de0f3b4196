"""What a recording is to hold: levels, content, selection; and msprobe's ``config.json``, read as it is."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from bitwitness.config.values import nearest
from bitwitness.errors import ConfigError, UsageError
from bitwitness.files.reading import read_object
from bitwitness.files.shown import quoted, shown
from bitwitness.site import PHASES

_MOST_BYTES = 16 << 20

LEVELS = {"modules": "modules", "ops": "ops", "mix": "mix", "L0": "modules", "L1": "ops", "L2": "ops"}
CONTENTS = ("structure", "stats", "hash", "tensors")
_RANGE = re.compile(r"(\d{1,18})(?:-(\d{1,18}))?", re.ASCII)
_MOST = 1 << 31  # of a rank or a step: rows hold them as int32
_MOST_ELEMENTS = 1 << 62

Ranges = tuple[tuple[int, int], ...]
"""Closed ranges of numbers."""


@dataclass(frozen=True)
class RecordConfig:
    """What to record; checked when it is made.

    Attributes
    ----------
    level
        ``modules``, ``ops`` or ``mix``, which is both; msprobe's ``L0`` and ``L1`` are understood.
    content
        ``structure`` (names, dtypes, shapes), ``stats``, ``hash`` (statistics and a hash of the bits) or ``tensors``
        (statistics and the values themselves).
    steps, ranks
        Which ones, as ``"0-3,10"``; None for all.
    sites
        Globs of sites (``layers.3.*``); none for all.
    phases
        Some of the phases of a site; none for all.
    max_elements
        Of larger tensors only every n-th element is kept, so that no more than these are; 0 keeps all.
    async_dump
        Copy tensors without waiting for the device.
    zeros
        Count zeros, too.
    stacks
        Record the lines that called each operator.
    optimizer_state
        Record the optimizer's state, too.
    recording
        Begin at once; else with ``start()``.

    Raises
    ------
    ConfigError
        For what is not allowed, with what is.

    """

    level: str = "mix"
    content: str = "stats"
    steps: str | None = None
    ranks: str | None = None
    sites: tuple[str, ...] = ()
    phases: tuple[str, ...] = ()
    max_elements: int = 0
    async_dump: bool = False
    zeros: bool = False
    stacks: bool = True
    optimizer_state: bool = False
    recording: bool = True

    def __post_init__(self) -> None:
        for name in ("level", "content", "steps", "ranks"):
            value = getattr(self, name)
            if not isinstance(value, str) and (value is not None or name in ("level", "content")):
                raise _wrong(name, value, "a text", ())
        if self.level not in LEVELS:
            raise _wrong("level", self.level, f"one of {', '.join(LEVELS)}", LEVELS)
        if self.content not in CONTENTS:
            raise _wrong("content", self.content, f"one of {', '.join(CONTENTS)}", CONTENTS)
        for name in ("sites", "phases"):
            value = getattr(self, name)
            if not isinstance(value, list | tuple) or not all(isinstance(item, str) for item in value):
                raise _wrong(name, value, "a list of texts", ())
        for phase in self.phases:
            if phase not in PHASES:
                raise _wrong("phases", phase, f"some of {', '.join(PHASES)}", PHASES)
        if not isinstance(self.max_elements, int) or not 0 <= self.max_elements < _MOST_ELEMENTS:
            raise _wrong("max_elements", self.max_elements, "a number of elements, 0 for all", ())
        ranges(self.steps, "steps")
        ranges(self.ranks, "ranks")

    @property
    def modules(self) -> bool:
        """Whether modules are recorded."""
        return LEVELS.get(self.level, self.level) != "ops"

    @property
    def operators(self) -> bool:
        """Whether operators are recorded."""
        return LEVELS.get(self.level, self.level) != "modules"

    def wants_step(self, step: int) -> bool:
        """Tell whether a step is recorded."""
        return within(step, ranges(self.steps, "steps"))

    def wants_rank(self, rank: int) -> bool:
        """Tell whether a rank records."""
        return within(rank, ranges(self.ranks, "ranks"))


def ranges(text: str | None, name: str, owner: str = "recording") -> Ranges | None:
    """Read ``"0-3,10"``; None for all. ``owner``: whose setting it is, for the message."""
    if text is None:
        return None
    pairs = _pairs(text) if isinstance(text, str) else ()
    if not pairs:
        raise _wrong(name, text, "numbers and ranges a-b (a <= b) separated by commas, for example 0-3,10", (), owner)
    return pairs


@cache
def _pairs(text: str) -> Ranges:
    """Return the ranges of a text, asked for at every step; none if it is not understood."""
    found = [_RANGE.fullmatch(part.strip()) for part in text.split(",")]
    pairs = tuple((int(m[1]), int(m[2] or m[1])) for m in found if m is not None)
    return pairs if len(pairs) == len(found) and all(first <= last for first, last in pairs) else ()


def within(number: int, wanted: Ranges | None) -> bool:
    """Tell whether a number lies in one of the ranges."""
    return wanted is None or any(first <= number <= last for first, last in wanted)


def _wrong(name: str, value: Any, expected: str, known: Iterable[str], owner: str = "recording") -> ConfigError:
    hint = nearest(value, list(known)) if isinstance(value, str) and known else ""
    return ConfigError(f"{owner}: {name} = {quoted(value)}: expected {expected}{hint}")


# -- msprobe's config.json ---------------------------------------------------------------------------------------

_TASKS = {"statistics": "stats", "tensor": "tensors", "structure": "structure"}
_COMMON = {"task", "dump_path", "rank", "step", "level", "async_dump", "seed", "is_deterministic", "enable_dataloader"}
_COMMON |= {"precision", "extra_info", "risk_level", "token_range", "acl_config", "framework"}
_SECTION = {"scope", "list", "tensor_list", "data_mode", "summary_mode", "file_format", "backward_input", "device"}
_MODES = {"all": (), "forward": ("forward",), "backward": ("backward",), "input": (), "output": ()}
_HALVES = frozenset({"input", "output"})


def _is_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


_KINDS: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "level": (lambda value: isinstance(value, str) and value in LEVELS, "L0, L1 or mix"),
    "dump_path": (lambda value: isinstance(value, str), "a folder's path"),
    "async_dump": (lambda value: isinstance(value, bool), "true or false"),
    "data_mode": (
        lambda value: _is_texts(value) and _MODES.keys() >= set(value),
        f"a list of some of {', '.join(_MODES)}",
    ),
    "summary_mode": (lambda value: isinstance(value, str) or _is_texts(value), "statistics or md5"),
    "list": (_is_texts, "a list of names"),
}
"""What a config.json's settings may hold, where they are there and not null."""


@dataclass(frozen=True)
class MsprobeSettings:
    """A config.json, understood: what to record, where to (None if it does not say), and what has no counterpart."""

    config: RecordConfig
    dump_path: str | None
    warnings: tuple[str, ...] = ()


def read_msprobe(path: str | os.PathLike[str]) -> MsprobeSettings:
    """Read msprobe's ``config.json``.

    Raises
    ------
    ConfigError
        If it cannot be read, or asks for what is no recording.

    """
    where = str(path)
    try:
        found = read_object(path, "msprobe's config.json", _MOST_BYTES)
    except UsageError as error:
        raise ConfigError(str(error)) from error
    return _understood(found, where)


def _understood(found: Mapping[str, Any], where: str) -> MsprobeSettings:
    task = found.get("task") or "statistics"
    if not isinstance(task, str) or task not in _TASKS:
        raise ConfigError(
            f"{shown(where)}: task {quoted(task)} is no recording; expected {', '.join(_TASKS)}"
            f"{nearest(task, list(_TASKS)) if isinstance(task, str) else ''}; for overflows see bitwitness trace"
        )
    section = found.get(task) or {}
    if not isinstance(section, dict):
        raise ConfigError(f"{shown(where)}: {task} = {quoted(section)}: expected an object of settings")
    for name, value in (*found.items(), *section.items()):
        fits, expected = _KINDS.get(name, (None, ""))
        if fits is not None and value not in (None, "") and not fits(value):
            raise _wrong(name, value, expected, LEVELS if name == "level" else (), shown(where))
    content = "hash" if section.get("summary_mode") == "md5" else _TASKS[task]
    phases = {phase for mode in section.get("data_mode") or () for phase in _MODES[mode]}
    config = RecordConfig(
        level=found.get("level") or "L1",
        content=content,
        steps=_numbers(found.get("step"), "step", where),
        ranks=_numbers(found.get("rank"), "rank", where),
        sites=tuple(glob for name in section.get("list") or () for glob in _globs(name)),
        phases=tuple(sorted(phases)),
        async_dump=bool(found.get("async_dump")),
    )
    return MsprobeSettings(config, found.get("dump_path") or None, _unheeded(found, section, shown(where)))


def _unheeded(found: Mapping[str, Any], section: Mapping[str, Any], where: str) -> tuple[str, ...]:
    unknown = [key for key in found if key not in _COMMON | _TASKS.keys() and not isinstance(found[key], dict)]
    unknown += [key for key in section if key not in _SECTION]
    ignored = [
        key for key in ("scope", "tensor_list", "acl_config", "token_range") if section.get(key) or found.get(key)
    ]
    ignored += [f"data_mode {mode}" for mode in sorted(_HALVES.intersection(section.get("data_mode") or ()))]
    texts = [f"{where}: {quoted(key)} is unknown and was ignored" for key in unknown]
    texts += [
        f"{where}: {key!r} has no counterpart here and was ignored; select with list or --sites" for key in ignored
    ]
    return tuple(texts)


def _numbers(value: Any, name: str, where: str) -> str | None:
    if value in (None, [], ""):
        return None
    entries: Collection[Any] = value if isinstance(value, list) else [value]
    for entry in entries:
        valid = (isinstance(entry, int) and not isinstance(entry, bool) and 0 <= entry < _MOST) or (
            isinstance(entry, str) and _RANGE.fullmatch(entry)
        )
        if not valid:
            raise _wrong(name, value, "a list of numbers, or of ranges like '2-5'", (), shown(where))
    return ",".join(str(entry) for entry in entries)


def _globs(name: str) -> list[str]:
    """Return the site globs for a name of msprobe's: ``Module.PATH.Class…``, ``Functional.op…`` or a part of one."""
    parts = name.split(".")
    if parts[0] == "Module" and len(parts) > 2:
        parts = parts[1:]
        while parts and (parts[-1].isdigit() or parts[-1] in ("forward", "backward")):
            parts.pop()
        path = ".".join(parts[:-1]) if len(parts) > 1 else parts[0]
        return [f"{path}/*", f"{path}.*/*"]
    op = parts[1] if len(parts) > 1 else parts[0]
    return [f"*/*{op}*", f"*{op}*/*"]
