"""What the trace of a step finds: origins, with the evidence that lets a reader check them."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

import torch

from bitwitness.nonfinite.exact import Exact
from bitwitness.nonfinite.flags import Flags
from bitwitness.site import Site
from bitwitness.stats import Stats, stats_of
from bitwitness.tap.frames import NOWHERE, Line


class Kind(StrEnum):
    """What kind of thing made the first non-finite value."""

    OPERATOR = "operator"
    PARAMETER = "parameter"
    BUFFER = "buffer"
    BATCH = "batch"
    GIVEN = "given"  # to the model, by what computed it before
    CONSTANT = "constant"
    TERM = "term"
    OPTIMIZER = "optimizer"
    LOSS_SCALE = "loss_scale"
    COLLECTIVE = "collective"
    RECEIVED = "received"
    AFTERMATH = "aftermath"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Extent:
    """One tensor of an operator: its dtype, shape, and statistics (`Stats` of its finite values)."""

    slot: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    stats: Stats

    @classmethod
    def of(cls, slot: str, tensor: torch.Tensor) -> Extent:
        """Measure a tensor; waits for its device."""
        return cls(slot, tensor.dtype, tuple(tensor.shape), stats_of(tensor.detach()))

    @property
    def bad(self) -> bool:
        """Whether any of its values is NaN or infinite."""
        return bool(self.stats.nan + self.stats.pos_inf + self.stats.neg_inf)

    def to_dict(self) -> dict[str, Any]:
        """Return it for ``evidence``."""
        stats = self.stats
        return {
            "slot": self.slot,
            "dtype": str(self.dtype).removeprefix("torch."),
            "shape": list(self.shape),
            "min": stats.min,
            "max": stats.max,
            "absmax": stats.absmax,
            "zeros": stats.zeros,
            "nan": stats.nan,
            "inf": stats.pos_inf + stats.neg_inf,
            "count": stats.count,
        }


@dataclass(frozen=True, slots=True)
class Origin:
    """One place where non-finite values began.

    Attributes
    ----------
    number
        Order of appearance in the step.
    kind, site
        What made them, and where.
    flags
        What came out.
    line, forward_line
        The user's code that ran; for a backward operator also the line of the forward operator it belongs to.
    forward_op, node
        That forward operator, and autograd's name of the backward node.
    inputs, outputs
        Their extents.
    arguments
        What the operator was given by position: an extent, a number, or None for all else.
    exact
        What its bad results are in float64, where that could be computed.
    accumulating
        Whether it adds many values into one place.
    reaches
        The losses, gradients and buffers that it made non-finite.
    detail
        What else is known, in words.
    others
        Names of further parameters of which the same is true.
    frame
        How many module frames had been noted before it.

    """

    number: int
    kind: Kind
    site: Site
    flags: Flags
    line: Line = NOWHERE
    forward_line: Line = NOWHERE
    forward_op: str = ""
    node: str = ""
    inputs: tuple[Extent, ...] = ()
    outputs: tuple[Extent, ...] = ()
    arguments: tuple[Extent | float | None, ...] = ()
    exact: Exact | None = None
    accumulating: bool = False
    reaches: tuple[str, ...] = ()
    detail: str = ""
    others: tuple[str, ...] = ()
    frame: int = 0

    @property
    def same(self) -> tuple[Any, ...]:
        """Equal for two appearances of one origin: a recomputed activation, a layer called again."""
        return (
            self.kind,
            self.site.module,
            self.site.op,
            self.site.phase,
            self.line if self.line[0] else self.forward_line,
        )

    def reaching(self, targets: tuple[str, ...]) -> Origin:
        """Return it with what it reaches."""
        return replace(self, reaches=targets)


@dataclass(frozen=True, slots=True)
class Told:
    """What one rank found: the kind of origin, its site, the line, and a sentence."""

    rank: int
    kind: Kind
    site: str
    line: str
    text: str

    @property
    def own(self) -> bool:
        """Whether it began on that rank."""
        return self.kind not in (Kind.RECEIVED, Kind.COLLECTIVE, Kind.UNKNOWN, Kind.AFTERMATH)


@dataclass(slots=True)
class Trace:
    """The outcome of one traced replay.

    Attributes
    ----------
    origins
        Those that reach a loss, a gradient or a buffer, in order of appearance.
    targets
        Losses, gradients and buffers that were not finite in the replay.
    frames
        Lines of the module frame list, up to each origin, by its number.
    tensors
        What the first origins read and wrote, by ``origin{number}.{slot}``.
    passed_over
        How many origins reach something, too, but are of a kind that the mode does not look at.
    problem
        Why the step could not be traced, or not through its loss code.
    seconds
        How long the replay took, by `tap.timer.stopwatch`.

    """

    origins: list[Origin] = field(default_factory=list)
    targets: list[str] = field(default_factory=list)
    frames: dict[int, list[str]] = field(default_factory=dict)
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    passed_over: int = 0
    problem: str | None = None
    seconds: float = 0.0
