"""The reference systems' environment variables, understood as those systems understand them.

========================  =================================================================================
``NPU_ASD_ENABLE``        0 or 1: V1 detection that ends the training at an anomaly; with
                          ``feature.levels = "release"`` the 1, 2, 3 of later releases
``NPU_ASD_UPPER_THRESH``  two integers, ``1000000,10000``: bounds on the value (error, warning)
``NPU_ASD_SIGMA_THRESH``  two integers, ``100000,5000``: bounds on the jump
``MS_NPU_ASD_CONFIG``     MindSpore's combined scheme, ``key:value`` pairs
``NPU_ASD_CONFIG``        the same for torch_npu, which wins where both are set
========================  =================================================================================

What those systems would ignore or replace is replaced here by the same rule, and said: each warning names the
key, the value, what is allowed, and the nearest key.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from bitwitness.config.schema import FeatureConfig, Scheme
from bitwitness.config.values import nearest
from bitwitness.files.shown import quoted

_THRESHOLDS = {"NPU_ASD_UPPER_THRESH": "feature.upper_thresh", "NPU_ASD_SIGMA_THRESH": "feature.sigma_thresh"}
_LEAST_THRESHOLD = 3  # the vendors' own bound; they raise what is below to it
_INT_MAX = 2**31 - 1  # the vendors hold these numbers in a 32-bit int
_MOST_DIGITS = 18  # a number of more is no threshold
_SWITCHES = ("enable", "with_checksum")
_NUMBERS = {  # key of the combined scheme: our name, least value
    "grad_sample_interval": ("feature.grad_sample_interval", 1),
    "upper_thresh1": ("feature.upper_thresh1", _LEAST_THRESHOLD),
    "upper_thresh2": ("feature.upper_thresh2", _LEAST_THRESHOLD),
    "cooldown": ("strikes.cooldown", 1),
    "strikes_num": ("strikes.strikes_num", 1),
    "strikes_window": ("strikes.strikes_window", 1),
    "checksum_cooldown": ("strikes.checksum_cooldown", 1),
}
_PAIR_VARIABLES = {  # grad_sample_interval where the variable does not give it
    "MS_NPU_ASD_CONFIG": 10,
    "NPU_ASD_CONFIG": 3,
}


@dataclass(slots=True)
class _SettingsRead:
    values: dict[str, Any] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    switched: dict[Scheme, bool] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Reference:
    """Settings by their dotted names, and what is to be said about the variables."""

    values: dict[str, Any]
    warnings: tuple[str, ...]


def read_reference(environ: Mapping[str, str], *, release_levels: bool = False) -> Reference:
    """Read the reference systems' variables.

    Parameters
    ----------
    environ
        The environment.
    release_levels
        Read NPU_ASD_ENABLE as later releases do: 1 logs, 2 also ends the training, 3 also logs every value.

    """
    reading = _SettingsRead()
    _read_enable(environ, reading, release_levels=release_levels)
    for variable, name in _THRESHOLDS.items():
        if variable in environ:
            reading.values[name] = _read_pair(variable, environ[variable], name, reading.warnings)
    given = [variable for variable in _PAIR_VARIABLES if environ.get(variable, "").strip()]
    if given:
        reading.values["feature.grad_sample_interval"] = _PAIR_VARIABLES[given[-1]]
        reading.switched["combined"] = False
    for variable in given:
        _read_combined(variable, environ[variable], reading)
    if len(given) > 1:
        reading.warnings.append(f"{' and '.join(given)} are both set; keys that both give are taken from {given[-1]}")
    if reading.switched:
        # A variable that is set decides, also against a file; V1 and the combined scheme may both be on.
        reading.values["feature.schemes"] = tuple(scheme for scheme, on in reading.switched.items() if on)
    return Reference(reading.values, tuple(reading.warnings))


def _read_enable(environ: Mapping[str, str], reading: _SettingsRead, *, release_levels: bool) -> None:
    text = environ.get("NPU_ASD_ENABLE")
    if text is None:
        return
    level, allowed = text.strip(), ("0", "1", "2", "3") if release_levels else ("0", "1")
    if level not in allowed:
        advice = "" if release_levels else "; for later releases' 2 and 3 set feature.levels = 'release'"
        reading.warnings.append(
            f"NPU_ASD_ENABLE = {quoted(text)}: expected one of {', '.join(allowed)}; detection stays off{advice}"
        )
        level = "0"
    reading.switched["v1"] = level != "0"
    if level != "0":
        reading.values["act"] = "observe" if release_levels and level == "1" else "stop"
        reading.values["feature.log_values"] = level == "3"


def _read_pair(variable: str, text: str, name: str, warnings: list[str]) -> tuple[int, int]:
    default: tuple[int, int] = getattr(FeatureConfig(), name.rpartition(".")[2])
    rule = f"expected two integers >= {_LEAST_THRESHOLD}, the first above the second"
    parts = [part.strip() for part in text.split(",")]
    if len(parts) != 2 or not all(_is_digits(part) for part in parts):
        warnings.append(f"{variable} = {quoted(text)}: {rule}; the default {default} holds")
        return default
    first, second = (max(int(part), _LEAST_THRESHOLD) for part in parts)
    if first <= second:
        warnings.append(f"{variable} = {quoted(text)}: {rule}; the default {default} holds")
        return default
    if (first, second) != tuple(int(part) for part in parts):
        warnings.append(f"{variable} = {quoted(text)}: {rule}; raised to {first},{second}")
    return first, second


def _read_combined(variable: str, text: str, reading: _SettingsRead) -> None:
    keys = (*_SWITCHES, *_NUMBERS)
    for item in (part.strip() for part in text.split(",")):
        if not item:
            continue
        key, value = _split(item)
        if key in _SWITCHES:
            _read_switch(variable, key, value, reading)
        elif key in _NUMBERS:
            _read_number(variable, key, value, reading)
        elif key is None:
            reading.warnings.append(f"{variable}: {quoted(item)} is not understood; expected key:value; it is ignored")
        else:
            reading.warnings.append(
                f"{variable}: unknown key {quoted(key)} (= {quoted(value)}) is ignored; expected one of {', '.join(keys)}"
                f"{nearest(key, keys)}"
            )


def _split(item: str) -> tuple[str | None, str]:
    """Split at the first colon, else at the first equals sign; the key is None where there is neither."""
    separator = ":" if ":" in item else "="
    key, found, value = item.partition(separator)
    return (key.strip() or None) if found else None, value.strip()


def _read_switch(variable: str, key: str, value: str, reading: _SettingsRead) -> None:
    if value not in ("true", "false"):
        reading.warnings.append(f"{variable}: {key} = {quoted(value)}: expected true or false; the default false holds")
        return
    if key == "enable":
        reading.switched["combined"] = value == "true"
    else:
        reading.values["feature.with_checksum"] = value == "true"


def _read_number(variable: str, key: str, value: str, reading: _SettingsRead) -> None:
    name, least = _NUMBERS[key]
    if not _is_digits(value) or not least <= int(value) <= _INT_MAX:
        reading.warnings.append(
            f"{variable}: {key} = {quoted(value)}: expected an integer >= {least}; the default holds"
        )
        return
    reading.values[name] = int(value)


def _is_digits(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= _MOST_DIGITS
