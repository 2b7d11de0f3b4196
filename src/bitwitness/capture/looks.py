"""Cheap looks at what a model's modules compute, and at the gradients that come back to it, on every step.

Normalisation brings a wrong block of activations back into range before a gradient tells of it. So what some modules return
is read where it is made: largest magnitude, norm, the largest norm of a row, exact zeros; of large results every k-th row,
other rows at each step. Hooks lie on the modules while a training forward runs, and at no other time: an evaluation, a replay,
a compiler or a pickle meets none. Nothing waits for a device; the numbers reach the host with the step's own.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from bitwitness.capture.light import Looks, Vector
from bitwitness.capture.lookedat import modules_to_look_at
from bitwitness.stats import reader
from bitwitness.stats.rowreader import RowReader
from bitwitness.stats.rows import RowFigures, figures_of, sample
from bitwitness.tap.hooks import ModuleHook
from bitwitness.tap.modes import scripts_modes_off
from bitwitness.tap.ownwork import in_own_work, in_replay, own_work

_KEPT = 4096  # forwards and backwards whose figures wait for a reading; a script may never use its gradients
_NESTED = 3  # tuples within tuples in which a tensor is looked for

Key = tuple[int, int, int]
"""Which module, 0 for its result or 1 for the gradient of that, and how many elements were read."""


class ModuleLooks:
    """Looks at the results of some of a root's modules, and at those results' gradients.

    Parameters
    ----------
    root
        The user's own module.
    now
        The clock by which looks are timed, in seconds.

    Attributes
    ----------
    paths
        The M modules that are looked at.
    unread
        Those whose results cannot be read, by path, each with the reason.
    seconds
        What the looks took inside the training's own forwards and backwards so far.

    """

    def __init__(self, root: nn.Module, now: Callable[[], float] = time.perf_counter) -> None:
        chosen = modules_to_look_at(root)
        self.paths = tuple(one.path for one in chosen)
        self.unread: dict[str, str] = {}
        self.seconds = 0.0
        self._chosen, self._now = chosen, now
        self._hooks = [ModuleHook(partial(self._came_out, index)) for index in range(len(chosen))]
        self._handles: list[torch.utils.hooks.RemovableHandle] = []
        self._thread = 0
        self._turn = 0
        self._open: list[tuple[Key, RowFigures]] = []
        compiled = reader.built()
        self._rows = None if compiled is None else RowReader(compiled)
        self._read: list[Key] = []
        self._kept: deque[tuple[list[Key], Tensor]] = deque(maxlen=_KEPT)
        self._closed = False

    def close(self) -> None:
        """Look no more."""
        self._closed = True
        self.forward_ended()
        for hook in self._hooks:
            hook.let_go()
        self.forget()

    def forget(self) -> None:
        """Let go of what was seen and not read."""
        self._open.clear()
        self._kept.clear()
        self._read = []
        if self._rows is not None:
            self._rows.forget()

    # -- moments -------------------------------------------------------------------------------------------------

    def forward_begins(self) -> None:
        """Look at the results of a training forward that begins now."""
        if self._handles or self._closed:
            return
        self._thread = threading.get_ident()
        for index, one in enumerate(self._chosen):
            if one.path not in self.unread:
                self._handles.append(one.module.register_forward_hook(self._hooks[index]))

    def forward_ended(self) -> None:
        """Take the hooks away."""
        while self._handles:
            self._handles.pop().remove()
        self.fold()

    def fold(self) -> None:
        """Bring what one forward or backward gave together, still on its device."""
        if self._open:
            seen, self._open = self._open, []
            with own_work(), torch.no_grad():
                self._kept.append(([key for key, _ in seen], figures_of([figures for _, figures in seen])))

    def _came_out(self, index: int, _module: nn.Module, _args: Any, result: Any) -> None:
        if threading.get_ident() != self._thread or in_own_work():
            return
        with scripts_modes_off():
            tensor = _first_tensor(result)
            if tensor is None:
                what = f"a tensor of {result.dtype}" if isinstance(result, Tensor) else type(result).__name__
                self._cannot_read(index, f"it returned no tensor of real numbers but {what}")
                return
            self._look(index, 0, tensor)
            if tensor.requires_grad and tensor.grad_fn is not None:
                tensor.register_hook(_Arrival(self, index))

    def gradient(self, index: int, grad: Tensor) -> None:
        """Look at the gradient that arrived at a module's result."""
        if not (self._closed or in_own_work() or in_replay()):
            with scripts_modes_off():
                self._look(index, 1, grad)

    def _look(self, index: int, direction: int, tensor: Tensor) -> None:
        if self._chosen[index].path in self.unread:
            return
        began = self._now()
        try:
            most = self._chosen[index].most
            size = 0 if self._rows is None or len(self._read) >= _KEPT else self._rows.read(tensor, most, self._turn)
            if size:
                self._read.append((index, direction, size))
            else:
                self._look_by_operators((index, direction), tensor, most)
        except Exception as error:
            self._cannot_read(index, f"{type(error).__name__}: {error}")
        self.seconds += self._now() - began

    def _look_by_operators(self, which: tuple[int, int], tensor: Tensor, most: int) -> None:
        with own_work(), torch.no_grad():
            rows = sample(tensor.detach(), most, self._turn)
            if rows.numel():
                self._open.append(((*which, rows.numel()), RowFigures.of(rows)))

    def _cannot_read(self, index: int, reason: str) -> None:
        self.unread[self._chosen[index].path] = reason

    # -- reading -------------------------------------------------------------------------------------------------

    def take(self, device: torch.device) -> tuple[list[Key], Tensor]:
        """Return what was seen since the last time, and forget it: K keys, and float32 [K, 4] on ``device``."""
        self.fold()
        self._turn += 1
        keys = [key for group, _ in self._kept for key in group]
        tables = [table.to(device) for _, table in self._kept]
        if self._rows is not None and self._read:
            keys += self._read
            tables.append(torch.from_numpy(self._rows.take()).float().to(device))
        self.forget()
        return keys, torch.cat(tables) if tables else torch.zeros(0, 4, device=device)

    def looks(self, keys: list[Key], table: Vector, scale: float) -> Looks:
        """Return a step's looks from what `take` gave, on the host; gradients are divided by the loss scale.

        Over a module's calls and a step's micro-batches magnitudes are maxima, squares and zeros are means.
        """
        count = len(self.paths)
        figures = np.full((2, 4, count), np.nan)
        if keys:
            module, direction, size = np.array(keys).T
            place = direction * count + module
            total = np.bincount(place, size, 2 * count)
            largest = np.full((2, 2 * count), -np.inf)
            with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
                for row, column in enumerate((0, 2)):
                    np.maximum.at(largest[row], place, table[:, column])
                squares = np.sqrt(np.bincount(place, table[:, 1] ** 2, 2 * count) / total)
                zeros = np.bincount(place, table[:, 3], 2 * count) / total
            rows = np.stack([largest[0], squares, largest[1], zeros])
            rows[:, total == 0] = np.nan
            figures = rows.reshape(4, 2, count).transpose(1, 0, 2)
            figures[1, :3] /= scale
        return Looks(self.paths, figures)


class _Arrival:
    """The hook on a result's gradient; it keeps no tensor, and torch does not warn of it where a tensor is saved."""

    __slots__ = ("_index", "_looks")
    __torch_unserializable__ = True

    def __init__(self, looks: ModuleLooks, index: int) -> None:
        self._looks = looks
        self._index = index

    def __call__(self, grad: Tensor) -> None:
        self._looks.gradient(self._index, grad)


def _first_tensor(result: Any, depth: int = 0) -> Tensor | None:
    """Return the first tensor of real numbers in what a module returned: itself, or in tuples, lists and mappings.

    A packed sequence is a tuple whose first is its tensor; a recurrent layer's result is one of these and a tuple of states.
    """
    if isinstance(result, Tensor):
        return result if result.is_floating_point() else None
    parts = result.values() if isinstance(result, dict) else result if isinstance(result, tuple | list) else ()
    if depth > _NESTED:
        return None
    return next((found for part in parts if (found := _first_tensor(part, depth + 1)) is not None), None)
