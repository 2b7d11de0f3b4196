"""Tensors as they were, and how far they have moved since: with their statistics in one reading, where they are long."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from bitwitness.stats.figures import COLUMNS, alone, figures_of, is_long
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
        names = list(named)
        values = {name: local_values(named[name].detach()) for name in names}
        long = [name for name in names if is_long(values[name])]
        rest = [name for name in names if not is_long(values[name])]
        device = values[names[0]].device
        ratios: dict[str, Tensor] = {}
        rows: dict[str, Tensor] = {}
        if rest:
            before, now = [self._kept[name].values for name in rest], [values[name] for name in rest]
            ratios.update(zip(rest, change_sizes(before, now, device).unbind(), strict=True))
            copy_all(before, now)
            if figures:
                rows.update(zip(rest, figures_of(now).unbind(), strict=True))
        for name in long:
            ratio, row = self._measured(self._kept[name], values[name])
            ratios[name], rows[name] = torch.tensor(ratio), torch.tensor(row, dtype=torch.float64)
        for name in names:
            kept = self._kept[name]
            kept.address, kept.version = values[name].data_ptr(), named[name]._version
            kept.square = kept.square if name in long else None
        table = torch.stack([rows[name] for name in names]) if figures else None
        return torch.stack([ratios[name].to(device) for name in names]), table

    def _is_kept(self, name: str, tensor: Tensor) -> bool:
        kept, values = self._kept.get(name), local_values(tensor.detach())
        return (
            kept is not None
            and (kept.address, kept.version) == (values.data_ptr(), tensor._version)
            and _fits(kept.values, values)
        )

    @staticmethod
    def _measured(kept: _Kept, values: Tensor) -> tuple[float, list[float]]:
        """Measure a long tensor on the CPU part by part, each while it is in the cache."""
        before = kept.square if kept.square is not None else float(norms_of([kept.values], values.device)[0]) ** 2
        changed = 0.0

        def compare(part: Tensor, start: int) -> None:
            nonlocal changed
            old = kept.values.view(-1)[start : start + part.numel()]
            gap = (part - old).float() if old.dtype.itemsize < 4 else part - old
            changed += torch.dot(gap, gap).item()
            old.copy_(part)

        row = alone(values, beside=compare)
        kept.square = row[COLUMNS.index("l2")] ** 2 if row[0] + row[1] == 0 else None
        return ((changed / before) ** 0.5 if before else float(changed > 0)), row


def _fits(memory: Tensor, values: Tensor) -> bool:
    """Tell whether values can be kept in some memory."""
    return (memory.shape, memory.dtype, memory.device) == (values.shape, values.dtype, values.device)
