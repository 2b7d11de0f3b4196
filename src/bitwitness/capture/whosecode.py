"""Whose code something is, the script's or a library's, and which modules a piece of code goes to by name."""

from __future__ import annotations

import dis
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import resolve_name
from itertools import islice
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any

import torch

_PLACES = [sysconfig.get_path(kind) for kind in ("stdlib", "platstdlib", "purelib", "platlib")]
_INSTALLED = ("/site-packages/", "/dist-packages/", "/torchinductor_")
"""Where installers put libraries, those of another environment, too, and torch's compiler what it makes."""
_OURS = str(Path(__file__).parents[1])
_LIBRARIES = (*_PLACES, str(Path(torch.__file__).parent), _OURS, "<frozen")
_LOOKUPS = frozenset(
    ("globals", "eval", "exec", "import_module", "__import__", "_getframe", "currentframe", "attrgetter")
)
"""Names by which code gets at names that it does not mention."""


def is_users(code: CodeType) -> bool:
    """Tell whether a piece of code is the script's own, and not a library's."""
    return is_users_file(code.co_filename)


def is_users_file(name: str) -> bool:
    """Tell whether a file of Python code is the script's own, by its name."""
    return not name.startswith(_LIBRARIES) and not any(place in name for place in _INSTALLED)


def is_ours(value: object) -> bool:
    """Tell whether a value is a function of bitwitness, such as stands in torch's place for a while."""
    return isinstance(value, FunctionType) and value.__code__.co_filename.startswith(_OURS)


def is_users_kind(kind: type) -> bool:
    """Tell whether a class is the script's own, and not a library's."""
    module = sys.modules.get(kind.__module__)
    return kind.__module__ == "__main__" or (module is not None and is_users_module(module))


def is_users_module(module: ModuleType) -> bool:
    """Tell whether a module is the script's own, by its file."""
    place = getattr(module, "__file__", None)
    return isinstance(place, str) and is_users_file(place)


def looks_up(names: frozenset[str]) -> bool:
    """Tell whether code that mentions these names gets at others that it does not mention."""
    return bool(_LOOKUPS & names) or {"sys", "modules"} <= names


def users_modules() -> list[ModuleType]:
    """Return the script's own modules, as many as are imported by now."""
    return _users(list(sys.modules.values()))


def imported_since(count: int) -> list[ModuleType]:
    """Return the script's own modules that were imported since ``len(sys.modules)`` was ``count``."""
    return _users(islice(list(sys.modules.values()), count, None))


@dataclass(frozen=True, slots=True)
class CodeNames:
    """What a piece of code mentions, with the code inside it: all names, those of globals, and modules that it imports."""

    mentioned: frozenset[str]
    wanted: frozenset[str]
    imported: tuple[str, ...]


@lru_cache(maxsize=1 << 14)  # reading instructions is dear, and code is looked through whenever some of it is new
def names_in(code: CodeType) -> CodeNames:
    """Return what a piece of code mentions."""
    mentioned, wanted, imported = set(code.co_names), set(), []
    before: list[Any] = []
    for one in dis.get_instructions(code):
        if one.opname == "IMPORT_NAME":
            level = before[-2] if len(before) > 1 and isinstance(before[-2], int) else 0
            imported.append(f"{'.' * level}{one.argval}")
        elif one.opname.endswith(("_GLOBAL", "_NAME")):  # ``co_names`` mixes them with names of attributes
            wanted.add(str(one.argval))
        before.append(one.argval)
    inner = [names_in(constant) for constant in code.co_consts if isinstance(constant, CodeType)]
    return CodeNames(
        frozenset(mentioned.union(*(one.mentioned for one in inner))),
        frozenset(wanted.union(*(one.wanted for one in inner))),
        (*imported, *(name for one in inner for name in one.imported)),
    )


def imports_of(code: CodeType, names: dict[str, Any]) -> Iterator[ModuleType]:
    """Yield the modules that a piece of code imports when it runs, of those that are there. ``names``: its globals."""
    for name in names_in(code).imported:
        yield from _modules_named(name, names)


def _modules_named(name: str, names: dict[str, Any]) -> Iterator[ModuleType]:
    try:
        name = resolve_name(name, names.get("__package__"))
    except ImportError:
        return  # a relative import outside a package
    while name:
        if isinstance(module := sys.modules.get(name), ModuleType):
            yield module
        name = name.rpartition(".")[0]


def _users(values: Iterable[Any]) -> list[ModuleType]:
    return [value for value in values if isinstance(value, ModuleType) and is_users_module(value)]
