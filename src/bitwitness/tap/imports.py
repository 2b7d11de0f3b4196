"""Something done once a module is there: now, or when the script imports it."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from typing import Any


@contextmanager
def when_imported(name: str, then: Callable[[], None]) -> Iterator[None]:
    """Call ``then`` once a module is imported, in the thread that imports it; at once if it is already.

    An error in ``then`` is the caller's where it is there already, and dropped where a script's import would fail of it.
    """
    if name in sys.modules:
        then()
        yield
        return
    finder = _Finder(name, then)
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        finder.name = ""
        with suppress(ValueError):
            sys.meta_path.remove(finder)


class _Finder(MetaPathFinder):
    """Finds a module as the others do, and has its loader tell when it is executed."""

    def __init__(self, name: str, then: Callable[[], None]) -> None:
        self.name, self._then = name, then

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        """Return the module's spec, once."""
        del path, target
        if fullname != self.name:
            return None
        self.name = ""  # whatever comes of it: an import that fails is not tried for twice
        spec = importlib.util.find_spec(fullname)
        loader: Any = None if spec is None else spec.loader
        if loader is None:
            return spec
        execute = loader.exec_module

        def exec_module(module: Any) -> None:
            execute(module)
            with suppress(Exception):
                self._then()

        loader.exec_module = exec_module
        return spec
