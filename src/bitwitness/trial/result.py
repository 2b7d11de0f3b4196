"""What a trial of an operator says: a verdict for each of its outputs and gradients, and one for all."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

PASS, WARN, FAIL, NOT_JUDGED = "pass", "warn", "fail", "not judged"
"""Verdicts: within what a careful kernel leaves; right, but less careful than it should be; wrong; neither could be told."""
NOTE = "note"
"""Of one way of trying it: right kernels may differ there, which is told and changes no verdict."""
ERROR, CRASH, TIMEOUT = "error", "crash", "timeout"
"""Verdicts of a case without a result: it raised, its process died, it was stopped after its time. None of them is passed."""
_FLOATS = ("ratio", "value", "expected", "allowed", "ulp_max", "euclidean", "relative")
_WORST_FIRST = (FAIL, CRASH, TIMEOUT, ERROR, WARN, NOT_JUDGED, PASS)


def worst(verdicts: Iterable[str]) -> str:
    """Return the worst of several verdicts; ``not judged`` of none at all, for nothing that was looked at has passed."""
    found = set(verdicts)
    return next((verdict for verdict in _WORST_FIRST if verdict in found), NOT_JUDGED)


@dataclass(frozen=True, slots=True)
class OutputResult:
    """One output, or the gradient of one input, against the oracle.

    Attributes
    ----------
    slot
        ``out0``, ``out1``, … for outputs; ``grad0``, … for the gradients of the inputs that want one, in order.
    verdict, reason
        ``reason`` is a sentence that names what was seen; empty where it passed.
    dtype, shape
        As the device returned it.
    ratio
        The worst element's error over what is allowed there; infinite for a NaN or Inf that the oracle does not have.
    at, value, expected, allowed
        The worst element: its index, the device's number, the oracle's, and by how much it may be off.
    ulp_max, ulp_histogram
        Distance from the oracle's value in units in the last place of the dtype: the largest, and how many elements are
        ``0``, up to ``1``, ``2``, ``4``, … away, by the upper end of the bucket as text; ``inf`` where it is no number.
    euclidean
        L2 distance from the oracle.
    relative
        The same over the oracle's L2.

    """

    slot: str
    verdict: str
    reason: str = ""
    dtype: str = ""
    shape: tuple[int, ...] = ()
    ratio: float = 0.0
    at: tuple[int, ...] = ()
    value: float = 0.0
    expected: float = 0.0
    allowed: float = 0.0
    ulp_max: float = 0.0
    ulp_histogram: Mapping[str, int] = field(default_factory=dict)
    euclidean: float = 0.0
    relative: float = 0.0


@dataclass(frozen=True, slots=True)
class CaseResult:
    """One case of a pre-check: an operator with its inputs, on the device under test.

    Attributes
    ----------
    name
        Unique in a pre-check, printable: ``nn.functional.gelu[float32]#3``, or a recorded call's site.
    operator, dtype, shapes
        What ran: the operator's full name, the dtype under test, the shapes of the tensors that it was given.
    calls
        Recorded calls that this one stands for: those with the same operator, dtypes, shapes and other arguments.
    verdict, reason
        The worst of its outputs', or what kept it from being judged.
    outputs
        One `OutputResult` each.
    seconds
        Process-CPU time of the case.
    reproducer
        Path of a Python file that runs the case alone, where it failed; else empty.

    """

    name: str
    operator: str
    dtype: str
    shapes: str
    verdict: str
    reason: str = ""
    calls: int = 1
    outputs: tuple[OutputResult, ...] = ()
    seconds: float = 0.0
    reproducer: str = ""

    def as_dict(self) -> dict[str, Any]:
        """Return the fields by name, as JSON takes them but for numbers that are not finite."""
        return asdict(self)

    @classmethod
    def from_dict(cls, found: Mapping[str, Any]) -> CaseResult:
        """Return what `as_dict` gave, also after it was written as JSON."""
        outputs = tuple(
            OutputResult(
                **{**one, "shape": tuple(one["shape"]), "at": tuple(one["at"])}
                | {name: float(one[name]) for name in _FLOATS}  # NaN and infinities are written as text
            )
            for one in found["outputs"]
        )
        return cls(**{**found, "outputs": outputs})
