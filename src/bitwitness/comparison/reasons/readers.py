"""The gradient of a tensor that several modules read: each of them shows the sum, of which it made a part.

Modules' rows hold the gradient of the tensor itself, complete when it passes. What code between the modules contributes is seen
by nobody where no operators are recorded: so what agrees on the one side of a module and differs on the other is that module's
doing only if nothing else has differed before.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from bitwitness.comparison.differences import Differences
from bitwitness.comparison.matching.align import Pair

_SHOWN = 3  # modules that are named in a sentence


class Readers:
    """Knows which modules' backwards show the gradient of one tensor.

    Parameters
    ----------
    differences
        The step's changes.

    """

    def __init__(self, differences: Differences) -> None:
        self._differences = differences
        self._shown: dict[int, list[Pair]] = defaultdict(list)
        for pair in differences.alignment.pairs:
            if _goes_back(pair):
                for value in {int(differences.a.value[row]) for row, _ in pair.outputs}:
                    self._shown[value].append(pair)

    def follows(self, pair: Pair, explained: float) -> bool:
        """Return whether a module's gradient may differ by what comes from elsewhere: what differed before, or another reader.

        Parameters
        ----------
        explained
            What is explained of its change.

        """
        if not _goes_back(pair):
            return False
        if self._differences.earlier.parted:
            return True
        change_of = self._differences.change_of
        exceeding = [row for row, _ in pair.outputs if change_of[row] > explained]
        return bool(exceeding) and all(self._is_anothers(pair, row, explained) for row in exceeding)

    def _is_anothers(self, pair: Pair, row: int, explained: float) -> bool:
        """Return whether another module that shows this gradient is given one that differs, which this one has not made."""
        a, change_of = self._differences.a, self._differences.change_of
        own = {int(a.value[out]) for out, _ in pair.outputs}
        return any(
            change_of[given] > explained and int(a.value[given]) not in own
            for other in self._others(pair, [row])
            for given, _ in other.inputs
        )

    def words(self, pair: Pair) -> str:
        """Return what is added where other modules show the same gradient; empty where none does."""
        found = self._others(pair, [row for row, _ in pair.outputs]) if _goes_back(pair) else ()
        others = list(dict.fromkeys(other.a.site.partition("#")[0] for other in found))
        if not others:
            return ""
        more = f" and {len(others) - _SHOWN} more" if len(others) > _SHOWN else ""
        return (
            f"; {', '.join(others[:_SHOWN])}{more} read the same tensor, of which this is the whole gradient: it may be of "
            "any of them, or of code beside them (--level mix tells)"
        )

    def _others(self, pair: Pair, rows: Sequence[int]) -> Sequence[Pair]:
        """Return the other calls that show gradients of a call, but for what is inside it or around it."""
        values = {int(self._differences.a.value[row]) for row in rows}
        found = (other for value in values for other in self._shown[value])
        return [other for other in found if other is not pair and not _is_around(pair.a.module, other.a.module)]


def _goes_back(pair: Pair) -> bool:
    return (pair.a.kind, pair.a.phase) == ("module", "backward")


def _is_around(one: str, other: str) -> bool:
    """Return whether one of two modules is in the other."""
    first, second = (f"{path}." if path != "." else "" for path in (one, other))
    return one != other and (first.startswith(second) or second.startswith(first))
