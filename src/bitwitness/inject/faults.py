"""Faults as declared by a user: where a device computes wrongly, when, and what it does to the value.

A file holds one table a fault::

    [[fault]]
    site = "layers.3.mlp.fc1/addmm:forward"   # a glob, see `bitwitness.site.matches`
    rank = 2
    steps = [5]
    times = 1                                 # a transient: a replay of the step is not struck again
    kind = "bitflip"
    bit = 30                                  # of float32: the highest exponent bit

docs/faults.md tells all keys.
"""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from bitwitness.errors import ConfigError, UsageError
from bitwitness.files.reading import read_text
from bitwitness.files.shown import shown
from bitwitness.site import PHASES, complete_glob

_MOST = 1000  # faults of one file: more than anybody declares by hand
_MOST_BYTES = 16 << 20
PATTERNS = ("element", "all", "row", "column", "tile", "warp")

DEFAULT_PATTERN = {
    "bitflip": "element",
    "exponent_msb": "element",
    "stuck_at": "element",
    "carry": "element",
    "multiply": "element",
    "nullify": "element",
    "multiply_max": "all",
    "permute": "tile",
}
"""Each kind of fault with the elements that it strikes where no pattern is given."""

OF_KIND = {
    "bitflip": ("bit",),
    "stuck_at": ("bit", "value"),
    "carry": ("ulps",),
    "multiply": ("factor",),
}
"""The keys that say what a kind does; no other kind reads them."""

ALIASES = {"bitflip_designed": "exponent_msb"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One defect of one device (or of every device, where ``rank`` and ``slot`` are None).

    Parameters
    ----------
    kind
        ``bitflip``: bit ``bit`` is inverted. ``exponent_msb`` (or ``bitflip_designed``): the highest exponent
        bit that is 0 becomes 1. ``stuck_at``: bit ``bit`` reads ``value``. ``carry``: ``ulps`` units in the
        last place too many; a carry lost at mantissa bit k is ``-2**k``. ``multiply``: times ``factor``.
        ``multiply_max``: becomes the largest magnitude of the tensor. ``nullify``: becomes 0.
        ``permute``: the struck elements change places among themselves.
    site
        Glob of the values that can be struck. Operators have the phases ``forward`` and ``backward``; weights
        are ``NAME/weight:param`` and optimizer state ``NAME/exp_avg:optim`` (``NAME``: the parameter's full
        name), struck after an optimizer's step; collectives have the phase ``comm``, a rank's contribution
        being slot ``in0`` and what it received ``out0``.
    rank, slot
        The rank whose device is faulty, or the number of that device on its node, whichever rank computes on it.
    steps, from_step, cycle, start
        When; at most one of the first three, none for every step. ``cycle`` strikes ``cycle``, ``2 cycle``, …
        steps after ``start``, as GenerateEodMaskV2 does.
    probability
        That an execution in a due step is struck; drawn anew for each, so a replay may differ.
    element_probability
        That an element of such an execution is struck, instead of ``pattern`` and ``element``.
    times
        At most so many strikes in all.
    pattern
        ``element``, ``all``, ``row``, ``column``, ``tile`` (16 by 16) or ``warp`` (every 32nd element), the
        tensor seen as a matrix whose columns are its last dimension. By default as in `DEFAULT_PATTERN`.
    element
        Flat index of an element that the pattern must contain; drawn anew for each strike if None.
    bit
        Position from the least significant bit, 0, on; a negative one counts from the top as Python's indices do: -1 is the
        sign, -2 the highest exponent bit (the default) in every dtype.
    value, factor, ulps
        Of the kinds that say so.

    Raises
    ------
    ConfigError
        A value is of the wrong type, out of its range or contradicts another.

    """

    kind: str
    site: str = "*"
    rank: int | None = None
    slot: int | None = None
    steps: tuple[int, ...] | None = None
    from_step: int | None = None
    cycle: int | None = None
    start: int = 0
    probability: float = 1.0
    element_probability: float | None = None
    times: int | None = None
    pattern: str | None = None
    element: int | None = None
    bit: int = -2
    value: int = 1
    factor: float = 2.0
    ulps: int = 1

    def __post_init__(self) -> None:
        for name, (fits, wanted) in _CHECKS.items():
            given = getattr(self, name)
            if not fits(given):
                raise ConfigError(f"fault: {name} = {_quoted(given)}, expected {wanted}")
        kind = ALIASES.get(self.kind, self.kind)
        if kind not in DEFAULT_PATTERN:
            raise ConfigError(f"fault: unknown kind {self.kind!r}{_nearest(self.kind, [*DEFAULT_PATTERN, *ALIASES])}")
        object.__setattr__(self, "kind", kind)
        self._check_site()
        self._check_elements()
        given_times = [name for name in ("steps", "from_step", "cycle") if getattr(self, name) is not None]
        if len(given_times) > 1:
            raise ConfigError(f"fault: {' and '.join(given_times)} are both given; keep one of them")
        if self.rank is not None and self.slot is not None:
            raise ConfigError("fault: rank and slot are both given; keep the one that names the device")
        if self.start and self.cycle is None:
            raise ConfigError(f"fault: start = {self.start} without a cycle; use from_step, or give the cycle too")
        if self.steps is not None:
            object.__setattr__(self, "steps", tuple(self.steps))

    def _check_site(self) -> None:
        tail = self.site.partition(":")[2].partition(".")[0]
        if tail.isalpha() and tail not in PHASES:
            raise ConfigError(
                f"fault: site = {self.site!r} names the phase {tail!r}{_nearest(tail, PHASES)}; "
                f"the phases are {', '.join(PHASES)}"
            )

    def _check_elements(self) -> None:
        pattern = DEFAULT_PATTERN[self.kind] if self.pattern is None else self.pattern
        if pattern not in PATTERNS:
            raise ConfigError(f"fault: unknown pattern {pattern!r}{_nearest(pattern, PATTERNS)}")
        if self.element_probability is not None and (self.pattern is not None or self.element is not None):
            raise ConfigError("fault: element_probability picks the elements itself; leave pattern and element out")
        if self.kind == "permute" and pattern == "element" and self.element_probability is None:
            raise ConfigError("fault: one element cannot be permuted; give permute another pattern, such as tile")
        if self.element_probability is None:
            object.__setattr__(self, "pattern", pattern)

    def due(self, step: int) -> bool:
        """Tell whether the fault can strike in a step."""
        if self.steps is not None:
            return step in self.steps
        if self.cycle is not None:
            return step > self.start and (step - self.start) % self.cycle == 0
        return self.from_step is None or step >= self.from_step

    @property
    def op_glob(self) -> str:
        """The part of the site that an operator's name must match."""
        return complete_glob(self.site).partition("/")[2].partition("#")[0]

    @property
    def phase_glob(self) -> str:
        """The part of the site that a phase must match."""
        return complete_glob(self.site).partition(":")[2].partition(".")[0]

    @property
    def slot_glob(self) -> str:
        """The part of the site that a slot must match."""
        return complete_glob(self.site).partition(":")[2].partition(".")[2] or "*"


def load_faults(path: str | Path) -> tuple[Fault, ...]:
    """Read the faults of a TOML file; raise `ConfigError` if it cannot be read or says something unknown."""
    path = Path(path)
    try:
        table = tomllib.loads(read_text(path, "a TOML file of faults", _MOST_BYTES))
    except (ValueError, RecursionError) as error:  # ValueError: also a number of thousands of digits
        raise ConfigError(f"{shown(path)} is not TOML: {shown(error)}; expected [[fault]] tables") from error
    except UsageError as error:
        raise ConfigError(f"cannot read the faults: {error}") from error
    try:
        found = from_mapping(table)
    except ConfigError as error:
        raise ConfigError(f"{shown(path)}: {error}") from error
    if not found:
        raise ConfigError(
            f"{shown(path)} declares no fault; expected [[fault]] tables (bitwitness demo --faults-template)"
        )
    return found


def from_mapping(table: Mapping[str, Any]) -> tuple[Fault, ...]:
    """Return the faults of ``{"fault": [{...}, ...]}``; raise `ConfigError` for what is not understood."""
    for key in table:
        if key != "fault":
            raise ConfigError(f"unknown key {shown(repr(key))}; faults are declared in [[fault]] tables")
    rows = table.get("fault", [])
    if not isinstance(rows, list) or not all(isinstance(row, Mapping) for row in rows):
        raise ConfigError("expected [[fault]] tables (with two brackets), one for each fault")
    if len(rows) > _MOST:
        raise ConfigError(
            f"{len(rows)} faults are declared; expected at most {_MOST}: each is asked at every operator it fits"
        )
    return tuple(_fault(number, row) for number, row in enumerate(rows))


def _fault(number: int, row: Mapping[str, Any]) -> Fault:
    known = [field.name for field in fields(Fault)]
    for key in row:
        if key not in known:
            raise ConfigError(f"fault {number}: unknown key {key!r}{_nearest(key, known)}")
    if "kind" not in row:
        raise ConfigError(f"fault {number}: no kind; expected one of {', '.join(DEFAULT_PATTERN)}")
    kind = ALIASES.get(row["kind"], row["kind"]) if isinstance(row["kind"], str) else ""
    for key in (key for keys in OF_KIND.values() for key in keys):
        if key in row and kind in DEFAULT_PATTERN and key not in OF_KIND.get(kind, ()):
            readers = " and ".join(name for name, keys in OF_KIND.items() if key in keys)
            raise ConfigError(
                f"fault {number}: {key} says nothing of kind {kind!r}; it is read by {readers}. Leave it out"
            )
    try:
        return Fault(**row)
    except ConfigError as error:
        raise ConfigError(str(error).replace("fault:", f"fault {number}:", 1)) from error


def _quoted(value: Any) -> str:
    """Return a value as it was given, if that can be shown: Python refuses to write numbers of thousands of digits."""
    try:
        return shown(repr(value), 100)
    except ValueError:
        return f"a number of more than {sys.get_int_max_str_digits()} digits"


def _nearest(word: str, known: list[str] | tuple[str, ...]) -> str:
    close = get_close_matches(word, known, n=1)
    return f"; did you mean {close[0]!r}?" if close else f"; known are {', '.join(known)}"


def _is_int(value: Any, least: int | None = None) -> bool:
    """Tell whether a value is a whole number that an index can hold."""
    fits = isinstance(value, int) and not isinstance(value, bool) and abs(value) < 1 << 63
    return fits and (least is None or value >= least)


def _is_number(value: Any) -> bool:
    return isinstance(value, float) or (_is_int(value) and abs(value) <= sys.float_info.max)


def _is_probability(value: Any) -> bool:
    return _is_number(value) and 0.0 <= value <= 1.0


def _or_none(fits: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: value is None or fits(value)


def _are_steps(value: Any) -> bool:
    return isinstance(value, list | tuple) and len(value) > 0 and all(_is_int(step, 0) for step in value)


_CHECKS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "kind": (lambda value: isinstance(value, str), "a word"),
    "site": (
        lambda value: isinstance(value, str) and value != "",
        "a glob of sites, for example '*/addmm:forward'",
    ),
    "rank": (_or_none(lambda value: _is_int(value, 0)), "a rank, 0 or more"),
    "slot": (_or_none(lambda value: _is_int(value, 0)), "a device's number on its node, 0 or more"),
    "steps": (_or_none(_are_steps), "a list of steps, one or more, each 0 or more"),
    "from_step": (_or_none(lambda value: _is_int(value, 0)), "a step, 0 or more"),
    "cycle": (_or_none(lambda value: _is_int(value, 1)), "a number of steps, 1 or more"),
    "start": (_is_int, "a step"),
    "probability": (_is_probability, "a number from 0 to 1"),
    "element_probability": (_or_none(_is_probability), "a number from 0 to 1"),
    "times": (_or_none(lambda value: _is_int(value, 1)), "a count, 1 or more"),
    "pattern": (_or_none(lambda value: isinstance(value, str)), "a word"),
    "element": (_or_none(lambda value: _is_int(value, 0)), "a flat index, 0 or more"),
    "bit": (
        lambda value: _is_int(value, -64) and value < 64,
        "a bit position from 0 (the lowest) to 63, or from -1 (the sign) down to -64",
    ),
    "value": (lambda value: _is_int(value) and value in {0, 1}, "0 or 1"),
    "factor": (_is_number, "a number"),
    "ulps": (lambda value: _is_int(value) and value != 0 and abs(value) < 2**62, "a whole number other than 0"),
}
