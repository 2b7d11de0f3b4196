"""Python commands that a guarded script starts: nothing of the guard reaches what they train, so they are named."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import wraps
from pathlib import Path
from typing import Any

from bitwitness.capture.whosecode import is_users_file
from bitwitness.tap.patching import replaced

_PYTHON = re.compile(r"python(\d+(\.\d+)*)?(\.exe)?")
_LAUNCHERS = {"torchrun", "accelerate", "deepspeed", "fabric", "lightning"}
_TOOLS = {"bitwitness", "pip", "pytest", "mypy", "ruff", "IPython", "jupyter", "tensorboard", "wandb", "torch"}
_TRAINS = {"torch.distributed.run", "torch.distributed.launch"}
_WITH_VALUE = {"-W", "-X", "--check-hash-based-pycs"}
_NAMED = 3  # commands; a script that starts many starts the same


@contextmanager
def commands_named(say: Callable[[str], None]) -> Iterator[None]:
    """Name the Python scripts, modules and launchers that this process starts meanwhile, or becomes.

    Parameters
    ----------
    say
        Told of a command that may train, before it begins.

    """
    told: set[str] = set()

    def notice(command: object) -> None:
        with suppress(Exception):  # not ours: whatever it is, the script starts it
            words = words_of(command)
            text = shlex.join(words)
            if len(told) < _NAMED and text not in told and may_train(words):
                told.add(text)
                say(
                    f"the script starts `{text}`: what is trained there is not guarded; give that command "
                    "`-m bitwitness run` before its script"
                )

    with (
        _before(subprocess.Popen, "__init__", lambda args, kwargs: notice(_first(args[1:], kwargs, "args"))),
        _before(os, "system", lambda args, kwargs: notice(_first(args, kwargs, "command"))),
        _before(os, "execv", lambda args, _kwargs: notice(args[1])),
        _before(os, "execve", lambda args, _kwargs: notice(args[1])),
    ):
        yield


def words_of(command: object) -> list[str]:
    """Return a command's words; a line for the shell is split as a shell does."""
    if isinstance(command, bytes):
        command = os.fsdecode(command)
    if isinstance(command, str):
        return shlex.split(command)
    if isinstance(command, os.PathLike):
        return [os.fsdecode(command)]
    return [os.fsdecode(word) for word in command] if isinstance(command, Sequence) else []


def may_train(words: Sequence[str]) -> bool:
    """Tell whether a command runs Python code that is neither ours, nor Python's, nor an installed tool's."""
    if not words or any("bitwitness" in word for word in words):
        return False
    program = Path(words[0]).name
    if program in _LAUNCHERS:
        return True
    if program.endswith(".py"):
        return _is_users(words[0])
    if not _PYTHON.fullmatch(program) and words[0] != sys.executable:
        return False
    rest = iter(words[1:])
    for word in rest:
        if word == "-m":
            return _may_train_as_module(next(rest, ""))
        if word in _WITH_VALUE:
            next(rest, None)
        elif not word.startswith("-"):
            return _is_users(word)
        elif word.startswith("-c"):
            return False
    return False


def _may_train_as_module(name: str) -> bool:
    root = name.partition(".")[0]
    return name in _TRAINS or (bool(root) and root not in _TOOLS and root not in sys.stdlib_module_names)


def _is_users(script: str) -> bool:
    return script.endswith(".py") and is_users_file(str(Path(script).absolute()))


def _first(args: Sequence[Any], kwargs: dict[str, Any], name: str) -> object:
    return args[0] if args else kwargs.get(name)


@contextmanager
def _before(owner: Any, name: str, look: Callable[[tuple[Any, ...], dict[str, Any]], None]) -> Iterator[None]:
    """Look at the arguments of each call of a function."""

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            if inside:
                look(args, kwargs)
            return original(*args, **kwargs)

        return call

    inside = True
    try:
        with replaced(owner, name, wrap):
            yield
    finally:
        inside = False
