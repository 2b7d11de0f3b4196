"""What a pre-check of a run takes its cases from: a recording of ours, or a folder of msprobe's."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from fnmatch import fnmatchcase
from pathlib import Path

from bitwitness.errors import UsageError
from bitwitness.oracle.names import canonical
from bitwitness.precheck.case import Case
from bitwitness.precheck.msprobe import dumps_in, msprobe_cases
from bitwitness.precheck.recorded import recorded_cases
from bitwitness.store.opening import open_source


def run_cases(run: str, *, only: Iterable[str] = (), site: str = "", alike: bool = True) -> Iterator[Case]:
    """Yield the cases of a run.

    Parameters
    ----------
    run
        A folder.
    only
        Globs of operators' names: full (``aten.mm.default``), bare (``mm``) or common ones (``matmul``).
    site, alike
        As `recorded.recorded_cases` has them.

    Raises
    ------
    UsageError
        If there is no such folder, or nothing in it that could be tried.

    """
    folder, wanted = Path(run), list(only)
    if not folder.exists():
        raise UsageError(f"{run} does not exist; expected the folder of a recording (bitwitness record, msprobe)")
    dumps = dumps_in(folder) if folder.is_dir() and not (folder / "run.json").is_file() else []
    found: Iterator[Case]
    if dumps:
        found = (
            case
            for dump in dumps
            for case in msprobe_cases(dump, alike=alike)
            if not site or case.name.startswith(site)
        )
    else:
        source = open_source(run)
        if source.kind != "bitwitness":
            raise UsageError(f"{run} is a recording of {source.kind}'s, of which no operator can be run again")
        found = recorded_cases(source, site=site, alike=alike)
    for case in found:
        if not wanted or any(_is(case.operator, glob) for glob in wanted):
            yield case


def _is(operator: str, glob: str) -> bool:
    parts = operator.split(".")
    bare = parts[1] if len(parts) == 3 else parts[-1]
    return any(fnmatchcase(name, glob) for name in (operator, bare, canonical(bare)))
