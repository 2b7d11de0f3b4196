"""What lasts from step to step: weights, the optimizer's moments, and how large its update was against the weight."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.optim.optimizer import Optimizer

from bitwitness.config.monitoring import MonitorConfig
from bitwitness.monitor.gradients import present
from bitwitness.monitor.sheet import Sheet
from bitwitness.stats import Moving
from bitwitness.stats.local import local_values

_MOMENTS = {"moment1": ("exp_avg", "momentum_buffer"), "moment2": ("exp_avg_sq", "square_avg", "sum")}
"""What optimizers call their first and second moments: Adam and its kin, SGD, RMSprop and Adagrad."""


class State:
    """Measures parameters, what the optimizer reads and what it keeps.

    Parameters
    ----------
    parameters
        Those that are looked at, by name.
    config
        What to look at.

    """

    def __init__(self, parameters: dict[str, nn.Parameter], config: MonitorConfig) -> None:
        self._parameters = parameters
        self._names = {id(parameter): name for name, parameter in parameters.items()}
        self._config = config
        self._moving = Moving()
        self._stepping: list[str] = []
        self._measured: set[str] = set()
        self._groups: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()
        self._next_group = 0
        self._stable_rank = "stable_rank" in config.metrics

    def before_optimizer(self, sheet: Sheet, optimizer: Optimizer, *, looked_at: bool) -> None:
        """Look at what an optimizer is about to read: gradients (clipped by now), its learning rates.

        ``looked_at``: the rows of local gradients are of just these values.
        """
        held = self._held(optimizer)
        grads = present(held)
        whole = looked_at and len(grads) == len(present(self._parameters))
        if self._config.looks_at("grad_reduced") and not (whole and sheet.same_as("grad_reduced", "grad")):
            sheet.measure_all("grad_reduced", list(grads), list(grads.values()))
        if self._config.looks_at("training"):
            for number, group in enumerate(optimizer.param_groups):
                rate = group.get("lr")
                if isinstance(rate, int | float | torch.Tensor):
                    sheet.value("training", str(self._group(optimizer, number)), "lr", rate)
        if self._config.looks_at("update"):
            self._stepping = [name for name, p in held.items() if p.grad is not None]
            self._moving.keep({name: held[name] for name in self._stepping})

    def after_optimizer(self, sheet: Sheet, optimizer: Optimizer) -> None:
        """Look at what it made of the parameters, and at what it keeps."""
        held = self._held(optimizer)
        measured = self._updates(sheet, held)
        if self._config.looks_at("param"):
            rest = [name for name in held if name not in measured]
            sheet.measure_all("param", rest, [held[name] for name in rest])
            self._measured |= set(held)
        for kind, keys in _MOMENTS.items():
            if self._config.looks_at(kind):
                found = dict(_moments(optimizer, held, keys))
                sheet.measure_all(kind, list(found), list(found.values()))
        if self._stable_rank:
            for name, parameter in held.items():
                if parameter.ndim == 2 and parameter.is_floating_point():
                    sheet.value("module", name, "stable_rank", stable_rank(local_values(parameter)))

    def end_step(self, sheet: Sheet) -> None:
        """Look at weights that no optimizer has stepped, perhaps since it holds them no more."""
        if self._config.looks_at("param"):
            rest = {name: p for name, p in self._parameters.items() if name not in self._measured}
            sheet.measure_all("param", list(rest), list(rest.values()))
        self._measured.clear()

    def _held(self, optimizer: Optimizer) -> dict[str, nn.Parameter]:
        every = (p for group in optimizer.param_groups for p in group["params"])
        return {self._names[id(p)]: p for p in every if id(p) in self._names}

    def _group(self, optimizer: Optimizer, number: int) -> int:
        """Return a group's number, counted over all optimizers in the order in which they step."""
        first = self._groups.setdefault(optimizer, self._next_group)
        self._next_group = max(self._next_group, first + len(optimizer.param_groups))
        return first + number

    def _updates(self, sheet: Sheet, held: dict[str, nn.Parameter]) -> set[str]:
        """Look at how far the step has moved weights; return the names of those that were measured in the same reading."""
        stepped = {name: held[name] for name in self._stepping if name in held}
        self._stepping = []
        if not stepped:
            return set()
        figures = self._config.looks_at("param") and not self._config.zeros
        ratios, table = self._moving.moved(stepped, figures=figures)
        for name, ratio in zip(stepped, ratios.unbind(), strict=True):
            sheet.value("update", name, "update_ratio", ratio)
        if table is None:
            return set()
        counts = [local_values(parameter.detach()).numel() for parameter in stepped.values()]
        sheet.add_all("param", list(stepped), counts, table)
        return set(stepped)


def _moments(optimizer: Optimizer, held: dict[str, nn.Parameter], keys: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
    for name, parameter in held.items():
        state = optimizer.state.get(parameter) or {}
        found = next((state[key] for key in keys if isinstance(state.get(key), torch.Tensor)), None)
        if found is not None:
            yield name, found


def stable_rank(matrix: torch.Tensor, rounds: int = 8) -> torch.Tensor:
    """Return the squared Frobenius norm of a matrix over the square of its spectral norm, by power iteration.

    Begins with the row sums, and draws no random numbers.
    """
    a = matrix.float()
    vector = a.sum(0) + a.abs().mean()
    for _ in range(rounds):
        vector = a.t() @ (a @ vector)
        vector = vector / vector.norm().clamp_min(1e-30)
    spectral = (a @ vector).norm()
    rank: torch.Tensor = (a.norm() / spectral.clamp_min(1e-30)).square()
    return rank
