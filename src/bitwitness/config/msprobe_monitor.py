"""msprobe's monitor configuration, read as it is: the one of its first monitor, and that of its second (``monitors``)."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from bitwitness.config.monitoring import RULES, MonitorConfig
from bitwitness.config.values import nearest
from bitwitness.errors import ConfigError, UsageError
from bitwitness.files.reading import read_object
from bitwitness.files.shown import quoted, shown

_MOST_BYTES = 16 << 20
_MOST = 100_000_000  # steps, ranks
_OPS = ("min", "max", "mean", "norm", "nans", "zeros", "id", "shape", "dtype")
_ALL = "monitors"

_SWITCHES = {
    "xy_distribution": ("activation", "activation_grad"),
    "wg_distribution": ("grad", "grad_reduced"),
    "param_distribution": ("param",),
    "mv_distribution": ("moment1", "moment2"),
    "ur_distribution": ("update",),
}
"""Which kinds each of the first monitor's switches turns on."""
_PARTS = {
    "module": ("activation", "activation_grad"),
    "weight_grad": ("grad", "grad_reduced"),
    "param": ("param",),
    "optimizer": ("moment1", "moment2"),
    "cc": ("comm",),
}
"""The same of the second's parts."""


def _is_bool(value: Any) -> bool:
    return isinstance(value, bool)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _MOST


def _is_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def _is_counts(value: Any) -> bool:
    return _is_count(value) or (isinstance(value, list) and all(map(_is_count, value)))


def _is_targets(value: Any) -> bool:
    return _is_texts(value) or (isinstance(value, dict) and all(isinstance(item, dict) for item in value.values()))


_BOOL: tuple[Callable[[Any], bool], str] = (_is_bool, "true or false")
_COUNT: tuple[Callable[[Any], bool], str] = (_is_count, "a number, 0 or more")
_OBJECT: tuple[Callable[[Any], bool], str] = (lambda value: isinstance(value, dict), "an object")
_TEXT: tuple[Callable[[Any], bool], str] = (lambda value: isinstance(value, str), "a text")
_NUMBER: tuple[Callable[[Any], bool], str] = (
    lambda value: isinstance(value, int | float) and not isinstance(value, bool),
    "a number",
)
_TARGETS = (_is_targets, "an object of module names, or a list of them")
_OPS_FORM = (lambda value: _is_texts(value) and set(value) <= set(_OPS), f"a list of some of {', '.join(_OPS)}")

_KEYS: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "targets": _TARGETS,
    "ops": _OPS_FORM,
    "eps": _NUMBER,
    "ndigits": _COUNT,
    "start_step": _COUNT,
    "stop_step": _COUNT,
    "collect_times": _COUNT,
    "step_interval": _COUNT,
    "step_count_per_record": _COUNT,
    "module_ranks": (_is_counts, "a list of ranks"),
    "rank": (_is_counts, "a list of ranks"),
    "print_struct": _BOOL,
    "format": _TEXT,
    "output_dir": _TEXT,
    "framework": _TEXT,
    "alert": _OBJECT,
    "cc_distribution": _OBJECT,
    "all_xy": _BOOL,
    "forward_only": _BOOL,
    "backward_only": _BOOL,
    "mg_direction": _BOOL,
    "squash_name": _BOOL,
    "stack_info": _BOOL,
    "monitor_mbs_grad": _BOOL,
    "recording_l2_features": _BOOL,
    "l2_targets": _OBJECT,
    "sa_order": _TEXT,
    "append_output": (_is_texts, "a list of times"),
    "dynamic_on": _BOOL,
    "async_write": _BOOL,
    "patch_optimizer_step": _BOOL,
    "micro_batch_number": _COUNT,
    "grad_acc_steps": _COUNT,
    _ALL: _OBJECT,
    **dict.fromkeys(_SWITCHES, _BOOL),
}
_PART_KEYS = ("enabled", "targets", "ops", "eps", "mv_distribution", "param_distribution", "monitor_mbs_grad",
              "micro_batch_number", "grad_acc_steps", "cc_distribution", "cc_codeline", "cc_log_only", "cc_pre_hook",
              "module_ranks", "mg_direction", "ur_distribution", "wg_distribution", "xy_distribution")  # fmt: skip
_NO_COUNTERPART = (
    "mg_direction",
    "stack_info",
    "l2_targets",
    "append_output",
    "dynamic_on",
    "squash_name",
    "recording_l2_features",
)
_ALERT_KEYS = ("rules", "dump", "inform")


@dataclass(frozen=True)
class MonitorSettings:
    """A configuration, understood: what to look at, where to write (None if it does not say), what has no counterpart."""

    config: MonitorConfig
    output_dir: str | None = None
    warnings: tuple[str, ...] = field(default=())


def read_monitor_config(path: str | os.PathLike[str]) -> MonitorSettings:
    """Read msprobe's monitor configuration.

    Raises
    ------
    ConfigError
        If it cannot be read, or a key or value in it is not understood.

    """
    where = shown(str(path))
    try:
        found = read_object(path, "msprobe's monitor configuration", _MOST_BYTES)
    except UsageError as error:
        raise ConfigError(str(error)) from error
    _check(found, _KEYS, where)
    kinds, targets, ops = _chosen(found, where)
    first = found.get("start_step") or 0
    last = found.get("stop_step")
    if last is not None and last <= first:
        raise ConfigError(f"{where}: stop_step = {last}: expected more than start_step, which is {first}")
    alert = found.get("alert")
    rules = alert.get("rules", []) if isinstance(alert, dict) else None
    if alert is not None:
        _known(alert, _ALERT_KEYS, f"{where}: alert")
    steps = f"{first}-{_MOST if last is None else last - 1}" if first or last is not None else None
    config = MonitorConfig(
        targets=targets,
        kinds=("training", *kinds),
        steps=steps,
        interval=max(1, found.get("step_interval") or 1),
        times=found["collect_times"] if 0 < (found.get("collect_times") or 0) < _MOST else 0,
        ranks=_ranks(found.get("module_ranks") or found.get("rank")),
        zeros="zeros" in ops,
        watch=alert is None or bool(rules),
        rules=RULES,
        print_struct=bool(found.get("print_struct")),
        digits=found.get("ndigits") or 0,
    )
    ignored = [key for key in _NO_COUNTERPART if found.get(key)]
    warnings = [f"{where}: {key!r} has no counterpart here and was left out" for key in ignored]
    if str(found.get("format") or "").lower() in ("csv", "tensorboard", "api"):
        warnings += [f"{where}: series are written as Parquet, not as {found['format']}; see --sink for others"]
    if rules:
        warnings += [f"{where}: the alert's rules are replaced by bitwitness's own: {', '.join(RULES)}"]
    return MonitorSettings(config, found.get("output_dir") or None, tuple(warnings))


def _chosen(found: Mapping[str, Any], where: str) -> tuple[tuple[str, ...], tuple[str, ...], set[str]]:
    """Return kinds, targets, and what is taken of each tensor."""
    kinds: list[str] = []
    targets, ops = _globs(found.get("targets")), set(found.get("ops") or ())
    for name, turned_on in _SWITCHES.items():
        if found.get(name):
            kinds += turned_on
    if (found.get("cc_distribution") or {}).get("enable"):
        kinds += ["comm"]
    parts = found.get(_ALL) or {}
    _known(parts, _PARTS, f"{where}: {_ALL}")
    for name, part in parts.items():
        if not isinstance(part, dict):
            raise ConfigError(f"{where}: {_ALL}.{name} = {quoted(part)}: expected an object")
        _known(part, _PART_KEYS, f"{where}: {_ALL}.{name}")
        _check({k: v for k, v in part.items() if k in _KEYS}, _KEYS, f"{where}: {_ALL}.{name}")
        if part.get("enabled", name == "module"):
            kinds += _PARTS[name]
            targets += _globs(part.get("targets"))
            ops |= set(part.get("ops") or ())
    kinds = [kind for kind in kinds if not (found.get("forward_only") and kind == "activation_grad")]
    kinds = [kind for kind in kinds if not (found.get("backward_only") and kind == "activation")]
    return tuple(dict.fromkeys(kinds)), () if found.get("all_xy") else targets, ops


def _globs(targets: Any) -> tuple[str, ...]:
    """Return globs for the modules that it names, and what lies inside."""
    if not targets:
        return ()
    names = [name.partition(":")[2] if name.partition(":")[0].isdigit() else name for name in targets]
    return tuple(glob for name in names for glob in ((name, f"{name}.*") if name else ()))


def _ranks(ranks: Any) -> str | None:
    if ranks is None or ranks == []:
        return None
    return ",".join(map(str, [ranks] if isinstance(ranks, int) else ranks))


def _check(found: Mapping[str, Any], keys: Mapping[str, tuple[Callable[[Any], bool], str]], where: str) -> None:
    _known(found, keys, where)
    for name, value in found.items():
        fits, expected = keys[name]
        if value not in (None, "") and not fits(value):
            hint = ""
            if name == "ops" and _is_texts(value):
                wrong = next(item for item in value if item not in _OPS)
                hint = nearest(wrong, list(_OPS))
            raise ConfigError(f"{where}: {name} = {quoted(value)}: expected {expected}{hint}")


def _known(found: Mapping[str, Any], keys: Collection[str], where: str) -> None:
    for name in found:
        if name not in keys:
            raise ConfigError(f"{where}: {quoted(name)} is no key of it{nearest(str(name), list(keys))}")
