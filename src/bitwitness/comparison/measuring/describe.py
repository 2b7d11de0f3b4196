"""Words for differences: which argument of an operator, by its name."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from bitwitness.comparison.matching.frame import Node, StepFrame

_UNIMPORTANT = (
    "names",
    "foreach",
    "fused",
    "capturable",
    "differentiable",
    "initial_lr",
    "memory_format",
    "sparse",
)
_EXTREMES = frozenset(torch.finfo(dtype).max for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16))
_LARGEST = torch.finfo(torch.float32).max
RECORD_OPERATORS = "record operators, too (--level mix), of the module that the script calls"
_RECORD_ALIKE = (
    "they work on parts of the batch, which are others in each run; record both with as many ranks and micro-batches"
)
"""What to do where nothing recorded tells who made a difference."""
_NAMED = 4
"""Operators that are named in one sentence."""
_DIMENSIONS = ("dim", "dims", "dim0", "dim1", "start_dim", "end_dim")
_PLACES = ("device", "layout", "pin_memory", "non_blocking")


def made_by_nothing(a: StepFrame, b: StepFrame, *, operators: bool) -> str:
    """Say that nothing that was compared made a value differ, and what to record; ``operators``: whether these were."""
    if (a.ranks, a.micros) != (b.ranks, b.micros):
        return f"operators were not compared: {_RECORD_ALIKE}"
    return "no recorded operator made it so" + ("" if operators else f": {RECORD_OPERATORS}")


def in_chain(nodes: Sequence[Node]) -> str:
    """Name operators that follow one another: ``mm, add``; of many the first and the last."""
    names = [node.op for node in nodes]
    return ", ".join(names if len(names) <= _NAMED else [*names[:2], "…", names[-1]])


def by_each(first: str, second: str) -> str:
    """Say by what each run computes something."""
    return f"by {first} in run A and by {second} in run B"


def argument_differences(
    a: dict[str, Any], b: dict[str, Any], precisions: tuple[str, str] | None = None, *, rank: int = 0
) -> list[str]:
    """Return ``name: value against value`` for each argument that differs and that numbers may depend on.

    ``precisions``: the dtypes that the runs compute in, where these are not the same; then arguments that are dtypes do not
    count, nor those that are each dtype's largest or smallest number, as masks are filled with. ``rank``: how many dimensions
    the first input has; the last one may be called by its number or be -1.
    """
    first, second = _named(a), _named(b)
    found = []
    kinds = str(a.get("f", "")), str(b.get("f", ""))
    if kinds[0] != kinds[1]:
        # Another optimizer. Another kernel of one operator, or another tool's name for it, has other arguments.
        is_operator = any("." in kind for kind in kinds)
        other = [
            f"{name} {_meant(name, first[name])} against {_meant(name, second[name])}" for name in _other_settings(a, b)
        ]
        return _along_others(kinds, first, second, rank) if is_operator else [f"{kinds[0]} against {kinds[1]}", *other]
    for name in [*first, *(name for name in second if name not in first)]:
        x, y = first.get(name, "(default)"), second.get(name, "(default)")
        if name in _DIMENSIONS and _counted(x, rank) == _counted(y, rank):
            continue
        if precisions and any(isinstance(value, dict) and "dtype" in value for value in (x, y)):
            continue
        if precisions and all(_is_extreme(value) for value in (x, y)) and (x > 0) == (y > 0):
            continue
        if "." not in kinds[0] and (name == "group" or not (name in first and name in second) or _unlike(name, x, y)):
            continue  # of an optimizer, of which another class of that name has other settings; a GroupNorm's matters
        if not _is_same(x, y) and name not in _UNIMPORTANT and name not in _PLACES and not _is_tensor(x, y):
            found.append(f"{name} {_meant(name, x)} against {_meant(name, y)}")
    return found


def _along_others(kinds: tuple[str, str], first: dict[str, Any], second: dict[str, Any], rank: int) -> list[str]:
    """Return that one run reduces over some dimensions, by the same operator's other kind, and the other over all."""
    over = first.get("dim"), second.get("dim")
    same = len({kind.rpartition(".")[0] for kind in kinds}) == 1
    if not same or rank < 2 or (over[0] is None) == (over[1] is None):
        return []
    some = over[1] if over[0] is None else over[0]
    if not isinstance(some, int | list) or (isinstance(some, list) and len(some) in (0, rank)):
        return []
    words = ["all" if one is None else _shown(one).replace(" ", "") for one in over]
    return [f"dim {words[0]} against {words[1]}"]


def _is_same(x: Any, y: Any) -> bool:
    """Return whether two arguments are one, or one number of which one run keeps a float32, as a learning rate in a tensor."""
    numbers = all(isinstance(value, float) for value in (x, y))
    return bool(x == y or (numbers and abs(x) < _LARGEST and abs(y) < _LARGEST and np.float32(x) == np.float32(y)))


def _unlike(name: str, x: Any, y: Any) -> bool:
    """Return whether what is known of two optimizers' states is not of one kind: steps of one, the keys of the other."""
    counted = [str(one).startswith("of ") for one in (x, y)]
    return name == "state" and any(counted) and not all(counted) and "none" not in (x, y)


def _counted(value: Any, rank: int) -> Any:
    """Return dimensions counted from the first one; one in a list is that one."""
    if isinstance(value, list):
        found = [_counted(one, rank) for one in value]
        return found[0] if len(found) == 1 else found
    return value + rank if isinstance(value, int) and value < 0 else value


def is_another_class_alone(a: dict[str, Any], b: dict[str, Any]) -> bool:
    """Tell whether two optimizers differ by their class, and not by a setting that both have or that decays weights."""
    names = str(a.get("f", "")), str(b.get("f", ""))
    if names[0] == names[1] or any("." in name for name in names):
        return False
    decays = [call["weight_decay"] or 0 for call in (_named(a), _named(b)) if "weight_decay" in call]
    return len(set(decays)) <= 1 and not _other_settings(a, b)


def _other_settings(a: dict[str, Any], b: dict[str, Any]) -> list[str]:
    """Return the settings that two optimizers of other classes both have, and that are not the same."""
    first, second = _named(a), _named(b)
    passed = {*_UNIMPORTANT, *_PLACES, "group", "state"}  # each counts as it likes
    return [name for name in first if name in second and name not in passed and first[name] != second[name]]


def _named(call: dict[str, Any]) -> dict[str, Any]:
    names, defaults = _schema(str(call.get("f", "")))
    values = call.get("a")
    positional = values if isinstance(values, list) else []
    keywords = call.get("k")
    named = {names[i] if i < len(names) else f"argument {i}": value for i, value in enumerate(positional)}
    named |= keywords if isinstance(keywords, dict) else {}
    return defaults | named


@lru_cache(maxsize=1024)
def _schema(function: str) -> tuple[tuple[str, ...], dict[str, Any]]:
    """Return an operator's argument names and defaults, where torch knows it: looked up, never run."""
    namespace, _, rest = function.partition(".")
    name, _, overload = rest.partition(".")
    if not (namespace == "aten" and name.isidentifier() and (overload.isidentifier() or not overload)):
        return (), {}
    try:
        schema = getattr(getattr(getattr(torch.ops, namespace), name), overload or "default")._schema
    except (AttributeError, RuntimeError):
        return (), {}
    plain = (bool, int, float, str)
    defaults = {a.name: a.default_value for a in schema.arguments if isinstance(a.default_value, plain)}
    return tuple(a.name for a in schema.arguments), defaults


def _is_extreme(value: Any) -> bool:
    """Return whether a number is the largest or smallest of a dtype; a half's, and the others of about 3.4e38."""
    return isinstance(value, float) and abs(value) in _EXTREMES


def _is_tensor(x: Any, y: Any) -> bool:
    return all(isinstance(value, dict) and "$" in value for value in (x, y))


def _meant(name: str, value: Any) -> str:
    """Return an argument as people write it in Python."""
    if name == "reduction" and value in (0, 1, 2):
        return f"{('none', 'mean', 'sum')[value]!r}"
    return _shown(value)


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        if "$" in value:
            return "a tensor"
        return str(next(iter(value.values()), value))
    return str(value)


def of_one_run(side: str, reader: str, count: int, *, adds: bool) -> str:
    """Say that only one run computes what ``reader`` reads; ``count``: through how many operators it goes backward to there.

    ``adds``: to a gradient that is there already.
    """
    if count > 1:
        why = "what the other run detaches, makes without gradients, or has another backward of its own for"
        return f"only run {side} goes backward here, through {count} operators that meet the other gradients in {reader}: {why}"
    if adds:
        why = "it was not zeroed (zero_grad), or there is one backward more"
        return f"only run {side} adds to a gradient that is still there, in {reader}: {why}"
    return f"only run {side} has it, and its result matters to {reader}"
