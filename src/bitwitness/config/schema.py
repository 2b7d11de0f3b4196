"""Every setting with its default, as nested frozen dataclasses that are validated where they are built."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from functools import cache
from types import MappingProxyType
from typing import Any, Literal, get_type_hints

from bitwitness.config.values import SettingType
from bitwitness.errors import ConfigError
from bitwitness.files.shown import quoted

Act = Literal["observe", "protect", "stop"]
OverflowMode = Literal["compute", "accumulate", "all", "aicore_overflow", "atomic_overflow"]
Scheme = Literal["v1", "v2", "v3", "combined"]


def _number(default: Any, *, minimum: float, above: bool = False) -> Any:
    return field(default=default, metadata={"minimum": minimum, "above": above})


class _Validated:
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


@dataclass(frozen=True)
class RanksConfig(_Validated):
    """``deadline_s``: seconds that one rank waits for another within experiments before the run ends with a clear error.

    Where a model's replay is long, twenty times that. In a light step the training's own timeout counts instead.
    """

    deadline_s: float = _number(120.0, minimum=0, above=True)


@dataclass(frozen=True)
class ReplayConfig(_Validated):
    """Running a suspicious step again.

    ``capture_limit_mib``: MiB one step's inputs and output gradients may take; a larger one is not replayed.
    ``calibrate``: replay some healthy steps to learn how far apart the model's own kernels' results are.
    """

    enabled: bool = True
    capture_limit_mib: int = _number(1024, minimum=0)
    calibrate: bool = True
    rest: bool = True


@dataclass(frozen=True)
class TrendConfig(_Validated):
    """A gradient against its own history: steps before it speaks, and deviations at which it does."""

    enabled: bool = True
    warmup: int = _number(20, minimum=1)
    z: float = _number(9.0, minimum=0, above=True)


@dataclass(frozen=True)
class PeersConfig(_Validated):
    """A local gradient against the other ranks': deviations at which it speaks."""

    enabled: bool = True
    z: float = _number(9.0, minimum=0, above=True)


@dataclass(frozen=True)
class ActivationsConfig(_Validated):
    """What modules return, and its gradients, against their own history: deviations at which it speaks."""

    enabled: bool = True
    z: float = _number(12.0, minimum=0, above=True)


@dataclass(frozen=True)
class WeightsConfig(_Validated):
    """How weights move from step to step, against how they usually do: deviations at which it speaks."""

    enabled: bool = True
    z: float = _number(9.0, minimum=0, above=True)


@dataclass(frozen=True)
class NonfiniteConfig(_Validated):
    """NaN and Inf in the loss, in gradients and buffers, followed back to the operator that made them.

    Attributes
    ----------
    enabled
        Look.
    mode
        Which operators to name: those that compute, those that accumulate (``scatter_add``, reductions across ranks), or all.
        The reference systems' ``aicore_overflow`` and ``atomic_overflow`` are understood.
    show_all
        Print every origin of a step, not the earliest alone.
    drops
        Steps in a row on which a gradient scaler lowered its scale that are worth a finding.
    extreme
        Share of a narrow dtype's largest number at which a finite result counts as an overflow.

    """

    enabled: bool = True
    mode: OverflowMode = "all"
    show_all: bool = False
    drops: int = _number(3, minimum=1)
    extreme: float = _number(0.5, minimum=0, above=True)


@dataclass(frozen=True)
class ChecksumConfig(_Validated):
    """The check of every matrix product on deep steps; scheme ``reference`` is the vendors' own."""

    enabled: bool = True
    scheme: Literal["bitwitness", "reference"] = "bitwitness"


@dataclass(frozen=True)
class FeatureConfig(_Validated):
    """The reference systems' feature-value detection.

    Attributes
    ----------
    schemes
        Those that are on; none by default.
    levels
        What the numbers of NPU_ASD_ENABLE mean. ``seed``: 1 stops at an anomaly; ``release``: 1 logs, 2 logs
        and stops, 3 also logs every value.
    log_values
        Print every feature value at level info.
    upper_thresh, sigma_thresh
        V1 and V2: bounds on the value, and on its jump relative to the range seen, for level 1 (error) and
        level 2 (warning).
    upper_thresh1, upper_thresh2
        Combined scheme: multiples of the average of squares; a strike, and no longer averaged in.
    grad_sample_interval
        Combined scheme: every k-th parameter is looked at.
    with_checksum
        Combined scheme: strikes turn the checksum on.

    """

    schemes: tuple[Scheme, ...] = ()
    levels: Literal["seed", "release"] = "seed"
    log_values: bool = False
    upper_thresh: tuple[int, int] = _number((1_000_000, 10_000), minimum=3)
    sigma_thresh: tuple[int, int] = _number((100_000, 5_000), minimum=3)
    upper_thresh1: int = _number(1_000_000, minimum=3)
    upper_thresh2: int = _number(100, minimum=3)
    grad_sample_interval: int = _number(10, minimum=1)
    with_checksum: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("upper_thresh", "sigma_thresh"):
            first, second = getattr(self, name)
            if first <= second:
                raise ConfigError(
                    f"feature.{name} = {(first, second)}: expected the first (error) above the "
                    "second (warning); swap them"
                )


@dataclass(frozen=True)
class StrikesConfig(_Validated):
    """From anomalies to a checksum, times in minutes.

    ``cooldown``: so long after a counted anomaly others are not counted, and so long lasts a checksum window.
    ``strikes_num`` counted anomalies within ``strikes_window`` open one; after it the next is at least
    ``checksum_cooldown`` away.
    """

    cooldown: float = _number(5.0, minimum=0, above=True)
    strikes_num: int = _number(3, minimum=1)
    strikes_window: float = _number(480.0, minimum=0, above=True)
    checksum_cooldown: float = _number(180.0, minimum=0, above=True)


@dataclass(frozen=True)
class Config(_Validated):
    """Everything that can be set.

    Attributes
    ----------
    act
        ``observe`` proves and reports, ``protect`` also heals or stops, ``stop`` ends at any anomaly.
    out
        The run folder; None records nothing.
    budget
        The share of the training's time that the guard may take: it decides how many steps are deep.
    deep_every
        Every so many steps all operators are checked, whatever it costs; 0 is never, 1 every step. None leaves it to
        the budget.
    self_test
        Let each sensor prove at the start that it sees.
    quiet
        Print verdicts, warnings and errors only.

    """

    act: Act = "observe"
    out: str | None = None
    budget: float = _number(0.01, minimum=0, above=True)
    deep_every: int | None = _number(None, minimum=0)
    self_test: bool = True
    quiet: bool = False
    ranks: RanksConfig = field(default_factory=RanksConfig)
    replay: ReplayConfig = field(default_factory=ReplayConfig)
    trend: TrendConfig = field(default_factory=TrendConfig)
    peers: PeersConfig = field(default_factory=PeersConfig)
    activations: ActivationsConfig = field(default_factory=ActivationsConfig)
    weights: WeightsConfig = field(default_factory=WeightsConfig)
    nonfinite: NonfiniteConfig = field(default_factory=NonfiniteConfig)
    checksum: ChecksumConfig = field(default_factory=ChecksumConfig)
    feature: FeatureConfig = field(default_factory=FeatureConfig)
    strikes: StrikesConfig = field(default_factory=StrikesConfig)


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


@cache
def all_kinds() -> dict[str, SettingType]:
    """Return every setting by its dotted name, ``trend.z``."""
    flat = dict(kinds_of(Config))
    for name, section in sections_of(Config).items():
        flat |= {f"{name}.{inner}": kind for inner, kind in kinds_of(section).items()}
    return flat


def to_dict(config: Config) -> dict[str, Any]:
    """Return the settings as nested plain dictionaries; tuples become lists, as JSON and TOML have them."""

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: plain(item) for key, item in value.items()}
        return list(value) if isinstance(value, tuple) else value

    result: dict[str, Any] = plain(asdict(config))
    return result


def from_flat(values: dict[str, Any]) -> Config:
    """Build a configuration from dotted names; what is missing keeps its default."""
    own = {name: value for name, value in values.items() if "." not in name}
    for name, section in sections_of(Config).items():
        inner = {key.partition(".")[2]: value for key, value in values.items() if key.startswith(f"{name}.")}
        own[name] = section(**inner)
    return Config(**own)


TRACER_SETTINGS: Mapping[str, Any] = MappingProxyType({"nonfinite.enabled": True, "deep_every": 100})
"""What differs for who looks for nothing but NaN and Inf, by dotted names: ranges are measured on one step in 100."""
