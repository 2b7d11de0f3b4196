"""torchrun's options, taken as they are and handed on, and what the launcher itself reads of them.

The names are torch's (``torch.distributed.run.get_args_parser``), kept here so that ``--help`` needs no torch; a test
compares them with torch's own.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from typing import Any

from bitwitness.errors import UsageError
from bitwitness.files.shown import shown

VALUED = (
    "--nnodes",
    "--node-rank",
    "--rdzv-backend",
    "--rdzv-endpoint",
    "--rdzv-id",
    "--rdzv-conf",
    "--master-addr",
    "--master-port",
    "--local-addr",
    "--monitor-interval",
    "--start-method",
    "--event-log-handler",
    "--role",
    "--log-dir",
    "--redirects",
    "--tee",
    "--local-ranks-filter",
    "--duplicate-stdout-filters",
    "--duplicate-stderr-filters",
    "--logs-specs",
    "--numa-binding",
    "--signals-to-handle",
    "--shutdown-timeout",
)
FLAGS = ("--standalone", "--module", "--no-python")
OURS = ("--nproc-per-node", "--max-restarts")
REFUSED = ("--run-path", "--virtual-local-rank")
_SHORT = {"--module": "-m", "--redirects": "-r", "--tee": "-t"}
_TOLD = {
    "--nnodes": "nodes, or MIN:MAX",
    "--module": "SCRIPT is a module's name",
    "--no-python": "SCRIPT is run as it is",
}


class _Pass(argparse.Action):
    """Keeps an option and its value, in the order given."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        del option_string  # a short name, say
        if self.dest in REFUSED:
            parser.error(f"{self.dest}: ranks run as processes of their own, by LOCAL_RANK; leave it out")
        value = () if self.nargs == 0 else (str(values),)
        namespace.torchrun = [*(namespace.torchrun or []), (self.dest, *value)]


def add_torchrun(parser: argparse.ArgumentParser) -> None:
    """Add torchrun's options, except those that `launch` has itself."""
    group = parser.add_argument_group("torchrun's options, as torchrun --help tells them")
    for name in (*VALUED, *FLAGS, *REFUSED):
        names = [*([_SHORT[name]] if name in _SHORT else []), name]
        names += [name[:2] + name[2:].replace("-", "_")] if "-" in name[2:] else []
        shape: dict[str, Any] = {"metavar": "VALUE"} if name in VALUED else {"nargs": 0}
        told = argparse.SUPPRESS if name in REFUSED else _TOLD.get(name, "")
        group.add_argument(*names, dest=name, action=_Pass, default=argparse.SUPPRESS, help=told, **shape)
    parser.set_defaults(torchrun=None)


class Given:
    """What was given of torchrun's options.

    Attributes
    ----------
    passed
        The options for torch's own parser.
    module, no_python
        What SCRIPT is.

    """

    def __init__(self, args: argparse.Namespace) -> None:
        self._given: Sequence[tuple[str, ...]] = args.torchrun or []
        self.module = self._flag("--module")
        self.no_python = self._flag("--no-python")
        if self.module and self.no_python:
            raise UsageError("--module and --no-python contradict each other; give one of them")
        self.passed = [
            f"{option[0]}={option[1]}" if len(option) > 1 else option[0]
            for option in self._given
            if option[0] not in ("--module", "--no-python")
        ]

    @property
    def alone(self) -> bool:
        """Whether the job has one node."""
        return self._value("--nnodes", "1").rpartition(":")[2] == "1"

    @property
    def shutdown_s(self) -> float:
        """Seconds that ranks have to end; torchrun's 30."""
        return float(self.number("--shutdown-timeout", None, os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "30")))

    @property
    def join_s(self) -> float:
        """Seconds that a node waits for the others; torch's 600."""
        told = dict(part.partition("=")[::2] for part in self._value("--rdzv-conf", "").split(","))
        given = told.get("join_timeout") or told.get("timeout") or "600"
        return float(_whole(given, "--rdzv-conf join_timeout"))

    def ranks(self, given: str | None) -> int:
        """Return how many ranks a node has; torchrun's words for "as many as there are devices" need torch."""
        text = given or os.environ.get("PET_NPROC_PER_NODE", "1")
        if text.isdecimal() and 0 < int(text) < 100_000:
            return int(text)
        if text not in ("auto", "gpu", "cpu", "xpu"):
            raise UsageError(f"--nproc-per-node {shown(text)}: expected a number, auto, gpu, cpu or xpu")
        from torch.distributed.run import determine_local_world_size

        try:
            return int(determine_local_world_size(text))
        except ValueError as error:
            raise UsageError(f"--nproc-per-node {text}: {error}") from error

    def number(self, name: str, given: int | None, otherwise: str | int) -> int:
        """Return a number that an option, its variable ``PET_…``, or neither gives."""
        text = str(given) if given is not None else self._value(name, str(otherwise))
        return _whole(text, name)

    def _value(self, name: str, otherwise: str) -> str:
        given = [option[1] for option in self._given if option[0] == name and len(option) > 1]
        variable = f"PET_{name.removeprefix('--').replace('-', '_').upper()}"
        return given[-1] if given else os.environ.get(variable, otherwise)

    def _flag(self, name: str) -> bool:
        variable = f"PET_{name.removeprefix('--').replace('-', '_').upper()}"
        return any(option[0] == name for option in self._given) or os.environ.get(variable, "0") not in ("", "0")


def _whole(text: str, name: str) -> int:
    if not (text.isdecimal() and len(text) < 10):
        raise UsageError(f"{name} {shown(text)}: expected a whole number, 0 or more")
    return int(text)
