"""Cases in processes of their own: what crashes or hangs is ended, told, and does not end the rest; a run can be resumed."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import TimeoutError as Late
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from pebble import ProcessExpired, ProcessFuture, ProcessPool

from bitwitness.files.reading import read_text
from bitwitness.finding import to_jsonable
from bitwitness.precheck.attempt import Terms, attempt_all, cases_in
from bitwitness.trial.result import CRASH, ERROR, TIMEOUT, CaseResult

Group = Mapping[str, Any]
"""Cases that one process tries after one another: ``key``, unique; and what `attempt_all` makes them of."""
Heard = Callable[[Sequence[CaseResult]], None]


def run_groups(
    groups: Sequence[Group],
    terms: Terms,
    *,
    done: Path,
    processes: int = 1,
    seconds: float = 120.0,
    heard: Heard | None = None,
) -> list[CaseResult]:
    """Try groups of cases, and return the results of all, in the order of the groups.

    Parameters
    ----------
    groups
        What is to be tried.
    terms
        How.
    done
        A file of what has been tried, a JSON line for each group. Groups that it holds are not tried again.
    processes
        So many at a time. Each is another Python, which imports torch first.
    seconds
        After which a group is stopped. Each of its cases is then tried alone, for as long.
    heard
        Called with the results of each group as it ends.

    """
    results = _done(done)
    left = [g for g in groups if g["key"] not in results]
    with done.open("a", encoding="utf-8") as file, _pool(processes) as pool:
        for group, found in _tried(pool, left, terms, seconds):
            results[group["key"]] = found
            line = {"key": group["key"], "results": [to_jsonable(r.as_dict()) for r in found]}
            file.write(json.dumps(line, allow_nan=False) + "\n")
            file.flush()
            os.fsync(file.fileno())
            if heard is not None:
                heard(found)
    return [r for g in groups for r in results[g["key"]]]


def _pool(processes: int) -> ProcessPool:
    return ProcessPool(max_workers=processes, context=get_context("spawn"))


def _tried(
    pool: ProcessPool, groups: Sequence[Group], terms: Terms, seconds: float
) -> Iterator[tuple[Group, list[CaseResult]]]:

    def asked(of: Sequence[Group]) -> list[tuple[Group, ProcessFuture[Any]]]:
        return [(g, pool.schedule(attempt_all, args=[g, terms], timeout=seconds)) for g in of]

    for group, future in asked(groups):
        ended, found = _answer(future, group, seconds)
        if not ended and len(parts := _alone(pool, group, terms, seconds)) > 1:  # which one it was, they tell alone
            found = [r for part, f in asked(parts) for r in _answer(f, part, seconds)[1]]
        yield group, found


def _answer(future: ProcessFuture[Any], group: Group, seconds: float) -> tuple[bool, list[CaseResult]]:
    """Return whether a group ended well, and its results; one that says how it ended, where it did not."""
    try:
        return True, [CaseResult.from_dict(one) for one in future.result()]
    except Late:
        verdict, reason = TIMEOUT, f"it had not ended after {seconds:g} seconds, and was stopped"
    except ProcessExpired as error:
        verdict, reason = CRASH, f"its process died ({_how(error.exitcode)})"
    except Exception as error:  # what cannot be made, or sent back
        verdict, reason = ERROR, f"{type(error).__name__}: {error}"
    name, operator = group.get("name", group["key"]), group.get("operator", group["key"])
    return False, [CaseResult(name, operator, group.get("dtype", ""), group.get("shapes", ""), verdict, reason)]


def _how(code: int) -> str:
    return f"signal {-code}" if code < 0 else f"exit code {code}"


def _alone(pool: ProcessPool, group: Group, terms: Terms, seconds: float) -> list[Group]:
    """Return a group's cases one by one, as groups; none where they cannot be listed."""
    try:
        cases = pool.schedule(cases_in, args=[group, terms], timeout=seconds).result()
    except Exception:
        return []
    heads = ("name", "operator", "dtype", "shapes")
    return [{"kind": group["kind"], "key": c["name"], "cases": [c], **{h: c[h] for h in heads}} for c in cases]


def _done(path: Path) -> dict[str, list[CaseResult]]:
    """Return the results that a file holds by group; a line that was not written whole is tried again."""
    found: dict[str, list[CaseResult]] = {}
    if not path.exists():
        return found
    for line in read_text(path, "what was tried before, one JSON object a line").splitlines():
        try:
            entry = json.loads(line)
            found[entry["key"]] = [CaseResult.from_dict(one) for one in entry["results"]]
        except (ValueError, KeyError, TypeError):
            continue
    return found
