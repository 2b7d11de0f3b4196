"""The values of a recording: each content is measured and kept once, however many operators read it."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from bitwitness.record.meter import Meter
from bitwitness.site import Site
from bitwitness.stats.host import to_host
from bitwitness.store.recording import RecordingWriter
from bitwitness.store.rows import Measured
from bitwitness.tap.compat import in_transform
from bitwitness.tap.identity import Identities, in_memory_order, layout_of, plain, unseen

_DTYPES: dict[torch.dtype, str] = {}


class Noted(NamedTuple):
    """What is known of a tensor that was seen: what the rows of a recording say of it."""

    number: int
    dtype: str
    shape: tuple[int, ...]
    placement: str | None
    producer: int
    name: str | None
    tensor: str | None
    layout: str | None


@dataclass(slots=True)
class Keeper:
    """Hands tensors to the writer, each under the site where it was first seen.

    ``largest``: elements of a tensor beyond which only every n-th is kept; 0 for no limit.
    """

    writer: RecordingWriter
    largest: int
    waits: bool
    step: int = 0
    _keys: set[str] | None = None

    def begin_step(self, step: int) -> None:
        """Begin with fresh names."""
        self.step, self._keys = step, set()

    def keep(self, number: int, values: torch.Tensor, site: str) -> str:
        """Keep the values as they lie in memory (or in their order, where there are gaps); return ``file|key``."""
        self._keys = set() if self._keys is None else self._keys
        key = site if site not in self._keys else f"{site}~{number}"
        self._keys.add(key)
        flat = in_memory_order(values)
        every = 1 if not self.largest else max(1, -(-flat.numel() // self.largest))
        flat = flat[::every]
        if flat.device.type == "cpu":
            return self.writer.tensor(self.step, key, flat.clone()) + _sampled(every)
        host, ready = to_host(flat.contiguous())
        if self.waits:
            ready()
        return self.writer.tensor(self.step, key, host, ready) + _sampled(every)


def _sampled(every: int) -> str:
    return f"|every={every}" if every > 1 else ""


class Values:
    """Numbers contents, and has new ones measured and kept.

    Parameters
    ----------
    meter
        Measures.
    keeper
        Keeps the values themselves; None for statistics only.

    """

    def __init__(self, meter: Meter, keeper: Keeper | None) -> None:
        self._meter = meter
        self._keeper = keeper
        self._identities = Identities()
        self._next = 0
        self._known: dict[Hashable, tuple[int, str | None]] = {}
        self._said: dict[int, dict[Hashable, Noted]] = {}  # of each storage, until something new is learnt of it
        self._makers: dict[int, int] = {}
        self._names: dict[int, dict[int, str]] = {}
        self._changes: dict[int, int] = {}
        self._lasting: dict[Hashable, int] = {}
        self._before: dict[Hashable, Measured] = {}

    def note(self, tensor: torch.Tensor, site: Site, *, overwritten: bool = False) -> Noted:
        """Return what is known of a tensor, measuring it if it is new.

        Parameters
        ----------
        site
            Where it is seen.
        overwritten
            An operator has just written it in place; torch counts that as a new version only when the operator returns.

        """
        storage, look = self._identities.look(tensor)
        if look is None:
            values = plain(tensor)
            storage, content = self._identities.key(values)
            return self._noted(values, storage, content, tensor, site, overwritten=overwritten)
        said = self._said.get(storage)
        if said is not None and not overwritten and (noted := said.get(look)) is not None:
            return noted
        content = self._identities.key_of_look(tensor, look)
        noted = self._noted(tensor, storage, content, tensor, site, overwritten=overwritten)
        if not overwritten:
            self._said.setdefault(storage, {})[look] = noted
        return noted

    def _noted(
        self,
        values: torch.Tensor,
        storage: int,
        content: Hashable,
        tensor: torch.Tensor,
        site: Site,
        *,
        overwritten: bool,
    ) -> Noted:
        key = content, self._changes.get(storage, 0)
        number, kept = self._known.get(key) or self._new(values, storage, key, site, overwritten=overwritten)
        return Noted(
            number,
            _DTYPES.get(values.dtype) or _DTYPES.setdefault(values.dtype, str(values.dtype)[6:]),
            tuple(values.shape),
            None if values is tensor else placement_of(tensor),
            self._makers.get(storage, -1),
            self._named(storage, values),
            kept,
            layout_of(values) if tensor.layout is torch.strided else _layout_name(tensor),
        )

    def _new(
        self, values: torch.Tensor, storage: int, key: tuple[Hashable, int], site: Site, *, overwritten: bool
    ) -> tuple[int, str | None]:
        """Number a content that was not seen before, and have it measured and kept."""
        number, self._next = self._next, self._next + 1
        # Expected once: after that, whatever lies there is new.
        expected = self._before.pop(_place(storage, values), None) if self._before else None
        self._meter.measure(number, values, expected)
        kept = None if self._keeper is None else self._keep(self._keeper, number, values, site)
        known = self._known[key] = number, kept
        if overwritten:
            self._known[self._identities.key(values, ahead=1)[1], key[1]] = known
        return known

    @staticmethod
    def _keep(keeper: Keeper, number: int, values: torch.Tensor, site: Site) -> str | None:
        with unseen():
            return keeper.keep(number, values, site.short)

    def made(self, tensor: torch.Tensor, node: int) -> None:
        """Say that a node wrote a tensor; what was known of its memory may be outdated."""
        storage = self._identities.storage(plain(tensor))
        self._makers[storage] = node
        self._said.pop(storage, None)

    def written(self, tensor: torch.Tensor, node: int) -> None:
        """Say that a node wrote a tensor, which torch may not have counted as a new version."""
        storage = self._identities.storage(plain(tensor))
        self._makers[storage] = node
        self._change(storage)

    def changed(self, tensors: Iterable[torch.Tensor]) -> None:
        """Say that tensors may have changed without torch counting it as a new version."""
        for tensor in tensors:
            storage = self._identities.storage(plain(tensor))
            self._change(storage)

    def _change(self, storage: int) -> None:
        self._changes[storage] = self._changes.get(storage, 0) + 1
        self._said.pop(storage, None)

    def reread(self, tensors: Iterable[torch.Tensor]) -> None:
        """Look again at tensors that may have been written without torch counting it; what is new is measured when noted."""
        for tensor in tensors:
            values = plain(tensor)
            storage, content = self._identities.key(values)
            known = self._known.get((content, self._changes.get(storage, 0)))
            if known is not None and not self._meter.still(known[0], values):
                self._change(storage)

    def name(self, tensor: torch.Tensor, name: str) -> None:
        """Give what lies in a tensor's memory a name: a parameter's, a buffer's, an input's."""
        if in_transform():
            return  # such tensors have no memory of their own
        storage, place = self._identities.place(plain(tensor))
        names = self._names.setdefault(storage, {})
        if place not in names:
            names[place] = name
            self._said.pop(storage, None)

    def _named(self, storage: int, values: torch.Tensor) -> str | None:
        """Return what a tensor's memory is called; where several lie in it (two parts of a batch), the nearest one before."""
        names = self._names.get(storage)
        if names is None:
            return None
        place = int(values.storage_offset())
        found = names.get(place)  # of a shard's memory, in which a model's parameters lie, there may be thousands
        return found or names[max((offset for offset in names if offset <= place), default=min(names))]

    def lasts(self, tensor: torch.Tensor, noted: Noted) -> None:
        """Say that a tensor that was noted is there in the next step, too: a parameter that was just updated."""
        values = plain(tensor)
        self._lasting[_place(self._identities.storage(values), values)] = noted.number

    def end_step(self) -> None:
        """Keep what is known of tensors that last, before the meter is drained."""
        found = {place: self._meter.measured(number) for place, number in self._lasting.items()}
        self._before = {place: measured for place, measured in found.items() if measured is not None}
        self._lasting.clear()

    def new_step(self) -> None:
        """Forget what was seen: memory is used anew."""
        self._identities.forget()
        self._known.clear()
        self._said.clear()
        self._makers.clear()
        self._names.clear()
        self._changes.clear()


def _layout_name(tensor: torch.Tensor) -> str | None:
    """Return what is said of a tensor of which stored values alone are measured; None for one that holds all of its own."""
    name = str(tensor.layout).removeprefix("torch.")
    return name if name.startswith("sparse") else None


def _place(storage: int, values: torch.Tensor) -> Hashable:
    """Return where a tensor lies, which it keeps from step to step."""
    return storage, values.storage_offset(), values.numel(), values.dtype


def placement_of(tensor: torch.Tensor) -> str | None:
    """Return how a DTensor is spread: placements, global shape, mesh; None for a plain tensor."""
    if not hasattr(type(tensor), "to_local"):
        return None
    mesh = tensor.device_mesh  # type: ignore[attr-defined]
    names = mesh.mesh_dim_names or [f"dim{i}" for i in range(mesh.ndim)]
    where = ", ".join(f"{name}={size}" for name, size in zip(names, mesh.shape, strict=True))
    placements = ", ".join(str(p) for p in tensor.placements)  # type: ignore[attr-defined]
    return f"{placements} of {list(tensor.shape)} on mesh({where}) at {list(mesh.get_coordinate() or [])}"
