"""Which modules are watched now: a second guard on one of them is refused, and each judges its own parameters."""

from __future__ import annotations

from torch import nn

from bitwitness.guard.watch import Watch
from bitwitness.session.session import sessions


def watched_roots(kind: type[Watch] = Watch) -> list[nn.Module]:
    """Return the modules whose steps are judged now, by whom of a kind."""
    return [session.root for session in sessions() if any(isinstance(one, kind) for one in session.instruments)]


def unguarded_among(parameters: list[nn.Parameter]) -> list[nn.Parameter]:
    """Return those parameters that nobody watches."""
    watched = {id(p) for root in watched_roots() for p in root.parameters()} if parameters else set()
    return [p for p in parameters if id(p) not in watched]
