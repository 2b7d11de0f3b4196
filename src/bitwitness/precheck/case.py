"""One case of a pre-check: what is to be run, told so that another process can make it; and what it becomes there."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from bitwitness.trial.call import Call


@dataclass(frozen=True, slots=True)
class Case:
    """An operator with its inputs, as plain values that JSON takes.

    Attributes
    ----------
    name, operator, dtype, shapes, calls
        As in `bitwitness.trial.result.CaseResult`.
    made_of
        How it is made: ``kind`` is a key of `bitwitness.precheck.trial.MAKERS`, the rest is that maker's.
    refused
        Why it cannot be judged, where that is known beforehand; else empty.

    """

    name: str
    operator: str
    dtype: str
    shapes: str
    made_of: Mapping[str, Any] = field(default_factory=dict)
    calls: int = 1
    refused: str = ""

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


class NotJudged(Exception):  # noqa: N818 - a case's own end, which becomes its verdict
    """A case that cannot be judged; the message says why."""


Maker = Callable[[Mapping[str, Any], torch.device], Prepared]
