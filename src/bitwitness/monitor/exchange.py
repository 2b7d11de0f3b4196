"""Ranks compared while they train: one small sum over them at each step, of the numbers of the step before."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
import torch

from bitwitness.errors import SideChannelError
from bitwitness.monitor.rules.rule import Peers
from bitwitness.monitor.series import SeriesKey, StepNumbers
from bitwitness.monitor.watch import compared, row_of
from bitwitness.ranks import Ranks

_PATIENCE_S = 60.0  # for this rank's own background thread, which has had a step's time for it


class Exchange:
    """Sums what the ranks contribute, where all of them stand at the same moment: gradients are complete.

    The sum is of [3, F] numbers, whatever the number of ranks; the step before's have arrived on the host by then, so
    that no device is waited for.

    Parameters
    ----------
    ranks
        Who train together.
    names
        Parameters that are compared, with their local gradients; the same on all ranks.
    fail
        Told why it ended.

    """

    def __init__(self, ranks: Ranks, names: list[str], fail: Callable[[str, BaseException], None]) -> None:
        self._ranks = ranks
        self._names = names
        self._fail = fail
        self._latest: tuple[int, list[SeriesKey], np.ndarray] | None = None
        self._ready = threading.Event()
        self._due = False
        self.on = ranks.size > 1

    def expect(self) -> None:
        """Say that a step's numbers are on their way; `give` brings them."""
        self._ready.clear()
        self._due = True

    def give(self, numbers: StepNumbers) -> None:
        """Take a step's numbers; called on the writer's thread."""
        self._latest = (numbers.step, *row_of(numbers, self._names))
        self._ready.set()

    def meet(self) -> tuple[int, Peers] | None:
        """Exchange with the other ranks; return the step, and how this rank lay among them. Collective."""
        if not self.on or not self._due:
            return None
        self._due = False
        there = self._ready.wait(_PATIENCE_S)
        step, keys, row = self._latest if there and self._latest else (-1, [], np.zeros((3, 2 * len(self._names) + 2)))
        try:
            with self._ranks.together():
                total = self._ranks.sum(torch.from_numpy(row)).numpy()
        except SideChannelError as error:
            self.on = False
            self._fail("comparison of ranks", error)
            return None
        return None if step < 0 else (step, compared(keys, row, total, self._ranks.size))
