"""What the rules of a monitored run said of it, and what its series hold where no rule was on to say so."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from bitwitness.finding import Finding, Note, Severity
from bitwitness.site import Site
from bitwitness.store.folder import Run
from bitwitness.store.monitored import monitored_ranks, read_series
from bitwitness.store.seal import SEAL

PREFIX = "monitor."
TURN = "turn"
"""Where an alert's evidence says when in the step its series came about."""
SURE = ("nonfinite", "replicas", "loss_scale")
"""Rules that leave nothing to chance."""
_BEFORE = 32
"""Steps before what is sure, in which something else may have led to it."""
NONFINITE = "monitor.nonfinite"
SLOW = ("drift", "rank_apart")
"""Rules of what goes on for a while: what happens at one step says more."""
_ORDER = ("forward", "backward", "grad.local", "comm", "grad.reduced", "optim", "param")
"""Phases and slots of sites in the order in which a step makes them."""
_POST_MORTEM = "monitor.post_mortem"
_LEFT_OVER = ("data", "one_layer")
"""What a rank says of a spike whose cause lies elsewhere, on another rank perhaps."""
_KEY = ["kind", "name", "slot", "metric"]
_COLUMNS = ("step", *_KEY)
_FIGURES = ("nan", "inf", "value")
_OVERFLOW = ("grad", "grad_reduced", "activation_grad", "comm", "training")
"""What may overflow under a gradient scaler, which then skips the step."""
_MASKS = ("activation", "comm")
"""Where an infinity that was there from the first step on is meant: a mask."""


@dataclass(frozen=True, slots=True)
class Broken:
    """The first NaN or Inf of a run whose series no rule held against that."""

    step: int
    rank: int
    series: str


@dataclass(slots=True)
class Watched:
    """A monitored run's numbers, as far as anybody looked at them.

    Attributes
    ----------
    rules
        What watched them; empty where nothing did.
    alerts, post_mortems
        What they said, the first first.
    series, steps, ranks
        How many series there are, which steps are on disk, and of how many ranks.
    broken
        NaN or Inf that no rule was on to tell of.
    unread
        What of its series is there and cannot be read.
    failures, remarks
        What the monitor itself says that it could not look at; what it says that it does not look at.

    """

    rules: tuple[str, ...]
    alerts: list[Finding] = field(default_factory=list)
    post_mortems: list[Finding] = field(default_factory=list)
    series: int = 0
    steps: list[int] = field(default_factory=list)
    ranks: int = 0
    broken: Broken | None = None
    unread: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)

    @property
    def found(self) -> bool:
        """Whether there is something to act on."""
        return bool(self.alerts) or self.broken is not None

    @property
    def first(self) -> Finding | None:
        """The alert to begin with: the first, but for those of rules that slow changes set off before something happens.

        Of one step the one that is nearest to the origin: in the order in which a step computes, on the rank that says most.
        """
        return self._first(self.alerts)

    def _first(self, alerts: Sequence[Finding]) -> Finding | None:
        said = Counter((one.step, one.rank) for one in self.alerts)
        sure = [one.step for one in self.alerts if one.sensor.removeprefix(PREFIX) in SURE]
        since = min(sure) - _BEFORE if sure else 0  # what chance may have set off long before it is not the beginning

        def turn(one: Finding) -> tuple[bool, bool, int, int, Sequence[float], int]:
            slow = one.sensor.removeprefix(PREFIX) in SLOW
            inner = one.evidence.get(TURN)
            within = [float(not one.site.slot.startswith("in"))]
            if isinstance(inner, list | tuple):
                within = [float(number) for number in inner]
            return one.step < since, slow, one.step, _turn(one.site), within, -said[one.step, one.rank]

        return min(alerts, key=turn, default=None)

    @property
    def nonfinite(self) -> Finding | None:
        """The first alert of NaN or Inf, which needs no proof."""
        return self._first([one for one in self.alerts if one.sensor == NONFINITE])

    def to_dict(self) -> dict[str, Any]:
        """Return it ready for JSON."""
        return {
            "rules": list(self.rules),
            "series": self.series,
            "steps": len(self.steps),
            "ranks": self.ranks,
            "alerts": len(self.alerts),
            "nonfinite": sum(one.sensor == NONFINITE for one in self.alerts),
            "first": None if self.first is None else self.first.to_event(),
            "post_mortem": self.post_mortems[0].message if self.post_mortems else None,
            "unwatched_nonfinite": None
            if self.broken is None
            else {"step": self.broken.step, "rank": self.broken.rank, "series": self.broken.series},
        }


def watched_in(
    run: Run, description: Mapping[str, Any], findings: Sequence[Finding], notes: Sequence[Note]
) -> tuple[Watched | None, list[str]]:
    """Return what is known of a monitored run, and what of its series cannot be read; None for any other run."""
    ranks = monitored_ranks(run.path)
    settings = description.get("monitor")
    if not ranks and not isinstance(settings, Mapping):
        return None, []
    told = Watched(_rules(settings if isinstance(settings, Mapping) else {}))
    said = [one for one in findings if one.sensor.startswith(PREFIX)]
    said.sort(key=lambda one: (one.step, one.rank))  # of one step and rank in the order in which they were written
    # what follows from an alert is there for whoever looks, and no alert of its own
    told.alerts = [one for one in said if one.sensor != _POST_MORTEM and one.severity != Severity.INFO]
    whose = None if told.first is None else told.first.rank  # each rank says what it saw itself: its own batch, for one
    told.post_mortems = [one for one in said if one.sensor == _POST_MORTEM]
    told.post_mortems.sort(key=lambda one: (one.step, one.evidence.get("cause") in _LEFT_OVER, one.rank != whose))
    told.remarks = [one.message for one in notes if one.sensor == "monitor" and one.severity == Severity.INFO]
    told.failures = [note.message for note in notes if _is_failure(note)]
    problems: list[str] = []
    broken: list[Broken] = []
    steps: set[int] = set()
    series: set[tuple[str | None, ...]] = set()
    looks = "nonfinite" not in told.rules or any("rules failed" in one for one in told.failures)
    sealed = {rank for rank in run.ranks() if (run.path / f"rank{rank:05d}" / SEAL).exists()}  # they may miss theirs
    for rank in sorted({*ranks, *sealed}):
        table, unread = read_series(run.path, rank, columns=(*_COLUMNS, *(_FIGURES if looks else ())))
        problems += unread
        told.ranks += table.num_rows > 0
        steps.update(pc.unique(table.column("step")).drop_null().to_pylist())
        firsts = _first_rows(table)
        series.update(firsts)
        broken += _broken(table, firsts, rank) if looks else []
    told.steps, told.series, told.unread = sorted(steps), len(series), list(problems)
    told.broken = min(broken, key=lambda one: (one.step, one.rank), default=None)
    return told, problems


def _turn(site: Site) -> int:
    """Return when in a step the value of a site comes about."""
    place = f"{site.phase}.{site.slot}"
    return next((i for i, one in enumerate(_ORDER) if place.startswith(one)), len(_ORDER))


def _rules(settings: Mapping[str, Any]) -> tuple[str, ...]:
    rules = settings.get("rules")
    return tuple(map(str, rules)) if settings.get("watch") and isinstance(rules, list) else ()


def _is_failure(note: Note) -> bool:
    """Tell whether a note says that something was not looked at; a sink that is away takes nothing from the series."""
    return note.sensor == "monitor" and note.severity != Severity.INFO and not note.message.startswith("a sink failed")


def _first_rows(table: pa.Table) -> dict[tuple[str | None, ...], int]:
    """Return the number of each series' first row."""
    numbered = table.select(_KEY).append_column("row", pa.array(np.arange(table.num_rows)))
    return _by_series(numbered)


def _by_series(numbered: pa.Table) -> dict[tuple[str | None, ...], int]:
    found = numbered.combine_chunks().group_by(_KEY).aggregate([("row", "min")]).to_pydict()
    return dict(zip(zip(*(found[name] for name in _KEY), strict=True), found["row_min"], strict=True))


def _broken(table: pa.Table, firsts: Mapping[tuple[str | None, ...], int], rank: int) -> list[Broken]:
    """Return one rank's first NaN or Inf, if it has one that is no mask and no gradient scaler's overflow."""
    value = table.column("value")
    nan = pc.or_(_positive(table, "nan"), pc.fill_null(pc.is_nan(value), fill_value=False))
    inf = pc.or_(_positive(table, "inf"), pc.fill_null(pc.is_inf(value), fill_value=False))
    scaled = any(key[3] == "loss_scale" for key in firsts)
    numbered = table.select(_KEY).append_column("row", pa.array(np.arange(table.num_rows)))
    places = []
    for bad, masks in ((nan, ()), (pc.and_(inf, pc.invert(nan)), _MASKS)):
        for key, row in _by_series(numbered.filter(bad)).items():
            if not (scaled and key[0] in _OVERFLOW) and not (key[0] in masks and row == firsts[key]):
                places.append((row, "/".join(part for part in key if part)))
    if not places:
        return []
    row, series = min(places)  # rows lie as the steps made them
    return [Broken(int(table.column("step")[row].as_py()), rank, series)]


def _positive(table: pa.Table, name: str) -> pa.ChunkedArray:
    return pc.fill_null(pc.greater(table.column(name), 0), fill_value=False)
