"""What was seen of what there was, and in words what was not, and why."""

from __future__ import annotations

import os
from typing import Any

from bitwitness.finding import Severity
from bitwitness.guard.guardwatch import GuardWatch
from bitwitness.guard.tracerwatch import TracerWatch
from bitwitness.guard.uncovered import UNSEEN
from bitwitness.guard.watch import Watch
from bitwitness.sense.nonfinite import UNTRACED
from bitwitness.tap.compat import compiles_backward
from bitwitness.tap.traffic import world_size

_TURNS = 3
"""Times that other parameters asked for gradients, from which on parts are frozen by turns, and not once for all."""
_SHORT = 0.2
"""Share of the steps without a history long enough, from which on it is said; each set of parameters has some."""
_FEW = 2
"""Forwards without an optimizer's step that are nothing to speak of: a dry run."""


def coverage_table(watch: GuardWatch) -> dict[str, Any]:
    """Return the table, ready for JSON."""
    reader, sensors, investigation = watch.reader, watch.sensors, watch.investigation
    root = reader.root
    everything = {id(p) for p in (*root.root.parameters(), *root.parameters.values())}  # pruning exchanges some
    table: dict[str, Any] = {
        "parameters": {"watched": min(len(sensors.ever), len(everything)), "of": len(everything)},
        "local_gradients": reader.gradients.mode,
        "steps": {"training_forwards": root.forwards_seen, **_counted(watch)},
        "outputs": {"outputs_seen": root.outputs_seen},
        "sensors": {"off": sensors.off},
        "suspicions": investigation.suspicions,
        "dismissed": investigation.dismissed,
        "left_open": investigation.left_open,
        "stopped_at": investigation.stopped_at,
        "verdicts": [f"step {v.step}: {v.cause} {list(v.ranks)} {v.action}" for v in investigation.verdicts],
        "replay": {
            "calibrations": investigation.experiments.calibrated,
            "same_bits": investigation.experiments.reproducible,
            "spread": investigation.experiments.spread,
            "this_step": root.entry.problem or root.record.unreplayable or "can be run again",
        },
        "price": watch.deep.report(),
        "own_seconds": round(watch.own_seconds, 3),
        "failures": dict(watch.reporter.failures),
        "not_covered": [*_late(watch.late), *_paused(watch.missed), *_gaps(watch)],
        **_nonfinite(watch),
    }
    if sensors.operators.checksum is not None:
        table["operators"] = sensors.operators.checksum.coverage()
    return table


def nonfinite_table(watch: TracerWatch) -> dict[str, Any]:
    """Return the same of who looks for nothing but NaN and Inf."""
    return {
        "steps": _counted(watch) | _by_hand(watch),
        "own_seconds": round(watch.own_seconds, 3),
        "failures": dict(watch.reporter.failures),
        "not_covered": [*_late(watch.late), *_paused(watch.missed), *_nonfinite_gaps(watch)],
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


def _by_hand(watch: Watch) -> dict[str, int]:
    """Return how many forwards went by where no optimizer stepped: nobody told when gradients were about to be used."""
    reader = watch.reader
    unread = watch.judged_times <= 1 and not reader.optimizer_steps and reader.root.forwards_seen > _FEW
    return {"by_hand": reader.root.forwards_seen} if unread else {}


def _share(count: int, watch: Watch) -> str:
    """Return, of how many that were judged, so many."""
    same = watch.steps_judged == watch.judged_times
    return f"{count} of {watch.judged_times} {'steps' if same else 'gradients judged'}"


def _late(steps: int) -> list[str]:
    first = "its first step" if steps == 1 else f"its first {steps} steps"
    return [f"{first} went by before this model was found"] if steps else []


def _paused(steps: int) -> list[str]:
    return [f"{steps} steps went by while the guard was paused"] if steps else []


def _gaps(watch: GuardWatch) -> list[str]:
    gaps = []
    reader = watch.reader
    root = reader.root
    for reason, count in reader.unrepeated_losses.most_common(3):
        gaps.append(
            f"in {_share(count, watch)} the loss code outside the model cannot be run again "
            f"({reason}): a fault there is "
            "sensed, and not proven"
        )
    for reason, count in watch.investigation.experiments.covered.most_common(5):
        gaps.append(f"{count} experiments were partial: {reason}")
    sensors = watch.sensors
    if sensors.turns >= _TURNS and sensors.unjudged > _SHORT * watch.judged_times:
        gaps.append(
            f"in {_share(sensors.unjudged, watch)} the parameters that asked for a gradient had been trained together too "
            "rarely for a history of their gradients: trend does not judge them"
        )
    if (refused := watch.investigation.replayer.refused) is not None:
        gaps.append(refused)
    gaps += _compiled_gaps(watch) + _unread(watch)
    if root.sharding.fsdp2:
        gaps.append("parameters are sharded: no replica of them is compared between ranks (their gradients are)")
    elif root.sharding.spread:
        how = ", shard by shard," if root.sharding.mesh is not None else ""
        gaps.append(f"{root.sharding.problem}; gradients are watched{how} and on deep steps the operators")
    for reason, count in watch.reader.limits.most_common(5):
        gaps.append(f"{_share(count, watch)} are sensed but cannot be run again: {reason}")
    gaps += _refused(watch, 5)
    if watch.ranks.size == 1:
        alone = world_size() == 1 and os.environ.get("WORLD_SIZE", "1") == "1"  # the script may have left its group
        who = "one rank" if alone else "no wrapper shares this model with other ranks"
        gaps.append(f"{who}: no second device can be asked; a repeating fault needs an operator's proof")
    elif watch.sensors.peers is None:
        gaps.append("peers: needs at least three ranks")
    return gaps


def _unread(watch: GuardWatch) -> list[str]:
    """Say what of the modules' results is not looked at on light steps."""
    looks = watch.reader.looks
    if looks is None:
        return []
    if watch.reader.root.regions.known:
        return ["activations: not looked at, since hooks do not run inside compiled code"]
    return [
        f"activations: results of {path} cannot be read: {reason}" for path, reason in list(looks.unread.items())[:3]
    ]


def _refused(watch: Watch, most: int) -> list[str]:
    """Say why steps could not be run again when they were to be."""
    told = "of the steps that were to be run again could not be, and others may not either"
    return [f"{count} {told}: {reason}" for reason, count in watch.reader.refusals.most_common(most)]


def _compiled_gaps(watch: GuardWatch) -> list[str]:
    """Say what of ``torch.compile``'d code is not seen."""
    gaps = []
    root, operators = watch.reader.root, watch.operators
    if watch.reader.unseen:
        gaps.append(UNSEEN)
    if root.entry.problem is not None:
        gaps.append(f"no step can be run again as compiled: {root.entry.problem}")
    if compiles_backward():
        gaps.append("compiled autograd: the kernels of the backward are not seen, and its gradients may not be")
    if not root.regions.present() or not watch.deep.taken:
        return gaps
    if operators.steps_looked_again:
        gaps.append(
            "compiled kernels themselves are not checked on deep steps; their matrix products were checked in an eager "
            f"re-execution ({operators.steps_looked_again} times)"
        )
    if operators.not_looked_again is not None:
        gaps.append(
            f"deep steps with compiled code that could not be re-executed eagerly: {operators.not_looked_again}"
        )
    return gaps


def _nonfinite_gaps(watch: TracerWatch) -> list[str]:
    lines = [UNSEEN] if watch.reader.unseen else []
    for reason, count in watch.reader.limits.most_common(3):
        lines.append(f"{_share(count, watch)} cannot be run again: {reason}")
    lines += _refused(watch, 3)
    return lines
