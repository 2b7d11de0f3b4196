"""Holds the rules against the series, step by step, and says what they say as findings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from bitwitness.config.monitoring import MonitorConfig
from bitwitness.finding import Finding, Severity
from bitwitness.monitor.movement import FLOORS, Movement
from bitwitness.monitor.postmortem import IndicesOf, PostMortem
from bitwitness.monitor.rules.diverging import Diverging
from bitwitness.monitor.rules.drift import Drift
from bitwitness.monitor.rules.exploding import Exploding
from bitwitness.monitor.rules.frozen import Frozen
from bitwitness.monitor.rules.nonfinite import Nonfinite
from bitwitness.monitor.rules.rank_apart import RankApart
from bitwitness.monitor.rules.rates import LearningRate, LossScale
from bitwitness.monitor.rules.replicas import Replicas
from bitwitness.monitor.rules.rule import Alert, Peers, Rule, View
from bitwitness.monitor.rules.spike import Spike
from bitwitness.monitor.rules.vanished import Vanished
from bitwitness.monitor.series import SeriesKey, StepNumbers
from bitwitness.store.watched import TURN

RULES: tuple[type[Rule], ...] = (
    Nonfinite, Vanished, Frozen, Exploding, Drift, Spike, Diverging, LearningRate, LossScale, RankApart, Replicas
)  # fmt: skip
_LEARNS_FROM = ("exploding", "drift", "vanished")
"""Rules whose alarms raise the threshold of the kind that they spoke of."""
_OF_SIZES = ("vanished", "exploding", "drift", "spike", "diverging")
"""Rules that look away from a step that a gradient scaler skips."""
_EPISODE = 20  # steps in which a rule does not say the same of the same again
_WAKE = 32
"""Steps after an alert in which what moves is taken for its consequence: it is recorded, and no alert of its own."""
_FOLLOW = ("exploding", "drift", "diverging")
"""Rules of which that is so: what turns zero, freezes, spikes or is not finite is told whenever it happens."""


class Watch:
    """Watches one rank's series.

    Parameters
    ----------
    config
        Which rules, and how wary.
    told
        Called with each finding.
    indices_of
        The samples of a batch, by the hashes of its tensors; none where they are not known.

    Attributes
    ----------
    looked_at
        How many numbers of series were held against the rules: steps times series.
    alerts
        How many findings there were.

    """

    def __init__(
        self, config: MonitorConfig, told: Callable[[Finding], None], indices_of: IndicesOf = lambda _hashes: ()
    ) -> None:
        self._told = told
        self._rules = [rule(config) for rule in RULES if rule.name in config.rules]
        self._movements = {kind: Movement(kind, warmup=config.warmup, z=config.z) for kind in FLOORS}
        self._post_mortem = PostMortem(indices_of)
        self._said: dict[tuple[str, str, str], int] = {}
        self._said_of_ranks: dict[str, int] = {}
        self._alerted = -_WAKE - 1
        self.looked_at = 0
        self.alerts = 0

    def step(self, numbers: StepNumbers) -> list[Finding]:
        """Look at the next step; return what there is to say of it."""
        moved = {kind: one for kind, m in self._movements.items() if (one := m.look(numbers)).places.size}
        view = View(numbers, moved)
        self.looked_at += len(numbers.order)
        overflowed = view.overflowed
        said = [a for rule in self._rules if not (overflowed and rule.name in _OF_SIZES) for a in rule.look(view)]
        for kind, one in moved.items() if not overflowed else ():
            alarmed = any(alert.rule in _LEARNS_FROM and alert.key.kind == kind for alert in said)
            self._movements[kind].learn(one, alarmed=alarmed)
        self._post_mortem.step(view)
        alerts = [alert for alert in said if self._is_new(alert, numbers.step)]
        in_wake = numbers.step - self._alerted <= _WAKE
        findings = [self._finding(alert, view, follows=in_wake and alert.rule in _FOLLOW) for alert in alerts]
        if any(finding.severity is not Severity.INFO for finding in findings) and not in_wake:
            self._alerted = numbers.step
        self._post_mortem.alerted(numbers.step, [alert for alert in alerts if alert.severity is not Severity.INFO])
        if any(alert.rule == "spike" for alert in alerts):
            findings.append(self._post_mortem.of(numbers.step, numbers.rank))
        for finding in findings:
            self._tell(finding)
        return findings

    def compare(self, step: int, rank: int, peers: Peers) -> list[Finding]:
        """Look at how this rank lay against the others at a step before."""
        self._post_mortem.compared(step, peers)
        alerts = [alert for rule in self._rules for alert in rule.compare(peers)]
        self.looked_at += peers.distance.size
        findings = [_finding(self._once(alert, step), step, rank) for alert in alerts]
        for finding in findings:
            self._tell(finding)
        return findings

    def _once(self, alert: Alert, step: int) -> Alert:
        """Return an alert about ranks, which is recorded and no alert of its own where the same rule has just spoken."""
        before, self._said_of_ranks[alert.rule] = self._said_of_ranks.get(alert.rule, -_EPISODE - 1), step
        return alert if step - before > _EPISODE else replace(alert, severity=Severity.INFO)

    def _is_new(self, alert: Alert, step: int) -> bool:
        """Tell whether an alert is not of what was alerted just before: the same gradient before and after reduction, say."""
        what = alert.rule, "grad" if alert.key.kind == "grad_reduced" else alert.key.kind, alert.key.name
        before, self._said[what] = self._said.get(what, -_EPISODE - 1), step
        return step - before > _EPISODE

    def _finding(self, alert: Alert, view: View, *, follows: bool) -> Finding:
        numbers = view.numbers
        if alert.key in numbers.keys:  # so that of one step's alerts whoever reads them knows which came about first
            alert = replace(alert, evidence={**alert.evidence, TURN: view.turn(numbers.keys.index(alert.key))})
        if not follows:
            return _finding(alert, numbers.step, numbers.rank)
        message = f"{alert.message}, in the wake of step {self._alerted}"
        return _finding(replace(alert, message=message, severity=Severity.INFO), numbers.step, numbers.rank)

    def _tell(self, finding: Finding) -> None:
        self.alerts += finding.sensor != "monitor.post_mortem" and finding.severity is not Severity.INFO
        self._told(finding)


def _finding(alert: Alert, step: int, rank: int) -> Finding:
    site = alert.key.site.at(rank=rank, step=step)
    return Finding(f"monitor.{alert.rule}", site, alert.severity, alert.message, alert.evidence, step, rank)


def compared(keys: list[SeriesKey], own: np.ndarray, total: np.ndarray, ranks: int) -> Peers:
    """Return this rank's place among its peers, from its own row [3, F] (there or not, size, square) and the sum of all."""
    others = total - own
    count = np.maximum(others[0], 1.0)
    mean = others[1] / count
    variance = np.maximum(others[2] / count - mean**2, 0.0) * count / np.maximum(count - 1.0, 1.0)
    comparable = (own[0] > 0) & (others[0] > 0)
    return Peers(keys, np.where(comparable, own[1] - mean, np.nan), np.sqrt(variance), ranks)


def row_of(numbers: StepNumbers, names: list[str]) -> tuple[list[SeriesKey], np.ndarray]:
    """Return what a rank contributes to the sum, [3, F].

    F are ln L2 of each weight, of each local gradient and of all gradients, and asinh of the loss.
    """
    weights, l2 = _sizes_of(numbers, "param", names), _sizes_of(numbers, "grad", names)
    with np.errstate(divide="ignore", invalid="ignore"):
        total = np.sqrt(np.nansum(l2**2)) if np.isfinite(l2).any() else np.nan
        sizes = np.log(np.concatenate([weights, l2, [total]]))
    sizes = np.append(sizes, np.arcsinh(numbers.number("training", "loss")))
    known = np.isfinite(sizes)
    values = np.where(known, sizes, 0.0)
    keys = [SeriesKey(kind, name) for kind in ("param", "grad") for name in names]
    keys += [SeriesKey("training", ".", None, "grad_norm"), SeriesKey("training", ".", None, "loss")]
    return keys, np.stack([known.astype(float), values, values**2])


def _sizes_of(numbers: StepNumbers, kind: str, names: list[str]) -> np.ndarray:
    places = {key.name: i for i, key in enumerate(numbers.keys) if key.kind == kind}
    return np.array([numbers.l2[places[name]] if name in places else np.nan for name in names])
