"""Brings what a light step is about to the host: the one wait of the step."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from bitwitness.capture.gradients import LocalGradients
from bitwitness.capture.light import LightStep, Vector
from bitwitness.capture.looks import ModuleLooks
from bitwitness.capture.root import RootTap
from bitwitness.numerics import summing_dtype
from bitwitness.stats import Features, total_of
from bitwitness.stats.local import local_values
from bitwitness.tap.ownwork import own_work

_LARGEST = 1 << 20  # elements of a buffer that is watched: running statistics, not position tables


class LightReader:
    """Reads one root's light steps.

    Parameters
    ----------
    root, gradients
        The root's taps.
    rank
        Whose steps these are.
    looks
        What looks at the root's modules, if anything does.

    """

    def __init__(self, root: RootTap, gradients: LocalGradients, rank: int, looks: ModuleLooks | None = None) -> None:
        self._looks = looks
        self._root = root
        self._local = gradients
        self._rank = rank
        self._names = tuple(root.parameters)
        self._renormed = self._renormed_places()
        self._buffers = self._finite_buffers()
        self._spoiled: dict[str, int] = {}

    def read(self, features: Features, losses: Sequence[torch.Tensor], scale: float, *, scaled: bool) -> LightStep:
        """Return the step's sizes, divided by the loss scale."""
        count = len(self._names)
        with own_work(), torch.no_grad():
            buffers = self._told_now()
            sizes = torch.cat([features.l2, features.absmax, *self._totals(buffers)])
            ends = [
                local_values(loss.detach()).reshape(1).to(sizes.device, summing_dtype(loss.dtype)) for loss in losses
            ]
            keys, table = ([], sizes.new_zeros(0)) if self._looks is None else self._looks.take(sizes.device)
            weights = self._weights(sizes)
            numbers = torch.cat([sizes, *ends, table.reshape(-1), weights.reshape(-1)]).cpu().double().numpy()
        own = 2 * count + 3 + len(ends)
        numbers, looked, weighed = np.split(numbers, [own, own + table.numel()])
        l2, absmax = numbers[:count] / scale, numbers[count : 2 * count] / scale
        # A float32 norm overflows where the values do not: the largest value is then the norm's better estimate.
        l2 = np.where(np.isinf(l2) & np.isfinite(absmax), absmax, l2)
        reduced, watched, spoiled = numbers[2 * count : 2 * count + 3]
        if np.isfinite(spoiled) and len(buffers) < len(self._buffers):  # somebody put them right
            self._spoiled = {name: step for name, step in self._spoiled.items() if name in buffers}
        return LightStep(
            step=self._root.record.step,
            rank=self._rank,
            names=self._names,
            l2=l2,
            absmax=absmax,
            losses=tuple(float(value) / scale for value in numbers[2 * count + 3 :]),
            scaled=scaled,
            scale=scale,
            reduced=() if np.isfinite(reduced) else self._bad(self._gradients()),
            buffers=() if np.isfinite(watched) else self._newly_bad(buffers),
            looks=None if self._looks is None else self._looks.looks(keys, looked.reshape(-1, 4), scale),
            weights=self._weighed(weighed.reshape(2, count)) if len(weighed) else None,
        )

    def _weighed(self, marks: Vector) -> Vector:
        """Return the marks of weights, NaN where torch itself changes one in the forward."""
        if self._renormed:
            marks[:, self._renormed] = np.nan
        return marks

    def _renormed_places(self) -> list[int]:
        """Return the places of weights whose rows torch scales down in the forward, each as it is looked up."""
        tables = (torch.nn.Embedding, torch.nn.EmbeddingBag)
        modules = [m for m in self._root.root.modules() if isinstance(m, tables) and m.max_norm is not None]
        weights = {id(module.weight) for module in modules}
        return [place for place, p in enumerate(self._root.parameters.values()) if id(p) in weights]

    def _weights(self, sizes: torch.Tensor) -> torch.Tensor:
        """Return the marks of the parameters as the step began, [2 P], if these very parameters were read then."""
        marks = None if self._looks is None else self._root.record.weights
        same = marks is not None and marks.shape[1] == len(self._names)
        return marks.to(sizes.device).reshape(-1) if marks is not None and same else sizes.new_zeros(0)

    def _told_now(self) -> dict[str, torch.Tensor]:
        """Return the buffers of which it would be told now: one that stays bad is told of at the step that it went bad at."""
        step = self._root.record.step
        return {name: buffer for name, buffer in self._buffers.items() if self._spoiled.get(name, step) == step}

    def _totals(self, buffers: dict[str, torch.Tensor]) -> list[torch.Tensor]:
        """Return one number each for all reduced gradients, the buffers, and the buffers that were told of before."""
        device, reduced = self._root.device, self._local.reduced
        whole = torch.zeros(1, device=device) if reduced is None else reduced.sum().reshape(1).to(device, torch.float32)
        spoiled = [buffer for name, buffer in self._buffers.items() if name not in buffers]
        return [whole, *(total_of(many, device).reshape(1) for many in (list(buffers.values()), spoiled))]

    def _newly_bad(self, buffers: dict[str, torch.Tensor]) -> tuple[str, ...]:
        bad = self._bad(buffers)
        self._spoiled |= dict.fromkeys(bad, self._root.record.step)
        return bad

    def _gradients(self) -> dict[str, torch.Tensor]:
        return {
            name: p.grad for name, p in self._root.parameters.items() if p.grad is not None and not p.grad.is_sparse
        }

    def _finite_buffers(self) -> dict[str, torch.Tensor]:
        """Return the buffers that hold finite numbers before the training: a mask of -inf is no running statistic."""
        named = {
            name: buffer
            for name, buffer in self._root.root.named_buffers()
            if buffer.is_floating_point() and 0 < buffer.numel() <= _LARGEST
        }
        bad = self._bad(named)
        return {name: buffer for name, buffer in named.items() if name not in bad}

    def _bad(self, named: dict[str, torch.Tensor]) -> tuple[str, ...]:
        return tuple(name for name, tensor in named.items() if not bool(local_values(tensor).isfinite().all()))
