"""What an operator hands on by any amount, being right.

Kept values show that it computed rightly what it was given; of statistics, that no more differs than few elements make.
"""

from __future__ import annotations

from bitwitness.comparison.differences import Differences
from bitwitness.comparison.matching.align import Pair
from bitwitness.comparison.matching.frame import Node
from bitwitness.comparison.measuring.relation import numbers_of

_TURNS = frozenset({
    "threshold_backward", "hardtanh_backward", "leaky_relu_backward", "max_pool2d_with_indices_backward",
    "ReLU", "ReLU6", "LeakyReLU", "Hardtanh", "MaxPool1d", "MaxPool2d",
})  # fmt: skip
"""Operators and modules whose backward hands each element on or not, by what their forward read."""
_FEW = 4.0
"""Times the largest element that a gradient may differ by, where rounding turns one or two: a sketch tells a norm so well."""
_OF_READ, _MOST_READ = 8.0, 0.5
"""Times the noise of what an operator reads that only one run has, and the most that is noise."""


def hands_on(differences: Differences, pair: Pair) -> bool:
    """Return whether a node computed rightly in both runs what it was given, which differs by noise alone.

    Its result may differ by any amount then: an element of a gradient passes where a ReLU's input is just above zero, not
    where it is just below. A module does so that returns what such an operator made.
    """
    if differences.right is None:
        return _turns_few(differences, pair)
    if pair.a.kind == "module":
        return all(_made_by_noise(differences, *rows) for rows in pair.outputs)
    if pair.a.kind != "op" or any(differences.is_real(pair.a, row) for row, _ in pair.inputs):
        return False
    first, second = (
        frame.text("args", node.rows[0]) for frame, node in ((differences.a, pair.a), (differences.b, pair.b))
    )
    return first == second and differences.right(pair)


def noise_read_by(differences: Differences, lone: Node, *, first: bool) -> float:
    """Return what may become of the noise in what a node of a backward reads that only A (``first``) or only B has."""
    if differences.precisions is not None or lone.phase != "backward":
        return 0.0
    pairs, _ = differences.makers.origins(lone, first=first)
    read = [differences.change_of[row] for pair in pairs if pair.a.phase == "backward" for row, _ in pair.outputs]
    return _OF_READ * max((change for change in read if change <= _MOST_READ), default=0.0)


def _turns_few(differences: Differences, pair: Pair) -> bool:
    """Return whether what is handed on differs by no more than few elements, of which rounding decided whether they are."""
    if pair.a.phase != "backward" or pair.a.op not in _TURNS or not pair.inputs:
        return False
    decided = differences.earlier.noise or any(differences.change_of[row] for row, _ in pair.inputs)
    if not decided or any(differences.is_real(pair.a, row) for row, _ in pair.inputs):
        return False
    largest = numbers_of(differences.a, pair.inputs[0][0]).top
    return all(
        differences.change_of[row] * numbers_of(differences.a, row).l2 <= _FEW * largest for row, _ in pair.outputs
    )


def _made_by_noise(differences: Differences, row_a: int, row_b: int) -> bool:
    """Return whether one operator of both runs made two rows, and what it made differs by noise."""
    maker = differences.makers.maker(row_a)
    if maker is None or maker.b.number != differences.b.producer[row_b]:
        return False
    return maker.a.number in differences.largest and maker.a.number not in differences.real
