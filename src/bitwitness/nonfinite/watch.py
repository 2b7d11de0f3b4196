"""Looks at every operator of a replay and tells which made NaN or infinities out of finite values.

An operator is an *origin* where what it returns is not finite although what it read is, or holds only infinities that the
model's author put there (an attention mask). What follows from an origin is followed by `Provenance`, so that in the
end only those origins count that a loss, a gradient or a buffer descends from.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch

from bitwitness.nonfinite.flags import FINITE, Flags, flags_of, measurable
from bitwitness.nonfinite.frames import FrameLog
from bitwitness.nonfinite.kinds import MATRIX_PRODUCTS, accumulates, overwritten, puts_in
from bitwitness.nonfinite.origin import Extent, Kind, Origin
from bitwitness.nonfinite.taint import CLEAN, NONE, Origins, Provenance, Value, joined
from bitwitness.site import Site
from bitwitness.tap.frames import NOWHERE, Line, current_line
from bitwitness.tap.modules import ModuleTracker
from bitwitness.tap.operators import OpCall, OperatorTap, tensors_in
from bitwitness.tap.trace import moves_between_ranks

_MEASURED = 32  # origins whose inputs and outputs are measured
_KEPT = 4  # origins whose inputs and outputs are kept
_LARGEST_KEPT = 64 << 20  # bytes, of all of them together


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor that enters a step from outside: what it is and what it is called."""

    kind: Kind
    name: str


def watched(func: torch._ops.OpOverload) -> bool:
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

    """

    def __init__(self, entries: Mapping[int, Entry], frames: FrameLog, *, scale: float = 1.0) -> None:
        self.entries = dict(entries)
        self.origins: list[Origin] = []
        self.constants: Origins = NONE
        self.kept: dict[str, torch.Tensor] = {}
        self._frames = frames
        self._gathered: list[str] | None = None
        self._scale = scale
        self._tracker = ModuleTracker()
        self._provenance = Provenance()
        self._entered: dict[Entry, int] = {}
        self._inputs: list[tuple[torch.Tensor, Value]] = []
        self._copies: dict[int, torch.Tensor] = {}
        self._lines: dict[int, Line] = {}
        self._kept_bytes = 0
        self._followed: dict[int, int] = {}

    def gathered_from(self, bad_here: list[str]) -> None:
        """Say that whole parameters are gathered from all ranks, and which are bad in this rank's shard."""
        self._gathered = bad_here

    def tap(self) -> OperatorTap:
        """Return the dispatch mode; enter it around each forward and each backward."""
        return OperatorTap(self._tracker, self._after, watched, before=self._before)

    def value(self, tensor: torch.Tensor) -> Value:
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

    def _known(self, tensor: torch.Tensor, call: OpCall) -> Value:
        known = self._provenance.get(tensor)
        return self._looked_at(tensor, call) if known is None else known

    def _looked_at(self, tensor: torch.Tensor, call: OpCall | None) -> Value:
        flags = flags_of(tensor, nan_expected=bool(self._provenance.written(tensor).nan_from))
        value = CLEAN if not flags else self._entering(tensor, flags, call)
        self._provenance.put(tensor, value)
        return value

    def _entering(self, tensor: torch.Tensor, flags: Flags, call: OpCall | None) -> Value:
        """Tell where the non-finite values of a tensor come from that no operator made just so."""
        before = self._provenance.written(tensor)
        if before.origins:
            nan_from, inf_from = before.nan_from or before.inf_from, before.inf_from or before.nan_from
            return Value(flags, nan_from if flags.nan else NONE, inf_from if flags.inf else NONE)
        entry = self.entries.get(tensor.untyped_storage().data_ptr()) or self._unknown(call)
        mask = flags == Flags(neg=True) and entry.kind is not Kind.PARAMETER
        if mask or (flags.inf and not flags.nan and not entry.name):
            entry = Entry(Kind.CONSTANT, entry.name)
        number = self._enter(entry, tensor, flags, call, lawful=entry.kind is Kind.CONSTANT and not flags.nan)
        origins = frozenset({number})
        return Value(flags, origins if flags.nan else NONE, origins if flags.inf else NONE)

    def _unknown(self, call: OpCall | None) -> Entry:
        """Tell what a tensor is that nobody has named: a constant or, where parameters are gathered, one of these."""
        if self._gathered is None:
            return Entry(Kind.CONSTANT, "")
        module = "" if call is None else call.module
        if not self._gathered:
            return Entry(Kind.RECEIVED, module)
        here = [name for name in self._gathered if name.rpartition(".")[0] == module]
        return Entry(Kind.PARAMETER, (here or self._gathered)[0])

    def _enter(self, entry: Entry, tensor: torch.Tensor, flags: Flags, call: OpCall | None, *, lawful: bool) -> int:
        if entry.name and entry in self._entered:
            return self._entered[entry]
        number = len(self.origins)
        if entry.kind in (Kind.PARAMETER, Kind.BUFFER):
            site = Site.of_parameter(entry.name, "param")
        elif entry.kind is Kind.BATCH:
            site = Site(".", "input", 0, "forward", entry.name)
        elif entry.kind is Kind.UNKNOWN:
            site = Site(".", "output", 0, "grad", "out0")
        elif entry.kind is Kind.RECEIVED:
            site = Site(entry.name or ".", "all_gather", 0, "comm", "out0")
        else:
            site = Site(".", "constant", 0, "forward", "value") if call is None else call.site()
        reader = "" if call is None else f"{call.op} in {call.module}"
        extents = (Extent.of("value", tensor),) if number < _MEASURED else ()
        origin = Origin(
            number,
            entry.kind,
            site,
            flags,
            current_line(),
            inputs=extents,
            detail=reader,
            frame=len(self._frames.frames),
        )
        self.origins.append(origin)
        if lawful:
            self.constants |= {number}
        if entry.name:
            self._entered[entry] = number
        return number

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
        self._buffers_written(call)

    def _written(self, call: OpCall) -> Iterable[Any]:
        for position, argument in enumerate(call.func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                value = call.args[position] if position < len(call.args) else call.kwargs.get(argument.name)
                yield from value if isinstance(value, list | tuple) else [value]

    def _buffers_written(self, call: OpCall) -> None:
        """Look again at buffers that a kernel may have updated without saying so in its schema (running statistics)."""
        for tensor, before in self._inputs:
            entry = self.entries.get(tensor.untyped_storage().data_ptr())
            if entry is None or entry.kind is not Kind.BUFFER or before.flags:
                continue
            flags = flags_of(tensor)
            if flags:
                self._provenance.put(tensor, self._judge(call, [(tensor, flags)])[id(tensor)])

    def _judge(self, call: OpCall, found: list[tuple[torch.Tensor, Flags]]) -> dict[int, Value]:
        """Tell of each non-finite output where it comes from; the operator itself may be the origin."""
        inputs = [value for _, value in self._inputs]
        known = {id(t): joined(inputs, flags, self.constants) for t, flags in found if flags}
        if any(value is None for value in known.values()):
            inputs = [self._again(tensor, value, call) for tensor, value in self._inputs]
            known = {id(t): joined(inputs, flags, self.constants) for t, flags in found if flags}
        # A gradient is no mask: an infinity put in there is a fault.
        constant = call.phase == "forward" and puts_in(call.op, call.args, call.kwargs)
        mine: Origins | None = None
        values: dict[int, Value] = {}
        for tensor, flags in found:
            if not flags:
                continue
            value = known[id(tensor)]
            if value is None:
                batch = self._fed_by_batch(call)
                mine = mine or (batch or frozenset({self._originate(call, found, constant=constant)}))
                value = Value(flags, mine if flags.nan else NONE, mine if flags.inf else NONE)
            values[id(tensor)] = value
        return values

    def _again(self, tensor: torch.Tensor, value: Value, call: OpCall) -> Value:
        """Look directly at an input before an operator is blamed: what we remember of its memory may be out of date."""
        seen = self._copies.get(id(tensor), tensor)
        flags = flags_of(seen)
        if flags == value.flags:
            return value
        fresh = CLEAN if flags == FINITE else self._entering(seen, flags, call)
        self._provenance.put(tensor, fresh)
        return fresh

    def _fed_by_batch(self, call: OpCall) -> Origins | None:
        """Return the batch's origin where a product reads infinities of the batch: no mask enters a product."""
        if call.op not in MATRIX_PRODUCTS:
            return None
        numbers = frozenset().union(*(value.inf_from for _, value in self._inputs))
        for number in sorted(numbers):
            entered = [entry for entry, known in self._entered.items() if known == number and entry.name]
            if entered:
                self.origins[number] = replace(self.origins[number], kind=Kind.BATCH)
                self.constants -= {number}
                return frozenset({number})
        return None

    # -- an origin -----------------------------------------------------------------------------------------------

    def _originate(self, call: OpCall, found: list[tuple[torch.Tensor, Flags]], *, constant: bool) -> int:
        number = len(self.origins)
        flags = Flags(any(f.nan for _, f in found), any(f.pos for _, f in found), any(f.neg for _, f in found))
        node = self._tracker.backward_node()
        forward_line = self._lines.get(self._tracker.node(), NOWHERE) if node is not None else NOWHERE
        inputs = [(f"in{i}", self._copies.get(id(t), t)) for i, (t, _) in enumerate(self._inputs)]
        outputs = [(f"out{i}", t) for i, (t, _) in enumerate(found)]
        measured = number < _MEASURED
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
                accumulates(call.op, call.phase, call.args, call.kwargs),
                frame=len(self._frames.frames),
            )
        )
        if constant:
            self.constants |= {number}
        else:
            self._keep(number, [*inputs, *outputs, *_saved(node)])
            if node is None:
                self._frames.end_after(call.module)
                self._followed[self._tracker.node()] = number
        return number

    def _keep_backward(self, call: OpCall, outputs: list[torch.Tensor]) -> None:
        """Keep what the first operator of a forward origin's backward reads and writes, too."""
        number = self._followed.pop(self._tracker.node(), None)
        if number is not None and any(name.startswith(f"origin{number}.") for name in self.kept):
            read = [(f"{call.op}.in{i}", tensor) for i, (tensor, _) in enumerate(self._inputs)]
            written = [(f"{call.op}.out{i}", tensor) for i, tensor in enumerate(outputs)]
            self._store(number, [(f"backward.{slot}", tensor) for slot, tensor in read + written])

    def _cured_by_unscaling(self, call: OpCall) -> bool:
        """Tell whether a backward operator's result is finite once one of its inputs, the gradient, is not scaled."""
        if self._scale <= 1 or self._copies:
            return False
        for position, value in enumerate(call.args):
            if isinstance(value, torch.Tensor) and measurable(value):
                args = (*call.args[:position], value / self._scale, *call.args[position + 1 :])
                with suppress(Exception):  # not every operator takes what we offer
                    if not any(flags_of(t) for t in tensors_in(call.func(*args, **call.kwargs)) if measurable(t)):
                        return True
        return False

    def _keep(self, number: int, tensors: list[tuple[str, torch.Tensor]]) -> None:
        if len({name.partition(".")[0] for name in self.kept}) < _KEPT:
            self._store(number, tensors)

    def _store(self, number: int, tensors: list[tuple[str, torch.Tensor]]) -> None:
        size = sum(t.numel() * t.element_size() for _, t in tensors)
        if self._kept_bytes + size > _LARGEST_KEPT:
            return
        self._kept_bytes += size
        for slot, tensor in tensors:
            self.kept[f"origin{number}.{slot}"] = tensor.detach().clone().contiguous()


def _saved(node: Any) -> list[tuple[str, torch.Tensor]]:
    """Return what the forward saved for a backward node, by its names in torch."""
    found: list[tuple[str, torch.Tensor]] = []
    for name in dir(node) if node is not None else ():
        if name.startswith("_saved_") or name == "saved_tensors":
            with suppress(Exception):  # a node may have let go of it already
                value = getattr(node, name)
                many = value if isinstance(value, tuple | list) else [value]
                found += [
                    (f"{name.removeprefix('_')}{i or ''}", t) for i, t in enumerate(many) if isinstance(t, torch.Tensor)
                ]
    return found
