"""Compares two recordings, step by step and rank by rank; no more than two steps of each are in memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from bitwitness.comparison.concluded import LISTED, conclude, name_lines, without_received
from bitwitness.comparison.counted import count_compared
from bitwitness.comparison.differences import Differences
from bitwitness.comparison.gradients.exchanged import name_not_exchanged
from bitwitness.comparison.gradients.unscaled import loss_scale, without_scale
from bitwitness.comparison.matching.align import align, row_by_row, same_column, same_structure
from bitwitness.comparison.matching.batches import (
    has_gradients,
    of_weights,
    ordered_otherwise,
    other_batch,
    other_values,
)
from bitwitness.comparison.matching.frame import StepFrame
from bitwitness.comparison.matching.lined import FAILED, Lined, Place, cut_short, line_up
from bitwitness.comparison.matching.parts import models_of, recorded_in_parts
from bitwitness.comparison.matching.uncompared import uncompared
from bitwitness.comparison.measuring.changes import changes
from bitwitness.comparison.measuring.drift import DriftBeside
from bitwitness.comparison.measuring.relation import in_times
from bitwitness.comparison.measuring.values import KeptValues, Side, kept_values
from bitwitness.comparison.noted import cause_first, in_recomputation
from bitwitness.comparison.precisions.alone import backward_alone
from bitwitness.comparison.precisions.betweensteps import written_between
from bitwitness.comparison.precisions.doubted import contradicted
from bitwitness.comparison.precisions.moved import moved_otherwise
from bitwitness.comparison.precisions.norms import wrong_norm
from bitwitness.comparison.precisions.otherwise import written_otherwise
from bitwitness.comparison.precisions.whole import angles_too_coarse, beyond_precision, other_loss, why_beyond
from bitwitness.comparison.reasons.choices import choice_first
from bitwitness.comparison.reasons.conditions import conditions, without_forward
from bitwitness.comparison.reasons.unseen import changed_past_torch
from bitwitness.comparison.report import Report
from bitwitness.comparison.rewriting.inside import with_module
from bitwitness.comparison.rewriting.outcome import leaves_nothing_of, of_gradients
from bitwitness.comparison.suspect import EarlierSteps, Suspect
from bitwitness.comparison.suspects import SuspectSearch
from bitwitness.store.reader import absent_ranks
from bitwitness.store.source import Source

RowSink = Callable[[int, int, Differences, KeptValues | None], None]
"""Takes rank, step and what is known of one step, to write its rows somewhere."""


@dataclass(slots=True)
class Settings:
    """How to compare: module paths of A by those of B, and which ranks and steps (None for all both have)."""

    modules: Mapping[str, str] = field(default_factory=dict)
    ranks: Sequence[int] | None = None
    steps: Sequence[int] | None = None


def compare_sources(
    a: Source,
    b: Source,
    settings: Settings | None = None,
    *,
    sinks: Sequence[RowSink] = (),
    progress: Callable[[int, int], None] = lambda _done, _all: None,
) -> Report:
    """Compare two recordings.

    Parameters
    ----------
    sinks
        Are shown each compared step.
    progress
        Told of (steps done, steps in all).

    Raises
    ------
    UsageError
        If the two have no rank or no step in common.

    """
    settings = settings or Settings()
    name_a, name_b = (f"{source.path} ({source.kind})" for source in (a, b))
    absent = [f"{one.path}: {told}" for one in (a, b) for told in absent_ranks(one.info, one.ranks())]
    lined = line_up(a, b, settings.ranks, settings.steps)
    a, b = lined.a, lined.b
    report = Report(
        name_a, name_b, modules=dict(settings.modules), merged=lined.merged, notes=[*lined.notes, *lined.left_out],
        left_out=lined.left_out, shifted=lined.shifted, steps=len({place.step for place in lined.places}),
    )  # fmt: skip
    earlier: dict[int, EarlierSteps] = {}
    models = [models_of(source) for source in (a, b)]
    beside = DriftBeside(a, b, models)
    report.in_parts = recorded_in_parts(a, b, models, lined.places[0])
    for done, place in enumerate([] if report.in_parts else lined.places):
        progress(done, len(lined.places))
        known = earlier.setdefault(place.rank, EarlierSteps())
        known.beside = partial(beside.at, place.rank, place.step, place.step_b)
        known.has_others = any(len(one) > 1 for one in models)
        known.cut_short = _ended_in(lined, place)
        _compare_step(report, a, b, place, known, settings, sinks)
    progress(len(lined.places), len(lined.places))
    if lined.left_out and not report.suspects:
        sides = [("A", lined.a), ("B", lined.b)]
        report.problems += [
            f"run {run} failed, and has no more steps" for run, one in sides if cut_short(one) == FAILED
        ]
    if len(ended := _ended_in(lined, lined.places[-1])) == 2:
        report.notes.append(f"run A {ended['A']} and run B {ended['B']} in the last step that was compared")
    report.noise = max((known.noise for known in earlier.values()), default=0.0)
    report.problems += [*a.problems, *b.problems, *absent, *lined.unread]
    report.suspects = without_received(report.suspects)
    name_not_exchanged(report.suspects, a, b, lined.places)
    conclude(report)
    name_lines(report.suspects, a, b)
    return report


def _ended_in(lined: Lined, place: Place) -> dict[str, str]:
    """Return the runs of which this step is the last one though they ended before their time, and how they did."""
    sides = (("A", lined.a, place.step), ("B", lined.b, place.step_b))
    last = [(run, source) for run, source, step in sides if step == source.steps(place.rank)[-1]]
    return {run: how for run, source in last if (how := cut_short(source))}


def _compare_step(
    report: Report,
    a: Source,
    b: Source,
    place: Place,
    known: EarlierSteps,
    settings: Settings,
    sinks: Sequence[RowSink],
) -> None:
    """Compare one step of one rank; what is found is added to the report."""
    step, step_b, rank = place
    frame_a, frame_b = StepFrame(a.table(rank, step)), StepFrame(b.table(rank, step_b))
    if _is_given_another_batch(report, frame_a, frame_b, place, known, settings):
        return
    same = not settings.modules and same_structure(frame_a, frame_b)
    # Most steps of two equal runs: told by the columns alone, without a node being built.
    if same and not sinks and _nothing_differs(frame_a, frame_b):
        report.rows += frame_a.size
        report.matched += len(np.unique(frame_a.node))
        known.add(frame_a, frame_b)
        return
    alignment = row_by_row(frame_a, frame_b) if same else align(frame_a, frame_b, settings.modules)
    first_look = Differences(frame_a, frame_b, alignment, known)
    if known.skipped and _begins_apart(first_look):
        known.parted = True  # in a step of which nothing is known
        first_look = Differences(frame_a, frame_b, alignment, known)
    if (scale := loss_scale(first_look)) is not None:
        frame_b = without_scale(first_look, scale)  # the same rows, with other numbers
        report.note(
            f"the loss is scaled {in_times(scale)} as much in run B, and gradients are not when the optimizer reads them: "
            "compared as if it were not scaled, gradients as the backward leaves them, too"
        )
    report.problems += uncompared(frame_a, frame_b, alignment, place)
    values = kept_values(Side(a, frame_a, rank), Side(b, frame_b, rank), alignment)
    differences = first_look
    if scale is not None or values is not None:
        by_values = () if values is None else (values.changes, values.right)
        differences = Differences(frame_a, frame_b, alignment, known, *by_values)
    text, change = ("", 0.0) if values is None else ordered_otherwise(differences)
    if text and _compared_by_weights(report, frame_a, frame_b, place, known, settings, text, change):
        return
    search = SuspectSearch(differences, rank, step)
    between = list(written_between(differences, rank, step))
    found = [*between, *search.suspects()]
    kept = found if values is None else [one for one in map(values.refine, found) if one is not None]
    kept = changed_past_torch(kept, differences)
    kept = choice_first([with_module(one, search.apart, differences) for one in kept], differences)
    kept = [in_recomputation(one) for one in cause_first(kept, differences)]
    known.parted |= bool(between)
    if differences.precisions and all(one.reason == "unknown" for one in kept):  # gradients that tell of no place
        at = place.rank, place.step
        kept = [*(other_loss(differences, *at) or wrong_norm(differences, values, *at)), *kept]
    kept = without_forward(differences, rank, step) or kept or _without_operator(search, differences, values, place)
    if found and not kept and not search.exceeding:
        known.parted = differences.parted_before  # float64 told that there was nothing
    report.suspects += kept
    _add(report, differences, search, values)
    for sink in sinks:
        sink(rank, step, differences, values)
    known.add(frame_a, frame_b)


def _without_operator(
    search: SuspectSearch, differences: Differences, values: KeptValues | None, place: Place
) -> list[Suspect]:
    """Return, of a step in which no operator is to blame, a module that returns something else; note what the whole shows."""
    wrong = contradicted(differences, values, place.rank, place.step)
    apart = wrong or [one for one in search.apart.values() if not search.settled.leave_nothing_of(one.change)]
    apart = apart or wrong_norm(differences, values, place.rank, place.step)
    if not apart and differences.precisions is not None:
        search.exceeding += [] if search.exceeding else beyond_precision(differences, place.rank, place.step)
        apart = [one for exceeding in search.exceeding[:1] for one in why_beyond(differences, exceeding)]
        at = place.rank, place.step
        apart = apart or backward_alone(differences, *at) or angles_too_coarse(differences, *at)
        apart = apart or ([] if search.exceeding else moved_otherwise(differences, *at))
    differences.earlier.parted |= bool(apart or search.exceeding)
    return apart[:1]


def _begins_apart(differences: Differences) -> bool:
    """Return whether a step begins with weights that differ by more than noise."""
    limit = differences.noise_limit()
    return any(differences.change_of[pair.outputs[0][0]] > limit for pair in differences.alignment.weights)


def _add(report: Report, differences: Differences, search: SuspectSearch, values: KeptValues | None) -> None:
    """Add to the report what a step showed beside its suspects."""
    report.kept |= values is not None
    if not report.conditions:
        report.conditions = conditions(differences)
    report.precisions = report.precisions or differences.precisions
    report.otherwise |= {} if len(report.otherwise) > LISTED else dict.fromkeys(written_otherwise(differences))
    report.operators = differences.has_operators
    report.exceeding += search.exceeding[: LISTED - len(report.exceeding)]
    report.unexplained = report.unexplained or search.unexplained
    report.cleared += search.cleared
    report.made_up_for = report.made_up_for or search.made_up_for
    report.nearest = max(filter(None, (report.nearest, search.nearest)), key=lambda one: one.ratio, default=None)
    report.problems += [] if values is None else values.problems
    count_compared(report, differences, search.settled)


def _nothing_differs(a: StepFrame, b: StepFrame) -> bool:
    """Return whether two steps with the same rows are equal in all that was recorded: most of a long run may be."""
    if (a.texts["tensor"].codes >= 0).any() or not same_column(a, b, "args"):
        return False
    every = np.arange(a.size)
    return not changes(a, b, every, every).any()


def _is_given_another_batch(
    report: Report, a: StepFrame, b: StepFrame, place: Place, known: EarlierSteps, settings: Settings
) -> bool:
    """Return whether two steps are given batches whose operators cannot be held side by side; compare what can be."""
    other = other_batch(a, b)
    text, change = (other, math.inf) if other else other_values(a, b)
    if text and _compared_by_weights(report, a, b, place, known, settings, text, change):
        return True
    if other:
        report.unaligned.append(f"step {place.step}: {text}")
        report.unaligned_from = min(place.step, report.unaligned_from)
        known.skipped = True
    return bool(other)


def _compared_by_weights(
    report: Report,
    a: StepFrame,
    b: StepFrame,
    place: Place,
    known: EarlierSteps,
    settings: Settings,
    text: str,
    change: float,
) -> bool:
    """Compare two steps by gradients and updates alone; return whether these agree within rounding.

    ``text``: how the batch differs. ``change``: by how much, of which next to nothing may be left; infinite where it has other
    shapes.

    If they do not, the batch may have been another one, and nothing is said of them.
    """
    a, b = of_weights(a), of_weights(b)
    tried = replace(known, named=dict(known.named), read=dict(known.read), trained=set(known.trained))
    differences = Differences(a, b, align(a, b, settings.modules), tried)
    search = SuspectSearch(differences, place.rank, place.step)
    if not has_gradients(a) or not has_gradients(b) or list(search.suspects()) or search.exceeding:
        return False
    if change < math.inf and not leaves_nothing_of(change, of_gradients(differences)):
        return False
    known.named, known.read, known.noise = tried.named, tried.read, tried.noise
    known.add(a, b)
    count_compared(report, differences, search.settled)
    report.note(f"step {place.step}: {text}; parameters, gradients and updates were compared, and nothing else")
    report.given = report.given or text
    return True
