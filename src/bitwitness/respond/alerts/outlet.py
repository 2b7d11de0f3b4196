"""What a process tells a fleet: one port, one text file a model, one queue for each who takes events, for all its guards."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from bitwitness.config import AlertsConfig
from bitwitness.config.addresses import host_and_port
from bitwitness.respond.alerts.delivery import Delivery
from bitwitness.respond.alerts.exposure import Exposure, Key
from bitwitness.respond.alerts.metrics import Row, Source
from bitwitness.respond.alerts.targets import HttpAddress, Stderr, Syslog, Target, UnixSocket
from bitwitness.session.forked import inert_in_children, still_while_forking

CLOSING_S = 0.8
"""Seconds that the end of a training waits for who takes events, at the most, for all of them together."""
_HIGHEST_PORT = 65535


def on(config: AlertsConfig) -> bool:
    """Whether anybody is to be told."""
    return config != AlertsConfig()


def targets_of(config: AlertsConfig) -> list[Target]:
    """Return who takes events."""
    found: list[Target] = []
    if config.health_socket is not None:
        found.append(UnixSocket(config.health_socket))
    if config.health_url is not None:
        found.append(HttpAddress(config.health_url))
    logs: dict[str, Callable[[], Target]] = {"stderr": Stderr, "syslog": Syslog}
    return found + [logs[name]() for name in dict.fromkeys(config.log)]


class Outlet:
    """One process's; see `outlet_of`."""

    def __init__(self, config: AlertsConfig, local_rank: int, say: Callable[[str], None]) -> None:
        self._deliveries = [Delivery(target, say) for target in targets_of(config)]
        address = None
        if config.prometheus is not None:
            host, port = host_and_port(config.prometheus)
            address = host, port + local_rank
            if address[1] > _HIGHEST_PORT:
                say(f"no metrics are served: port {port} and local rank {local_rank} are more than {_HIGHEST_PORT}")
                address = None
        self._exposure = Exposure(address, config.prometheus_textfile, say)
        still_while_forking(self._exposure)
        inert_in_children(self._exposure)

    def join(self, key: Key, source: Source) -> None:
        """Show the numbers of one more guard."""
        self._exposure.join(key, source)

    def put(self, event: Mapping[str, Any]) -> None:
        """Tell of an event; returns at once."""
        for delivery in self._deliveries:
            delivery.put(event)

    @property
    def undelivered(self) -> int:
        """Events that nobody took, counted for each who was to take them."""
        return sum(delivery.undelivered for delivery in self._deliveries)

    def flush(self, say: Callable[[str], None]) -> None:
        """Wait `CLOSING_S` at the most for what is under way; what is left then is given up, and said. Take no more."""
        until = time.monotonic() + CLOSING_S
        for delivery in self._deliveries:
            if lost := delivery.close(until):
                say(f"{delivery.name}: {lost} event{'s' * (lost > 1)} not taken before the end; the run folder has all")

    def leave(self, key: Key, *, keep: bool, say: Callable[[str], None]) -> bool:
        """Show a guard no more; the last one closes it all. Return whether it was the last."""
        if self._exposure.leave(key, keep=keep):
            return False
        self.flush(say)
        self._exposure.close()
        return True


_OPEN: dict[tuple[int, AlertsConfig, int], Outlet] = {}
"""By process and configuration: a port is a process's, and a process may train several models."""
_LOCK = threading.Lock()


def join(
    config: AlertsConfig, local_rank: int, key: Key, numbers: Callable[[Outlet], Row], say: Callable[[str], None]
) -> tuple[Outlet, Callable[[bool], None]]:
    """Return this process's outlet, which shows ``numbers`` from now on, and what leaves it (``keep`` its text file)."""
    place = os.getpid(), config, local_rank
    with _LOCK:
        outlet = _OPEN.get(place) or _OPEN.setdefault(place, Outlet(config, local_rank, say))
        outlet.join(key, partial(numbers, outlet))
    return outlet, partial(_leave, place, outlet, key, say)


def _leave(
    place: tuple[int, AlertsConfig, int], outlet: Outlet, key: Key, say: Callable[[str], None], keep: bool
) -> None:
    with _LOCK:
        if outlet.leave(key, keep=keep, say=say) and _OPEN.get(place) is outlet:
            del _OPEN[place]
