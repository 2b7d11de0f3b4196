"""Tells of devices that somebody has cleared, at once and with a short patience: a person waits for it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from bitwitness.config import AlertsConfig
from bitwitness.files.shown import shown
from bitwitness.respond.alerts.events import cleared_event
from bitwitness.respond.alerts.exposure import Key
from bitwitness.respond.alerts.outlet import targets_of
from bitwitness.store.warned import Clearance, Warned


def tell_of(config: AlertsConfig, run: Path, done: Sequence[tuple[Warned, Clearance]], *, lives: bool) -> list[str]:
    """Send an event for each device to whom the run's configuration names; return why one was not reached, for each.

    The text file of a run that has ended, which stays for its Warning, goes; one that lives writes its own anew.
    """
    events = [
        cleared_event(one.device, one.rank, str(run), step=one.since, by=how.by, reason=how.reason) for one, how in done
    ]
    untold = []
    for target in targets_of(config):
        try:
            for event in events:
                target.deliver(event)
        except (OSError, ValueError) as error:
            untold.append(f"{shown(target.name)}: {shown(error)}")
    if config.prometheus_textfile is not None and not lives:
        for one, _ in done:
            with suppress(OSError):
                (Path(config.prometheus_textfile) / Key(str(run), one.rank).file).unlink(missing_ok=True)
    return untold
