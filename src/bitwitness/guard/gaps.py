"""What a watch does not see, and why, in words."""

from __future__ import annotations

import os

from bitwitness.guard.guardwatch import GuardWatch
from bitwitness.guard.tracerwatch import TracerWatch
from bitwitness.guard.uncovered import UNSEEN
from bitwitness.guard.watch import Watch
from bitwitness.judge.replicated import NEVER_EQUAL
from bitwitness.tap.compat import compiles_backward
from bitwitness.tap.traffic import world_size

_TURNS = 3
"""Times that other parameters asked for gradients, from which on parts are frozen by turns, and not once for all."""
_SHORT = 0.2
"""Share of the steps without a history long enough, from which on it is said; each set of parameters has some."""


def _share(count: int, watch: Watch) -> str:
    """Return, of how many that were judged, so many."""
    same = watch.steps_judged == watch.judged_times
    return f"{count} of {watch.judged_times} {'steps' if same else 'gradients judged'}"


def late_gaps(steps: int) -> list[str]:
    """Say which steps were not seen at the start."""
    first = "its first step" if steps == 1 else f"its first {steps} steps"
    return [f"{first} went by before this model was found"] if steps else []


def paused_gaps(steps: int) -> list[str]:
    """Say which steps went by while nobody looked."""
    return [f"{steps} steps went by while the guard was paused"] if steps else []


def gaps_of(watch: GuardWatch) -> list[str]:
    """Say what the guard does not see, and why."""
    gaps = []
    reader = watch.reader
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
    gaps += [
        f"{count} calls of operators were not checked: {reason}"
        for reason, count in sensors.operators.in_doubt.most_common(2)
    ]
    gaps += [*sensors.exact.gaps(), *_compiled_gaps(watch), *_unread_gaps(watch)]
    gaps += [*_state_gaps(watch), *_sharding_gaps(watch)]
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


def _state_gaps(watch: GuardWatch) -> list[str]:
    """Say what of the state that lasts from step to step is not looked at."""
    replicas, state = watch.investigation.replicas, watch.state
    gaps = [f"replicas: {replicas.left_out}"] if replicas.left_out else []
    if replicas.apart:
        gaps.append(f"replicas: {NEVER_EQUAL}: {len(replicas.apart)} tensors, {min(replicas.apart)} among them")
    if state.seals.by_script:
        gaps.append(f"seal: {state.seals.reason()}")
    if watch.kept.seals.by_script:
        gaps.append(f"gradients: {watch.kept.seals.reason()}")
    for reason, count in state.optimizer.left_out.most_common(2):
        gaps.append(f"optimizer: {count} steps are not recomputed: {reason}")
    return gaps


def _sharding_gaps(watch: GuardWatch) -> list[str]:
    """Say what of parameters that are spread over the ranks is not looked at."""
    sharding = watch.reader.root.sharding
    if sharding.fsdp2 and watch.investigation.replicas.unshared:
        return ["parameters are sharded: no replica of them is compared between ranks (their gradients are)"]
    if sharding.spread and not sharding.fsdp2:
        how = ", shard by shard," if sharding.mesh is not None else ""
        return [f"{sharding.problem}; gradients are watched{how} and on deep steps the operators"]
    return []


def _unread_gaps(watch: GuardWatch) -> list[str]:
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


def nonfinite_gaps(watch: TracerWatch) -> list[str]:
    """Say what the tracer does not see, and why."""
    lines = [UNSEEN] if watch.reader.unseen else []
    for reason, count in watch.reader.limits.most_common(3):
        lines.append(f"{_share(count, watch)} cannot be run again: {reason}")
    lines += _refused(watch, 3)
    return lines
