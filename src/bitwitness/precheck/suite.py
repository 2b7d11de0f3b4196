"""Cases of PyTorch's own sample inputs: its OpInfo database, several hundred operators in each dtype that a device supports.

The database is a part of torch's tests (``torch.testing._internal.common_methods_invocations``, through `tap.opinfo`); it needs
``expecttest``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from difflib import get_close_matches
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from bitwitness.errors import UsageError
from bitwitness.precheck.case import Case, NotJudged, Prepared, shapes_text
from bitwitness.precheck.literals import call_source
from bitwitness.tap.opinfo import database
from bitwitness.trial.call import Call, tensors_of

KIND = "opinfo"
DTYPES = ("float32", "bfloat16", "float16")
"""What is tried unless other dtypes are asked for."""


def groups(operators: Iterable[str], dtypes: Iterable[str], device: torch.device) -> list[dict[str, Any]]:
    """Return what `cases_of` makes cases of: an operator in one dtype, by its place in the database.

    Parameters
    ----------
    operators
        Globs of names (``nn.functional.*``, ``linalg_*``); all where there is none.
    dtypes
        Names of dtypes; ``all`` for every one that the device supports.
    device
        The device under test.

    Raises
    ------
    UsageError
        For an operator that torch has no samples for, and a dtype that is none.

    """
    wanted, known = list(operators), database()
    names = [op.formatted_name for op in known]
    for glob in wanted:
        if not any(_named(op, glob) for op in known):
            near = get_close_matches(glob, [*names, *(op.name for op in known)], n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise UsageError(f"torch has no samples of an operator {glob!r}: it was not tried, and is not passed{hint}")
    chosen = _dtypes(dtypes)
    found = []
    for place, op in enumerate(known):
        if wanted and not any(_named(op, glob) for glob in wanted):
            continue
        supported = op.supported_dtypes(device.type)
        head = {"kind": KIND, "place": place, "operator": op.formatted_name}
        for dtype in sorted(supported, key=str) if chosen is None else chosen:
            refused = "" if dtype in supported else f"it does not take {_name(dtype)} on {device.type}"
            found.append(head | {"dtype": _name(dtype), "refused": refused})
    return found


def _named(op: Any, glob: str) -> bool:
    return fnmatchcase(op.formatted_name, glob) or fnmatchcase(op.name, glob)


def _dtypes(names: Iterable[str]) -> list[torch.dtype] | None:
    found = []
    for name in names:
        if name == "all":
            return None
        dtype = getattr(torch, name, None)
        if not isinstance(dtype, torch.dtype):
            raise UsageError(f"{name!r} is no dtype of torch's; expected names such as {', '.join(DTYPES)}, or all")
        found.append(dtype)
    return found


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def cases_of(group: Mapping[str, Any], device: torch.device) -> Iterator[Case]:
    """Yield the cases of a group: torch's samples, in their order."""
    head = f"{group['operator']}[{group['dtype']}]"
    if group["refused"]:
        yield Case(head, group["operator"], group["dtype"], "", group, refused=group["refused"])
        return
    try:
        samples = _samples(group["place"], group["dtype"], device.type)
    except Exception as error:  # the database's own samples may not be made for a device
        yield Case(
            head, group["operator"], group["dtype"], "", group, refused=f"torch could not make its samples: {error}"
        )
        return
    if not samples:
        yield Case(
            head, group["operator"], group["dtype"], "", group, refused="torch has no sample of it in this dtype"
        )
    for number, sample in enumerate(samples):
        tensors = tensors_of(((sample.input, *sample.args), sample.kwargs))
        shapes = shapes_text(t.shape for t in tensors)
        yield Case(f"{head}#{number}", group["operator"], group["dtype"], shapes, {**group, "sample": number})


@lru_cache(maxsize=2)
def _samples(place: int, dtype: str, device: str) -> list[Any]:
    op, kind = database()[place], getattr(torch, dtype)
    torch.manual_seed(0)
    with_gradients = kind in op.supported_backward_dtypes(device) and bool(op.supports_autograd)
    return list(op.sample_inputs(device, kind, requires_grad=with_gradients))


def prepare(made_of: Mapping[str, Any], device: torch.device) -> Prepared:
    """Return one of torch's samples as a call."""
    op = database()[made_of["place"]]
    sample = _samples(made_of["place"], made_of["dtype"], device.type)[made_of["sample"]]
    args = (sample.input, *sample.args)
    if any(isinstance(a, Tensor) and a.layout is not torch.strided for a in tensors_of((args, sample.kwargs))):
        raise NotJudged("a sparse input has no counterpart in float64 that could be held against")
    public = _public_name(op)
    source, tensors = call_source(public, args, sample.kwargs) if public else ("", {})
    return Prepared(Call(op.op, args, sample.kwargs), {}, source, tensors)


def _public_name(op: Any) -> str:
    """Return under which of torch's names a reproducer finds the operator; empty where it is wrapped for torch's own tests."""
    found: Any = torch
    for part in op.name.split("."):
        found = getattr(found, part, None)
    if found is op.op or (callable(found) and getattr(found, "__name__", "") == getattr(op.op, "__name__", "?")):
        return f"torch.{op.name}"
    method = getattr(torch.Tensor, op.name, None)
    return f"torch.Tensor.{op.name}" if method is not None and method is op.op else ""
