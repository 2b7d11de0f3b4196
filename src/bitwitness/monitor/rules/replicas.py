"""Weights that were the same on all ranks, and are not any more."""

from __future__ import annotations

import numpy as np

from bitwitness.config.monitoring import MonitorConfig
from bitwitness.monitor.rules.rule import Alert, Peers, Rule, named

_EQUAL = 1e-9  # difference of ln of an L2 norm up to which two ranks' are one number, summed over ranks in float64
_APART = 1e-6  # from which they are not; between the two is what other kernels of other devices round
_SAME, _OTHER = 1e-13, 1e-10
"""The same where they were equal to the last digit, as replicas on devices of one kind are; then the smallest difference
counts, if it stays."""
_LEARNED = 8  # steps in a row in which they were equal, before a difference means something
_STAYS = 3  # steps
_ALONE = 0.25  # of a rank's distance that the others may be apart among themselves, so that it is this rank that left


class Replicas(Rule):
    """Alerts where a parameter that this rank has held as the others do for eight steps differs from theirs.

    Data parallelism keeps replicas equal to the bit; whoever's gradients or updates go wrong leaves them for good. Exact: no
    chance is in it. Weights that are sharded, or synchronised now and then, are never equal for so long, and not looked at.
    """

    name = "replicas"
    rate = 0.0

    def __init__(self, config: MonitorConfig) -> None:
        super().__init__(config)
        self._equal = np.zeros(0)
        self._exact = np.zeros(0)
        self._off = np.zeros(0)
        self._told = np.zeros(0, dtype=bool)

    def compare(self, peers: Peers) -> list[Alert]:
        """Return the parameter that is farthest from the other ranks', of those that were equal."""
        peers = peers.of(lambda key: key.kind == "param")
        if self._equal.size != peers.distance.size:
            self._equal, self._told = np.zeros(peers.distance.size), np.zeros(peers.distance.size, dtype=bool)
            self._exact, self._off = np.zeros(peers.distance.size), np.zeros(peers.distance.size)
        with np.errstate(invalid="ignore"):
            distance = np.abs(peers.distance)
            alone = (peers.ranks <= 2) | (peers.spread <= _ALONE * distance)
            self._off = np.where(distance > _OTHER, self._off + 1, 0)
            apart = (distance > _APART) & (self._equal >= _LEARNED)
            apart |= (self._exact >= _LEARNED) & (self._off >= _STAYS)
            left = apart & alone & ~self._told
            self._exact = np.where(distance <= _SAME, self._exact + 1, np.where(self._off > 0, self._exact, 0))
            self._equal = np.where(distance <= _EQUAL, self._equal + 1, np.where(left | self._told, self._equal, 0))
        if not left.any():
            return []
        self._told |= left
        index = int(np.nanargmax(np.where(left, distance, np.nan)))
        factor = float(np.exp(peers.distance[index]))
        text = f"{named(peers.keys[index])} are {factor:.9g} times {peers.others}, and were equal to theirs until now"
        beyond = [peers.keys[int(i)] for i in np.flatnonzero(left)]
        return [self.alert(peers.keys[index], text + peers.which, beyond, factor=factor)]
