"""A step as a whole, of two runs that compute in different precisions: its loss, and half of its gradients.

What single operators may differ by in a coarse dtype grows along the depth, up to where nothing exceeds it. The loss is a mean,
in which rounding errors cancel, and gradients of many parameters differ by much only where something in common does.
"""

from __future__ import annotations

import math
from collections.abc import Collection

from bitwitness.comparison.differences import NEGLIGIBLE, Differences
from bitwitness.comparison.matching.align import Pair
from bitwitness.comparison.matching.operands import Operands
from bitwitness.comparison.measuring.allowance import roundoff
from bitwitness.comparison.measuring.describe import RECORD_OPERATORS, in_chain
from bitwitness.comparison.measuring.relation import in_words
from bitwitness.comparison.precisions.otherwise import MOVES, computed_alone
from bitwitness.comparison.reasons.reason import OUTSIDE
from bitwitness.comparison.rewriting.outcome import gradients_of
from bitwitness.comparison.suspect import Exceeding, Suspect, suspect_of
from bitwitness.oracle.names import canonical, is_random

_GRADIENTS = 16.0
"""Unit roundoffs that half of the gradients stay within. Seen in healthy first steps in bfloat16, of twenty architectures: up
to 3e-2, 9e-2 of convolutions behind batch norms, whose losses differed by less than 8e-4; of losses up to 3.8e-3, of a CLIP."""


_FLOAT16 = "float16"
_GRADIENTS_ALONE = (56.0, 112.0)
"""The same of the first step, whatever the loss does; the second of float16, in which small gradients have fewer digits.
Seen: 19 in bfloat16, 58 in float16, both of a ResNet."""

_FINEST = 2.0**-14
"""The least roundoff that a whole step is held to."""
_COPIED = 4.0
"""Unit roundoffs by which an input may differ that is a copy of what was rounded before."""
_PICK = ("index", "index_select", "gather", "embedding", "cat", "stack", "repeat", "roll", "flip", "tril", "triu")
"""Operators that hand on what they read, or a part of it."""
_PERIODIC = ("sin", "cos", "tan")
_SHARE_OF_LOSS = 0.25
"""Of a loss's change, up to which what modules return differs, where something behind them makes the loss another one."""
_ELEMENTS, _SMALL, _MUCH = 16, 4.0, 0.25
"""Of how many numbers at least, up to how many unit roundoffs of its inputs, and from which change on an operator counts as one
that rounding does not leave right."""


def beyond_precision(differences: Differences, rank: int, step: int) -> list[Exceeding]:
    """Return the loss that differs most, if that and half of the gradients differ by more than the coarser dtype leaves.

    In the first step also the gradient in their middle, if half of them differ by much more; a loss may agree by chance.
    """
    losses = differences.alignment.losses
    gradients = [(differences.change_of[pair.outputs[0][0]], pair) for pair in gradients_of(differences)]
    apart = differences.parted_before or differences.makers.other_losses
    if differences.precisions is None or apart or not losses or not gradients:
        return []
    limit = differences.slack * differences.roundoff_inside
    worst = max(losses, key=lambda pair: differences.change_of[pair.outputs[0][0]])
    change = differences.change_of[worst.outputs[0][0]]
    median, middle = sorted(gradients, key=lambda one: one[0])[len(gradients) // 2]
    limit = max(limit, _FINEST)  # in float32, too, a loss may be the difference of large numbers
    if median <= _GRADIENTS * limit:
        return []
    if change > limit:
        return [_exceeding(differences, worst, rank, step, change, limit)]
    alone = _GRADIENTS_ALONE[_FLOAT16 in differences.precisions] * limit
    if differences.earlier.last is None and median > alone:
        return [_exceeding(differences, middle, rank, step, median, alone)]
    return []


def _exceeding(differences: Differences, pair: Pair, rank: int, step: int, change: float, limit: float) -> Exceeding:
    return Exceeding(f"{pair.a.site}.{differences.a.text('slot', pair.outputs[0][0])}", rank, step, change, limit)


def why_beyond(differences: Differences, beyond: Exceeding) -> list[Suspect]:
    """Return what explains that.

    Another input of the model, an operator that makes much of a rounding, what one run alone computes in one module, or reads
    elsewhere.
    """
    return (
        other_input(differences, beyond.rank, beyond.step)
        or _sensitive(differences, beyond.rank, beyond.step)
        or _lone_operator(differences, beyond)
        or _other_operand(differences, beyond)
    )


def other_input(differences: Differences, rank: int, step: int) -> list[Suspect]:
    """Return what the model was given otherwise, if it was."""
    a, b, limit = differences.a, differences.b, NEGLIGIBLE + _COPIED * differences.copies
    for pair in differences.alignment.pairs:
        for i, j in pair.inputs if (pair.a.kind, pair.a.phase) == ("module", "forward") else ():
            name, alike = a.text("name", i), a.text("dtype", i) == b.text("dtype", j)
            if name.startswith("input ") and alike and differences.change_of[i] > limit:
                text = f"{name} differs: {in_words(a, b, i, j)}{OUTSIDE}"
                return [
                    suspect_of(
                        pair, a, i, rank=rank, step=step, reason="source", text=text,
                        change=differences.change_of[i], explained=limit,
                    )
                ]  # fmt: skip
    return []


def other_loss(differences: Differences, rank: int, step: int) -> list[Suspect]:
    """Return a loss that differs by far more than all that modules return, of which it is made, where no operators tell why."""
    a, b = differences.a, differences.b
    least = _GRADIENTS * differences.slack * differences.roundoff_inside
    returned = [
        differences.change_of[row]
        for pair in differences.alignment.pairs
        for row, _ in (pair.outputs if (pair.a.kind, pair.a.phase) == ("module", "forward") else ())
    ]
    if differences.precisions is None or differences.parted_before or differences.makers.other_losses or not returned:
        return []
    for pair in () if differences.has_operators else differences.alignment.losses:
        (i, j), most = pair.outputs[0], _SHARE_OF_LOSS * differences.change_of[pair.outputs[0][0]]
        if least < differences.change_of[i] < math.inf and max(returned) < most:
            text = (
                f"the loss differs ({in_words(a, b, i, j)}), and what the modules return agrees within rounding: it is "
                f"computed otherwise, or of other targets: {RECORD_OPERATORS}"
            )
            return [
                suspect_of(
                    pair,
                    a,
                    i,
                    rank=rank,
                    step=step,
                    reason="loss",
                    text=text,
                    change=differences.change_of[i],
                    explained=least,
                )
            ]
    return []


def angles_too_coarse(differences: Differences, rank: int, step: int) -> list[Suspect]:
    """Return the first sine or cosine of angles so large that the coarser dtype holds no part of a turn."""
    if differences.precisions is None or differences.parted_before:
        return []
    return _sensitive(differences, rank, step, _PERIODIC)


def _sensitive(differences: Differences, rank: int, step: int, ops: Collection[str] = ()) -> list[Suspect]:
    """Return the first operator (one of ``ops``, if given) that makes another result of inputs that rounding moved apart."""
    unit = differences.roundoff_inside
    for pair in differences.alignment.pairs:
        other = (ops and pair.a.op not in ops) or is_random(pair.a.op) or canonical(pair.a.op) in (*MOVES, *_PICK)
        if (pair.a.kind, pair.a.phase) != ("op", "forward") or not pair.outputs or other:
            continue
        row, inputs = pair.outputs[0][0], [differences.change_of[i] for i, _ in pair.inputs]
        change, carried = differences.change_of[row], max([unit, *inputs])
        if differences.a.count[row] >= _ELEMENTS and carried <= _SMALL * unit and change > _MUCH and change < math.inf:
            coarse = max(differences.precisions or (), key=roundoff)
            text = (
                f"its inputs differ by {max(inputs, default=0.0):.2g}, which rounding to {coarse} explains, and its result by "
                f"{change:.2g}: what it reads needs a finer dtype"
            )
            return [
                suspect_of(
                    pair, differences.a, row, rank=rank, step=step, reason="dtype", text=text, change=change, explained=carried
                )
            ]  # fmt: skip
    return []


def _other_operand(differences: Differences, beyond: Exceeding) -> list[Suspect]:
    """Return the first operator that reads two different things, which differ by more than the coarser dtype's roundoff."""
    operands = Operands(differences.a, differences.b, differences.alignment, differences.makers)
    for pair in differences.alignment.pairs:
        for i, j in pair.inputs if pair.a.kind == "op" else ():
            change, others = differences.change_of[i], operands.other(i, j)
            if others is not None and others[0].text != others[1].text and change > differences.roundoff_inside:
                text = f"{differences.a.text('slot', i)} is {others[0].text} in run A, and {others[1].text} in run B"
                row, limit = (pair.outputs or [(i, j)])[0][0], differences.roundoff_inside
                return [
                    suspect_of(
                        pair, differences.a, row, rank=beyond.rank, step=beyond.step, reason="view", text=text, change=change,
                        explained=limit,
                    )
                ]  # fmt: skip
    return []


def _lone_operator(differences: Differences, beyond: Exceeding) -> list[Suspect]:
    found = computed_alone(differences)
    if len(found) != 1:
        return []
    node, side = found[0].nodes[0], "A" if found[0].first else "B"
    frame = differences.a if found[0].first else differences.b
    text = (
        f"only run {side} computes {in_chain(found[0].nodes)} here. What that does to the values that follow is within the "
        f"rounding of the coarser dtype; {beyond.site} differs by more ({beyond.change:.3g}, of {beyond.explained:.2g})"
    )
    return [
        Suspect(
            site=f"{node.site}.out0", rank=beyond.rank, step=beyond.step, reason="missing", text=text, score=beyond.ratio,
            change=beyond.change, explained=beyond.explained, order=(beyond.step, node.rows[-1]), side=side.lower(),
            stack=int(frame.stack[node.rows[0]]), micro=node.micro, lone=node,
        )
    ]  # fmt: skip
