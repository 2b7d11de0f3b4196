"""A re-execution calls what the training called, and reports nothing: neither to a trainer's sums, nor to anybody who reads."""

from __future__ import annotations

import io
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from typing import Any

from torch import nn

_REPORTERS = {"LightningModule": ("log", "log_dict")}
"""Classes by name (they need not be installed), and methods of theirs that add to sums kept elsewhere."""


@contextmanager
def quiet(root: nn.Module) -> Iterator[None]:
    """Have what modules of ``root`` report, print and log meanwhile come to nothing."""
    silenced: list[tuple[dict[str, Any], str, bool, Any]] = []
    for module in root.modules():
        for name in _methods(type(module)):
            own = vars(module)
            silenced.append((own, name, name in own, own.get(name)))
            own[name] = _nothing
    nowhere = io.StringIO()
    level = logging.root.manager.disable
    logging.disable(sys.maxsize)
    try:
        with redirect_stdout(nowhere), redirect_stderr(nowhere):
            yield
    finally:
        logging.disable(level)
        for own, name, there, before in reversed(silenced):
            if there:
                own[name] = before
            else:
                own.pop(name, None)


@contextmanager
def redirected(root: nn.Module, forward: Any) -> Iterator[None]:
    """Have the root's call go where it went in the training; ``forward`` stood in its own attribute then, or None."""
    names = vars(root)
    now = names.get("forward")
    if forward is not None:
        names["forward"] = forward
    try:
        yield
    finally:
        if now is None:
            names.pop("forward", None)
        else:
            names["forward"] = now


def _methods(kind: type) -> list[str]:
    return [name for base in kind.__mro__ for name in _REPORTERS.get(base.__name__, ())]


def _nothing(*_args: Any, **_kwargs: Any) -> None:
    """Stand for a method that reports."""
