"""What enters a replayed step bad already: parameters, buffers, the batch, terms, masks; each an origin of its kind."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from bitwitness.nonfinite.flags import Flags
from bitwitness.nonfinite.frames import FrameLog
from bitwitness.nonfinite.origin import Extent, Kind, Origin
from bitwitness.nonfinite.strays import Strays
from bitwitness.nonfinite.taint import NONE, Origins, Provenance, Taint
from bitwitness.site import Site
from bitwitness.tap.frames import current_line
from bitwitness.tap.operators import OpCall

MEASURED = 32  # origins whose tensors are measured


@dataclass(frozen=True, slots=True)
class EnteringTensor:
    """A tensor that enters a step from outside: what it is, what it is called, and what else is known of it."""

    kind: Kind
    name: str
    detail: str = ""


class Entrances:
    """Makes an origin of each bad tensor that no operator of the replay made.

    Parameters
    ----------
    entries
        What is known of such tensors, by the address of their memory.
    strays
        What the loss code read without a word of who made it.
    frames
        Counts the modules that have run.
    origins
        The list to which new ones are added.
    provenance
        What the replay's operators wrote.

    """

    def __init__(
        self,
        entries: Mapping[int, EnteringTensor],
        strays: Strays,
        frames: FrameLog,
        origins: list[Origin],
        provenance: Provenance,
    ) -> None:
        self.entries = dict(entries)
        self.constants: Origins = NONE
        self.gathered: list[str] | None = None
        """Where whole parameters are gathered from all ranks: those that are bad in this rank's shard."""
        self._strays = strays
        self._frames = frames
        self._origins = origins
        self._provenance = provenance
        self._entered: dict[EnteringTensor, int] = {}
        self._alive: list[torch.Tensor] = []

    def name(self, tensor: torch.Tensor, entry: EnteringTensor) -> None:
        """Say what a tensor is; it is kept alive, or another one might come to lie where it lay and take its name."""
        self._alive.append(tensor)
        self.entries[tensor.untyped_storage().data_ptr()] = entry

    def entry(self, tensor: torch.Tensor) -> EnteringTensor | None:
        """Return what is known of a tensor, by where it lies."""
        return self.entries.get(tensor.untyped_storage().data_ptr())

    def take(self, tensor: torch.Tensor, flags: Flags, call: OpCall | None) -> Taint:
        """Tell where the non-finite values of a tensor come from that no operator made just so."""
        before = self._provenance.written(tensor)
        before = before if before.origins else self._strays.get(tensor) or before
        if before.origins:
            nan_from, inf_from = before.nan_from or before.inf_from, before.inf_from or before.nan_from
            return Taint(flags, nan_from if flags.nan else NONE, inf_from if flags.inf else NONE)
        entry = self.entry(tensor) or self._unknown(call)
        mask = flags == Flags(neg=True) and entry.kind not in (Kind.PARAMETER, Kind.TERM)
        if mask or (flags.inf and not flags.nan and not entry.name):
            entry = EnteringTensor(Kind.CONSTANT, entry.name)
        number = self._enter(entry, tensor, flags, call)
        if self._origins[number].kind is Kind.CONSTANT and not flags.nan:  # it may be known for no mask by now
            self.constants |= {number}
        origins = frozenset({number})
        return Taint(flags, origins if flags.nan else NONE, origins if flags.inf else NONE)

    def no_mask(self, numbers: Origins) -> Origins | None:
        """Take infinities that were named and thought a mask's for the batch's; None if none of them was."""
        for number in sorted(numbers):
            if any(known == number and entry.name for entry, known in self._entered.items()):
                self._origins[number] = replace(self._origins[number], kind=Kind.BATCH)
                self.constants -= {number}
                return frozenset({number})
        return None

    def _unknown(self, call: OpCall | None) -> EnteringTensor:
        """Tell what a tensor is that nobody has named: a constant or, where parameters are gathered, one of these."""
        if self.gathered is None:
            return EnteringTensor(Kind.CONSTANT, "")
        module = "" if call is None else call.module
        if not self.gathered:
            return EnteringTensor(Kind.RECEIVED, module)
        here = [name for name in self.gathered if name.rpartition(".")[0] == module]
        return EnteringTensor(Kind.PARAMETER, (here or self.gathered)[0])

    def _enter(self, entry: EnteringTensor, tensor: torch.Tensor, flags: Flags, call: OpCall | None) -> int:
        if entry.name and entry in self._entered:
            return self._entered[entry]
        number = len(self._origins)
        elsewhere = f"; {entry.detail}" if entry.detail else ""
        origin = Origin(
            number,
            entry.kind,
            _site(entry, call),
            flags,
            current_line(),
            inputs=(Extent.of("value", tensor),) if number < MEASURED else (),
            detail="" if call is None else f"{call.op} in {call.module}{elsewhere}",
            frame=len(self._frames.frames),
        )
        self._origins.append(origin)
        if entry.name:
            self._entered[entry] = number
        return number


def _site(entry: EnteringTensor, call: OpCall | None) -> Site:
    match entry.kind:
        case Kind.PARAMETER | Kind.BUFFER:
            return Site.of_parameter(entry.name, "param")
        case Kind.BATCH | Kind.GIVEN | Kind.TERM:
            return Site(".", "input", 0, "forward", entry.name)
        case Kind.UNKNOWN:
            return Site(".", "output", 0, "grad", "out0")
        case Kind.RECEIVED:
            return Site(entry.name or ".", "all_gather", 0, "comm", "out0")
        case _:
            return Site(".", "constant", 0, "forward", "value") if call is None else call.site()
