"""What did not come as it was given: out of a collective, or from a backward to the use of its gradients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from bitwitness.site import Site


@dataclass(frozen=True, slots=True)
class Mismatch:
    """A proven loss on the way; the same on every rank.

    Attributes
    ----------
    text
        What is wrong.
    ranks
        Where it went wrong, by the guard's numbers; empty where that is not known, or on all.
    site
        The value.
    evidence
        What is known of it, ready for JSON, by the word that names it: ``collective`` or ``gradient``.
    did
        What such a rank did, in words that follow its name.

    """

    text: str
    ranks: tuple[int, ...]
    site: Site
    evidence: dict[str, dict[str, Any]]
    did: str
