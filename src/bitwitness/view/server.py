"""A server for one browser on this machine: a page, what it shows as JSON, and nothing else.

It listens on 127.0.0.1 alone. Each path begins with a random token, without which everything is refused; so are other hosts'
names (a page elsewhere may point its name at this machine) and all methods but GET and HEAD. What is sent comes from a list of
files read at the start, or is made from the runs' own rows: no path of a request is ever opened.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from bitwitness.errors import UsageError

HOST = "127.0.0.1"
_LONGEST = 4_096
"""Characters of a path: those that our own pages ask for are shorter."""
_POLICY = (
    "default-src 'none'; script-src 'self' 'wasm-unsafe-eval'; style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:; "
    "font-src 'self'; connect-src 'self'; worker-src 'self' blob:; frame-src 'self'; frame-ancestors 'self'; base-uri 'self'; "
    "form-action 'none'"
)
_HEADERS = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}

Query = Mapping[str, str]
Answer = Callable[[Query], Any]
"""Makes JSON from a request's query; raises `UsageError` where that asks for what is not there."""


@dataclass(frozen=True, slots=True)
class Pages:
    """What a server has to give: files by path (kind, contents), and answers by path."""

    files: Mapping[str, tuple[str, bytes]]
    answers: Mapping[str, Answer]


class Server(ThreadingHTTPServer):
    """Serves pages below a token; ``address`` is where.

    Parameters
    ----------
    pages
        Makes them, given the prefix that their addresses need.
    port
        0: any that is free.

    Raises
    ------
    UsageError
        If the port is taken, or none.

    """

    daemon_threads = True

    def __init__(self, pages: Callable[[str], Pages], port: int = 0) -> None:
        self.token = secrets.token_urlsafe(24)
        self.prefix = f"/{self.token}/"
        try:
            super().__init__((HOST, port), _Handler)
        except (OSError, OverflowError) as error:
            said = getattr(error, "strerror", None) or str(error)
            raise UsageError(
                f"--port {port}: cannot listen there ({said}); expected a free port, or 0 for any"
            ) from error
        self.pages = pages(self.prefix)

    @property
    def address(self) -> str:
        """Where the page is."""
        return f"http://{HOST}:{self.server_port}{self.prefix}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of browsers that hang up."""


class _Handler(BaseHTTPRequestHandler):
    server: Server
    server_version, sys_version = "bitwitness", ""
    protocol_version = "HTTP/1.1"
    timeout = 60  # of a connection on which nothing comes

    def __getattr__(self, name: str) -> Callable[[], None]:
        """Answer every other method, known or not."""
        if name.startswith("do_"):
            return partial(self._refuse, HTTPStatus.METHOD_NOT_ALLOWED)
        raise AttributeError(name)

    def do_GET(self) -> None:
        """Answer."""
        self._answer()

    def do_HEAD(self) -> None:
        """Answer without the contents."""
        self._answer()

    def _answer(self) -> None:
        if len(self.path) > _LONGEST:
            return self._refuse(HTTPStatus.REQUEST_URI_TOO_LONG)
        port = self.server.server_port
        if self.headers.get_all("Host") not in ([f"{HOST}:{port}"], [f"localhost:{port}"]):
            return self._refuse(HTTPStatus.FORBIDDEN)
        try:
            parts = urlsplit(self.path)
        except ValueError:
            return self._refuse(HTTPStatus.BAD_REQUEST)
        token, slash, rest = parts.path.removeprefix("/").partition("/")
        if not slash or not secrets.compare_digest(
            token.encode("utf-8", "surrogateescape"), self.server.token.encode()
        ):
            return self._refuse(HTTPStatus.FORBIDDEN)
        if rest in self.server.pages.files:
            return self._send(HTTPStatus.OK, *self.server.pages.files[rest])
        answer = self.server.pages.answers.get(rest)
        if answer is None:
            return self._refuse(HTTPStatus.NOT_FOUND)
        return self._json(answer, parts.query)

    def _json(self, answer: Answer, query: str) -> None:
        try:
            asked = dict(parse_qsl(query, keep_blank_values=True, strict_parsing=bool(query), max_num_fields=20))
            body = json.dumps(answer(asked), allow_nan=False).encode()
        except (UsageError, ValueError) as error:
            # A sentence of ours, or what a query lacks to be one.
            text = str(error) if isinstance(error, UsageError) else "the query asks for nothing that is here"
            return self._send(HTTPStatus.BAD_REQUEST, "application/json", json.dumps({"error": text}).encode())
        return self._send(HTTPStatus.OK, "application/json", body)

    def _refuse(self, status: HTTPStatus) -> None:
        self.close_connection = True  # what else was sent with it is not read
        self.request_version = (
            self.protocol_version
        )  # to a request that names none, http.server answers without a status
        self._send(status, "text/plain; charset=utf-8", f"{status.value} {status.phrase}\n".encode())

    def _send(self, status: HTTPStatus, kind: str, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        for name, value in _HEADERS.items():
            self.send_header(name, value)
        if status is HTTPStatus.METHOD_NOT_ALLOWED:
            self.send_header("Allow", "GET, HEAD")
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Refuse a request that is none: in http.server's own words some of these are the server's fault."""
        del message, explain
        self._refuse(HTTPStatus(code if code < HTTPStatus.INTERNAL_SERVER_ERROR else HTTPStatus.BAD_REQUEST))

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - http.server's name
        """Say nothing of single requests."""
