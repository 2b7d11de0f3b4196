"""Processes that a guarded script starts by ``multiprocessing``: what trains in them is guarded there."""

from __future__ import annotations

import functools
import multiprocessing
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

from bitwitness.config import Config
from bitwitness.guard.childstops import ChildStops, telling
from bitwitness.respond.final import PROCESS
from bitwitness.session.forked import starting_worker

_PROCESS: Any = BaseProcess
_OTHERS = ("torch.utils.data", "multiprocessing.managers", "multiprocessing.resource", "multiprocessing.forkserver")
"""Modules whose processes load data, or serve objects: nothing is trained in them."""
_SPAWNED = "torch.multiprocessing.spawn"

Watch = Callable[[Config], AbstractContextManager[Any]]


@dataclass(frozen=True)
class GuardedRun:
    """Stands in for a process's ``run`` in the child; it can be pickled where the process can."""

    process: BaseProcess
    watch: Watch
    config: Config
    original: Callable[[], Any] | None
    mouth: Connection

    def __call__(self) -> None:
        """Run what the process was made for, under guard."""
        _put_back(self.process, self.original)
        PROCESS.also(telling(self.mouth))
        with self.watch(self.config):
            self.process.run()


@contextmanager
def children_guarded(config: Config, watch: Watch, say: Callable[[str], None]) -> Iterator[None]:
    """Have every process that is started meanwhile guard what is trained in it.

    Parameters
    ----------
    config
        How; a child's records go to ``out`` with the process's name behind.
    watch
        Returns the context in which a child runs; a name that can be imported.
    say
        Told of processes that cannot be guarded.

    """
    original = _PROCESS.start
    here = os.getpid()
    stops = ChildStops(say)

    @functools.wraps(original)
    def start(process: BaseProcess) -> None:
        if os.getpid() != here:
            original(process)
            return
        with starting_worker():
            if _may_train(process):
                _start_guarded(process, original, (_config_of(process, config), watch), stops, say)
            else:
                original(process)

    _PROCESS.start = start
    try:
        yield
    finally:
        if _PROCESS.start is start:
            _PROCESS.start = original
        stops.close()


def _start_guarded(
    process: BaseProcess,
    start: Callable[[BaseProcess], None],
    how: tuple[Config, Watch],
    stops: ChildStops,
    say: Callable[[str], None],
) -> None:
    own = vars(process).get("run")
    if problem := _problem(process):
        start(process)
        say(f"what the process {process.name} trains is not guarded: {problem}")
        return
    config, watch = how
    ear, mouth = stops.line()
    process.run = GuardedRun(process, watch, config, own, mouth)  # type: ignore[method-assign]
    failed = None
    try:
        start(process)
        stops.listen(process, ear)
    except Exception as error:
        if getattr(process, "_popen", None) is not None:
            raise
        failed = error
        ear.close()
    finally:
        mouth.close()
        _put_back(process, own)
    if failed is not None:
        start(process)  # raises the same where it was not ours
        say(f"what the process {process.name} trains is not guarded: it does not start with the guard ({failed})")


def _put_back(process: BaseProcess, run: Callable[[], Any] | None) -> None:
    if run is None:
        vars(process).pop("run", None)
    else:
        process.run = run  # type: ignore[method-assign]


def _problem(process: BaseProcess) -> str | None:
    """Say why the guard does not reach the child, if so: it travels among the attributes of a process that is pickled."""
    if not hasattr(process, "__dict__"):
        return "its class has no attributes of its own"
    kind: Any = type(process)
    pickles_itself = (
        hasattr(kind, "__getstate__") and kind.__getstate__ is not getattr(object, "__getstate__", None)
    ) or any("__reduce__" in vars(base) or "__reduce_ex__" in vars(base) for base in kind.__mro__[:-1])
    if pickles_itself and _method(process) != "fork":
        return f"{kind.__name__} says itself what is pickled of it"
    return None


def _method(process: BaseProcess) -> str:
    """Return how the process is started: fork, spawn or forkserver."""
    method = getattr(process, "_start_method", None)
    return str(method or multiprocessing.get_start_method())


def _may_train(process: BaseProcess) -> bool:
    return not _home(process).startswith(_OTHERS)


def _config_of(process: BaseProcess, config: Config) -> Config:
    # What torch.multiprocessing.spawn starts is the training itself; it keeps the name that was asked for.
    if config.out is None or _home(process).startswith(_SPAWNED):
        return config
    return replace(config, out=f"{config.out}-{process.name.replace(os.sep, '-').replace(':', '-')}")


def _home(process: BaseProcess) -> str:
    """Return the module of what a process runs."""
    target: Any = getattr(process, "_target", None)
    while isinstance(target, functools.partial):
        target = target.func
    return str(getattr(target, "__module__", None) or type(process).__module__)
