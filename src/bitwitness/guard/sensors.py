"""The sensors that a configuration asks for, asked together; one that fails is turned off and named."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from typing import Any

import torch

from bitwitness.config import Config
from bitwitness.finding import Finding
from bitwitness.guard.reference import ReferenceSchemes
from bitwitness.nonfinite.approach import ApproachSensor
from bitwitness.ranks import Ranks
from bitwitness.replay.run import Replayer, ReplayError
from bitwitness.respond.reporter import Reporter
from bitwitness.sense.checksum import ChecksumSensor
from bitwitness.sense.light import LightStep
from bitwitness.sense.nonfinite import NonfiniteSensor
from bitwitness.sense.peers import PeersSensor
from bitwitness.sense.trend import TrendSensor
from bitwitness.tap.capture import StepRecord
from bitwitness.tap.modules import ModuleTracker
from bitwitness.tap.operators import OpCall, OperatorTap
from bitwitness.tap.root import RootTap

_PEERS_NEEDED = 3
STATISTICAL = ("trend", "peers")
"""The sensors that judge by a history."""


class Sensors:
    """Holds one root's sensors."""

    def __init__(
        self,
        config: Config,
        root: RootTap,
        ranks: Ranks,
        reporter: Reporter,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.names = tuple(root.parameters)
        self._ranks = ranks
        self._reporter = reporter
        count = len(self.names)
        self._off: dict[str, str] = {}
        self.alone = False
        """Ask no other rank, for now."""
        self._active: dict[str, ChecksumSensor | ApproachSensor] = {}
        self.nonfinite = NonfiniteSensor() if config.nonfinite.enabled else None
        self.trend = TrendSensor(count, warmup=config.trend.warmup, z=config.trend.z) if config.trend.enabled else None
        enough = ranks.size >= _PEERS_NEEDED
        self.peers = PeersSensor(count, z=config.peers.z) if config.peers.enabled and enough else None
        self.checksum = None
        if config.checksum.enabled:
            self.checksum = ChecksumSensor("signs" if config.checksum.scheme == "bitwitness" else "reference")
        self.approach = ApproachSensor(config.nonfinite.extreme) if config.nonfinite.enabled else None
        self.reference = ReferenceSchemes(config, root, ranks, clock)
        self._tracker = ModuleTracker()
        self._tracker.name_tree(root.root)
        self._regions = root.regions
        self._root = root
        self.steps_looked_again = 0
        self.not_looked_again: str | None = None
        self._now = root.now
        self._checking_seconds = 0.0

    def close(self) -> None:
        """Remove the sensors' hooks and patches."""
        self.reference.close()

    @property
    def off(self) -> dict[str, str]:
        """Sensors that turned themselves off, and why."""
        return dict(self._off)

    def operator_tap(self, *, ranges: bool = True) -> AbstractContextManager[Any] | None:
        """Return the dispatch mode of a deep step; what is compiled for the first time meanwhile can be so later.

        ``ranges``: measure how close results come to the ends of narrow dtypes, too.
        """
        self._active = self._handlers()
        if not ranges:
            self._active.pop("approach", None)
        if not self._active:
            return None
        stack = ExitStack()
        stack.enter_context(self._regions.eagerly())
        stack.enter_context(self._tap())
        return stack

    def _handlers(self) -> dict[str, ChecksumSensor | ApproachSensor]:
        """Return the sensors that look at operators and are on."""
        here = {"checksum": self.checksum, "approach": self.approach}
        resting = self.approach is not None and self.approach.resting
        return {
            name: sensor
            for name, sensor in here.items()
            if sensor is not None and name not in self._off and not (name == "approach" and resting)
        }

    def _tap(self) -> OperatorTap:
        return OperatorTap(self._tracker, self._checked, self._wanted)

    def _wanted(self, func: Any) -> bool:
        return any(sensor.select(func) for sensor in self._active.values())

    def look_again(self, replayer: Replayer, record: StepRecord) -> None:
        """Execute a step with compiled code once more, eagerly, under the operator tap; its result is thrown away."""
        self._active = self._handlers()
        if not self._active:
            return
        try:
            replayer.run(record, around=self._tap)
            self.steps_looked_again += 1
        except ReplayError as error:
            self.not_looked_again = str(error)
        except Exception as error:
            self._turn_off("checksum", error)

    def _checked(self, call: OpCall) -> None:
        started = self._now()
        for name, sensor in self._active.items():
            try:
                if name not in self._off and sensor.select(call.func):
                    sensor(call)
            except Exception as error:
                self._turn_off(name, error)
        self._checking_seconds += self._now() - started

    def ranges(self, light: LightStep) -> list[Finding]:
        """Return what a deep step's operators showed of the ends of their dtypes."""
        if self.approach is None or "approach" not in self._active:
            return []
        return self._safely("approach", partial(self.approach.drain, light.step, light.rank, scaled=light.scaled))

    def take_checking_seconds(self) -> float:
        """Return the seconds that operators' checks took since the last time."""
        seconds, self._checking_seconds = self._checking_seconds, 0.0
        return seconds

    @property
    def has_products(self) -> bool:
        """Whether the model was seen to run any operator that can be checked."""
        return self.checksum is not None and self.checksum.checked_any

    def look_at_one_product_in(self, count: int) -> None:
        """Have only a share of a deep step's operators checked, by turns."""
        if self.checksum is not None:
            self.checksum.one_in = count

    def look(self, light: LightStep, *, deep: bool, scale: float) -> list[Finding]:
        """Ask every sensor about this step. Collective, by what `peers` and the strike rule exchange.

        ``scale`` is the loss scale, by which ``light`` is divided already.
        """
        findings = self._safely("feature", partial(self.reference.look, light, scale))
        if self.nonfinite is not None:
            findings += self._safely("nonfinite", partial(self.nonfinite.look, light))
        if self.trend is not None:
            findings += self._safely("trend", partial(self.trend.look, light))
        if self.peers is not None and not self.alone:
            findings += self._compare(self.peers, light)
        failed: list[Finding] = []
        if deep and self.checksum is not None:
            failed = self._safely("checksum", partial(self.checksum.drain, light.step, light.rank))
        if not self.alone:
            self.reference.advance(failed)
        return findings + failed

    def learn(self, light: LightStep, *, false_alarm: bool = False) -> None:
        """Take a step that was not proven wrong into the sensors' histories.

        ``false_alarm``: a history's suspicion, on whatever rank, was what this step was questioned for. All ranks grow
        cautious together, so that the rate of false alarms does not grow with the number of ranks.
        """
        if self.trend is not None:
            self._safely("trend", partial(_quietly, partial(self.trend.learn, light, false_alarm=false_alarm)))
        if self.peers is not None:
            self._safely("peers", partial(_quietly, partial(self.peers.learn, false_alarm=false_alarm)))

    def _compare(self, peers: PeersSensor, light: LightStep) -> list[Finding]:
        # The exchange happens whatever this rank's own state, so that the others do not wait for it.
        total = self._ranks.sum(torch.from_numpy(peers.row(light)))
        return self._safely("peers", lambda: peers.look(light, total.numpy()))

    def _safely(self, name: str, ask: Callable[[], list[Finding]]) -> list[Finding]:
        if name in self._off:
            return []
        try:
            return ask()
        except Exception as error:
            self._turn_off(name, error)
            return []

    def _turn_off(self, name: str, error: Exception) -> None:
        self._off[name] = f"{type(error).__name__}: {error}"
        self._reporter.failure(f"sensor {name} (now off)", error, self._root.record.step)


def _quietly(learn: Callable[[], None]) -> list[Finding]:
    learn()
    return []
