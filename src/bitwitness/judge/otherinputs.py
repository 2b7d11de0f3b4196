"""Whether re-executions differ by what their operators are given: state that a forward keeps where no replay puts it back.

A kernel that does not repeat its bits, and a device that errs, give another *result* for the same inputs. A counter in a
library's own memory, or a generator nobody can reach, changes an operator's *inputs*, while all results before it agree. Two
replays, operator by operator, tell one from the other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

import torch

from bitwitness.capture.step import StepRecord
from bitwitness.capture.structure import PLAIN
from bitwitness.judge.agreement import Match
from bitwitness.judge.fingerprint import Fingerprint
from bitwitness.oracle.eligible import is_torchs
from bitwitness.ranks import Ranks
from bitwitness.replay.run import Replayer
from bitwitness.stats import bit_hash
from bitwitness.tap.compat import OpOverload
from bitwitness.tap.frames import current_line, line_text
from bitwitness.tap.modules import ModuleTracker
from bitwitness.tap.operators import OpCall, OperatorTap
from bitwitness.tap.trace import computes, moves_between_ranks

_OVERWRITES = frozenset(
    ("fill_", "zero_", "copy_", "normal_", "uniform_", "random_", "bernoulli_", "exponential_", "geometric_")
)
"""Operators that do not read what they write over, which may be raw memory."""
_ENDED = (
    "{what} in each re-execution: state of the forward's that nothing puts back, so that the training's own numbers may be "
    "others since the first one (`replay.enabled = false` runs nothing again)"
)


@dataclass(frozen=True, slots=True)
class OtherInput:
    """The first operator that two replays give other inputs, though all results before are the same; or that is not torch's.

    ``plain``: numbers of the script's, or other operators, and no tensors' contents: what no kernel can have made.
    """

    site: str
    line: str
    plain: bool

    def __str__(self) -> str:
        where = f" ({self.line})" if self.line else ""
        return f"{self.site}{where} works with other values"


def find_other_input(replayer: Replayer, record: StepRecord) -> OtherInput | None:
    """Replay the step twice, operator by operator; None where a result is the first that differs, or nothing.

    Raises
    ------
    ReplayError
        If the step cannot be run again.

    """
    traces = []
    for _ in range(2):
        trace = _InputTrace()
        replayer.run(record, around=trace.tap, strict=False)
        traces.append(trace.steps)
    for one, other in zip(*traces, strict=False):
        if (one.op, one.plain) != (other.op, other.plain):
            return OtherInput(other.site, other.line, plain=True)
        if not torch.equal(one.inputs, other.inputs):
            return OtherInput(other.site, other.line, plain=False)
        if not torch.equal(one.results, other.results):
            # an operator of the script's, or of a library's, may keep state inside
            return None if one.torchs else OtherInput(one.site, one.line, plain=False)
    return None


class HiddenState:
    """Ends replays where re-executions differ by state that none of them can put back.

    Parameters
    ----------
    ranks, replayer
        The side channel, and what runs steps again on this rank.

    """

    def __init__(self, ranks: Ranks, replayer: Replayer) -> None:
        self._ranks = ranks
        self._replayer = replayer

    def ends_replays(
        self, record: StepRecord, executions: Sequence[Fingerprint | None], tolerance: float
    ) -> str | None:
        """Return why nothing is run again any more, on all ranks; None where replays go on. Collective.

        ``executions`` are one step's on this rank. Where they differ by rounding, only numbers of the script's count:
        kernels that torch does not dispatch may round otherwise each time.
        """
        made = [one for one in executions if one is not None]
        matches = {one.compare(other, tolerance) for one, other in combinations(made, 2)}
        differs = not matches <= {Match.EQUAL}
        if self._replayer.lockstep:
            differs = bool(self._ranks.max(torch.tensor([float(differs)])))
        found = self._found(record) if differs else None
        certain = found is not None and (found.plain or Match.FAR in matches)
        told = self._ranks.gather_text(str(found) if certain else "")
        what = next((f"rank {rank}: {text}" if len(told) > 1 else text for rank, text in enumerate(told) if text), None)
        if what is None:
            return None
        self._replayer.end(_ENDED.format(what=what), disturbed=True)
        return self._replayer.refused

    def _found(self, record: StepRecord) -> OtherInput | None:
        try:
            return find_other_input(self._replayer, record)
        except Exception:  # the script's own code runs again; whoever asked for the executions tells what was wrong
            return None


@dataclass(frozen=True, slots=True)
class _Step:
    """One operator (``torchs``: of torch's own): hashes of what it read and gave, int64 0-d, and the rest of its arguments."""

    op: str
    torchs: bool
    site: str
    line: str
    plain: str
    inputs: torch.Tensor
    results: torch.Tensor


@dataclass(slots=True)
class _InputTrace:
    steps: list[_Step] = field(default_factory=list)
    _read: tuple[str, torch.Tensor] | None = None
    _tracker: ModuleTracker = field(default_factory=ModuleTracker)

    def tap(self) -> OperatorTap:
        return OperatorTap(self._tracker, self._after, _is_looked_at, before=self._before)

    def _before(self, call: OpCall) -> None:
        read = list(_arguments(call, lambda info: info is None or not _is_overwritten(call.func, info)))
        plain = [value for value in read if isinstance(value, PLAIN)]  # a copy of a generator has another address
        self._read = repr(plain), _hash(value for value in read if isinstance(value, torch.Tensor))

    def _after(self, call: OpCall) -> None:
        if self._read is None:
            return
        written = _arguments(call, lambda info: info is not None and info.is_write)
        made = [tensor for tensor in (*call.outputs, *written) if isinstance(tensor, torch.Tensor)]
        line = line_text(current_line()) if call.phase == "forward" else ""
        self.steps.append(_Step(call.op, is_torchs(call.func), call.site().short, line, *self._read, _hash(made)))
        self._read = None


def _is_looked_at(func: OpOverload) -> bool:
    return not moves_between_ranks(func) and (computes(func) or func._schema.is_mutable)


def _is_overwritten(func: OpOverload, info: Any) -> bool:
    return bool(info.is_write) and (func.overloadpacket.__name__ in _OVERWRITES or "out" in func._overloadname)


def _arguments(call: OpCall, wanted: Callable[[Any], bool]) -> Iterator[Any]:
    """Yield an operator's arguments one by one, of lists what is in them; those of whose aliases ``wanted`` tells so."""
    aliases = {argument.name: argument.alias_info for argument in call.func._schema.arguments}
    for name, value in {**dict(zip(aliases, call.args, strict=False)), **call.kwargs}.items():
        if wanted(aliases.get(name)):
            yield from value if isinstance(value, list | tuple) else (value,)


def _hash(tensors: Any) -> torch.Tensor:
    total = torch.zeros((), dtype=torch.int64)
    for tensor in tensors:
        if tensor.dtype is torch.uint8:
            continue  # work space and generators' states, which may be raw memory
        digest = bit_hash(tensor.detach())
        total = total.to(digest.device) * 31 + digest + tensor.dim()
    return total
