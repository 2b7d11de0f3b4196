"""Which modules are watched now: a second guard on one of them is refused, and each judges its own parameters."""

from __future__ import annotations

from torch import nn

from bitwitness.capture.structure import tensors_of
from bitwitness.finding import Finding
from bitwitness.guard.watch import Watch
from bitwitness.session.session import sessions


def watched_roots(kind: type[Watch] = Watch) -> list[nn.Module]:
    """Return the modules whose steps are judged now, by whom of a kind."""
    return [root for root, _ in _watched(kind)]


def unguarded_among(parameters: list[nn.Parameter], *, fed: bool) -> list[nn.Parameter]:
    """Return those parameters that nobody watches.

    ``fed``: also those of a model that was given, in this step, what another had computed: its own guard's re-executions begin
    with that, and tell nothing of it.
    """
    trusted = [root for root, watch in _watched(Watch) if not (fed and _was_fed(watch))] if parameters else []
    watched = {id(p) for root in trusted for p in root.parameters()}
    return [p for p in parameters if id(p) not in watched]


def seen_beside(own: nn.Module, rank: int) -> list[Finding]:
    """Return what the guards of other models have seen fail in passes that gave this one its gradients, and not judged yet.

    A discriminator computes wrongly in its generator's step: the generator's gradients come from there.
    """
    records = [(watch, watch.reader.root.record) for root, watch in _watched(Watch) if root is not own]
    deep = [(watch, record) for watch, record in records if watch.is_deep(record.number)]
    mine = {id(p) for p in own.parameters()} if deep else set()
    found: list[Finding] = []
    for watch, record in deep:
        if any(id(p) in mine for given in record.others() for p in given):
            found += watch.operators.so_far(record.step, rank)
    return found


def _watched(kind: type[Watch]) -> list[tuple[nn.Module, Watch]]:
    found = [(session.root, [one for one in session.instruments if isinstance(one, kind)]) for session in sessions()]
    return [(root, watches[0]) for root, watches in found if watches]


def _was_fed(watch: Watch) -> bool:
    forwards = watch.reader.root.record.forwards
    return any(t.requires_grad for one in forwards for t in tensors_of((one.args, one.kwargs)))
