"""Settings from a TOML file, the reference systems' variables, ``BITWITNESS_*`` and keywords; the later wins.

In the environment two underscores stand for a dot: ``BITWITNESS_TREND__Z=8`` is ``trend.z``.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

from bitwitness.config.dumpconfig import DumpConfig
from bitwitness.config.reference import read_reference
from bitwitness.config.schema import Config, all_kinds, from_flat, to_dict
from bitwitness.config.validated import sections_of
from bitwitness.config.values import nearest
from bitwitness.config.variables import NOT_SETTINGS
from bitwitness.errors import ConfigError, UsageError
from bitwitness.files.reading import read_text
from bitwitness.files.shown import quoted, shown

_MOST_BYTES = 1 << 20
_MOST_DOTS = 100  # of a key in TOML, whose reader takes a time that is the square of their number

PREFIX = "BITWITNESS_"


@dataclass(frozen=True, slots=True)
class Loaded:
    """A configuration, and what is to be said about the reference systems' variables it was read from."""

    config: Config
    warnings: tuple[str, ...] = ()


def load_config(
    source: Config | str | os.PathLike[str] | None = None,
    overrides: Mapping[str, Any] | None = None,
    environ: Mapping[str, str] | None = None,
) -> Loaded:
    """Put a configuration together.

    Parameters
    ----------
    source
        A TOML file; or a `Config`, which is taken as loaded already, so that only ``overrides`` apply to it.
    overrides
        Single settings, ``{"act": "stop"}``; of a section ``{"trend": {"z": 8}}``, ``{"trend.z": 8}`` or
        ``{"trend": TrendConfig(z=8)}``.
    environ
        The process's environment by default.

    Raises
    ------
    ConfigError
        For a file that cannot be read, an unknown key, or a value that is not of its kind.

    """
    keywords = _flat(overrides or {}, "a keyword")
    if isinstance(source, Config):
        return Loaded(from_flat(_flat(to_dict(source), "the given Config") | keywords))
    environ = os.environ if environ is None else environ
    tables = {} if source is None else _read_toml(Path(source))
    dump, warnings = _dump_section(tables, source)
    file = dump | _flat(tables, str(source))
    own = _from_environment(environ)
    levels = (file | own | keywords).get("feature.levels", "seed")
    reference = read_reference(environ, release_levels=levels == "release")
    return Loaded(from_flat(file | reference.values | own | keywords), (*warnings, *reference.warnings))


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        text = read_text(path, "a configuration in TOML", _MOST_BYTES)
    except UsageError as error:
        raise ConfigError(f"cannot read the configuration: {error}") from error
    if any(part.count(".") > _MOST_DOTS for part in re.split(r"[=,\n\[\]{}]", text)):
        raise ConfigError(
            f"{shown(path)} is not TOML that is understood: more than {_MOST_DOTS} dots in one key or value"
        )
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # ValueError: also a number of thousands of digits
        raise ConfigError(
            f"{shown(path)} is not TOML: {shown(error)}; expected key = value lines and [section] tables"
        ) from error


def _dump_section(tables: dict[str, Any], source: Any) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Take a section ``[dump_config]``, the reference system's, out of a file; return what it means, and what to say."""
    section = tables.pop("dump_config", None)
    if section is None:
        return {}, ()
    if not isinstance(section, dict):
        raise ConfigError(f"dump_config = {quoted(section)} in {shown(source)}: expected a section [dump_config]")
    dump = DumpConfig.from_mapping(section, f"[dump_config] of {source}")
    return dump.to_settings(), dump.warnings


def _flat(values: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return settings by their dotted names, each checked; ``where`` is named if one is not understood."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        if name in sections_of(Config):
            flat |= _flat({f"{name}.{key}": item for key, item in _items(name, value, where).items()}, where)
            continue
        kind = all_kinds().get(name)
        if kind is None:
            raise ConfigError(_unknown(name, value, where))
        try:
            flat[name] = kind.check(value)
        except ValueError:
            raise ConfigError(f"{name} = {quoted(value)} in {shown(where)}: expected {kind}") from None
    return flat


def _items(name: str, value: Any, where: str) -> dict[str, Any]:
    if is_dataclass(value) and type(value) is sections_of(Config)[name]:
        return {f.name: getattr(value, f.name) for f in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): item for key, item in value.items()}
    keys = ", ".join(f"{name}.{f.name}" for f in fields(sections_of(Config)[name]))
    raise ConfigError(f"{name} = {quoted(value)} in {shown(where)}: expected a section with the keys {keys}")


def _unknown(name: str, value: Any, where: str) -> str:
    known = all_kinds()
    hint = nearest(name, known)
    if not hint:  # a key written without its section
        hint = nearest(name.rpartition(".")[2], [key.rpartition(".")[2] for key in known])
    return f"unknown key {quoted(name)} (= {quoted(value)}) in {shown(where)}: expected one of the documented settings{hint}"


def _from_environment(environ: Mapping[str, str]) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for variable, text in environ.items():
        if not variable.startswith(PREFIX) or variable in NOT_SETTINGS:
            continue
        name = variable.removeprefix(PREFIX).lower().replace("__", ".")
        kind = all_kinds().get(name)
        if kind is None:
            spelled = [PREFIX + key.upper().replace(".", "__") for key in all_kinds()]
            raise ConfigError(
                f"unknown variable {shown(variable)} (= {quoted(text)}) in the environment: expected BITWITNESS_ and a "
                f"setting's name, with __ for each dot{nearest(variable, spelled)}"
            )
        try:
            flat[name] = kind.parse(text)
        except ValueError:
            raise ConfigError(f"{variable} = {quoted(text)} in the environment: expected {kind} ({name})") from None
    return flat
