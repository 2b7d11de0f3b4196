"""One rank whose local gradients go another way than the other ranks'."""

from __future__ import annotations

import numpy as np

from bitwitness.config.monitoring import MonitorConfig
from bitwitness.monitor.rules.rule import Alert, Peers, Rule, named
from bitwitness.monitor.slowsum import SlowSum
from bitwitness.stats.history import History

_FLOOR = 0.08
_TWOFOLD = float(np.log(2.0))
"""How far a size has to have gone to be told of as slowly: ranks learn at a pace of their own where their data differ."""
_YOUNG, _QUIET = 48, 128
"""Steps of a training, and behind such an alert, in which no slow one is told: ranks find their places among one another."""


class RankApart(Rule):
    """Alerts on the rank whose distance from the mean of the others leaves its own history, at once or slowly.

    A rank whose data always differ a little is used to that, and what goes slowly is told once of each size. Where there are
    only two ranks both say it, and that either may be the one; only what else moved on one of them tells which it is.
    The threshold rises with each alarm as that of ``exploding``.
    """

    name = "rank_apart"
    rate = 6e-5

    def __init__(self, config: MonitorConfig) -> None:
        super().__init__(config)
        self._history: History | None = None
        self._slow = SlowSum(0, _FLOOR)
        self._told = np.zeros(0, dtype=bool)
        self._steps, self._quiet_until = 0, _YOUNG

    def compare(self, peers: Peers) -> list[Alert]:
        """Return the parameter whose gradient is farthest from the other ranks', if that is beyond the threshold."""
        peers = peers.of(lambda key: key.kind != "param")  # whose own rule is `replicas`
        size = peers.distance.size
        if not size:
            return []
        if self._history is None or self._history.mean.size != size:
            self._history = History(size, warmup=self._config.warmup, z=self._config.z, floor=_FLOOR)
            self._slow = SlowSum(size, _FLOOR, _TWOFOLD)
            self._told = np.zeros(size, dtype=bool)
        history = self._history
        scores = history.scores(peers.distance, peers.spread if peers.ranks > 2 else None)
        slow = self._slow.step(self._settled(peers))
        self._steps += 1
        quiet = self._steps < self._quiet_until
        apart, drifting = np.abs(scores) / history.threshold, np.where(self._told | quiet, 0.0, np.abs(slow))
        share = np.maximum(apart, drifting)
        index = int(share.argmax())
        alarmed = bool(share[index] > 1)
        usual = float(history.mean[index])
        history.learn(peers.distance, false_alarm=alarmed)
        if (drifting > 1).any():
            self._told |= drifting > 1
            self._quiet_until = self._steps + _QUIET  # what learns at another pace does so in many places
        if not alarmed:
            return []
        key = peers.keys[index]
        how = "is" if apart[index] >= drifting[index] else "slowly went"
        gap = float(peers.distance[index] - usual) if how == "is" else float(self._slow.gap[index])
        factor = float(np.exp(gap))
        text = f"{named(key)} {how} apart from {peers.others}: {factor:.3g} times its usual size against them"
        beyond = [peers.keys[int(i)] for i in np.flatnonzero(share > 1)]
        return [
            self.alert(
                key, text + peers.which, beyond, z=float(scores[index]), drift=float(drifting[index]), factor=factor
            )
        ]

    @staticmethod
    def _settled(peers: Peers) -> np.ndarray:
        """Return by how much distances exceed what the others are apart among themselves: to them an odd rank is a spread."""
        if peers.ranks <= 2:
            return peers.distance
        return np.sign(peers.distance) * np.maximum(np.abs(peers.distance) - peers.spread, 0.0)
