"""Two monitored runs held against each other: which steps, layers and ranks deviate, before and after the reduction."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from bitwitness.errors import UsageError
from bitwitness.files.shown import shown
from bitwitness.monitor.sheet import Numbers
from bitwitness.store.monitored import is_monitored, monitored_ranks, read_series

_KINDS = ("activation", "activation_grad", "grad", "grad_reduced", "update", "param")
"""In the order in which a step makes them."""
TOLERANCE = 0.05
"""Of a norm: a series deviates at a step where it is off by more, and by far more than most of its kind."""
_TIMES = 4.0  # the median deviation of a kind at a step, below which one series is as far off as the others
_NAMED = 10


@dataclass(frozen=True)
class Deviation:
    """A series that deviates: from which step, how far there and at its worst."""

    kind: str
    name: str
    rank: int
    step: int
    change: float
    worst: float
    steps: int


@dataclass(frozen=True)
class Trend:
    """How a layer's gradient goes with the total in each run: the correlation of their logarithms, and its share of it."""

    name: str
    rank: int
    a: float
    b: float
    share_a: float
    share_b: float


@dataclass(frozen=True)
class Rate:
    """A parameter group's learning rate that is not the same in both: from which step on, and what it is there."""

    group: str
    step: int
    a: float
    b: float


@dataclass
class MonitorReport:
    """What two runs' series say.

    Attributes
    ----------
    first
        The first deviation of each kind and rank, in the order of steps.
    deviations
        All that deviate, the same way.
    ranks
        How many series of each rank deviate; ``abnormal``: the ranks with many more than the others have.
    trends
        Layers whose gradient goes another way with the total in one run than in the other, the farthest apart first.
    rate
        The first learning rate that differs.
    largest
        The largest change of any series, and where; None where all are equal to the last digit.
    alone
        How many series only one of the runs has.

    """

    a: str
    b: str
    steps: int = 0
    series: int = 0
    first: list[Deviation] = field(default_factory=list)
    deviations: list[Deviation] = field(default_factory=list)
    ranks: dict[int, int] = field(default_factory=dict)
    abnormal: list[int] = field(default_factory=list)
    trends: list[Trend] = field(default_factory=list)
    rate: Rate | None = None
    largest: tuple[float, str] | None = None
    alone: int = 0
    tolerance: float = TOLERANCE
    problems: list[str] = field(default_factory=list)

    @property
    def status(self) -> str:
        """``fine``, ``findings`` or ``unread``."""
        if self.problems or not self.series:
            return "unread"
        return "findings" if self.deviations or self.rate is not None else "fine"

    @property
    def conclusion(self) -> str:
        """The answer in one sentence."""
        if not self.series:
            return "the two runs have no step and series in common"
        alone = f"; {self.alone} more series are in one of the runs alone" if self.alone else ""
        rate = ""
        if self.rate is not None:
            group = f" of group {self.rate.group}" if self.rate.group != "0" else ""
            rate = f"the learning rate{group} is {self.rate.a:.6g} in A and {self.rate.b:.6g} in B at step {self.rate.step}; "
        if not self.first:
            if self.largest is None:
                return f"{rate}all {self.series} series are equal to the last digit in {self.steps} steps{alone}"
            much, where = self.largest
            return (
                f"{rate}no series deviates by more than {self.tolerance:.0%} of its norm in {self.steps} steps (the most: "
                f"{much:.2g} of it, {where}){alone}"
            )
        one = self.first[0]
        ranks = f"; abnormal ranks: {', '.join(map(str, self.abnormal))}" if self.abnormal else ""
        return (
            f"{rate}the runs part at step {one.step}, in {one.kind} {one.name} of rank {one.rank}: A's is {one.change:+.1%} "
            f"against B's ({len(self.deviations)} of {self.series} series deviate){ranks}{alone}"
        )

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain objects."""
        return asdict(self) | {"status": self.status, "conclusion": self.conclusion}


def compare_monitored(
    a: str | os.PathLike[str], b: str | os.PathLike[str], *, tolerance: float = TOLERANCE
) -> MonitorReport:
    """Compare the series of two runs, step by step and rank by rank.

    Raises
    ------
    UsageError
        If one of them holds no series.

    """
    for run in (a, b):
        if not is_monitored(run):
            raise UsageError(f"{shown(run)} holds no series; expected a run folder that bitwitness monitor wrote")
    report = MonitorReport(os.fspath(a), os.fspath(b), tolerance=tolerance)
    ranks = sorted(set(monitored_ranks(a)) & set(monitored_ranks(b)))
    for side, other in ((a, b), (b, a)):
        if missing := sorted(set(monitored_ranks(side)) - set(monitored_ranks(other))):
            report.problems.append(f"ranks {', '.join(map(str, missing))} are in {shown(side)} alone")
    steps: set[int] = set()
    for rank in ranks:
        mine, theirs = (_series(Path(run), rank, report) for run in (a, b))
        common = sorted(set(mine.steps) & set(theirs.steps))
        steps |= set(common)
        report.deviations += _deviations(mine, theirs, common, rank, report, tolerance)
        report.trends += _trends(mine, theirs, common, rank)
        report.alone += len(mine.tables.keys() ^ theirs.tables.keys())
        report.rate = report.rate or _rate(mine, theirs, common)
    report.steps = len(steps)
    order = {kind: number for number, kind in enumerate(_KINDS)}
    report.deviations.sort(key=lambda one: (one.step, order[one.kind], -abs(one.change)))
    _firsts(report)
    _ranks(report, ranks)
    report.trends.sort(key=lambda one: -abs(one.a - one.b))
    del report.trends[_NAMED:]
    return report


@dataclass
class _Series:
    steps: list[int]
    tables: dict[tuple[str, str], dict[int, float]]
    rates: dict[tuple[int, str], float]


def _series(run: Path, rank: int, report: MonitorReport) -> _Series:
    """Return sizes by kind, name (with slot) and step; of micro-batches together."""
    table, problems = read_series(run, rank, kinds=(*_KINDS, "training"))
    report.problems += problems
    training = pc.equal(table["kind"], "training")
    rates = table.filter(pc.and_(training, pc.fill_null(pc.equal(table["metric"], "lr"), fill_value=False)))
    named = zip(*(rates[name].to_pylist() for name in ("step", "name", "value")), strict=True)
    table = table.filter(pc.invert(training))
    found: dict[tuple[str, str], dict[int, float]] = {}
    for kind, name, step, size in _sizes(table):
        one = found.setdefault((kind, name), {})
        one[step] = float(np.hypot(one.get(step, 0.0), size))
    steps = sorted({step for one in found.values() for step in one})
    return _Series(steps, found, {(step, group): value for step, group, value in named})


def _rate(mine: _Series, theirs: _Series, steps: list[int]) -> Rate | None:
    """Return the first learning rate that differs."""
    compared = set(steps)
    common = sorted(key for key in mine.rates.keys() & theirs.rates.keys() if key[0] in compared)
    differing = ((step, group) for step, group in common if mine.rates[step, group] != theirs.rates[step, group])
    first = next(differing, None)
    return None if first is None else Rate(first[1], first[0], mine.rates[first], theirs.rates[first])


def _sizes(table: pa.Table) -> Iterator[tuple[str, str, int, float]]:
    columns = [table[name].to_pylist() for name in ("kind", "name", "slot", "step", "value", "l2", "nan", "inf")]
    for kind, name, slot, step, value, l2, nan, inf in zip(*columns, strict=True):
        size = value if kind == "update" else float("nan") if (nan or 0) + (inf or 0) else l2
        yield kind, f"{name} ({slot})" if slot else name, step, float("nan") if size is None else float(size)


def _deviations(
    mine: _Series, theirs: _Series, steps: list[int], rank: int, report: MonitorReport, tolerance: float
) -> Iterator[Deviation]:
    for kind in _KINDS:
        names = [key[1] for key in mine.tables if key[0] == kind and key in theirs.tables]
        report.series += len(names) if steps else 0
        if not names or not steps:
            continue
        ours, others = (
            np.array([[one.tables[kind, name].get(step, np.nan) for step in steps] for name in names])
            for one in (mine, theirs)
        )
        change, off = _changes(ours, others, tolerance)
        most = int(np.abs(change).argmax())
        if (much := float(np.abs(change).flat[most])) > (report.largest or (0.0,))[0]:
            row_, at_ = divmod(most, len(steps))
            report.largest = much, f"{kind} {names[row_]} of rank {rank} at step {steps[at_]}"
        for row in np.flatnonzero(off.any(axis=1)):
            places = np.flatnonzero(off[row])
            worst = float(np.abs(change[row, places]).max())
            at = int(places[0])
            yield Deviation(kind, names[row], rank, steps[at], float(change[row, at]), worst, len(places))


def _changes(ours: Numbers, others: Numbers, tolerance: float) -> tuple[Numbers, np.ndarray]:
    """Return A's sizes against B's, and where they deviate; what only one of them has, or has as NaN, is infinitely off."""
    with np.errstate(divide="ignore", invalid="ignore"):
        change = np.where(ours == others, 0.0, (ours - others) / np.abs(others))
    change[np.isnan(ours) & np.isnan(others)] = 0.0
    change[np.isnan(ours) ^ np.isnan(others)] = np.inf
    usual = np.median(np.abs(change), axis=0) if len(change) >= 4 else np.zeros(change.shape[1])
    # once all of a kind are off (runs that have parted), only what is far more so says something
    limit = np.maximum(tolerance, _TIMES * np.where(np.isfinite(usual), usual, 0.0))
    parted = np.flatnonzero((np.abs(change) > tolerance).any(axis=0))
    limit[parted[:1]] = tolerance  # where they part all that is off belongs to it
    return change, np.abs(change) > limit


def _firsts(report: MonitorReport) -> None:
    seen: set[tuple[str, int]] = set()
    for one in report.deviations:
        if (one.kind, one.rank) not in seen:
            seen.add((one.kind, one.rank))
            report.first.append(one)


def _ranks(report: MonitorReport, ranks: list[int]) -> None:
    """Find ranks that deviate by themselves: in what is theirs alone, before the reduction."""
    own = [one for one in report.deviations if one.kind != "grad_reduced"]
    report.ranks = {rank: sum(one.rank == rank for one in own) for rank in ranks}
    if len(ranks) > 1:
        usual = float(np.median(list(report.ranks.values())))
        report.abnormal = [rank for rank, count in report.ranks.items() if count > max(2 * usual, usual + 1)]
        first = min((one.step for one in own), default=0)
        begun = {one.rank for one in own if one.step == first}
        if not report.abnormal and own and len(begun) < len(ranks):  # all deviate by now, but one began
            report.abnormal = sorted(begun)


def _trends(mine: _Series, theirs: _Series, steps: list[int], rank: int) -> Iterator[Trend]:
    """Yield how each layer's gradient goes with the total, where there are steps enough to say."""
    if len(steps) < 8:
        return
    names = [key[1] for key in mine.tables if key[0] == "grad" and key in theirs.tables]
    if len(names) < 2:
        return
    found = [_with_total(one, names, steps) for one in (mine, theirs)]
    for number, name in enumerate(names):
        (a, share_a), (b, share_b) = ((r[number], s[number]) for r, s in found)
        yield Trend(name, rank, float(a), float(b), float(share_a), float(share_b))


def _with_total(one: _Series, names: list[str], steps: list[int]) -> tuple[Numbers, Numbers]:
    sizes = np.array([[one.tables["grad", name].get(step, np.nan) for step in steps] for name in names])
    total = np.sqrt(np.nansum(sizes**2, axis=0))
    logs = np.log(np.maximum(np.nan_to_num(sizes), 1e-30))
    whole = np.log(np.maximum(total, 1e-30))
    centred, level = logs - logs.mean(axis=1, keepdims=True), whole - whole.mean()
    spread = np.sqrt((centred**2).sum(axis=1) * (level**2).sum())
    related: Numbers = (centred @ level) / np.where(spread > 0, spread, np.inf)
    shares: Numbers = np.nanmean(np.nan_to_num(sizes) ** 2 / np.maximum(total, 1e-30) ** 2, axis=1)
    return related, shares
