"""What of a command line may be recorded: an allow-list, since nobody can list what a secret looks like.

Kept are the script, the names of options, numbers and switches, paths that exist on this machine, and the plain values
of options that say what is trained (``--model gpt2``). Everything else becomes ``***``; the value of an option whose
name speaks of a secret always does.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence

HIDDEN = "***"

_SWITCHES = frozenset({"true", "false", "yes", "no", "on", "off", "none", "null", "auto"})
_TELLING = frozenset(
    {"act", "backend", "config", "dataset", "device", "dtype", "mode", "model", "optim", "optimizer"}
    | {"precision", "scheduler", "strategy", "task"}
)
_SECRET = frozenset(
    {"apikey", "auth", "credential", "credentials", "key", "keys", "pass", "passwd", "password"}
    | {"pat", "pin", "pwd", "secret", "token"}
)
_OPTION = re.compile(r"--[A-Za-z][\w.-]*|-[a-z][a-z_-]*|[+~]{0,2}[a-z_][a-z0-9_]*([./][a-z0-9_]+)*")
_NUMBER = re.compile(r"[+-]?(\d[\d_]*\.?\d*|\.\d+)(e[+-]?\d+)?", re.IGNORECASE)
_PLAIN = re.compile(r"[\w.+/-]{1,64}")


def redacted(arguments: Sequence[str]) -> list[str]:
    """Return a command line with everything left out that is not known to be harmless; its length is the same."""
    result: list[str] = []
    option = ""
    for position, argument in enumerate(arguments):
        name, equals, value = argument.partition("=")
        if position == 0 or argument == "--":
            result.append(argument)
            option = ""
        elif value.strip("=") and _OPTION.fullmatch(name):
            result.append(f"{name}={_shown(value, name)}")
            option = ""
        elif not equals and argument.startswith("-") and _OPTION.fullmatch(argument):
            result.append(argument)
            option = argument
        else:
            result.append(_shown(argument, option))
            option = option if _words(option) & _SECRET else ""  # a secret may be of several words
    return result


def says_secret(name: str) -> bool:
    """Tell whether a name speaks of a secret."""
    return bool(_words(name) & _SECRET)


def _shown(value: str, option: str) -> str:
    if _words(option) & _SECRET:
        return HIDDEN
    if _NUMBER.fullmatch(value) or value.lower() in _SWITCHES or os.path.exists(value):  # noqa: PTH110 - never raises, whatever it is given
        return value
    return value if _words(option) & _TELLING and _PLAIN.fullmatch(value) else HIDDEN


def _words(option: str) -> set[str]:
    return set(re.split(r"[-_.+~/]+", option.lower()))
