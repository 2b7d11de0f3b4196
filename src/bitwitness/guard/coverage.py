"""What was seen of what there was, and in words what was not, and why."""

from __future__ import annotations

from typing import Any

from bitwitness.finding import Severity
from bitwitness.guard.gaps import gaps_of, late_gaps, nonfinite_gaps, paused_gaps
from bitwitness.guard.guardwatch import GuardWatch
from bitwitness.guard.tracerwatch import TracerWatch
from bitwitness.guard.watch import Watch
from bitwitness.sense.nonfinite import UNTRACED
from bitwitness.session.instrument import Kind

_FEW = 2
"""Forwards without an optimizer's step that are nothing to speak of: a dry run."""


def coverage_table(watch: GuardWatch) -> dict[str, Any]:
    """Return the table, ready for JSON."""
    reader, sensors, investigation = watch.reader, watch.sensors, watch.investigation
    root = reader.root
    everything = {id(p) for p in (*root.root.parameters(), *root.parameters.values())}  # pruning exchanges some
    table: dict[str, Any] = {
        "parameters": {"watched": min(len(sensors.ever), len(everything)), "of": len(everything)},
        "ranks": watch.ranks.size,
        "local_gradients": reader.gradients.mode,
        "steps": {"training_forwards": root.forwards_seen, **_counted(watch), **_forwards(watch)},
        "outputs": {"outputs_seen": root.outputs_seen},
        "sensors": {"off": sensors.off, "on": sensors.on, "self_tests": watch.self_tests, "periods": sensors.periods},
        "suspicions": investigation.suspicions + watch.left_open + watch.explained,
        "dismissed": investigation.dismissed + watch.explained,
        "left_open": investigation.left_open + watch.left_open,
        "stopped_at": investigation.stopped_at,
        "verdicts": [f"step {v.step}: {v.cause} {list(v.ranks)} {v.action}" for v in investigation.verdicts],
        "replay": {
            "calibrations": investigation.experiments.calibrated,
            "same_bits": investigation.experiments.reproducible,
            "spread": investigation.experiments.spread,
            "disturbed": investigation.replayer.disturbance,
            **_replays(watch),
            "this_step": root.entry.problem or root.record.unreplayable or "can be run again",
        },
        "price": watch.deep.report(),
        "state": {"replicas": investigation.replicas.table(), **watch.state.table(), "gradients": watch.kept.table()},
        "own_seconds": round(watch.own_seconds, 3),
        "failures": dict(watch.reporter.failures),
        "not_covered": [*late_gaps(watch.late), *paused_gaps(watch.missed), *gaps_of(watch)],
        **_nonfinite(watch),
    }
    checksum, census = sensors.operators.checksum, sensors.operators.census
    exact = sensors.exact.table()
    compared = exact.pop("collectives", {})
    table["collectives"] = {
        "begun": watch.traffic.total,
        "on_deep_steps": census.collectives(),
        "checked": compared.get("compared", {}),
        **compared,
    }
    table |= exact
    if (twice := sensors.operators.twice) is not None:
        table["twice"] = twice.coverage()
    if checksum is not None:
        again = {} if twice is None else twice.calls
        counted = census.table(checksum.flops, checksum.checked_calls, again)
        table["operators"] = {**checksum.coverage(), "census": counted}
        table["failures"] |= {f"checksum of {op}": why for op, why in checksum.failed.items()}
    return table


def nonfinite_table(watch: TracerWatch) -> dict[str, Any]:
    """Return the same of who looks for nothing but NaN and Inf."""
    return {
        "steps": _counted(watch) | _by_hand(watch),
        "own_seconds": round(watch.own_seconds, 3),
        "failures": dict(watch.reporter.failures),
        "not_covered": [*late_gaps(watch.late), *paused_gaps(watch.missed), *nonfinite_gaps(watch)],
        **_nonfinite(watch),
    }


def _nonfinite(watch: Watch) -> dict[str, Any]:
    tracing, approach = watch.tracing, watch.operators.approach
    bad = sum(finding.severity is Severity.ERROR for finding in tracing.findings)  # what a loss scale skips is no harm
    table: dict[str, Any] = {"nonfinite": {"hits": tracing.hits, "findings": len(tracing.findings), "bad": bad}}
    if untraced := sum(finding.evidence.get("kind") == UNTRACED for finding in tracing.findings):
        table["nonfinite"]["untraced"] = untraced
    if tracing.scaling.steps:
        table["loss_scale"] = {
            **tracing.scaling.to_dict(),
            "told": tracing.scaling.line() if tracing.scaling.drops else "",
        }
    if approach is not None:
        table["ranges"] = approach.table()
    return table


def _counted(watch: Watch) -> dict[str, int]:
    return {
        "held": watch.steps_judged,
        "judged": watch.judged_times,
        "deep": watch.deep.taken,
        "paused": watch.missed,
    }


def _forwards(watch: Watch) -> dict[str, int]:
    """Return how many calls of the model were no training: evaluations, inference, inside a transform."""
    return {f"{kind}_forwards": watch.forwards[kind] for kind in Kind if kind is not Kind.TRAINING}


def _replays(watch: GuardWatch) -> dict[str, Any]:
    """Return how many steps could be run again as far as was found, of all that were judged, and why the others could not."""
    why = watch.reader.limits + watch.reader.refusals
    problem = watch.reader.root.entry.problem
    if problem is not None:
        why[problem] = watch.judged_times
    can = max(0, watch.judged_times - sum(why.values()))
    return {"of": watch.judged_times, "can": can, "why_not": dict(why.most_common(5))}


def _by_hand(watch: Watch) -> dict[str, int]:
    """Return how many forwards went by where no optimizer stepped: nobody told when gradients were about to be used."""
    reader = watch.reader
    unread = watch.judged_times <= 1 and not reader.optimizer_steps and reader.root.forwards_seen > _FEW
    return {"by_hand": reader.root.forwards_seen} if unread else {}
