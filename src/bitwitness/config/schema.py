"""Every setting with its default, as nested frozen dataclasses that are validated where they are built."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cache
from types import MappingProxyType
from typing import Any, Literal

from bitwitness.config.addresses import wrong_address
from bitwitness.config.exact import (
    CollectiveConfig,
    RecomputeConfig,
    ReplicasConfig,
    SealConfig,
    TwiceConfig,
    UpdateConfig,
)
from bitwitness.config.validated import Validated, kinds_of, number, sections_of
from bitwitness.config.values import SettingType
from bitwitness.errors import ConfigError
from bitwitness.files.shown import quoted

Act = Literal["observe", "protect", "stop"]
OverflowMode = Literal["compute", "accumulate", "all", "aicore_overflow", "atomic_overflow"]
Scheme = Literal["v1", "v2", "v3", "combined"]
LogTarget = Literal["stderr", "syslog"]


@dataclass(frozen=True)
class RanksConfig(Validated):
    """``deadline_s``: seconds that one rank waits for another within experiments before the run ends with a clear error.

    Where a model's replay is long, twenty times that. In a light step the training's own timeout counts instead.
    """

    deadline_s: float = number(120.0, minimum=0, above=True)


@dataclass(frozen=True)
class ReplayConfig(Validated):
    """Running a suspicious step again.

    ``capture_limit_mib``: MiB one step's inputs and output gradients may take; a larger one is not replayed.
    ``calibrate``: replay some healthy steps to learn how far apart the model's own kernels' results are.
    """

    enabled: bool = True
    capture_limit_mib: int = number(1024, minimum=0)
    calibrate: bool = True
    rest: bool = True


@dataclass(frozen=True)
class TrendConfig(Validated):
    """A gradient against its own history: steps before it speaks, and deviations at which it does."""

    enabled: bool = True
    warmup: int = number(20, minimum=1)
    z: float = number(9.0, minimum=0, above=True)


@dataclass(frozen=True)
class PeersConfig(Validated):
    """A local gradient against the other ranks': deviations at which it speaks."""

    enabled: bool = True
    z: float = number(9.0, minimum=0, above=True)


@dataclass(frozen=True)
class ActivationsConfig(Validated):
    """What modules return, and its gradients, against their own history: deviations at which it speaks."""

    enabled: bool = True
    z: float = number(12.0, minimum=0, above=True)


@dataclass(frozen=True)
class WeightsConfig(Validated):
    """How weights move from step to step, against how they usually do: deviations at which it speaks."""

    enabled: bool = True
    z: float = number(9.0, minimum=0, above=True)


@dataclass(frozen=True)
class NonfiniteConfig(Validated):
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
    drops: int = number(3, minimum=1)
    extreme: float = number(0.5, minimum=0, above=True)


@dataclass(frozen=True)
class ChecksumConfig(Validated):
    """The check of every matrix product on deep steps; scheme ``reference`` is the vendors' own.

    ``rows_one_in``: of the large operators between products one in so many is checked on a deep step, by turns; of copies one
    in four times as many.
    """

    enabled: bool = True
    scheme: Literal["bitwitness", "reference"] = "bitwitness"
    rows_one_in: int = number(2, minimum=1)


@dataclass(frozen=True)
class FeatureConfig(Validated):
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
    upper_thresh: tuple[int, int] = number((1_000_000, 10_000), minimum=3)
    sigma_thresh: tuple[int, int] = number((100_000, 5_000), minimum=3)
    upper_thresh1: int = number(1_000_000, minimum=3)
    upper_thresh2: int = number(100, minimum=3)
    grad_sample_interval: int = number(10, minimum=1)
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
class StrikesConfig(Validated):
    """From anomalies to a checksum, times in minutes.

    ``cooldown``: so long after a counted anomaly others are not counted, and so long lasts a checksum window.
    ``strikes_num`` counted anomalies within ``strikes_window`` open one; after it the next is at least
    ``checksum_cooldown`` away.
    """

    cooldown: float = number(5.0, minimum=0, above=True)
    strikes_num: int = number(3, minimum=1)
    strikes_window: float = number(480.0, minimum=0, above=True)
    checksum_cooldown: float = number(180.0, minimum=0, above=True)


@dataclass(frozen=True)
class AlertsConfig(Validated):
    """Who is told besides the run folder; nobody by default.

    ``prometheus``: ``HOST:PORT`` of the metrics, the local rank added to the port; ``prometheus_textfile``: the folder that
    node_exporter's collector reads. ``health_socket``, ``health_url``: a Unix socket, an HTTP address that are told of each
    verdict; ``log``: where a line of JSON for each goes.
    """

    prometheus: str | None = None
    prometheus_textfile: str | None = None
    health_socket: str | None = None
    health_url: str | None = None
    log: tuple[LogTarget, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("prometheus", "prometheus_textfile", "health_socket", "health_url"):
            value = getattr(self, name)
            if value is not None and (expected := wrong_address(name, value)):
                raise ConfigError(f"alerts.{name} = {quoted(value)}: expected {expected}")


@dataclass(frozen=True)
class Config(Validated):
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
    budget: float = number(0.01, minimum=0, above=True)
    deep_every: int | None = number(None, minimum=0)
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
    twice: TwiceConfig = field(default_factory=TwiceConfig)
    replicas: ReplicasConfig = field(default_factory=ReplicasConfig)
    seal: SealConfig = field(default_factory=SealConfig)
    update: UpdateConfig = field(default_factory=UpdateConfig)
    collective: CollectiveConfig = field(default_factory=CollectiveConfig)
    recompute: RecomputeConfig = field(default_factory=RecomputeConfig)
    feature: FeatureConfig = field(default_factory=FeatureConfig)
    strikes: StrikesConfig = field(default_factory=StrikesConfig)
    alerts: AlertsConfig = field(default_factory=AlertsConfig)


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
