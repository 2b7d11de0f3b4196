"""What an operator hands on by any amount, being right: where kept values show that it computed rightly what it was given."""

from __future__ import annotations

from bitwitness.comparison.differences import Differences
from bitwitness.comparison.matching.align import Pair


def hands_on(differences: Differences, pair: Pair) -> bool:
    """Return whether a node computed rightly in both runs what it was given, which differs by noise alone.

    Its result may differ by any amount then: an element of a gradient passes where a ReLU's input is just above zero, not
    where it is just below. A module does so that returns what such an operator made.
    """
    if differences.right is None:
        return False
    if pair.a.kind == "module":
        return all(_made_by_noise(differences, *rows) for rows in pair.outputs)
    if pair.a.kind != "op" or any(differences.is_real(pair.a, row) for row, _ in pair.inputs):
        return False
    first, second = (
        frame.text("args", node.rows[0]) for frame, node in ((differences.a, pair.a), (differences.b, pair.b))
    )
    return first == second and differences.right(pair)


def _made_by_noise(differences: Differences, row_a: int, row_b: int) -> bool:
    """Return whether one operator of both runs made two rows, and what it made differs by noise."""
    maker = differences.makers.maker(row_a)
    if maker is None or maker.b.number != differences.b.producer[row_b]:
        return False
    return maker.a.number in differences.largest and maker.a.number not in differences.real
