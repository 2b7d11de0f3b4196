"""Whether two steps were given the same batch, and what can be compared where it is laid out otherwise.

Three calls or one, packed, padded or token by token: the operators work on other shapes then, but the weights' gradients and
updates are those of the same mathematics.
"""

from __future__ import annotations

import math

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from bitwitness.comparison.frame import StepFrame

_OF_WEIGHTS = ("parameter", "gradient", "optimizer")


def other_batch(a: StepFrame, b: StepFrame) -> str:
    """Say which of the model's inputs has another shape in each run; empty if none has."""
    first, second = _inputs(a), _inputs(b)
    for name in reversed(first):  # in the order in which they were given
        if name in second and set(first[name]) != set(second[name]):
            here, there = (" and ".join(map(str, map(list, found[name]))) for found in (first, second))
            return f"{name} has the shape {here} in run A and {there} in run B"
    return ""


def of_weights(frame: StepFrame) -> StepFrame:
    """Return a step's parameters, gradients and updates alone."""
    kinds = frame.table.column("kind").cast(pa.string())
    return StepFrame(frame.table.filter(pc.is_in(kinds, pa.array(_OF_WEIGHTS))))


def has_gradients(frame: StepFrame) -> bool:
    """Return whether a step has gradients: without, equal weights say nothing of what was computed."""
    return bool(frame.texts["kind"].equals("gradient").any())


def _inputs(frame: StepFrame) -> dict[str, list[tuple[int, ...]]]:
    """Return the shapes of each of the model's inputs, over its calls: as the model was given it, or as it was read first."""
    text = frame.texts["name"]
    codes = [code for code, word in enumerate(text.words) if word.startswith("input ")]
    named = np.isin(text.codes, codes)
    given = named & frame.texts["kind"].equals("module") & frame.texts["module"].equals(".")
    rows = np.flatnonzero(given if given.any() else named).tolist()
    whole = [
        row for row in rows if math.prod(frame.shapes[row]) == frame.count[row]
    ]  # others are damaged, told elsewhere
    found: dict[str, list[tuple[int, ...]]] = {frame.text("name", row): [] for row in reversed(whole)}
    for row in whole:
        shapes = found[frame.text("name", row)]
        if frame.shapes[row] not in shapes and (given.any() or not shapes):
            shapes.append(frame.shapes[row])
    return found
