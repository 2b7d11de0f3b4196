"""What Prometheus is shown of a guarded training, in its text format (version 0.0.4).

The series are few and fixed: a rank has a dozen, and one for each cause that a verdict may have. Values are read when they are
asked for, in the thread that asks, from what the guard counts anyway.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

from bitwitness.config import AlertsConfig
from bitwitness.errors import UsageError
from bitwitness.finding import Cause

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_LABELS = ("run", "model", "rank", "host", "device")
_CAUSES = tuple(str(cause) for cause in Cause if cause is not Cause.DISMISSED)


@dataclass(frozen=True, slots=True)
class Labels:
    """Whose numbers: the run folder, the model where a process trains several, the rank in the job, host, the device's uuid."""

    run: str
    model: str
    rank: str
    host: str
    device: str

    def values(self) -> list[str]:
        """Return them in the order of the metrics' labels."""
        return [self.run, self.model, self.rank, self.host, self.device]


@dataclass(frozen=True, slots=True)
class Numbers:
    """One rank's numbers at one time; None and what a mapping lacks is not known.

    Attributes
    ----------
    verdicts
        Those that this rank tells of, by cause: those against it, and where nobody is accused those of the first rank; so the
        sum over all ranks counts each once.
    warning
        Whether this rank's device was convicted, and not cleared since.
    cost
        The guard's share of the training's time, 0.01 for one percent.
    covered
        Shares of what there is that is looked at: ``parameters``, and of deep steps' ``flops``.
    step_ended, step_seconds
        Unix time at which the last step was judged; seconds from the one before to it.

    """

    steps: int = 0
    deep: int = 0
    suspicions: int = 0
    dismissed: int = 0
    verdicts: Mapping[str, int] = field(default_factory=dict)
    warning: bool = False
    cost: float | None = None
    covered: Mapping[str, float] = field(default_factory=dict)
    step_ended: float | None = None
    step_seconds: float | None = None
    lost: int = 0
    undelivered: int = 0


Row = tuple[Labels, Numbers]
Source = Callable[[], Row]
_Value = Callable[[Numbers], float | None]
_COUNTERS: tuple[tuple[str, str, _Value], ...] = (
    ("steps", "steps whose gradients were judged", lambda n: n.steps),
    ("deep_steps", "steps whose operators were checked", lambda n: n.deep),
    ("suspicions", "steps that were questioned by experiments", lambda n: n.suspicions),
    ("dismissed", "suspicions that experiments dismissed", lambda n: n.dismissed),
    ("undelivered_events", "health events and lines that nobody took", lambda n: n.undelivered),
)
_GAUGES: tuple[tuple[str, str, _Value], ...] = (
    ("device_status", "0: ok; 1: Warning (80818C00), until it is cleared", lambda n: float(n.warning)),
    ("cost_share", "the guard's own share of the training's time", lambda n: n.cost),
    ("last_step_timestamp_seconds", "Unix time at which the last step was judged", lambda n: n.step_ended),
    ("last_step_seconds", "seconds from one judged step to the next", lambda n: n.step_seconds),
    ("lost_ranks", "ranks that stopped answering", lambda n: n.lost),
)


def library() -> Any:
    """Return ``prometheus_client``; raises `UsageError` where it is missing."""
    try:
        return import_module("prometheus_client")
    except ImportError as error:
        raise UsageError(
            "alerts.prometheus and alerts.prometheus_textfile need prometheus-client, which is not installed; "
            "pip install 'bitwitness[prometheus]', or leave them out"
        ) from error


def check(config: AlertsConfig) -> None:
    """Raise `UsageError` where a setting needs the library and it is missing; where none does, it is not imported."""
    if config.prometheus is not None or config.prometheus_textfile is not None:
        library()


def text_of(sources: Iterable[Source]) -> bytes:
    """Return the numbers of all sources as Prometheus reads them."""
    client = library()
    registry = client.CollectorRegistry()
    registry.register(_Collected([source() for source in sources]))
    text: bytes = client.generate_latest(registry)
    return text


class _Collected:
    """Shows rows as `prometheus_client` wants them."""

    def __init__(self, rows: list[Row]) -> None:
        self._rows = rows

    def collect(self) -> Iterator[Any]:
        """Yield the metrics, each with all rows."""
        core = import_module("prometheus_client.core")
        for kind, metrics in ((core.CounterMetricFamily, _COUNTERS), (core.GaugeMetricFamily, _GAUGES)):
            for name, what, value in metrics:
                family = kind(f"bitwitness_{name}", what, labels=_LABELS)
                for labels, numbers in self._rows:
                    if (known := value(numbers)) is not None:
                        family.add_metric(labels.values(), known)
                yield family
        verdicts = core.CounterMetricFamily("bitwitness_verdicts", "verdicts, by cause", labels=[*_LABELS, "cause"])
        covered = core.GaugeMetricFamily(
            "bitwitness_coverage_share", "share that is looked at", labels=[*_LABELS, "of"]
        )
        for labels, numbers in self._rows:
            for cause in _CAUSES:
                verdicts.add_metric([*labels.values(), cause], numbers.verdicts.get(cause, 0))
            for of, share in numbers.covered.items():
                covered.add_metric([*labels.values(), of], share)
        yield from (verdicts, covered)
