"""Tells of devices that somebody has cleared, at once and with a short patience: a person waits for it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import suppress
from pathlib import Path

from bitwitness.config import AlertsConfig
from bitwitness.files.shown import shown
from bitwitness.respond.alerts.events import cleared_event
from bitwitness.respond.alerts.exposure import Key, prefix_of
from bitwitness.respond.alerts.outlet import targets_of
from bitwitness.store.warned import Clearance, Warned


def tell_of(config: AlertsConfig, run: Path, done: Sequence[tuple[Warned, Clearance]]) -> list[str]:
    """Send an event for each device to whom the run's configuration names; return who was told, and who was not and why."""
    events = [
        cleared_event(one.device, one.rank, str(run), step=one.since, by=how.by, reason=how.reason) for one, how in done
    ]
    lines = []
    for target in targets_of(config) if events else ():
        try:
            for event in events:
                target.deliver(event)
        except (OSError, ValueError) as error:
            lines.append(f"not told: {shown(target.name)}: {shown(error)}")
        else:
            lines.append(f"told: {shown(target.name)}")
    return lines


def remove_files(config: AlertsConfig, run: Path, ranks: Collection[int] | None) -> list[str]:
    """Take the text files away that a run which has ended left on this host, of some ranks or of all; return what was done."""
    if config.prometheus_textfile is None:
        return []
    folder = Path(config.prometheus_textfile)
    if ranks is None:
        files = list(folder.glob(f"{prefix_of(str(run))}*.prom"))
    else:
        files = [file for rank in ranks if (file := folder / Key(str(run), rank).file).exists()]
    gone = 0
    for file in files:
        with suppress(OSError):
            file.unlink()
            gone += 1
    return [f"{gone} of its text files taken out of {shown(folder)}"] if gone else []
