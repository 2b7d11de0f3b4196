"""Series made by hand, for rules to be tried on: no model, no training."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from bitwitness import Finding
from bitwitness.config.monitoring import MonitorConfig
from bitwitness.monitor.series import Universe
from bitwitness.monitor.sheet import Key, StepRows
from bitwitness.monitor.watch import Watch

PARAMETERS = [f"layers.{i}.{name}.weight" for i in range(6) for name in ("up", "down")]
MODULES = [f"layers.{i}.{name}" for i in range(6) for name in ("up", "down")]
Change = Callable[[int, dict[Key, list[float]]], None]
"""Edits a step's rows: nan, inf, zeros, min, max, sum, l2 by key; or one number of a key with a metric."""


def steps(
    count: int,
    change: Change = lambda _step, _rows: None,
    *,
    seed: int = 0,
    noise: float = 0.08,
    rank: int | None = None,
) -> list[StepRows]:
    """Return the rows of a training: the loss falls, gradients move together, and each has a noise of its own."""
    draw = np.random.default_rng(seed)
    own_draw = draw if rank is None else np.random.default_rng(1000 + rank)
    usual = {("grad", name): np.exp(draw.normal(-3, 1)) for name in PARAMETERS}
    usual |= {("activation", name): np.exp(draw.normal(2, 1)) for name in MODULES}
    usual |= {("param", name): np.exp(draw.normal(1, 0.3)) for name in PARAMETERS}
    usual |= {("moment2", name): np.exp(draw.normal(-9, 1)) for name in PARAMETERS}
    made = []
    for step in range(count):
        together = {
            "grad": draw.normal(0, 0.3) - 0.002 * step,
            "activation": 0.001 * step,
            "param": 0.0005 * step,
            "moment2": 0.0,
        }
        own = {"grad": noise, "activation": 0.3 * noise, "param": 1e-4, "moment2": 0.05}
        rows: dict[Key, list[float]] = {}
        for (kind, name), size in usual.items():
            slot, micro = ("out0", 0) if kind == "activation" else (None, -1)
            l2 = size * np.exp(together[kind] + own_draw.normal(0, own[kind]))
            rows[Key(kind, name, slot, None, micro)] = [0, 0, -1, -l2 / 5, l2 / 4, l2 / 100, l2]
        for name in PARAMETERS:
            rows[Key("update", name, None, "update_ratio", -1)] = [1e-3 * np.exp(own_draw.normal(0, 0.1))]
        rows[Key("training", ".", None, "loss", -1)] = [3.0 * np.exp(-step / 400) + own_draw.normal(0, 0.05)]
        rows[Key("training", ".", None, "grad_norm", -1)] = [np.exp(together["grad"])]
        change(step, rows)
        made.append(_rows(step, rows))
    return made


def _rows(step: int, rows: dict[Key, list[float]]) -> StepRows:
    keys = list(rows)
    nothing = [np.nan] * 7
    figures = np.array([nothing if key.metric else rows[key] for key in keys], dtype=float)
    values = np.array([rows[key][0] if key.metric else np.nan for key in keys], dtype=float)
    counts = np.array([0.0 if key.metric else 100.0 for key in keys])
    return StepRows(step, keys, counts, figures, values)


def watched(rows: list[StepRows], *, rank: int = 0, **settings: object) -> tuple[list[Finding], Watch]:
    """Hold the rules against steps; return what they said."""
    findings: list[Finding] = []
    watch, universe = Watch(MonitorConfig(**settings), findings.append), Universe(rank)  # type: ignore[arg-type]
    for one in rows:
        watch.step(universe.numbers(one))
    return findings, watch


def key_of(kind: str, name: str) -> Key:
    return Key(kind, name, "out0" if kind == "activation" else None, None, 0 if kind == "activation" else -1)


def scaled(kind: str, name: str, factor: Callable[[int], float]) -> Change:
    """Multiply one series by a factor that depends on the step."""

    def change(step: int, rows: dict[Key, list[float]]) -> None:
        row, times = rows[key_of(kind, name)], factor(step)
        row[3:] = [number * times for number in row[3:]]

    return change
