"""What a monitor looks at: kinds, modules, steps; checked where it is made."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Any

from bitwitness.config.recording import ranges, within
from bitwitness.config.values import nearest
from bitwitness.errors import ConfigError
from bitwitness.files.shown import quoted

KINDS = (
    "training",
    "activation",
    "activation_grad",
    "grad",
    "grad_reduced",
    "param",
    "moment1",
    "moment2",
    "update",
    "comm",
)
"""What can be looked at; `bitwitness.store.monitored` tells what each is."""
METRICS = ("attention", "router", "stable_rank", "kurtosis")
"""What is computed on request only: it costs more than statistics."""
RULES = (
    "nonfinite", "vanished", "frozen", "exploding", "drift", "spike", "diverging", "learning_rate", "loss_scale",
    "rank_apart", "replicas",
)  # fmt: skip
_MOST = 1 << 31


@dataclass(frozen=True)
class MonitorConfig:
    """What to monitor; checked when it is made.

    Attributes
    ----------
    targets
        Globs of module paths (``layers.3.*``) or parameter names; none for all.
    kinds
        What is looked at; all of ``KINDS`` by default.
    metrics
        On request: ``attention`` (entropy, largest logit), ``router`` (an MoE's shares and balance), ``stable_rank`` (of
        weights), ``kurtosis`` (of activations).
    steps
        Which, as ``"0-99,200"``; None for all.
    interval
        Every how many steps, from the first on.
    times
        After how many steps that were looked at it ends; 0 for never.
    ranks
        Which, as ``"0-3"``; None for all.
    zeros
        Count zeros, too, which costs as much as the other statistics together.
    watch
        Hold the rules against the series as they come.
    rules
        Which of them.
    warmup
        Steps that a series is learned from before it is judged in full.
    z
        Deviations from which a step is unusual; `bitwitness.stats.history` tells what of.
    exchange
        Compare ranks that train together, by one small sum at each step.
    print_struct
        Print the modules' paths at the start.
    digits
        Digits that are kept of a number; 0 for all.

    Raises
    ------
    ConfigError
        For what is not allowed, with what is.

    """

    targets: tuple[str, ...] = ()
    kinds: tuple[str, ...] = KINDS
    metrics: tuple[str, ...] = ()
    steps: str | None = None
    interval: int = 1
    times: int = 0
    ranks: str | None = None
    zeros: bool = False
    watch: bool = True
    rules: tuple[str, ...] = RULES
    warmup: int = 20
    z: float = 9.0
    exchange: bool = True
    print_struct: bool = False
    digits: int = 0

    def __post_init__(self) -> None:
        for name, known in (("targets", ()), ("kinds", KINDS), ("metrics", METRICS), ("rules", RULES)):
            _check_texts(name, getattr(self, name), known)
        for name, least in (("interval", 1), ("times", 0), ("warmup", 1), ("digits", 0)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or not least <= value < _MOST:
                raise _wrong(name, value, f"a number, {least} or more")
        for name in ("zeros", "watch", "exchange", "print_struct"):
            if not isinstance(getattr(self, name), bool):
                raise _wrong(name, getattr(self, name), "true or false")
        if isinstance(self.z, bool) or not isinstance(self.z, int | float) or not 0 < self.z < 1e6:
            raise _wrong("z", self.z, "a number of deviations, 9 by default")
        ranges(self.steps, "steps", "monitor")
        ranges(self.ranks, "ranks", "monitor")

    @cached_property
    def _looked_at(self) -> frozenset[str]:
        return frozenset(self.kinds)

    def looks_at(self, *kinds: str) -> bool:
        """Tell whether one of some kinds is looked at."""
        return not self._looked_at.isdisjoint(kinds)

    def wants_step(self, step: int) -> bool:
        """Tell whether a step is looked at."""
        wanted = ranges(self.steps, "steps", "monitor")
        first = 0 if wanted is None else wanted[0][0]
        return within(step, wanted) and step >= first and (step - first) % self.interval == 0

    def wants_rank(self, rank: int) -> bool:
        """Tell whether a rank is monitored."""
        return within(rank, ranges(self.ranks, "ranks", "monitor"))

    def wants_module(self, path: str) -> bool:
        """Tell whether a module is looked at."""
        return not self.targets or any(fnmatchcase(path, glob) for glob in self.targets)

    def wants_parameter(self, name: str) -> bool:
        """Tell whether a parameter is: its own name is asked for, or its module's."""
        return self.wants_module(name) or self.wants_module(name.rpartition(".")[0] or ".")


def _check_texts(name: str, value: Any, known: Iterable[str]) -> None:
    allowed = list(known)
    if not isinstance(value, list | tuple) or not all(isinstance(item, str) for item in value):
        raise _wrong(name, value, "a list of texts")
    for item in value if allowed else ():
        if item not in allowed:
            raise _wrong(name, item, f"some of {', '.join(allowed)}", allowed)


def _wrong(name: str, value: Any, expected: str, known: Iterable[str] = ()) -> ConfigError:
    hint = nearest(value, list(known)) if isinstance(value, str) and known else ""
    return ConfigError(f"monitor: {name} = {quoted(value)}: expected {expected}{hint}")
