"""Two checkpoints, parameter by parameter: which differ, how far, and which the most."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bitwitness.comparison.pair import DIFFERS, EQUAL, SAME_VALUES, SHAPES, UNREADABLE, Parameter, compare_pair
from bitwitness.comparison.renames import Names, matched
from bitwitness.files.shown import harmless
from bitwitness.finding import to_jsonable
from bitwitness.store.checkpoints import Checkpoint

_AT_ONCE = 2  # pairs in memory: one is read while the other is compared

Progress = Callable[[int, int], None]


@dataclass(slots=True)
class CheckpointReport:
    """What two checkpoints have in common, and what not.

    Attributes
    ----------
    parameters
        What is in both, the farthest apart first, then in A's order.
    only_a, only_b
        Names that one side alone has.
    stripped
        Prefixes that were left out of names, in words.
    problems
        What could not be read; then nothing is called equal.
    same_place
        Whether both are the same file or folder.

    """

    a: str
    b: str
    parameters: list[Parameter]
    only_a: list[str]
    only_b: list[str]
    stripped: list[str]
    problems: list[str]
    ignored_a: int = 0
    ignored_b: int = 0
    same_place: bool = False
    _counts: dict[str, int] = field(default_factory=dict)

    def count(self, result: str) -> int:
        """Return how many parameters have a result."""
        if not self._counts:
            for parameter in self.parameters:
                self._counts[parameter.result] = self._counts.get(parameter.result, 0) + 1
        return self._counts.get(result, 0)

    @property
    def equal(self) -> bool:
        """Whether all is in both, was read, and has the same bits."""
        left_out = self.only_a or self.only_b or self.problems
        return not left_out and bool(self.parameters) and self.count(EQUAL) == len(self.parameters)

    @property
    def status(self) -> str:
        """Tell ``fine``, ``findings`` or ``unread``: not everything could be read or compared, beside differences or not."""
        if self.problems or not self.parameters or self.count(UNREADABLE):
            return "unread"
        return "fine" if self.equal else "findings"

    @property
    def conclusion(self) -> str:
        """One sentence; names in it can be printed anywhere."""
        rest = "".join(f"; {text}" for text in self._rest())
        return f"{self._head()}{rest}"

    def _head(self) -> str:
        total, differing = len(self.parameters), self.count(DIFFERS)
        if not total:
            return f"not comparable: no name is in both (A has {_first(self.only_a)}, B has {_first(self.only_b)})"
        if differing:
            return f"{differing} of {total} parameters {_verb(differing)}; most: {_described(self.parameters[0])}"
        if other := self.count(SHAPES):
            return f"{other} of {total} parameters have another shape in B, such as {self._example(SHAPES)}"
        if unread := self.count(UNREADABLE):
            return f"{unread} of {total} parameters cannot be read, such as {self._example(UNREADABLE)}"
        if count := self.count(SAME_VALUES):
            return (
                f"equal values: all {total} parameters have the same values, {count} of them in other bits (another dtype, "
                "the sign of a zero, or the kind of a NaN)"
            )
        return f"{'equal: ' if self.equal else ''}all {total} parameters{'' if self.equal else ' in both'} have the same bits"

    def _rest(self) -> Iterator[str]:
        if self.count(DIFFERS):
            others = {SHAPES: "have another shape", UNREADABLE: "cannot be read", SAME_VALUES: "have other bits alone"}
            for result, text in others.items():
                if count := self.count(result):
                    yield f"{count} {text}"
        if self.parameters:
            for side, names in (("A", self.only_a), ("B", self.only_b)):
                if names:
                    yield f"{len(names)} only in {side}, such as {_first(names)}"
        if bad := [p for p in self.parameters if p.nan_a + p.nan_b + p.inf_a + p.inf_b]:
            yield f"{len(bad)} {'holds' if len(bad) == 1 else 'hold'} NaN or Inf, such as {harmless(bad[0].name)}"
        if self.problems:
            yield f"not all was compared: {len(self.problems)} could not be read (problems)"
        if self.same_place:
            yield "A and B are the same file or folder"

    def _example(self, result: str) -> str:
        return next(harmless(p.name) for p in self.parameters if p.result == result)

    def to_dict(self) -> dict[str, Any]:
        """Return it as what JSON can hold; names are as they are in the checkpoints."""
        found: dict[str, Any] = to_jsonable(
            {
                "a": self.a,
                "b": self.b,
                "status": self.status,
                "compared": len(self.parameters) - self.count(UNREADABLE),
                "equal": self.equal,
                "conclusion": self.conclusion,
                "same_place": self.same_place,
                "counts": {result: self.count(result) for result in (EQUAL, SAME_VALUES, DIFFERS, SHAPES, UNREADABLE)},
                "only_a": self.only_a,
                "only_b": self.only_b,
                "stripped": self.stripped,
                "ignored_a": self.ignored_a,
                "ignored_b": self.ignored_b,
                "problems": self.problems,
                "parameters": [parameter.to_dict() for parameter in self.parameters],
            }
        )
        return found


def compare_checkpoints(a: Checkpoint, b: Checkpoint, progress: Progress | None = None) -> CheckpointReport:
    """Compare what two checkpoints hold under the same names; B is the golden one.

    Parameters
    ----------
    a, b
        As `bitwitness.store.checkpoints.open_checkpoint` returns them.
    progress
        Called with how many parameters are done, and of how many.

    """
    names = matched(a.names(), b.names())
    common = [name for name in names.a if name in names.b]
    parameters = []
    for done, parameter in enumerate(_compared(a, b, names, common), start=1):
        parameters.append(parameter)
        if progress is not None:
            progress(done, len(common))
    parameters.sort(key=lambda one: (one.result == DIFFERS, one.weight), reverse=True)
    unread = [str(one.why) for one in parameters if one.result == UNREADABLE]
    return CheckpointReport(
        a=a.path,
        b=b.path,
        parameters=parameters,
        only_a=[own for name, own in names.a.items() if name not in names.b],
        only_b=[own for name, own in names.b.items() if name not in names.a],
        stripped=names.stripped,
        problems=[*(f"A: {p}" for p in a.problems), *(f"B: {p}" for p in b.problems), *unread],
        ignored_a=a.ignored,
        ignored_b=b.ignored,
        same_place=_same_place(a.path, b.path),
    )


def _compared(a: Checkpoint, b: Checkpoint, names: Names, common: list[str]) -> Iterator[Parameter]:
    """Yield the parameters in their order; two pairs are in memory at a time."""
    pool = ThreadPoolExecutor(min(_AT_ONCE, os.cpu_count() or 1))
    try:
        yield from pool.map(lambda name: compare_pair(a, b, name, names.a[name], names.b[name]), common)
    finally:
        pool.shutdown(cancel_futures=True)


def _same_place(a: str, b: str) -> bool:
    try:
        return Path(a).samefile(b)
    except OSError:
        return False


def _verb(count: int) -> str:
    return "differs" if count == 1 else "differ"


def _first(names: list[str]) -> str:
    return harmless(names[0]) if names else "none"


def _described(parameter: Parameter) -> str:
    metrics, name = parameter.metrics, harmless(parameter.name)
    if metrics is None:
        return f"{name} ({parameter.why})"
    at = f" at {list(parameter.where)}" if parameter.where is not None else ""
    if mismatched := metrics.nan_mismatch + metrics.inf_mismatch:
        return f"{name} (NaN or Inf on one side only: {mismatched}, one of them{at})"
    return f"{name} (relative L2 {metrics.l2_relative:.1e}, largest error {metrics.max_abs:.3g}{at})"
