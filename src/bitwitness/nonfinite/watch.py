"""Looks at every operator of a replay and tells which made NaN or infinities out of finite values.

An operator is an *origin* where what it returns is not finite although what it read is, or holds only infinities that the
model's author put there (an attention mask). What follows from an origin is followed by `Provenance`, so that in the
end only those origins count that a loss, a gradient or a buffer descends from.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any

import torch

from bitwitness.nonfinite.entrances import MEASURED, EnteringTensor, Entrances
from bitwitness.nonfinite.exact import Exact, in_float64
from bitwitness.nonfinite.flags import FINITE, Flags, flags_of, measurable
from bitwitness.nonfinite.frames import FrameLog
from bitwitness.nonfinite.kept import KeptTensors, saved_by
from bitwitness.nonfinite.kinds import MATRIX_PRODUCTS, accumulates, overwritten, puts_in
from bitwitness.nonfinite.origin import Extent, Kind, Origin
from bitwitness.nonfinite.strays import Strays
from bitwitness.nonfinite.taint import CLEAN, NONE, Origins, Provenance, Taint, joined
from bitwitness.tap.compat import OpOverload
from bitwitness.tap.frames import NOWHERE, Line, current_line
from bitwitness.tap.modules import ModuleTracker
from bitwitness.tap.operators import OpCall, OperatorTap, tensors_in
from bitwitness.tap.trace import moves_between_ranks

_LARGEST_BUFFER = 1 << 20  # elements of a buffer that is copied before an operator that may change it without a word


def watched(func: OpOverload) -> bool:
    """Tell whether an operator writes memory, rather than returning a view of its input."""
    if moves_between_ranks(func):
        return False
    returns = func._schema.returns
    if not returns:
        return any(a.alias_info is not None and a.alias_info.is_write for a in func._schema.arguments)
    info = returns[0].alias_info
    return info is None or info.is_write or func.overloadpacket.__name__ == "lift_fresh"


class OriginWatch:
    """The handler of a traced replay's operator tap.

    Parameters
    ----------
    entries
        What enters the step, by the address of its memory.
    frames
        Counts the modules that have run.
    scale
        The loss scale: an overflow in the backward that is gone without it is the scale's doing.
    strays
        What the loss code read without a word of who made it.

    """

    def __init__(
        self,
        entries: Mapping[int, EnteringTensor],
        frames: FrameLog,
        *,
        scale: float = 1.0,
        strays: Strays | None = None,
    ) -> None:
        self.origins: list[Origin] = []
        self._strays = Strays() if strays is None else strays
        self._frames = frames
        self._scale = scale
        self._tracker = ModuleTracker()
        self._provenance = Provenance()
        self._entrances = Entrances(entries, self._strays, frames, self.origins, self._provenance)
        self._inputs: list[tuple[torch.Tensor, Taint]] = []
        self._copies: dict[int, torch.Tensor] = {}
        self._lines: dict[int, Line] = {}
        self._keeper = KeptTensors()
        self._followed: dict[int, int] = {}

    @property
    def kept(self) -> dict[str, torch.Tensor]:
        """What the first origins read and wrote."""
        return self._keeper.tensors

    @property
    def constants(self) -> Origins:
        """The origins that are a constant of the model's author, a mask perhaps."""
        return self._entrances.constants

    def name(self, tensor: torch.Tensor, entry: EnteringTensor) -> None:
        """Say what a tensor is that enters the step."""
        self._entrances.name(tensor, entry)

    def gathered_from(self, bad_here: list[str]) -> None:
        """Say that whole parameters are gathered from all ranks, and which are bad in this rank's shard."""
        self._entrances.gathered = bad_here

    def tap(self) -> OperatorTap:
        """Return the dispatch mode; enter it around each forward and each backward."""
        return OperatorTap(self._tracker, self._after, watched, before=self._before)

    def value(self, tensor: torch.Tensor) -> Taint:
        """Return what a tensor holds at the end, and where it comes from."""
        if not measurable(tensor):
            return CLEAN
        known = self._provenance.get(tensor)
        return self._looked_at(tensor, None) if known is None else known

    # -- one operator --------------------------------------------------------------------------------------------

    def _before(self, call: OpCall) -> None:
        """Look at what the operator is about to read: in place, it would be gone afterwards."""
        if call.phase == "forward":
            self._lines.setdefault(self._tracker.node(), current_line())
        ignored = overwritten(call.func, call.args, call.kwargs)
        read = [t for t in tensors_in([*call.args, *call.kwargs.values()]) if measurable(t) and id(t) not in ignored]
        self._inputs = [(tensor, self._known(tensor, call)) for tensor in read]
        self._copies = {}
        returns = call.func._schema.returns
        if returns and returns[0].alias_info is not None and read:
            self._copies[id(read[0])] = read[0].detach().clone()
        # Running statistics are updated by kernels that do not say so in their schema.
        self._copies |= {id(t): t.detach().clone() for t in read if self._is_buffer(t) and id(t) not in self._copies}

    def _is_buffer(self, tensor: torch.Tensor) -> bool:
        entry = self._entrances.entry(tensor)
        return entry is not None and entry.kind is Kind.BUFFER and tensor.numel() <= _LARGEST_BUFFER

    def _known(self, tensor: torch.Tensor, call: OpCall) -> Taint:
        known = self._provenance.get(tensor)
        return self._looked_at(tensor, call) if known is None else known

    def _looked_at(self, tensor: torch.Tensor, call: OpCall | None) -> Taint:
        flags = flags_of(tensor, nan_expected=bool(self._provenance.written(tensor).nan_from))
        value = CLEAN if not flags else self._entrances.take(tensor, flags, call)
        self._provenance.put(tensor, value)
        return value

    def _after(self, call: OpCall) -> None:
        outputs = [t for t in call.outputs or self._written(call) if isinstance(t, torch.Tensor) and measurable(t)]
        read = {tensor.untyped_storage().data_ptr() for tensor, _ in self._inputs}
        for tensor in outputs:
            if tensor.untyped_storage().data_ptr() not in read:
                self._provenance.begin(tensor)
        if not outputs or "empty" in call.op:
            return
        spoiled = any(value.flags.nan for _, value in self._inputs)
        found = [(tensor, flags_of(tensor, nan_expected=spoiled)) for tensor in outputs]
        if call.phase == "backward":
            self._keep_backward(call, outputs)
        value_of = self._judge(call, found) if any(flags for _, flags in found) else {}
        for tensor, _ in found:
            self._provenance.put(tensor, value_of.get(id(tensor), CLEAN))
            if id(tensor) in value_of and call.phase == "forward":
                self._strays.meet(call.op, tensor, value_of[id(tensor)])
        self._buffers_written(call)

    def _written(self, call: OpCall) -> Iterable[Any]:
        for position, argument in enumerate(call.func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                value = call.args[position] if position < len(call.args) else call.kwargs.get(argument.name)
                yield from value if isinstance(value, list | tuple) else [value]

    def _buffers_written(self, call: OpCall) -> None:
        """Look again at buffers that a kernel may have updated without saying so in its schema (running statistics)."""
        for tensor, before in self._inputs:
            if before.flags or not self._is_buffer(tensor):
                continue
            flags = flags_of(tensor)
            if flags:
                self._provenance.put(tensor, self._judge(call, [(tensor, flags)])[id(tensor)])

    def _judge(self, call: OpCall, found: list[tuple[torch.Tensor, Flags]]) -> dict[int, Taint]:
        """Tell of each non-finite output where it comes from; the operator itself may be the origin."""
        inputs = [value for _, value in self._inputs]
        known = {id(t): joined(inputs, flags, self.constants) for t, flags in found if flags}
        if any(value is None for value in known.values()):
            inputs = [self._again(tensor, value, call) for tensor, value in self._inputs]
            known = {id(t): joined(inputs, flags, self.constants) for t, flags in found if flags}
        # A gradient is no mask: an infinity put in there is a fault.
        constant = call.phase == "forward" and puts_in(call.op, call.args, call.kwargs)
        mine: Origins | None = None
        values: dict[int, Taint] = {}
        for tensor, flags in found:
            if not flags:
                continue
            value = known[id(tensor)]
            if value is None:
                batch = self._fed_by_batch(call)
                mine = mine or (batch or frozenset({self._originate(call, found, constant=constant)}))
                value = Taint(flags, mine if flags.nan else NONE, mine if flags.inf else NONE)
            values[id(tensor)] = value
        return values

    def _again(self, tensor: torch.Tensor, value: Taint, call: OpCall) -> Taint:
        """Look directly at an input before an operator is blamed: what we remember of its memory may be out of date."""
        seen = self._copies.get(id(tensor), tensor)
        flags = flags_of(seen)
        if flags == value.flags:
            return value
        fresh = CLEAN if flags == FINITE else self._entrances.take(seen, flags, call)
        self._provenance.put(tensor, fresh)
        return fresh

    def _fed_by_batch(self, call: OpCall) -> Origins | None:
        """Return the batch's origin where a product reads infinities of the batch: no mask enters a product."""
        if call.op not in MATRIX_PRODUCTS:
            return None
        numbers = frozenset().union(*(value.inf_from for _, value in self._inputs))
        return self._entrances.no_mask(numbers)

    # -- an origin -----------------------------------------------------------------------------------------------

    def _originate(self, call: OpCall, found: list[tuple[torch.Tensor, Flags]], *, constant: bool) -> int:
        number = len(self.origins)
        flags = Flags(any(f.nan for _, f in found), any(f.pos for _, f in found), any(f.neg for _, f in found))
        node = self._tracker.backward_node()
        forward_line = self._lines.get(self._tracker.node(), NOWHERE) if node is not None else NOWHERE
        inputs = [(f"in{i}", self._copies.get(id(t), t)) for i, (t, _) in enumerate(self._inputs)]
        outputs = [(f"out{i}", t) for i, (t, _) in enumerate(found)]
        measured = number < MEASURED
        exact = self._exact(call, found) if measured and not constant else None
        kind = Kind.CONSTANT if constant else Kind.OPERATOR
        if node is not None and measured and self._cured_by_unscaling(call):
            kind = Kind.LOSS_SCALE
        self.origins.append(
            Origin(
                number,
                kind,
                call.site(),
                flags,
                current_line(),
                forward_line,
                self._tracker.forward_op() if node is not None else "",
                "" if node is None else node.name(),
                tuple(Extent.of(slot, t) for slot, t in inputs) if measured else (),
                tuple(Extent.of(slot, t) for slot, t in outputs) if measured else (),
                self._arguments(call) if measured else (),
                exact,
                accumulates(call.op, call.phase, call.args, call.kwargs),
                frame=len(self._frames.frames),
            )
        )
        if constant:
            self._entrances.constants |= {number}
        else:
            self._keeper.keep(number, [*inputs, *outputs, *saved_by(node)])
            if node is None:
                self._frames.end_after(call.module)
                self._followed[self._tracker.node()] = number
        return number

    def _exact(self, call: OpCall, found: list[tuple[torch.Tensor, Flags]]) -> Exact | None:
        """Return what an operator's bad results are in float64; NaN alone where it may pass infinities on."""
        given = any(value.flags.inf for _, value in self._inputs)
        bad = [tensor for tensor, flags in found if flags]
        return in_float64(call, self._copies, bad, nan_alone=given and any(flags.nan for _, flags in found))

    def _arguments(self, call: OpCall) -> tuple[Extent | float | None, ...]:
        """Return what a call was given by position, as far as it can be measured."""

        def measure(position: int, value: Any) -> Extent | float | None:
            if isinstance(value, torch.Tensor) and measurable(value):
                return Extent.of(f"arg{position}", self._copies.get(id(value), value))
            return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None

        return tuple(measure(position, value) for position, value in enumerate(call.args))

    def _keep_backward(self, call: OpCall, outputs: list[torch.Tensor]) -> None:
        """Keep what the first operator of a forward origin's backward reads and writes, too."""
        number = self._followed.pop(self._tracker.node(), None)
        if number is not None:
            read = [(f"{call.op}.in{i}", tensor) for i, (tensor, _) in enumerate(self._inputs)]
            written = [(f"{call.op}.out{i}", tensor) for i, tensor in enumerate(outputs)]
            self._keeper.add(number, [(f"backward.{slot}", tensor) for slot, tensor in read + written])

    def _cured_by_unscaling(self, call: OpCall) -> bool:
        """Tell whether a backward operator's result is finite once one of its inputs, the gradient, is not scaled."""
        if self._scale <= 1 or (self._inputs and id(self._inputs[0][0]) in self._copies):  # it works in place
            return False
        for position, value in enumerate(call.args):
            if isinstance(value, torch.Tensor) and measurable(value):
                args = (*call.args[:position], value / self._scale, *call.args[position + 1 :])
                with suppress(Exception):  # not every operator takes what we offer
                    if not any(flags_of(t) for t in tensors_in(call.func(*args, **call.kwargs)) if measurable(t)):
                        return True
        return False
