"""What every sensor says of the collected faults, each with the history that it had when the fault struck.

Nothing is fitted to the faults: a sensor sees the training step by step, is asked about each struck variant of a step, and
then learns the clean one.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from bitwitness import Site
from bitwitness.capture.light import LightStep, Looks
from bitwitness.config import FeatureConfig, load_config
from bitwitness.guard.sensors import STATISTICAL
from bitwitness.sense.activations import ActivationsSensor
from bitwitness.sense.feature import FeatureSensor
from bitwitness.sense.nonfinite import NonfiniteSensor
from bitwitness.sense.peers import PeersSensor
from bitwitness.sense.trend import TrendSensor
from bitwitness.sense.weights import WeightsSensor
from detection.collect import Part, Seen

LIGHT = ("trend", "nonfinite", "activations", "weights")
REFERENCES = {
    "V1": FeatureConfig(schemes=("v1",)),
    "V2": FeatureConfig(schemes=("v2",)),
    "V3": FeatureConfig(schemes=("v3",)),
    "combined, every 10th": FeatureConfig(schemes=("combined",), grad_sample_interval=10),
    "combined, every one": FeatureConfig(schemes=("combined",), grad_sample_interval=1),
}
"""The reference schemes at their default thresholds; MindSpore's default sampling, and every parameter."""


class Panel:
    """Every sensor of one rank."""

    def __init__(self, part: Part) -> None:
        defaults = load_config(None, {}).config
        count = len(part.names)
        self.names = tuple(part.names)
        self.sites = [Site.parse(site) for site in part.v1_sites]
        self.trend = TrendSensor(count, warmup=defaults.trend.warmup, z=defaults.trend.z)
        self.peers = PeersSensor(count, z=defaults.peers.z)
        self.modules = tuple(part.modules)
        self.activations = ActivationsSensor(len(part.modules), z=defaults.activations.z)
        self.weights = WeightsSensor(count, z=defaults.weights.z)
        self.references = {
            name: FeatureSensor(config, part.names, communicates=part.ranks > 1) for name, config in REFERENCES.items()
        }

    def light(self, step: int, rank: int, seen: Seen) -> LightStep:
        """Return what the guard would hand to its sensors."""
        l2 = np.where(np.isinf(seen.l2) & np.isfinite(seen.absmax), seen.absmax, seen.l2).astype(np.float64)
        looks = Looks(self.modules, seen.looks.astype(np.float64))
        weights = seen.weights.astype(np.float64)
        sizes = seen.absmax.astype(np.float64)
        return LightStep(step, rank, self.names, l2, sizes, (seen.loss,), looks=looks, weights=weights)

    def ask(self, light: LightStep, total: Any, v1: Any) -> dict[str, bool]:
        """Ask every sensor about one step; none of them learns."""
        told = {
            "trend": bool(self.trend.look(light)),
            "nonfinite": bool(NonfiniteSensor().look(light)),
            "activations": bool(self.activations.look(light)),
            "weights": bool(self.weights.look(light)),
            "peers": bool(self.peers.look(light, total)),
        }
        for name, sensor in self.references.items():
            sites = self.sites if sensor.taps and len(v1) == len(self.sites) else []
            told[name] = bool(copy.deepcopy(sensor).look(light, sites, v1.astype(np.float64) if sites else None))
        return told

    def learn(self, light: LightStep, total: Any, v1: Any, *, false_alarm: bool) -> None:
        """Let every sensor learn a clean step."""
        for sensor in (self.trend, self.activations, self.weights):
            sensor.learn(light, false_alarm=false_alarm)
        self.peers.look(light, total)
        self.peers.learn(false_alarm=false_alarm)
        for sensor in self.references.values():
            sites = self.sites if sensor.taps and len(v1) == len(self.sites) else []
            sensor.look(light, sites, v1.astype(np.float64) if sites else None)


def evaluate(
    part: Part, notice: Callable[[str], None] = lambda _text: None
) -> tuple[list[dict[str, Any]], dict[str, int]]:
    """Return each trial with ``told`` (sensor: whether it suspects), and the alarms on clean steps by sensor.

    ``steps`` among the latter counts the clean steps of all ranks.
    """
    panels = [Panel(part) for _ in range(part.ranks)]
    struck = defaultdict(list)
    for trial, seen in zip(part.trials, part.struck, strict=True):
        struck[trial["step"]].append((trial, seen))
    results = []
    alarms: dict[str, int] = defaultdict(int)
    for step, row in enumerate(part.clean):
        lights = [panel.light(step, rank, seen) for rank, (panel, seen) in enumerate(zip(panels, row, strict=True))]
        rows = [panel.peers.row(light) for panel, light in zip(panels, lights, strict=True)]
        total = np.sum(rows, axis=0)
        for trial, seen in struck[step]:
            rank = trial["rank"]
            if trial["place"] == "gradient":
                seen.loss = row[rank].loss  # the forward was clean
            light = panels[rank].light(step, rank, seen)
            told = panels[rank].ask(light, total - rows[rank] + panels[rank].peers.row(light), seen.v1)
            results.append({**trial, "subject": part.subject, "told": told})
        alarm = False
        for panel, light, seen in zip(panels, lights, row, strict=True):
            told = panel.ask(light, total, seen.v1)
            alarms["steps"] += 1
            for name, said in told.items():
                alarms[name] += said
            alarm |= any(told[name] for name in STATISTICAL)
        for panel, light, seen in zip(panels, lights, row, strict=True):
            panel.learn(light, total, seen.v1, false_alarm=alarm)
    notice(part.subject)
    return results, dict(alarms)


def light(told: dict[str, bool]) -> bool:
    """Tell whether a light step of one process suspects."""
    return any(told[name] for name in LIGHT)


def together(told: dict[str, bool]) -> bool:
    """Tell whether a light step among several ranks suspects."""
    return light(told) or told["peers"]


COLUMNS: dict[str, Callable[[dict[str, bool]], bool]] = {
    "one process": light,
    "four ranks": together,
    **{name: (lambda told, name=name: told[name]) for name in REFERENCES},
    "best reference": lambda told: any(told[name] for name in REFERENCES),
}


def wilson(hits: int, count: int, z: float = 1.96) -> tuple[float, float]:
    """Return the ends of Wilson's 95 % interval of a share (Wilson, 1927)."""
    if not count:
        return 0.0, 1.0
    share, square = hits / count, z * z
    middle = (share + square / (2 * count)) / (1 + square / count)
    half = z * np.sqrt(share * (1 - share) / count + square / (4 * count * count)) / (1 + square / count)
    return max(0.0, float(middle - half)), min(1.0, float(middle + half))


def shares(results: Sequence[dict[str, Any]]) -> dict[str, tuple[int, int]]:
    """Return hits and count of every column."""
    return {name: (sum(said(r["told"]) for r in results), len(results)) for name, said in COLUMNS.items()}
