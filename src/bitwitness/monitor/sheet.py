"""One step's numbers: on their devices until the step ends, then in one transfer to the host, for which no step waits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from bitwitness.stats import figures_of, in_hex
from bitwitness.stats.figures import COLUMNS, columns_of
from bitwitness.stats.host import to_host
from bitwitness.stats.launches import Launches
from bitwitness.stats.local import local_values
from bitwitness.tap.identity import Identities

Numbers = NDArray[np.float64]
_SCALED = ("grad", "activation_grad")
"""What a loss scale has multiplied."""
_LAUNCHED = 1 << 40
"""From which on a place is one among what was launched."""
_WHOLE = -1  # the micro-batch of what is of the step as a whole


class Key(NamedTuple):
    """What a row is of, as `bitwitness.store.monitored` has it."""

    kind: str
    name: str
    slot: str | None
    metric: str | None
    micro: int


@dataclass(frozen=True)
class StepRows:
    """A step's numbers on the host, in the order in which they came.

    ``figures``: [R, 7] as `COLUMNS` (NaN in a row with a value); ``values``: [R], NaN in a row of statistics; ``counts``: how
    many values each tensor has. ``batch``: hashes of what the model was called with. ``norm_of``:
    the kind whose rows together are the whole gradient, where its norm was not measured by itself.
    """

    step: int
    keys: list[Key]
    counts: Numbers
    figures: Numbers
    values: Numbers
    scaled: bool = False
    batch: tuple[str, ...] = ()
    norm_of: str | None = None

    def with_value(self, kind: str, name: str, metric: str, value: float) -> StepRows:
        """Return the same with one more number."""
        return replace(
            self,
            keys=[*self.keys, Key(kind, name, None, metric, _WHOLE)],
            counts=np.append(self.counts, 0.0),
            figures=np.concatenate([self.figures, np.full((1, len(COLUMNS)), np.nan)]),
            values=np.append(self.values, value),
        )


class Sheet:
    """Takes one step's numbers.

    Parameters
    ----------
    step
        Which.
    zeros
        Count zeros, too.

    """

    def __init__(self, step: int, *, zeros: bool = False) -> None:
        self.step = step
        self.micro = 0
        """The number of the micro-batch, which the activations of this moment are of."""
        self.scale = 1.0
        self.scaled = False
        """Whether a gradient scaler is at work: what overflows under it is ordinary."""
        self.norm_of: str | None = None
        """The kind whose rows together are the whole gradient."""
        self._zeros = zeros
        self._keys: list[Key] = []
        self._counts: list[int] = []
        self._places: list[int] = []
        self._blocks: list[torch.Tensor] = []
        self._height = 0
        self._values: list[tuple[int, float | torch.Tensor]] = []
        self._hashes: list[torch.Tensor] = []
        self._identities = Identities()
        self._seen: dict[object, int] = {}
        self._launches: dict[torch.device, Launches] = {}
        self._launched: list[int] = []

    def measure(self, kind: str, name: str, slot: str, tensor: torch.Tensor) -> None:
        """Take a tensor's statistics now; of one that was measured before and holds the same, those."""
        values = local_values(tensor.detach())
        _, identity = self._identities.key(values)
        place = self._seen.get(identity)
        if place is None:
            place = self._launch(values)
            if place is None:
                place = self._height
                self._blocks.append(figures_of([values], zeros=self._zeros))
                self._height += 1
            self._seen[identity] = place
        self._add(Key(kind, name, slot, None, self.micro), values.numel(), place)

    def _launch(self, values: torch.Tensor) -> int | None:
        """Read a tensor by one launch, if its device has that; return its place."""
        if not Launches.takes(values):
            return None
        launches = self._launches.setdefault(values.device, Launches(values.device))
        place = _LAUNCHED + len(self._launched)
        if not launches.add(len(self._launched), values, signed=False):
            return None
        self._launched.append(values.numel())
        return place

    def forget(self) -> None:
        """Measure anew from now on: a collective writes into tensors without torch counting it as a change."""
        self._seen.clear()

    def measure_all(self, kind: str, names: Sequence[str], tensors: Sequence[torch.Tensor]) -> None:
        """Take the statistics of many tensors, of the step as a whole, in as few calls as their devices allow."""
        self.add_all(kind, names, *measured(tensors, zeros=self._zeros))

    def same_as(self, kind: str, other: str) -> bool:
        """Give a kind the statistics that another's rows have, of the very same values; return whether it has any."""
        rows = [i for i, key in enumerate(self._keys) if key.kind == other and key.metric is None]
        for row in rows:
            self._add(self._keys[row]._replace(kind=kind), self._counts[row], self._places[row])
        return bool(rows)

    def add_all(self, kind: str, names: Sequence[str], counts: Sequence[int], figures: torch.Tensor) -> None:
        """Take statistics that were measured already."""
        if not names:
            return
        self._blocks.append(figures)
        for number, (name, count) in enumerate(zip(names, counts, strict=True)):
            self._add(Key(kind, name, None, None, _WHOLE), count, self._height + number)
        self._height += len(names)

    def value(
        self,
        kind: str,
        name: str,
        metric: str,
        value: float | torch.Tensor,
        *,
        slot: str | None = None,
        micro: int = _WHOLE,
    ) -> None:
        """Take a number; a tensor of one stays on its device."""
        self._values.append((len(self._keys), value))
        self._add(Key(kind, name, slot, metric, micro), 0, -1)

    def hashed(self, hashes: Sequence[torch.Tensor]) -> None:
        """Take hashes of what the model was called with."""
        self._hashes += hashes

    def _add(self, key: Key, count: int, place: int) -> None:
        self._keys.append(key)
        self._counts.append(count)
        self._places.append(place)

    def take(self) -> Callable[[], StepRows]:
        """Begin the transfer; return what waits for it, to be called on any thread."""
        figures = _to_host([block for block in self._blocks if block.numel()])
        on_device = [value for _, value in self._values if isinstance(value, torch.Tensor)]
        numbers = _to_host(
            [
                value.detach().reshape(1).double().cpu()
                if value.device.type == "cpu"
                else value.detach().reshape(1).to(_wide(value))
                for value in on_device
            ]
        )
        hashes = _to_host([value.reshape(1) for value in self._hashes])
        launched = self._join()
        keys, counts, places, values = self._keys, self._counts, np.asarray(self._places), self._values
        step, scale, scaled, norm_of = self.step, self.scale, self.scaled, self.norm_of

        def read() -> StepRows:
            table = np.full((len(keys), len(COLUMNS)), np.nan)
            there, late = (places >= 0) & (places < _LAUNCHED), places >= _LAUNCHED
            if there.any():
                table[there] = figures().reshape(-1, len(COLUMNS))[places[there]]
            if late.any():
                table[late] = launched()[places[late] - _LAUNCHED]
            column = np.full(len(keys), np.nan)
            arrived = iter(numbers().tolist())
            for index, value in values:
                column[index] = next(arrived) if isinstance(value, torch.Tensor) else value
            if scale != 1.0:
                rows = [i for i, key in enumerate(keys) if key.kind in _SCALED]
                table[rows, 3:] /= scale
                column[[i for i, key in enumerate(keys) if key.metric == "loss"]] /= scale
            batch = tuple(in_hex(int(number)) for number in hashes())
            return StepRows(step, keys, np.asarray(counts, dtype=np.float64), table, column, scaled, batch, norm_of)

        return read

    def _join(self) -> Callable[[], Numbers]:
        """Begin the transfer of what was launched; return what waits for it: [L, 7] in the order of launching."""
        joined = [one for launches in self._launches.values() for one in launches.join()]
        counts = self._launched
        each = [[counts[key] for key in one.keys] if self._zeros else None for one in joined]
        blocks = [_to_host([columns_of(one.figures, n)]) for one, n in zip(joined, each, strict=True)]

        def read() -> Numbers:
            table = np.full((len(counts), len(COLUMNS)), np.nan)
            for one, block in zip(joined, blocks, strict=True):
                table[one.keys] = block().reshape(-1, len(COLUMNS))
            return table

        return read


def measured(tensors: Sequence[torch.Tensor], *, zeros: bool) -> tuple[list[int], torch.Tensor]:
    """Return how many values tensors have, and their figures."""
    local = [local_values(tensor.detach()) for tensor in tensors]
    return [value.numel() for value in local], figures_of(local, zeros=zeros)


def _wide(value: torch.Tensor) -> torch.dtype:
    return torch.float64 if value.device.type in ("cpu", "cuda") else torch.float32


def _to_host(blocks: list[torch.Tensor]) -> Callable[[], NDArray[np.float64]]:
    """Begin to bring tensors, joined along their first dimension, to the host; those of one device in one copy."""
    if all(block.device.type == "cpu" for block in blocks):
        joined = torch.cat(blocks).numpy() if blocks else np.empty(0)
        return lambda: joined
    copies = [_copied(device, [b for b in blocks if b.device == device]) for device in {b.device for b in blocks}]
    order = [block.device for block in blocks]

    def wait() -> NDArray[np.float64]:
        parts = {device: iter(found()) for device, found in copies}
        return np.concatenate([next(parts[device]) for device in order])

    return wait


def _copied(
    device: torch.device, blocks: list[torch.Tensor]
) -> tuple[torch.device, Callable[[], Sequence[NDArray[np.float64]]]]:
    lengths = [len(block) for block in blocks]
    joined = torch.cat(blocks)
    if device.type == "cpu":
        return device, lambda: np.split(joined.numpy(), np.cumsum(lengths)[:-1])
    host, arrived = to_host(joined)

    def wait() -> Sequence[NDArray[np.float64]]:
        arrived()
        return np.split(host.numpy(), np.cumsum(lengths)[:-1])

    return device, wait
