"""What only one run has of a parameter that both have: a gradient, an update, or the parameter as one of its own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from bitwitness.comparison.differences import Differences
from bitwitness.comparison.gradients.ownranks import NOT_REDUCED, changed_before, never_shared
from bitwitness.comparison.matching.align import Alignment
from bitwitness.comparison.matching.frame import Node, StepFrame
from bitwitness.comparison.measuring.changes import changes, moved
from bitwitness.comparison.reasons.conditions import of_forwards

NOT_THERE = "frozen, or not used, in run {}"
"""What is said of a gradient that one run has not."""
_NAMED = 3  # parameters that are named in a sentence


class Absence(NamedTuple):
    """Nodes that only run ``side`` has, what follows from that, and whether it comes before all that is computed."""

    nodes: Sequence[Node]
    side: str
    text: str
    structural: bool = False


def absences(differences: Differences) -> list[Absence]:
    """Return what only one run has, of parameters that both have; nothing where the other recorded none of its kind."""
    found = [*_batches(differences), *_own_parameters(differences), *_updates(differences)]
    untold = {_name(node) for one in found for node in one.nodes}
    gradients = [one for one in _gradients(differences) if not {*map(_name, one.nodes)} <= untold]
    return [*found, *gradients]


def _batches(differences: Differences) -> Iterable[Absence]:
    """Yield what one run computes beyond the other's batch in the same step, where they were not put together."""
    frames = differences.a, differences.b
    batches = [_computed(frame) for frame in frames]
    counts = [len(found) for found in batches]
    joined = any(frame.ranks > 1 or frame.micros != count for frame, count in zip(frames, counts, strict=True))
    if counts[0] == counts[1] or 0 in counts or joined:
        return
    more = int(counts[1] > counts[0])
    extra = batches[more][counts[1 - more]]
    node = next((n for n in frames[more].nodes if n.kind in ("op", "module") and n.micro == extra), None)
    if node is not None:
        side, other = "AB"[more], "BA"[more]
        text = f"run {side} computes {counts[more]} batches in this step, and run {other} {counts[1 - more]}"
        yield Absence([node], side, f"{text}: {_why_more(differences, counts, more)}", structural=True)


def _computed(frame: StepFrame) -> npt.NDArray[np.int64]:
    """Return the numbers of the batches that a step computes forward."""
    found: npt.NDArray[np.int64] = np.unique(frame.micro[of_forwards(frame)])
    return found


def _why_more(differences: Differences, counts: Sequence[int], more: int) -> str:
    """Say why one run computes more batches in a step, by how many both computed in the step before."""
    before = differences.earlier.last
    usual = {len(_computed(frame)) for frame in before} if before is not None else set()
    if usual == {counts[more]}:
        return f"both computed {counts[more]} in the step before, so that run {'BA'[more]} leaves one out"
    if usual == {counts[1 - more]}:
        return (
            f"both computed {counts[1 - more]} in the step before, so that run {'AB'[more]} leaves an optimizer step out "
            "between them, or accumulates gradients"
        )
    return f"an optimizer step was left out between them, gradients are accumulated, or run {'BA'[more]} loses batches"


def _own_parameters(differences: Differences) -> Iterable[Absence]:
    """Yield parameters of one run whose module both have: tied to another one in the other run."""
    shared = len(_matched(differences.alignment, "A", "parameter"))
    elsewhere = _stored_otherwise(differences)
    for only, side, other in _sides(differences.alignment):
        frame = differences.b if side == "A" else differences.a
        # A module whose parameters a function reads is not called itself.
        theirs = {node.module for node in frame.nodes if node.kind in ("module", "op", "parameter")} - {"."} - elsewhere
        # What the optimizer steps is there, whatever stood in its place while the model ran (``functional_call``).
        stepped = set(map(_name, _matched(differences.alignment, side, "optimizer")))
        lone = [
            node for node in only if node.kind == "parameter" and node.module in theirs and _name(node) not in stepped
        ]
        if lone and len(lone) < shared:
            are = "is a parameter of its own" if len(lone) == 1 else "are parameters of their own"
            why = f"and not in run {other}: tied there to another one, or not registered"
            yield Absence(lone, side, f"{_listed(lone)} {are} in run {side}, {why}", structural=True)


def _stored_otherwise(differences: Differences) -> set[str]:
    """Return the modules that have parameters that only one run has, in themselves or below, of one size in both runs."""
    frames = {"A": differences.a, "B": differences.b}
    sizes: tuple[Counter[str], Counter[str]] = Counter(), Counter()
    for found, (only, side, _) in zip(sizes, _sides(differences.alignment), strict=True):
        for node in only:
            if node.kind == "parameter" and node.outputs:
                parts = node.module.split(".")
                for depth in range(1, len(parts) + 1):
                    found[".".join(parts[:depth])] += int(frames[side].count[node.outputs[0]])
    return {path for path, size in sizes[0].items() if sizes[1][path] == size}


def _updates(differences: Differences) -> Iterable[Absence]:
    """Yield parameters that the optimizer of one run updates more often in the step, or alone."""
    for only, side, other in _sides(differences.alignment):
        counts = Counter(map(_name, _matched(differences.alignment, side, "optimizer")))
        known = set(map(_name, _matched(differences.alignment, side, "parameter")))
        if not counts:
            if (skipped := _skipped(differences, only, side, other)) is not None:
                yield skipped
            continue  # the other run recorded no updates
        lone = [node for node in only if node.kind == "optimizer" and node.module in known]
        same = _come_to_the_same(differences) if lone else set()
        more = [node for node in lone if node.module in counts and node.module not in same]
        frame = differences.a if side == "A" else differences.b
        alone = [node for node in lone if node.module not in counts and _is_updated(frame, node)]
        if more:
            name = more[0].module
            times = f"{counts[name] + sum(node.module == name for node in more)} times against {counts[name]}"
            yield Absence(more, side, f"run {side}'s optimizer updates {_listed(more)} more often in one step: {times}")
        if alone:
            why = f"frozen, not used, or not given to the optimizer in run {other}"
            yield Absence(alone, side, f"only run {side} has an update of {_listed(alone)}: {why}")


def _come_to_the_same(differences: Differences) -> set[str]:
    """Return, by their names in both runs, parameters that are the same after their last update.

    An optimizer may hold another one, that is told of, too.
    """
    names = {pair.a.module: pair.b.module for pair in differences.alignment.pairs if pair.a.kind == "optimizer"}
    first, second = last_updates(differences.a), last_updates(differences.b)
    both = [(name, other) for name, other in names.items() if name in first and other in second]
    if not both:
        return set()
    rows = np.array([first[name] for name, _ in both]), np.array([second[other] for _, other in both])
    found, limit = changes(differences.a, differences.b, *rows), differences.noise_limit()
    return {name for pair, change in zip(both, found, strict=True) if change <= limit for name in pair}


def last_updates(frame: StepFrame) -> dict[str, int]:
    """Return the row of each parameter's last update, by its name."""
    return {node.module: node.outputs[0] for node in frame.nodes if node.kind == "optimizer" and node.outputs}


def weights_begun(frame: StepFrame) -> dict[str, int]:
    """Return the row of each parameter as a step begins with it, by its name."""
    return {node.parameter: node.outputs[0] for node in frame.nodes if node.kind == "parameter" and node.outputs}


def _skipped(differences: Differences, only: Sequence[Node], side: str, other: str) -> Absence | None:
    """Return the updates of a step in which the other run's optimizer, which stepped before, did not."""
    updates = [node for node in only if node.kind == "optimizer"]
    before, theirs = differences.earlier.last, (differences.a, differences.b)["AB".index(other)]
    if not updates or before is None or not before["AB".index(other)].texts["kind"].equals("optimizer").any():
        return None
    if theirs.texts["kind"].equals("optimizer").any():
        return None  # of parameters that have other names there
    if (ended := differences.earlier.cut_short.get(other)) is not None:
        return Absence(updates, side, f"run {other} {ended} in this step, before its optimizer's step")
    return Absence(updates, side, f"run {other} takes no optimizer step in this step: its gradients are not used")


def _gradients(differences: Differences) -> Iterable[Absence]:
    """Yield parameters of which one run alone has a gradient."""
    alignment = differences.alignment
    for only, side, other in _sides(alignment):
        theirs = differences.b if side == "A" else differences.a
        have = set(map(_name, _matched(alignment, side, "gradient")))
        known = set(map(_name, _matched(alignment, side, "parameter"))) - have
        lone = [node for node in only if node.kind == "gradient" and _name(node) in known]
        apart = [node for node in lone if never_shared(theirs, _name(node))]
        if apart:
            yield Absence(
                apart, side, f"the gradient of {_listed(apart)} is each rank's own in run {other}: {NOT_REDUCED}"
            )
        # What each rank changes before all are averaged is there, and told where the optimizer reads it.
        lone = [node for node in lone if node not in apart and not changed_before(theirs, _name(node))]
        # Nor is one missing that an optimizer has read: in the backward, say, that lets go of it.
        read = {node.module for node in theirs.nodes if node.kind == "optimizer" and _reads_gradient(theirs, node)}
        lone = [node for node in lone if _name(node) not in read]
        gone = [node for node in lone if differences.makers.made_in_both(node.outputs[0], first=side == "A")]
        for nodes, why in ((gone, let_go(other)), ([n for n in lone if n not in gone], NOT_THERE.format(other))):
            if nodes and have:
                yield Absence(nodes, side, f"only run {side} has a gradient of {_listed(nodes)}: {why}")


def let_go(run: str) -> str:
    """Say of a gradient that a run's backward makes it, and that its optimizer does not find it."""
    return (
        f"run {run}'s backward makes it, too, and it is gone before the optimizer steps (zero_grad, or p.grad = None)"
    )


def _is_updated(frame: StepFrame, node: Node) -> bool:
    """Return whether an optimizer that holds a parameter has a gradient of it, or changes it without: not of a frozen one."""
    held = next((row for row in node.inputs if frame.text("slot", row) == "param"), None)
    if held is None or not node.outputs or _reads_gradient(frame, node):
        return True
    return moved(frame, held, node.outputs[0])


def _reads_gradient(frame: StepFrame, node: Node) -> bool:
    return any(frame.text("slot", row) == "grad" for row in node.inputs)


def _sides(alignment: Alignment) -> tuple[tuple[list[Node], str, str], ...]:
    return (alignment.only_a, "A", "B"), (alignment.only_b, "B", "A")


def _matched(alignment: Alignment, side: str, kind: str) -> list[Node]:
    """Return one run's nodes of a kind that both runs have."""
    return [pair.a if side == "A" else pair.b for pair in alignment.pairs if pair.a.kind == kind]


def _name(node: Node) -> str:
    return node.module if node.kind == "optimizer" else node.parameter


def _listed(nodes: Sequence[Node]) -> str:
    names = list(dict.fromkeys(map(_name, nodes)))
    if len(names) == 1:
        return names[0]
    more = ", …" if len(names) > _NAMED else ""
    return f"{len(names)} parameters ({', '.join(names[:_NAMED])}{more})"
