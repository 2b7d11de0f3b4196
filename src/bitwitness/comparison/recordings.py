"""``bw.compare(a, b)``: two recordings by their folders; what ``bitwitness compare`` prints, as an object."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence

from bitwitness.comparison.matching.renamed import Mapping as Renamed
from bitwitness.comparison.matching.renamed import proposed
from bitwitness.comparison.report import Report
from bitwitness.comparison.runs import RowSink, Settings, compare_sources
from bitwitness.config.recording import ranges
from bitwitness.errors import UsageError
from bitwitness.store.folder import Run
from bitwitness.store.opening import open_source
from bitwitness.store.source import Source

Recording = str | os.PathLike[str] | Run
Numbers = int | str | Sequence[int] | None
_MOST = 10**6  # numbers of one range: a slip such as 0-10000000000 shall not fill the memory


def compare(
    a: Recording,
    b: Recording,
    *,
    modules: Mapping[str, str] | None = None,
    ranks: Numbers = None,
    steps: Numbers = None,
    sinks: Sequence[RowSink] = (),
    progress: Callable[[int, int], None] = lambda _done, _all: None,
) -> Report:
    """Find where two recorded runs part.

    Parameters
    ----------
    a, b
        Run folders, dumps of msprobe or folders of Ascend dump files; ``b`` is the one to compare with.
    modules
        Module paths of A and their names in B, ``*`` for any part; proposed from the two structures by default.
    ranks, steps
        Only these: a number, several, or a text such as ``"0-3,7"``; all that both have by default.
    sinks
        Are shown each compared step, to write its rows somewhere.
    progress
        Told of (steps done, steps in all).

    Returns
    -------
    Report
        ``first`` is the first operator that made an error (None if none did), ``conclusion`` one sentence for all,
        ``to_dict()`` what ``bitwitness compare --json`` writes.

    Raises
    ------
    UsageError
        If one of them cannot be read, or they have no rank or no step in common.

    """
    left, right = (_opened(one, name) for one, name in ((a, "a"), (b, "b")))
    names = proposed(left, right) if modules is None else modules
    settings = Settings(modules=Renamed(names), ranks=_numbers(ranks, "ranks"), steps=_numbers(steps, "steps"))
    return compare_sources(left, right, settings, sinks=sinks, progress=progress)


def _opened(recording: Recording, name: str) -> Source:
    if not isinstance(recording, str | os.PathLike | Run):
        raise UsageError(f"compare: {name} is {type(recording).__name__}; expected a path or a Run")
    return open_source(recording.path if isinstance(recording, Run) else recording)


def _numbers(given: Numbers, name: str) -> list[int] | None:
    if given is None:
        return None
    if isinstance(given, str):
        return [
            number for first, last in ranges(given, name) or () for number in range(first, min(last, first + _MOST) + 1)
        ]
    listed = [given] if isinstance(given, int) else list(given) if isinstance(given, Iterable) else [given]
    if not all(isinstance(number, int) and not isinstance(number, bool) for number in listed):
        raise UsageError(f"compare: {name} = {given!r}; expected a number, several, or a text such as '0-3,7'")
    return listed
