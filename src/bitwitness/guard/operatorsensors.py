"""The sensors that look at single operators, on deep steps: one tap for all of them; one that fails is turned off and named."""

from __future__ import annotations

from collections import Counter, defaultdict
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from typing import Any, Protocol

from bitwitness.capture.light import LightStep
from bitwitness.capture.root import RootTap
from bitwitness.capture.step import StepRecord
from bitwitness.finding import Finding
from bitwitness.guard.census import Census
from bitwitness.guard.exactsensors import ExactSensors
from bitwitness.guard.switches import Switches
from bitwitness.nonfinite.approach import ApproachSensor
from bitwitness.replay.errors import reason_of
from bitwitness.replay.run import Replayer
from bitwitness.sense.checksum import ChecksumSensor
from bitwitness.sense.twice import TwiceSensor
from bitwitness.stats.local import is_in_shared_memory
from bitwitness.tap.compat import OpOverload
from bitwitness.tap.inplace import InPlaceCalls, functional_of
from bitwitness.tap.modes import mode_in_doubt
from bitwitness.tap.modules import ModuleTracker
from bitwitness.tap.operators import OpCall, OperatorTap, tensors_in

_RESULTS = ("checksum", "twice")
"""The sensors that hold an operator's result against what it must be."""


class _Looking(Protocol):
    """A sensor of operators."""

    def select(self, func: OpOverload) -> bool:
        """Tell whether it looks at an operator."""

    def __call__(self, call: OpCall) -> None:
        """Look at a call."""


class OperatorSensors:
    """Holds one root's sensors of operators.

    Parameters
    ----------
    root
        Whose operators these are.
    switches
        Turn off what fails.
    checksum
        Checks matrix products and attention; None to leave them out.
    approach
        Measures how close results come to the ends of narrow dtypes; None to leave it out.
    twice
        Computes again what nothing else checks; None to leave it out.
    exact
        Look at collectives and at recomputed activations under the same tap; None to leave them out.

    """

    def __init__(
        self,
        root: RootTap,
        switches: Switches,
        *,
        checksum: ChecksumSensor | None,
        approach: ApproachSensor | None,
        twice: TwiceSensor | None = None,
        exact: ExactSensors | None = None,
    ) -> None:
        self.checksum, self.approach, self.twice, self.exact = checksum, approach, twice, exact
        self.census = Census()
        self._switches = switches
        self._active: dict[str, _Looking] = {}
        self._asked: dict[OpOverload, list[str]] = {}
        self._in_place = InPlaceCalls()
        self._early: defaultdict[str, list[Finding]] = defaultdict(list)
        self._tracker = ModuleTracker()
        self._tracker.name_tree(root.root)
        if exact is not None:
            exact.use(self._tracker)
        self._regions = root.regions
        self.steps_looked_again = 0
        self.not_looked_again: str | None = None
        self._now = root.now
        self._checking_seconds = 0.0
        self.in_doubt: Counter[str] = Counter()
        """Calls whose results may not follow from their inputs by the operator alone, by the reason."""

    def tap(self, *, ranges: bool = True) -> AbstractContextManager[Any] | None:
        """Return the dispatch mode of a deep step; what is compiled for the first time meanwhile can be so later.

        ``ranges``: measure how close results come to the ends of narrow dtypes, too.
        """
        self._active, self._asked = self._handlers(), {}
        if not ranges:
            self._active.pop("approach", None)
        if not self._active:
            return None
        stack = ExitStack()
        if self.exact is not None:
            self.exact.open()
            stack.callback(self.exact.pass_ended)
        stack.enter_context(self._regions.eagerly())
        stack.enter_context(self._tap())
        return stack

    def _handlers(self) -> dict[str, _Looking]:
        """Return the sensors that look at operators and are on."""
        exact = self.exact if self.exact is not None and self.exact.any_on else None
        here: dict[str, _Looking | None] = {
            "checksum": self.checksum,
            "twice": self.twice,  # of what the checksum has not checked
            "approach": self.approach,
            "collective": exact,
        }
        resting = self.approach is not None and self.approach.resting
        return {
            name: sensor
            for name, sensor in here.items()
            if sensor is not None
            and (name not in self._switches.off or sensor is exact)
            and not (name == "approach" and resting)
        }

    def _tap(self) -> OperatorTap:
        return OperatorTap(self._tracker, self._checked, self._wanted, self._before, census=self.census)

    def _wanted(self, func: Any) -> bool:
        return bool(self._asked_of(func) or ((other := functional_of(func)) is not None and self._asked_of(other)))

    def _asked_of(self, func: OpOverload) -> list[str]:
        """Return which sensors look at an operator."""
        asked = self._asked.get(func)
        if asked is None:
            asked = self._asked[func] = [name for name, one in self._active.items() if one.select(func)]
        return asked

    def _before(self, call: OpCall) -> None:
        if self.exact is not None:
            self.exact.before(call)
        if any(name in self._active and name not in self._switches.off for name in _RESULTS):
            try:
                self._in_place.before(call)
            except Exception as error:  # no memory left for a copy, say
                self.in_doubt[f"what they write over could not be copied ({type(error).__name__})"] += 1

    def look_again(self, replayer: Replayer, record: StepRecord) -> None:
        """Execute a step with compiled code once more, eagerly, under the operator tap; its result is thrown away."""
        self._active, self._asked = self._handlers(), {}
        if not self._active:
            return
        try:
            replayer.run(record, around=self._tap)
            self.steps_looked_again += 1
        except Exception as error:  # the script's own code runs again, and may raise
            self.not_looked_again = reason_of(error)

    def _checked(self, call: OpCall) -> None:
        started = self._now()
        try:
            doubt = self._doubt(call)
        except Exception as error:  # this runs inside the script's own operator
            doubt = f"it cannot be told what they read ({type(error).__name__}: {error})"
        if doubt is not None:
            self.in_doubt[doubt] += 1
        shown = self._in_place.shown(call)
        for name, sensor in self._active.items():
            one = shown if name in _RESULTS else call
            if name not in self._asked_of(one.func) or name in self._switches.off:
                continue
            if doubt is not None and name in _RESULTS:
                continue
            try:
                sensor(one)
            except Exception as error:
                self._switches.turn_off(name, error)
        self._checking_seconds += self._now() - started

    @staticmethod
    def _doubt(call: OpCall) -> str | None:
        """Say why a result may be another's doing: a mode's, or that of who changes the inputs meanwhile; None if it is not."""
        mode = mode_in_doubt()
        if mode is not None:
            return f"the script's {mode} was on, and what it makes of results is not known"
        shared = any(map(is_in_shared_memory, tensors_in((*call.args, *call.kwargs.values()))))
        return "they read memory that other processes may write" if shared else None

    def so_far(self, step: int, rank: int) -> list[Finding]:
        """Return what has failed since the last time in a step that is not complete yet; it is told with that step, too."""
        found: list[Finding] = []
        for name in _RESULTS:
            new = self._drained(name, step, rank)
            self._early[name] += new
            found += new
        return found

    def failed_checksums(self, light: LightStep) -> list[Finding]:
        """Return which of a deep step's products failed their checksums."""
        return self._early.pop("checksum", []) + self._drained("checksum", light.step, light.rank)

    def differing(self, light: LightStep) -> list[Finding]:
        """Return which of a deep step's operators gave other bits the second time."""
        return self._early.pop("twice", []) + self._drained("twice", light.step, light.rank)

    def _drained(self, name: str, step: int, rank: int) -> list[Finding]:
        sensor = self.checksum if name == "checksum" else self.twice
        return [] if sensor is None else self._switches.ask(name, partial(sensor.drain, step, rank))

    def dismissed(self, findings: list[Finding], *, proven: bool) -> None:
        """Mind that experiments found nothing behind these; ``proven``: because they showed that the numbers are right."""
        if self.twice is not None:
            self.twice.dismissed(findings)
        if self.checksum is not None and proven:
            self.checksum.dismissed(findings)

    def ranges(self, light: LightStep) -> list[Finding]:
        """Return what a deep step's operators showed of the ends of their dtypes."""
        if self.approach is None or "approach" not in self._active:
            return []
        return self._switches.ask("approach", partial(self.approach.drain, light.step, light.rank, scaled=light.scaled))

    def take_checking_seconds(self) -> float:
        """Return the seconds that operators' checks took since the last time."""
        seconds, self._checking_seconds = self._checking_seconds, 0.0
        return seconds

    @property
    def has_products(self) -> bool:
        """Whether the model was seen to run any operator that can be checked."""
        return self.checksum is not None and self.checksum.checked_any

    def look_at_one_product_in(self, count: int) -> None:
        """Have only a share of a deep step's operators checked, by turns."""
        if self.checksum is not None:
            self.checksum.one_in = count
        if self.twice is not None:
            self.twice.share = count
