"""How far rounding has moved the weights apart until a later step begins: up to which that step's values may differ.

An optimizer that looks at signs makes whole steps of gradients that are rounding errors. What no gradient has moved, a teacher
or a target network, is made of the weights of another model of the process, and may differ as far as those do.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np

from bitwitness.comparison.matching.align import Pair
from bitwitness.comparison.matching.frame import StepFrame
from bitwitness.comparison.measuring.changes import changes
from bitwitness.comparison.suspect import EarlierSteps
from bitwitness.errors import UsageError
from bitwitness.store.opening import open_source
from bitwitness.store.source import Source

_TIMES = 8.0
"""Times what the weights have moved by.

Seen (small GPTs and Llamas in bfloat16 against the same written otherwise, AdamW at 1e-3 to 1e-2): weights by 1 to 10 %, values
and gradients by up to six times that.
"""
_TOLD = 4.0
"""Times by which statistics of an update may be off against those of the weight that a module reads."""
_MOST = 0.9
"""Quantile of the weights that tells how far: a few move by more, as a key's bias does, whose gradient is rounding alone."""
_ROUNDED = 1e-5
"""The most that rounding counts for where optimizers were not seen to step in both runs: a script may do anything."""
COARSE = 1e-3
"""Drift from which on values are compared as a whole, and not element by element: where a gradient is a rounding error, an
optimizer that looks at signs moves single elements of a weight by all of a step."""


class DriftBeside:
    """Tells how far the trained weights of a process's other models have moved apart; reads these when it is asked.

    Parameters
    ----------
    a, b
        The two recordings that are compared.
    models
        All recordings of their processes.

    """

    def __init__(self, a: Source, b: Source, models: Sequence[Sequence[Path]]) -> None:
        self._paths = [(x, y) for x, y in zip(*models, strict=False) if str(x) != a.path and str(y) != b.path]
        self._named = a
        self._open: list[tuple[Source, Source]] | None = None
        self._found: dict[tuple[int, int, int], dict[str, float]] = {}

    def at(self, rank: int, step: int, step_b: int) -> dict[str, float]:
        """Return the changes of other models' weights in one step of one rank, by name; of several the largest."""
        if self._open is None:
            self._open = [pair for paths in self._paths if (pair := _opened(*paths)) is not None]
        place = rank, step, step_b
        if place not in self._found:
            found = self._found[place] = {}
            for a, b in self._open:
                calls = calls_a_step(len(self._named.steps(rank)), len(a.steps(rank)) if rank in a.ranks() else 0)
                for name, change in _of_model(a, b, rank, step // calls, step_b // calls).items():
                    found[name] = max(change, found.get(name, 0.0))
        return self._found[place]


def calls_a_step(steps: int, others: int) -> int:
    """Return how many steps of one model are one of another's: a target network counts each of its calls."""
    calls, rest = divmod(steps, max(others, 1))
    return calls if calls > 1 and not rest and others else 1


def drift(frame: StepFrame, weights: Iterable[Pair], change_of: Mapping[int, float], earlier: EarlierSteps) -> float:
    """Return up to which relative change a step's values may differ; 0 in the first, and where no parameters were recorded.

    Parameters
    ----------
    frame
        The step, of run A.
    weights, change_of
        Its parameters, matched, and the changes of run A's rows by statistics.
    earlier
        What is known of the steps before.

    """
    if earlier.last is None or earlier.parted:
        return 0.0
    moved = {
        row: pair.a.parameter in earlier.trained
        for pair in weights
        for row, _ in pair.outputs
        if len(frame.shapes[row]) > 1
    }
    # what came to the weights after the step before ended, somebody has done, and no rounding
    ended = {row: _at_end(pair, earlier) for pair in weights for row, _ in pair.outputs}
    stepped = all(frame.texts["kind"].equals("optimizer").any() for frame in earlier.last)
    trained = [min(change_of[row], ended[row] if stepped else math.inf) for row, own in moved.items() if own]
    if trained and not stepped:
        return _TIMES * min(_far(trained), _ROUNDED)
    if not trained and any(change_of[row] > 0.0 for row in moved):
        return _TIMES * min(_far([*earlier.beside().values()]), 1.0)
    return _TIMES * min(_far(trained), 1.0)


def _at_end(pair: Pair, earlier: EarlierSteps) -> float:
    """Return how far apart a weight may be that was as far apart as it was when the step before ended; 0 where nothing was."""
    return _TOLD * earlier.named.get(pair.a.parameter, 0.0)


def _far(found: Sequence[float]) -> float:
    return float(np.quantile(found, _MOST)) if found else 0.0


def _opened(a: Path, b: Path) -> tuple[Source, Source] | None:
    try:
        return open_source(a), open_source(b)
    except (UsageError, OSError):
        return None  # told where that model is compared itself


def _of_model(a: Source, b: Source, rank: int, step: int, step_b: int) -> dict[str, float]:
    if rank not in a.ranks() or rank not in b.ranks() or step not in a.steps(rank) or step_b not in b.steps(rank):
        return {}
    first, second = StepFrame(a.table(rank, step)), StepFrame(b.table(rank, step_b))
    here, there = _weights(first), _weights(second)
    names = [name for name in here if name in there]
    rows = [np.array([found[name] for name in names], dtype=np.int64) for found in (here, there)]
    found = changes(first, second, *rows).tolist()
    return {name: change for name, change in zip(names, found, strict=True) if math.isfinite(change)}


def _weights(frame: StepFrame) -> dict[str, int]:
    """Return the rows of parameters that have a gradient in this step."""
    trained = frame.trained
    nodes = (node for node in frame.nodes if node.kind == "parameter" and node.outputs)
    return {node.parameter: node.outputs[0] for node in nodes if node.parameter in trained}
