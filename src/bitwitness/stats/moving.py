"""Tensors as they were, and how far they have moved since: with their statistics in one reading, where one is compiled."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from bitwitness.stats import reader
from bitwitness.stats.figures import COLUMNS, figures_of, row_of
from bitwitness.stats.local import local_values
from bitwitness.stats.total import change_sizes, copy_all, norms_of


@dataclass(slots=True)
class _Kept:
    """A tensor's values, and by what it is known that they still are its own: its storage's address and its version."""

    values: Tensor
    address: int
    version: int
    square: float | None
    """The sum of their squares, where that is known on the host."""


class Moving:
    """Keeps tensors by name, in memory that is used again, and tells by how much they have moved.

    What was measured last is what is kept, so that nothing is copied before a step unless something else has edited a tensor
    in between (through ``.data`` that is not seen: it counts as part of the step).
    """

    def __init__(self) -> None:
        self._kept: dict[str, _Kept] = {}

    def keep(self, named: Mapping[str, Tensor]) -> None:
        """Keep tensors as they are now."""
        stale = {
            name: local_values(tensor.detach()) for name, tensor in named.items() if not self._is_kept(name, tensor)
        }
        for name, values in stale.items():
            old = self._kept.get(name)
            memory = old.values if old is not None and _fits(old.values, values) else torch.empty_like(values)
            self._kept[name] = _Kept(memory, values.data_ptr(), named[name]._version, None)
        copy_all([self._kept[name].values for name in stale], list(stale.values()))

    @torch.no_grad()
    def moved(self, named: Mapping[str, Tensor], *, figures: bool) -> tuple[Tensor, Tensor | None]:
        """Return how far tensors that are kept have moved since, and keep them as they are now.

        Parameters
        ----------
        figures
            Measure them, too.

        Returns
        -------
        tuple of Tensor and (Tensor or None)
            The size of each one's change over that of what it was, [P] (1 where that was zero, and is not any more); and their
            figures as `figures_of`, [P, 7].

        """
        values = {name: local_values(tensor.detach()) for name, tensor in named.items()}
        device = next(iter(values.values())).device
        compiled = reader.built()
        here = [] if compiled is None else [n for n, v in values.items() if self._is_read(compiled, n, v)]
        rest = [name for name in values if name not in set(here)]
        ratios: dict[str, Tensor] = {}
        rows: dict[str, Tensor] = {}
        if rest:
            before, now = [self._kept[name].values for name in rest], [values[name] for name in rest]
            ratios.update(zip(rest, change_sizes(before, now, device).unbind(), strict=True))
            copy_all(before, now)
            if figures:
                rows.update(zip(rest, figures_of(now).unbind(), strict=True))
        if compiled is not None and here:
            found, table = self._read(compiled, here, [values[name] for name in here])
            ratios.update(zip(here, found.unbind(), strict=True))
            rows.update(zip(here, table.unbind(), strict=True))
        for name, value in values.items():
            kept = self._kept[name]
            kept.address, kept.version = value.data_ptr(), named[name]._version
        for name in rest:
            self._kept[name].square = None
        every = torch.stack([rows[name] for name in values]) if figures else None
        return torch.stack([ratios[name].to(device) for name in values]), every

    def _is_kept(self, name: str, tensor: Tensor) -> bool:
        kept, values = self._kept.get(name), local_values(tensor.detach())
        return (
            kept is not None
            and (kept.address, kept.version) == (values.data_ptr(), tensor._version)
            and _fits(kept.values, values)
        )

    def _is_read(self, compiled: reader.Reader, name: str, values: Tensor) -> bool:
        return compiled.takes(values) and compiled.takes(self._kept[name].values)

    def _read(self, compiled: reader.Reader, names: list[str], values: list[Tensor]) -> tuple[Tensor, Tensor]:
        """Measure what the compiled reader takes, and keep it, in one reading."""
        kept = [self._kept[name] for name in names]
        unknown = [one for one in kept if one.square is None]
        if unknown:
            norms = norms_of([one.values for one in unknown], torch.device("cpu")).double().square().tolist()
            for one, square in zip(unknown, norms, strict=True):
                one.square = square
        sizes = [one.square or 0.0 for one in kept]
        every = compiled.read_all(values, before=[one.values for one in kept])
        ratios, rows = [], []
        for one, value, found, size in zip(kept, values, every, sizes, strict=True):
            ratios.append((found.moved / size) ** 0.5 if size else float(found.moved > 0))
            rows.append(row_of(value, found, zeros=False))
            l2 = rows[-1][COLUMNS.index("l2")]
            one.square = l2**2 if rows[-1][0] + rows[-1][1] == 0 else None
        return torch.tensor(ratios), torch.tensor(rows, dtype=torch.float64)


def _fits(memory: Tensor, values: Tensor) -> bool:
    """Tell whether values can be kept in some memory."""
    return (memory.shape, memory.dtype, memory.device) == (values.shape, values.dtype, values.device)
