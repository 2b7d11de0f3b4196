"""What sensors have proven by themselves: settled among the ranks, so that all conclude the same (`guard/lostverdicts.py`)."""

from __future__ import annotations

import json

import torch

from bitwitness.finding import Finding, Severity
from bitwitness.ranks import Ranks
from bitwitness.sense.mismatch import Mismatch
from bitwitness.site import Site

DID = {"gradients": "lost what it held", "twice": "computed it wrongly"}
"""The sensors whose errors are proof, and what the rank did, in words that follow its name."""


class Proven:
    """Keeps what was proven of the last step; ``ranks`` settle it."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self.mismatch: Mismatch | None = None
        """What went wrong, and on whom; the same on every rank."""

    def settle(self, findings: list[Finding], *, together: bool) -> None:
        """Learn what any rank has proven; collective, where it is ``together``."""
        self.mismatch = None
        mine = next((f for f in findings if f.sensor in DID and f.severity is Severity.ERROR), None)
        text = (
            "" if mine is None else json.dumps([mine.sensor, mine.message, mine.site.short, mine.evidence], default=str)
        )
        if self._ranks.size == 1:
            texts = {self._ranks.rank: text}
        elif together and bool(self._ranks.max(torch.tensor([float(mine is not None)]))):
            texts = dict(enumerate(self._ranks.gather_text(text)))
        else:
            return
        told = {rank: json.loads(text) for rank, text in texts.items() if text}
        if told:
            sensor, message, site, evidence = next(iter(told.values()))
            ranks = tuple(rank for rank, (whose, *_) in told.items() if whose == sensor)
            self.mismatch = Mismatch(message, ranks, Site.parse(site), {sensor: evidence}, DID[sensor])
