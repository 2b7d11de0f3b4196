"""``bw.compare(a, b)``: two recordings by their folders; what ``bitwitness compare`` prints, as an object."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence

from bitwitness.comparison.renamed import Mapping as Renamed
from bitwitness.comparison.renamed import proposed
from bitwitness.comparison.runs import Report, RowSink, Settings, compare_sources
from bitwitness.store.folder import Run
from bitwitness.store.opening import open_source

Recording = str | os.PathLike[str] | Run


def compare(
    a: Recording,
    b: Recording,
    *,
    modules: Mapping[str, str] | None = None,
    ranks: Sequence[int] | None = None,
    steps: Sequence[int] | None = None,
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
        Only these; all that both have by default.
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
    left, right = (open_source(one.path if isinstance(one, Run) else one) for one in (a, b))
    names = proposed(left, right) if modules is None else modules
    settings = Settings(modules=Renamed(names), ranks=ranks, steps=steps)
    return compare_sources(left, right, settings, sinks=sinks, progress=progress)
