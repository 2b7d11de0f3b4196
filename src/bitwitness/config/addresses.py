"""Where alerts go: what an address of each kind must look like. Nothing is looked up or connected to."""

from __future__ import annotations

import ipaddress
from collections.abc import Callable
from contextlib import suppress
from urllib.parse import urlsplit

_LONGEST_SOCKET = 107  # bytes of a Unix socket's path: `sun_path` of unix(7), without its closing zero
_PORTS = range(1, 1 << 16)


def host_and_port(text: str) -> tuple[str, int]:
    """Return an address and a port, of ``127.0.0.1:9500`` or ``[::1]:9500``; raises `ValueError`.

    Names are not looked up, ``localhost`` aside: a resolver that does not answer would hold a training up.
    """
    host, colon, port = text.rpartition(":")
    if not colon or not (port.isascii() and port.isdigit() and int(port) in _PORTS):
        raise ValueError(text)
    if host == "localhost":
        return "127.0.0.1", int(port)
    inner = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    if ipaddress.ip_address(inner).version == 6 and inner == host:
        raise ValueError(text)
    return inner, int(port)


def wrong_address(setting: str, value: str) -> str:
    """Return what was expected of a setting of ``[alerts]``, or nothing where its value can be meant."""
    expected, fits = _KINDS[setting]
    good = False
    with suppress(ValueError, UnicodeError):
        good = bool(value) and value.isprintable() and fits(value)
    return "" if good else expected


def _is_address(value: str) -> bool:
    host_and_port(value)
    return True


def _is_url(value: str) -> bool:
    parts = urlsplit(value)
    whole = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port is None or parts.port in _PORTS)
    return whole and "@" not in parts.netloc and value.isascii() and not set(" \\") & set(value)


_KINDS: dict[str, tuple[str, Callable[[str], bool]]] = {
    "prometheus": (
        "HOST:PORT, the host an IP address (IPv6 in brackets) or localhost, e.g. 127.0.0.1:9500",
        _is_address,
    ),
    "prometheus_textfile": (
        "a folder, e.g. /var/lib/node_exporter/textfile_collector",
        lambda value: "\0" not in value,
    ),
    "health_socket": (
        f"the path of a Unix socket, of at most {_LONGEST_SOCKET} bytes",
        lambda value: len(value.encode()) <= _LONGEST_SOCKET,
    ),
    "health_url": ("an address http://HOST[:PORT]/PATH or https://…, without a user's name or password", _is_url),
}
