"""The entries of msprobe's ``dump.json``: what their names and the values in them tell. Nothing in them is trusted.

An entry stands for one call of a module or an API, or for the gradients of a module's own parameters::

    Functional.linear.0.forward                    prefix, API, number of the call, direction
    Module.blocks.0.attn.qkv.Linear.forward.0      prefix, path, class, direction, number of the call
    Module.blocks.0.attn.qkv.Linear.parameters_grad.0
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from typing import Any, NamedTuple

from bitwitness.store.rows import AT_LEAST_ONE, Measured

_MODULES = ("Module", "Cell")
_COLLECTIVES = ("Distributed", "MintDistributed")
_GRADIENTS = "parameters_grad"
_PARTS = frozenset({"input", "input_args", "input_kwargs", "output", "parameters"})
_STATISTICS = ("Max", "Min", "Mean", "Norm")
_SAID = frozenset({"type", "dtype", "shape", "requires_grad", "md5", "data_name", *_STATISTICS})
_DIRECTIONS = ("forward", "backward")
_DEEPEST = 64  # of containers inside one another, and of a shape
_MOST_ELEMENTS = 1 << 62  # of a tensor: counts are stored as int64, and this leaves room to add some up
_NOT_IN_A_SITE = re.compile(r"[/#:@]")
_HEX = re.compile(r"[0-9a-fA-F]{1,64}")


class Malformed(Exception):  # noqa: N818 - never leaves the reader but as a sentence
    """A part of the file is not what the format says."""


class EntryName(NamedTuple):
    """What an entry's name tells."""

    kind: str
    phase: str
    module: str
    op: str


def clean(text: str) -> str:
    """Return text that can be written as UTF-8: JSON may hold halves of surrogate pairs."""
    return text.encode("utf-8", "backslashreplace").decode()


def parse_name(name: str, parent: str) -> EntryName:
    """Read an entry's name; ``parent`` is the name of the module in which it ran, or empty."""
    parts = name.split(".")
    if parts[0] in _MODULES:
        if len(parts) < 4 or parts[-2] not in (*_DIRECTIONS, _GRADIENTS):
            raise Malformed("expected Module.path.Class.forward.0, with backward or parameters_grad in other entries")
        gradient = parts[-2] == _GRADIENTS
        path = ".".join(parts[1:-3]) or "."
        return EntryName(
            "gradient" if gradient else "module", "grad" if gradient else parts[-2], in_site(path), in_site(parts[-3])
        )
    if len(parts) < 4 or parts[-1] not in _DIRECTIONS or not all(parts):
        raise Malformed("expected Functional.linear.0.forward, or another prefix, API, number and direction")
    op = parts[1] if parts[0] == "Aten" else ".".join(parts[1:-2])  # an Aten name ends with the overload
    kind, phase = ("collective", "comm") if parts[0] in _COLLECTIVES else ("op", parts[-1])
    return EntryName(kind, phase, module_of(parent), in_site(_bare(op)))


def module_of(parent: str) -> str:
    """Return the path of a module, given by the name of one of its entries; ``.`` if it names no module."""
    parts = parent.split(".")
    if parts[0] not in _MODULES or len(parts) < 5:
        return "."
    return in_site(".".join(parts[1:-3]))


def _bare(op: str) -> str:
    return op[2:-2] if len(op) > 4 and op.startswith("__") and op.endswith("__") else op


def in_site(text: str) -> str:
    """Return a name that can be part of a printed site."""
    return _NOT_IN_A_SITE.sub("_", clean(text)) or "."


# -- values ------------------------------------------------------------------------------------------------------


class EntryTensor(NamedTuple):
    """A tensor of an entry: its place, and what the file says of it."""

    slot: str
    dtype: str
    shape: tuple[int, ...]
    file: str | None
    measured: Measured


def read_value(slot: str, found: Mapping[str, Any]) -> EntryTensor:
    """Read what the file says of one tensor."""
    shape, dtype, file = found.get("shape"), found.get("dtype"), found.get("data_name")
    if not isinstance(dtype, str):
        raise Malformed(f"dtype {short(dtype)}; expected a name such as torch.float32")
    if not isinstance(shape, list) or len(shape) > _DEEPEST or not all(type(n) is int and n >= 0 for n in shape):
        raise Malformed(f"shape {short(shape)}; expected a list of sizes")
    count = math.prod(shape)
    if max(shape, default=0) > _MOST_ELEMENTS or count > _MOST_ELEMENTS:
        raise Malformed(f"shape {short(shape)}; no tensor is that large")
    name = clean(dtype.rpartition(".")[2].lower())
    kept = clean(file) if isinstance(file, str) and file not in ("", "-1") else None
    return EntryTensor(slot, name, tuple(shape), kept, _measured(found, count, name))


def _measured(found: Mapping[str, Any], count: int, dtype: str) -> Measured:
    """Return statistics as ours are defined, as far as the file's tell them.

    Its extremes are of all values: finite ones prove that there is neither NaN nor Inf; others tell that there is one, but
    not how many. Its mean and norm are then of no use.
    """
    code = _hash(found.get("md5"))
    if dtype.startswith("complex"):  # extremes of magnitudes, which are no extremes of parts
        return Measured(2 * count, hash=code)
    low, high = _finite(found.get("Min")), _finite(found.get("Max"))
    if not count:
        return Measured(0, 0, 0, 0, 0, hash=code)
    if low is None or high is None:
        least, most = _number(found.get("Min")), _number(found.get("Max"))
        # Extremes pass a NaN on, and each infinity is one of them; a mean may be NaN without there being one.
        there = {
            "nan": any(n is not None and math.isnan(n) for n in (least, most)),
            "pos_inf": most == math.inf,
            "neg_inf": least == -math.inf,
        }
        some = {name: AT_LEAST_ONE for name, seen in there.items() if seen}
        return Measured(count, min=low, max=high, hash=code, **some)
    norm = _finite(found.get("Norm"))
    # The norm of a tensor without dimensions is its value there, sign and all.
    mean = _finite(found.get("Mean"))
    return Measured(count, 0, 0, 0, None, low, high, mean, None if norm is None else abs(norm), hash=code)


def _number(value: Any) -> float | None:
    if isinstance(value, str) and value in ("nan", "inf", "-inf"):
        return float(value)
    if not isinstance(value, int | float):
        return None
    try:
        return float(value)
    except OverflowError:
        return None


def _finite(value: Any) -> float | None:
    number = _number(value)
    return number if number is not None and math.isfinite(number) else None


def measures_of(found: Mapping[str, Any]) -> frozenset[str]:
    """Return which statistics the file has of a tensor."""
    return frozenset(name for name in _STATISTICS if name in found)


def wrong_measures(found: Mapping[str, Any]) -> list[str]:
    """Return what is said of a tensor in no form that can be read, or under a name that is almost one that is known."""
    wrong = [name for name in _STATISTICS if not _is_number(found.get(name))]
    wrong += ["md5"] if found.get("md5") is not None and _hash(found["md5"]) is None else []
    missing = [name for name in _SAID if name not in found]
    return wrong + [name for key in found.keys() - _SAID for name in get_close_matches(key[:20], missing, 1, 0.6)]


def _is_number(value: Any) -> bool:
    return value is None or isinstance(value, int | float) or value in ("nan", "inf", "-inf", "N/A")


def _hash(value: Any) -> int | None:
    """Return a checksum as a number that fits; of one longer than 60 bits its end."""
    return int(value[-15:], 16) if isinstance(value, str) and _HEX.fullmatch(value) else None


def short(value: Any) -> str:
    """Return how a value looks, for a sentence about it."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # a number of more digits than Python prints
        text = type(value).__name__
    return clean(text if len(text) <= 80 else f"{text[:77]}...")


# -- what an entry holds -------------------------------------------------------------------------------------------


def tensors_in(found: Any, slot: str, depth: int = 0) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield what is said of the tensors in a value, with slots as a recording of ours names them."""
    if depth > _DEEPEST:
        raise Malformed(f"containers more than {_DEEPEST} deep at {slot[:80]}")
    if isinstance(found, dict):
        if "shape" in found and "dtype" in found:
            yield slot, found
            return
        if str(found.get("type")).endswith("Tensor"):
            raise Malformed(f"a tensor at {slot[:80]} without shape and dtype")
        inside = slot.rstrip("0123456789") or slot  # out0 of a module that returns a dict: out.logits
        for key, item in found.items():
            yield from tensors_in(item, f"{inside if slot[-1:].isdigit() else slot}.{clean(key)}", depth + 1)
    elif isinstance(found, list):
        for i, item in enumerate(found):
            yield from tensors_in(item, f"{slot}.{i}", depth + 1)


def _numbered(found: Any, slot: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the tensors of a list of arguments or results."""
    if isinstance(found, list):
        for i, item in enumerate(found):
            yield from tensors_in(item, f"{slot}{i}")
    elif isinstance(found, dict):
        yield from tensors_in(found, f"{slot}0" if "dtype" in found else slot)
    elif found is not None:
        raise Malformed(f"{short(found)} where {slot}0, {slot}1, … were expected")


def _named(found: Any, prefix: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the tensors of a mapping of names."""
    if found is None:
        return
    if not isinstance(found, dict):
        raise Malformed(f"{short(found)} where names with values were expected")
    for key, item in found.items():
        yield from tensors_in(item, f"{prefix}{clean(key)}")


def values_of(call: EntryName, entry: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield an entry's tensors, arguments first."""
    backward = call.phase == "backward"
    swap = backward and call.kind == "module"  # a gradient enters where the output left
    if backward:
        yield from _numbered(entry.get("input"), "grad_out" if swap else "in")
    yield from _numbered(entry.get("input_args"), "in")
    yield from _named(entry.get("input_kwargs"), "in.")
    yield from _named(entry.get("parameters"), "")
    yield from _numbered(entry.get("output"), "grad_in" if swap else "out")


def unknown_parts(entry: Mapping[str, Any]) -> list[str]:
    """Return the parts of an entry that hold tensors and have a name that is not known; others may hold what they like."""
    return [
        key for key, found in entry.items() if key not in _PARTS and isinstance(found, dict | list) and _holds(found)
    ]


def _holds(found: Any) -> bool:
    try:
        return next(tensors_in(found, ""), None) is not None
    except Malformed:
        return True


def arguments_text(op: str, entry: Mapping[str, Any]) -> str | None:
    """Return a call's plain arguments as JSON, in the form of a recording of ours; None if there are none."""
    args, kwargs = entry.get("input_args"), entry.get("input_kwargs")
    scalars, seen = [0], [0]
    body = {
        "f": op,
        "a": [_plain(item, scalars, seen) for item in args] if isinstance(args, list) else [],
        "k": {clean(k): _plain(v, scalars, seen) for k, v in kwargs.items()} if isinstance(kwargs, dict) else {},
    }
    return json.dumps(body, separators=(",", ":")) if scalars[0] else None


def _plain(item: Any, scalars: list[int], seen: list[int], depth: int = 0) -> Any:
    if depth > _DEEPEST:
        raise Malformed(f"arguments more than {_DEEPEST} deep")
    if isinstance(item, list):
        return [_plain(part, scalars, seen, depth + 1) for part in item]
    if not isinstance(item, dict):
        return None
    if "shape" in item and "dtype" in item:
        seen[0] += 1
        return {"$": seen[0] - 1}
    if "value" not in item:
        return {"other": str(item.get("type", "dict"))[:80]}
    scalars[0] += 1
    value = item["value"]
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": repr(value)}  # JSON has no infinities
    return value if value is None or isinstance(value, bool | int | float | str) else {"other": short(value)}
