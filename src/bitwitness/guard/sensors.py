"""The sensors that a configuration asks for, asked together once a step; one that fails is turned off and named."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import torch

from bitwitness.capture.light import LightStep
from bitwitness.capture.root import RootTap
from bitwitness.config import Config
from bitwitness.finding import Finding
from bitwitness.guard.byparameters import ByParameters
from bitwitness.guard.exactsensors import ExactSensors
from bitwitness.guard.operatorsensors import OperatorSensors
from bitwitness.guard.reference import ReferenceSchemes
from bitwitness.guard.statesensors import RAREST
from bitwitness.guard.switches import Switches
from bitwitness.nonfinite.approach import ApproachSensor
from bitwitness.ranks import Ranks
from bitwitness.sense.activations import ActivationsSensor
from bitwitness.sense.checksum import ChecksumSensor, Scheme
from bitwitness.sense.nonfinite import NonfiniteSensor
from bitwitness.sense.peers import PeersSensor
from bitwitness.sense.trend import TrendSensor
from bitwitness.sense.twice import TwiceSensor
from bitwitness.sense.weights import WeightsSensor
from bitwitness.session.reporter import Reporter
from bitwitness.stats.history import History

_PEERS_NEEDED = 3  # of two ranks that differ neither is the odd one
STATISTICAL = ("trend", "peers", "activations", "weights")
"""The sensors that judge by a history."""

_Histories = tuple[TrendSensor | None, PeersSensor | None, WeightsSensor | None]


class Sensors:
    """Holds one root's sensors; ``modules``: how many modules' results are looked at."""

    def __init__(
        self,
        config: Config,
        root: RootTap,
        ranks: Ranks,
        reporter: Reporter,
        clock: Callable[[], float] = time.monotonic,
        *,
        modules: int = 0,
    ) -> None:
        self.names = tuple(root.parameters)
        self.ever = set(self.names)
        """The names of all parameters that were judged at some time."""
        self.turns = 0
        """How often others were to be judged."""
        self.unjudged = 0
        """Steps for which the history of just these parameters was too short to judge by."""
        self._config, self._root, self._ranks, self._clock = config, root, ranks, clock
        self.switches = Switches(root, reporter)
        self.periods = _periods(config)
        """Steps between two looks of a sensor that has a period of its own, by its name; others look on deep steps."""
        self.alone = False
        """Ask no other rank, for now."""
        self.nonfinite = NonfiniteSensor() if config.nonfinite.enabled else None
        wanted = config.activations.enabled and modules
        self.activations = ActivationsSensor(modules, z=config.activations.z) if wanted else None
        self.trend, self.peers, self.weights = self._histories()
        self._others: ByParameters[_Histories] = ByParameters()
        self.exact = ExactSensors(config, ranks, self.switches)
        self.operators = OperatorSensors(
            root,
            self.switches,
            checksum=_checksum(config),
            approach=ApproachSensor(config.nonfinite.extreme) if config.nonfinite.enabled else None,
            twice=TwiceSensor(config.twice.one_in) if config.twice.enabled else None,
            exact=self.exact,
        )
        self.reference = ReferenceSchemes(config, root, ranks, clock)

    def _histories(self) -> _Histories:
        config, count = self._config, len(self.names)
        trend = TrendSensor(count, warmup=config.trend.warmup, z=config.trend.z) if config.trend.enabled else None
        enough = self._ranks.size >= _PEERS_NEEDED
        peers = PeersSensor(count, z=config.peers.z) if config.peers.enabled and enough else None
        return trend, peers, WeightsSensor(count, z=config.weights.z) if config.weights.enabled else None

    def follow(self) -> None:
        """Judge the root's parameters of now: by their own history, where just these were judged before.

        Scripts freeze and unfreeze parts by turns, as the two halves of a GAN; what is judged anew each time is never judged.
        """
        self.turns += 1
        before, self.names = self.names, tuple(self._root.parameters)
        self.ever.update(self.names)
        known = self._others.exchange(before, (self.trend, self.peers, self.weights), self.names)
        self.trend, self.peers, self.weights = self._histories() if known is None else known
        if self.weights is not None:
            self.weights.forget_last()
        self.reference.close()
        self.reference = ReferenceSchemes(self._config, self._root, self._ranks, self._clock)

    @property
    def histories(self) -> dict[str, History]:
        """What was learned of ordinary steps, by sensor."""
        every = {"trend": self.trend, "peers": self.peers, "activations": self.activations, "weights": self.weights}
        return {name: sensor.history for name, sensor in every.items() if sensor is not None}

    def close(self) -> None:
        """Remove the sensors' hooks and patches."""
        self.reference.close()
        self.exact.leave()

    @property
    def off(self) -> dict[str, str]:
        """Sensors that turned themselves off, and why."""
        return dict(self.switches.off)

    @property
    def on(self) -> list[str]:
        """The names of the sensors that look at this training, by which their self-tests are found."""
        operators, several = self.operators, self._ranks.size > 1
        there = {
            "nonfinite": self.nonfinite,
            "trend": self.trend,
            "peers": self.peers,
            "activations": self.activations,
            "weights": self.weights,
            "feature": self._config.feature.schemes or None,
            "checksum": operators.checksum,
            "approach": operators.approach,
            "twice": operators.twice,
            "replicas": (several and self._config.replicas.enabled) or None,
            "seal": self._config.seal.enabled or None,
            "gradients": self._config.seal.enabled or None,
            "optimizer": self._config.update.enabled or None,
            "collective": self.exact.collective,
            "recompute": self.exact.recompute,
        }
        return [name for name, sensor in there.items() if sensor is not None and name not in self.off]

    def look(self, light: LightStep, *, deep: bool, scale: float) -> list[Finding]:
        """Ask every sensor about this step. Collective, by what `peers` and the strike rule exchange.

        ``scale`` is the loss scale, by which ``light`` is divided already.
        """
        findings = self.switches.ask("feature", partial(self.reference.look, light, scale))
        if self.nonfinite is not None:
            findings += self.switches.ask("nonfinite", partial(self.nonfinite.look, light))
        if self.trend is not None:
            self.unjudged += not self.trend.ripe
            findings += self.switches.ask("trend", partial(self.trend.look, light))
        for sensor in self._steady:
            findings += self.switches.ask(sensor.name, partial(sensor.look, light))
        if self.peers is not None and not self.alone:
            findings += self._compare(self.peers, light)
        failed = self.operators.failed_checksums(light) if deep else []
        if not self.alone:
            self.reference.advance(failed)
        if deep:
            findings += failed + self.operators.differing(light) + self.exact.look(light, alone=self.alone)
        return findings

    def learn(self, light: LightStep, *, false_alarm: bool = False) -> None:
        """Take a step that was not proven wrong into the sensors' histories.

        ``false_alarm``: a history's suspicion, on whatever rank, was what this step was questioned for. All ranks grow
        cautious together, so that the rate of false alarms does not grow with the number of ranks.
        """
        if self.trend is not None:
            self.switches.do("trend", partial(self.trend.learn, light, false_alarm=false_alarm))
        for sensor in self._steady:
            self.switches.do(sensor.name, partial(sensor.learn, light, false_alarm=false_alarm))
        if self.peers is not None:
            self.switches.do("peers", partial(self.peers.learn, false_alarm=false_alarm))

    @property
    def _steady(self) -> list[ActivationsSensor | WeightsSensor]:
        """The sensors of what a step computes with, and on the way."""
        return [sensor for sensor in (self.activations, self.weights) if sensor is not None]

    def _compare(self, peers: PeersSensor, light: LightStep) -> list[Finding]:
        # The exchange happens whatever this rank's own state, so that the others do not wait for it.
        total = self._ranks.sum(torch.from_numpy(peers.row(light)))
        return self.switches.ask("peers", lambda: peers.look(light, total.numpy()))


def _periods(config: Config) -> dict[str, int]:
    seal = config.seal.every
    given = {"replicas": config.replicas.every, "seal": seal, "gradients": seal, "optimizer": config.update.every}
    otherwise = RAREST if config.deep_every == 0 else None  # else with the deep steps
    periods = {name: every or otherwise for name, every in given.items()}
    return {name: period for name, period in periods.items() if period}


def _checksum(config: Config) -> ChecksumSensor | None:
    if not config.checksum.enabled:
        return None
    scheme: Scheme = "signs" if config.checksum.scheme == "bitwitness" else "reference"
    return ChecksumSensor(scheme, rows_one_in=config.checksum.rows_one_in)
