"""One case of a pre-check: what is to be run, told so that another process can make it; and what it becomes there."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch

from bitwitness.trial.call import Call

_MOST_ELEMENTS = 1 << 28  # of an input: 2 GiB in float64


@dataclass(frozen=True, slots=True)
class Case:
    """An operator with its inputs, as plain values that JSON takes.

    Attributes
    ----------
    name, operator, dtype, shapes, calls
        As in `bitwitness.trial.result.CaseResult`.
    made_of
        How it is made: ``kind`` is a key of `bitwitness.precheck.attempt.MAKERS`, the rest is that maker's.
    refused
        Why it cannot be judged, where that is known beforehand; else empty.
    damaged
        Whether that is because a part of the recording cannot be read.

    """

    name: str
    operator: str
    dtype: str
    shapes: str
    made_of: Mapping[str, Any] = field(default_factory=dict)
    calls: int = 1
    refused: str = ""
    damaged: bool = False

    def as_dict(self) -> dict[str, Any]:
        """Return the fields by name."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Prepared:
    """A case with its tensors, ready to run.

    Attributes
    ----------
    call
        What runs on the device under test.
    recorded
        Results that a run wrote down, by slot (``out0``): they are judged, too.
    source
        The call as a Python expression for a reproducer (`bitwitness.precheck.reproducer`); empty where it has none.
    tensors
        The tensors that it names.

    """

    call: Call
    recorded: Mapping[str, torch.Tensor] = field(default_factory=dict)
    source: str = ""
    tensors: Mapping[str, torch.Tensor] = field(default_factory=dict)


def counted(cases: Iterable[tuple[str, Case]]) -> Iterator[Case]:
    """Yield the first case of each key, with how many there are, in their order."""
    found: dict[str, Case] = {}
    calls: Counter[str] = Counter()
    for key, case in cases:
        found.setdefault(key, case)
        calls[key] += 1
    for key, case in found.items():
        yield replace(case, calls=calls[key])


def shapes_text(shapes: Iterable[Sequence[int]]) -> str:
    """Return shapes as ``[64,256] [256]``."""
    return " ".join(str(list(shape)).replace(" ", "") for shape in shapes)


def first_floating(dtypes: Iterable[str]) -> str:
    """Return the first floating dtype of several by its name; empty where there is none."""
    return next((dtype for dtype in dtypes if dtype.startswith(("float", "bfloat"))), "")


def too_large(shape: Sequence[int]) -> str:
    """Return why an input is too large to be tried in float64; empty where it is not."""
    return f"an input has more than {_MOST_ELEMENTS:,} elements" if math.prod(shape) > _MOST_ELEMENTS else ""


class NotJudged(Exception):  # noqa: N818 - a case's own end, which becomes its verdict
    """A case that cannot be judged; the message says why."""


class Damaged(NotJudged):
    """A case of which a part was recorded and cannot be read; the message says which."""


Maker = Callable[[Mapping[str, Any], torch.device], Prepared]
