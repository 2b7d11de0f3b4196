"""A Python object by the name that a user gives it on the command line: ``FILE.py:NAME`` or ``package.module:NAME``."""

from __future__ import annotations

import sys
from difflib import get_close_matches
from importlib import import_module, util
from pathlib import Path
from typing import Any

from bitwitness.errors import UsageError

_LIKE = 0.75
"""How much alike a name is that may be meant, as difflib measures it: a letter of four may differ."""


def named(name: str) -> Any:
    """Return the object; the file's folder is where its own imports look first, as when it is run.

    Raises
    ------
    UsageError
        If there is no such file, module or object, or importing it fails.

    """
    home, _, attribute = name.rpartition(":")
    if not home or not attribute:
        raise UsageError(f"{name!r} names no object; expected FILE.py:NAME or package.module:NAME")
    try:
        found = _from_file(Path(home)) if home.endswith(".py") else import_module(home)
    except Exception as error:
        raise UsageError(f"{home} cannot be imported: {type(error).__name__}: {error}") from error
    for part in attribute.split("."):
        if not hasattr(found, part):
            near = get_close_matches(part, dir(found), n=1, cutoff=_LIKE)
            raise UsageError(f"{home} has no {attribute}" + (f"; did you mean {near[0]}?" if near else ""))
        found = getattr(found, part)
    return found


def _from_file(path: Path) -> Any:
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path}")
    name = path.stem
    known = sys.modules.get(name)
    if known is not None and Path(str(getattr(known, "__file__", ""))).resolve() == path.resolve():
        return known
    sys.path.insert(0, str(path.resolve().parent))
    spec = util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is no Python file")
    module = util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
