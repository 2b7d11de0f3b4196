"""Which operators may be recomputed: those whose result follows from their arguments, and is the only right one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from bitwitness.oracle.kernels import named_arguments
from bitwitness.tap.compat import OpOverload

_NOT_UNIQUE = ("svd", "eig", "linalg_qr", "geqrf", "ormqr", "householder", "lstsq", "lobpcg")
"""Parts of names of operators whose results are right with either sign or in any order."""
_TORCHS = frozenset(("aten", "prims", "quantized", "mkldnn", "c10d", "_c10d_functional", "torchvision"))
"""Namespaces of torch's own operators. They keep no state beside a generator's; a script's may."""
_BARRED = ("from_file", "empty", "rand", "normal", "bernoulli", "to_copy", "copy", "resize", "set_", "repeat", "full")
"""Beginnings of names that a recording may not have run: what reads files, draws, or makes memory of any size.

A recording may come from somebody else: ``repeat`` and ``full`` would take as much memory as its args column asks for.
"""

_CAST = "aten._to_copy.default"


def is_torchs(func: OpOverload) -> bool:
    """Whether an operator is torch's own; one that a script declares may depend on more than its arguments."""
    return func.namespace in _TORCHS


def is_unique(func: OpOverload) -> bool:
    """Whether an operator has only one right result."""
    return not any(part in func.overloadpacket.__name__ for part in _NOT_UNIQUE)


_FRESH = frozenset(("empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "empty_permuted"))
_OF_THE_DTYPE = frozenset(("nextafter", "nextafter_"))


def have_truth(funcs: Sequence[OpOverload]) -> bool:
    """Whether float64 can say what operators should give: not the next number of a dtype, nor what fresh memory holds."""
    names = [func.overloadpacket.__name__ for func in funcs]
    return not (names and _FRESH.issuperset(names)) and _OF_THE_DTYPE.isdisjoint(names)


def may_draw(func: OpOverload) -> bool:
    """Whether an operator draws random numbers for some arguments."""
    return torch.Tag.nondeterministic_seeded in func.tags


def draws(func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call draws random numbers; attention without dropout does not."""
    if not may_draw(func):
        return False
    given = named_arguments(func, args, kwargs)
    return bool(given.get("dropout_p", 1.0) != 0.0)  # what has no dropout draws in any case


def functional_operator(
    name: str, args: Sequence[Any] | None = None, kwargs: Mapping[str, Any] | None = None, *, casts: bool = False
) -> OpOverload | None:
    """Return the operator of that full name (``aten.mm.default``) if a recording may have it run, else None.

    ``args``, ``kwargs``: of the call, where they are known: attention draws with dropout alone. ``casts``: whether it may be
    one that casts, too: it rounds once, which only shows where dtypes are kept.

    A recording's word is not taken for what is run: only torch's own ``aten`` operators that change no argument, draw no
    random numbers and read no files.
    """
    parts = name.split(".")
    if len(parts) != 3 or parts[0] != "aten" or not all(part.isidentifier() for part in parts):
        return None
    if parts[1].lstrip("_").startswith(_BARRED) and not (casts and name == _CAST):
        return None
    try:
        func: OpOverload = getattr(getattr(torch.ops.aten, parts[1]), parts[2])
        arguments = func._schema.arguments
    except (AttributeError, RuntimeError):
        return None
    # Whatever its name, what takes a file's name may read it.
    reads_file = any(str(a.type) in ("str", "Optional[str]") and a.name == "filename" for a in arguments)
    random = may_draw(func) if args is None else draws(func, args, kwargs or {})
    return None if func._schema.is_mutable or random or reads_file else func
