"""Ranks by their numbers in the whole job: a group of some of its ranks counts its own from zero."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from bitwitness.finding import Verdict

_NUMBERED = re.compile(r"\b(ranks? )(\d+(?:, \d+)*)")


def numbered_in_job(verdict: Verdict, members: Sequence[int]) -> Verdict:
    """Return a verdict of a group in which every rank has the number that the job gives it.

    ``members``: the group's ranks, by their numbers in the job; empty, or all of them in order: the verdict as it is.
    """
    if list(members) == list(range(len(members))):
        return verdict

    def renumbered(text: str) -> str:
        return _NUMBERED.sub(lambda m: m[1] + ", ".join(str(members[int(n)]) for n in m[2].split(", ")), text)

    def inside(value: Any) -> Any:
        if isinstance(value, str):
            return renumbered(value)
        if isinstance(value, dict):
            return {inside(key): inside(item) for key, item in value.items()}
        return [inside(item) for item in value] if isinstance(value, list | tuple) else value

    ranks = tuple(members[rank] for rank in verdict.ranks)
    return replace(verdict, ranks=ranks, message=renumbered(verdict.message), evidence=inside(verdict.evidence))
