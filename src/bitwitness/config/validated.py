"""What every section of the settings has in common: fields are checked where a section is built."""

from __future__ import annotations

from dataclasses import field, fields, is_dataclass
from typing import Any, get_type_hints

from bitwitness.config.values import SettingType
from bitwitness.errors import ConfigError
from bitwitness.files.shown import quoted


def number(default: Any, *, minimum: float, above: bool = False) -> Any:
    """Return a field for a number with a least value, which it may have to be above."""
    return field(default=default, metadata={"minimum": minimum, "above": above})


class Validated:
    """Checks every field against its type hint and its limits when built."""

    def __post_init__(self) -> None:
        for name, kind in kinds_of(type(self)).items():
            value = getattr(self, name)
            try:
                object.__setattr__(self, name, kind.check(value))
            except ValueError:
                message = f"{type(self).__name__}.{name} = {quoted(value)}: expected {kind}; change it"
                raise ConfigError(message) from None
        for name, section in sections_of(type(self)).items():
            if not isinstance(getattr(self, name), section):
                raise ConfigError(
                    f"{type(self).__name__}.{name} = {quoted(getattr(self, name))}: expected a {section.__name__}"
                )


def kinds_of(schema: type[Any]) -> dict[str, SettingType]:
    """Return the plain settings of one dataclass and their kinds."""
    hints = get_type_hints(schema)
    return {
        f.name: SettingType(hints[f.name], f.metadata.get("minimum"), f.metadata.get("above", False))
        for f in fields(schema)
        if not is_dataclass(hints[f.name])
    }


def sections_of(schema: type[Any]) -> dict[str, type[Any]]:
    """Return the nested dataclasses of one dataclass."""
    hints = get_type_hints(schema)
    return {f.name: hints[f.name] for f in fields(schema) if is_dataclass(hints[f.name])}
