"""The TensorFlow side's settings of the reference system: ``DumpConfig``, ``NPURunConfig``, NpuOptimizer's parameter map.

So that a user's settings carry over as they are written:

    DumpConfig(enable_dump_debug=True, dump_path="/output", dump_debug_mode="all").to_settings()
    DumpConfig.from_parameter_map(custom_op.parameter_map).to_settings()

and in a TOML file, a section ``[dump_config]`` with the same keys.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from bitwitness.config.values import nearest
from bitwitness.errors import ConfigError
from bitwitness.files.shown import quoted, shown

_DUMP_MODES = ("input", "output", "all")
_DEBUG_MODES = {"aicore_overflow": "compute", "atomic_overflow": "accumulate", "all": "all"}
_MOST_STEPS = 100  # the vendors' own bound for this key
_STEP = re.compile(r"(\d{1,18})(?:-(\d{1,18}))?", re.ASCII)
_NOT_OURS = frozenset({"use_off_line"})
"""Keys of the parameter map that concern other things."""


@dataclass(frozen=True)
class DumpConfig:
    """What to dump, and whether to look for overflows; checked when it is made.

    Attributes
    ----------
    enable_dump
        Dump operators' data.
    dump_path
        Where to; an existing folder that can be read and written. Required with either switch.
    dump_step
        Which steps, ``0|5|10-20``, at most 100 entries.
    dump_mode
        ``input``, ``output`` or ``all``.
    enable_dump_debug
        Look for overflows; not together with ``enable_dump``.
    dump_debug_mode
        ``aicore_overflow``, ``atomic_overflow`` or ``all``.

    Raises
    ------
    ConfigError
        For what is not allowed, with what is.

    """

    enable_dump: bool = False
    dump_path: str | None = None
    dump_step: str | None = None
    dump_mode: str = "output"
    enable_dump_debug: bool = False
    dump_debug_mode: str = "all"

    def __post_init__(self) -> None:
        for name in ("enable_dump", "enable_dump_debug"):
            if not isinstance(getattr(self, name), bool):
                raise _wrong(name, getattr(self, name), "True or False")
        if self.enable_dump and self.enable_dump_debug:
            raise ConfigError(
                "DumpConfig: enable_dump and enable_dump_debug are both on; dump and overflow detection exclude each other: "
                "turn one off"
            )
        for name in ("dump_mode", "dump_debug_mode"):
            if not isinstance(getattr(self, name), str):
                raise _wrong(name, getattr(self, name), "a text")
        if self.dump_mode not in _DUMP_MODES:
            raise _wrong("dump_mode", self.dump_mode, f"one of {', '.join(_DUMP_MODES)}")
        if self.dump_debug_mode not in _DEBUG_MODES:
            raise _wrong("dump_debug_mode", self.dump_debug_mode, f"one of {', '.join(_DEBUG_MODES)}")
        if self.dump_step is not None:
            _check_steps(self.dump_step)
        if self.enable_dump or self.enable_dump_debug:
            _check_path(self.dump_path)

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any], where: str = "DumpConfig") -> DumpConfig:
        """Build it from keywords, of a TOML section say; an unknown one is an error that names the nearest."""
        known = [f.name for f in fields(cls)]
        for name, value in values.items():
            if name not in known:
                raise ConfigError(
                    f"unknown key {quoted(name)} (= {quoted(value)}) in {shown(where)}: expected one of "
                    f"{', '.join(known)}{nearest(str(name), known)}"
                )
        return cls(**values)

    @classmethod
    def from_parameter_map(cls, parameters: Mapping[str, Any]) -> DumpConfig:
        """Build it from NpuOptimizer's parameter map: plain values, bytes, or protobuf's with ``b``, ``s`` and ``i``."""
        known = {f.name: f.type for f in fields(cls)}
        values = {
            name: _plain(value, switch=str(known.get(name)) == "bool")
            for name, value in parameters.items()
            if name not in _NOT_OURS
        }
        return cls.from_mapping(values, "the parameter map")

    def to_settings(self) -> dict[str, Any]:
        """Return what it means here, by dotted names: overflow detection, in which mode, recorded where."""
        if not self.enable_dump_debug:
            return {}
        return {
            "nonfinite.enabled": True,
            "nonfinite.mode": _DEBUG_MODES[self.dump_debug_mode],
            "out": self.dump_path,
        }

    @property
    def warnings(self) -> tuple[str, ...]:
        """What is understood and has no counterpart here."""
        if not self.enable_dump:
            return ()
        return ("DumpConfig: enable_dump is understood, but the guard records no plain dumps; bitwitness record does",)


class NPURunConfig:
    """Takes the keywords of the reference system's class of that name; ``dump_config`` is what counts here.

    ``ignored`` names the other keywords.
    """

    def __init__(self, dump_config: DumpConfig | None = None, **others: Any) -> None:
        if dump_config is not None and not isinstance(dump_config, DumpConfig):
            raise _wrong("dump_config", dump_config, "a DumpConfig", "NPURunConfig")
        self.dump_config = dump_config or DumpConfig()
        self.ignored = tuple(sorted(others))

    def to_settings(self) -> dict[str, Any]:
        """Return what it means here, by dotted names."""
        return self.dump_config.to_settings()


def _wrong(name: str, value: Any, expected: str, owner: str = "DumpConfig") -> ConfigError:
    return ConfigError(f"{owner}: {name} = {quoted(value)}: expected {expected}; change it")


def _check_steps(text: Any) -> None:
    entries = text.split("|") if isinstance(text, str) else []
    expected = "numbers or ranges a-b (a < b), separated by |, for example 0|5|10-20"
    for entry in entries or [text]:
        found = _STEP.fullmatch(entry) if isinstance(entry, str) else None
        if found is None or (found[2] is not None and int(found[1]) >= int(found[2])):
            raise _wrong("dump_step", text, f"{expected} (seen {quoted(entry)})")
    if len(entries) > _MOST_STEPS:
        raise ConfigError(
            f"DumpConfig: dump_step has {len(entries)} entries; expected at most {_MOST_STEPS}; join some to ranges"
        )


def _check_path(path: Any) -> None:
    if not path:
        raise _wrong("dump_path", path, "an existing folder, since dump or overflow detection is on")
    if not isinstance(path, str | os.PathLike):
        raise _wrong("dump_path", path, "a path")
    try:
        is_folder = Path(path).is_dir()
    except OSError as error:
        raise _wrong("dump_path", str(path), f"a folder that can be looked at ({error.strerror})") from error
    if not is_folder:
        raise _wrong("dump_path", str(path), "a folder that exists; create it first")
    if not os.access(path, os.R_OK | os.W_OK):
        raise _wrong("dump_path", str(path), "a folder that this user may read and write")


def _plain(value: Any, *, switch: bool) -> Any:
    """Return a parameter map's value as a plain one."""
    if hasattr(value, "b") and hasattr(value, "s"):
        value = value.b if switch else value.s
    return value.decode("utf-8", "backslashreplace") if isinstance(value, bytes) else value
