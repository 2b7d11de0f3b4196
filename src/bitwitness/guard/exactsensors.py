"""The sensors of deep steps that need no history and no threshold of taste: `collective` and `recompute`."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from bitwitness.capture.light import LightStep
from bitwitness.config import Config
from bitwitness.finding import Finding, Severity
from bitwitness.guard.switches import Switches
from bitwitness.ranks import Ranks
from bitwitness.sense.collective import CollectiveSensor, Noted
from bitwitness.sense.exchanged import Comparison
from bitwitness.sense.mismatch import Mismatch
from bitwitness.sense.recompute import RecomputeSensor
from bitwitness.tap.buffersync import BufferSync
from bitwitness.tap.compat import OpOverload
from bitwitness.tap.exchanges import ExchangeTap
from bitwitness.tap.modules import ModuleTracker
from bitwitness.tap.operators import OpCall
from bitwitness.tap.recomputing import RecomputeTap


class ExactSensors:
    """Holds one root's exact sensors, and opens their taps from a deep step's first forward to its judgement.

    Parameters
    ----------
    config
        Which of them are on.
    ranks
        Those that compare what they exchanged.
    switches
        Turn off what fails.

    """

    def __init__(self, config: Config, ranks: Ranks, switches: Switches) -> None:
        self._ranks, self._switches = ranks, switches
        self.collective = CollectiveSensor() if config.collective.enabled and ranks.size > 1 else None
        self.comparison = Comparison()
        self.recompute = RecomputeSensor() if config.recompute.enabled else None
        self.exchanges: ExchangeTap | None = None
        self.regions: RecomputeTap | None = None
        self._buffers: BufferSync | None = None
        self.mismatch: Mismatch | None = None
        """What the last deep step's collectives did not give as they must; the same on every rank."""

    def use(self, tracker: ModuleTracker) -> None:
        """Make the taps; ``tracker`` knows the running module."""
        turn_off = self._switches.turn_off
        if self.collective is not None:
            sensor = self.collective
            self.exchanges = ExchangeTap(sensor.began, sensor.ended, partial(turn_off, "collective"))
        if self.recompute is not None:
            self.regions = RecomputeTap(tracker, self.recompute, partial(turn_off, "recompute"))

    def hear_buffers(self, wrapper: DistributedDataParallel, due: Callable[[], bool]) -> None:
        """Look at the broadcasts of buffers, too, which come before a forward; ``due``: whether that is of a deep step."""

        def around(group: Any, tensors: list[Tensor], root: int) -> AbstractContextManager[None]:
            try:
                if self.exchanges is not None and due():
                    self._open_exchanges()
                    return self.exchanges.showing_broadcast(group, tensors, root)
            except Exception as error:  # this runs inside the script's own forward
                self._switches.turn_off("collective", error)
            return nullcontext()

        if self.collective is not None:
            self._buffers = BufferSync(wrapper, around)

    @property
    def any_on(self) -> bool:
        """Whether any of them looks."""
        off = self._switches.off
        return ("collective" not in off and self.exchanges is not None) or (
            "recompute" not in off and self.regions is not None
        )

    # -- as the operator tap sees it -----------------------------------------------------------------------------

    def select(self, func: OpOverload) -> bool:
        """Tell whether an operator is a collective."""
        return self.exchanges is not None and self.exchanges.wants(func)

    def before(self, call: OpCall) -> None:
        """Note a collective that is about to begin."""
        if self.exchanges is not None:
            self.exchanges.before(call)

    def __call__(self, call: OpCall) -> None:
        """Note that it has begun."""
        if self.exchanges is not None:
            self.exchanges.after(call)

    def open(self) -> None:
        """Look from now on; a forward or a backward of a deep step begins."""
        self._open_exchanges()
        if self.regions is not None and "recompute" not in self._switches.off:
            self.regions.open()

    def _open_exchanges(self) -> None:
        if self.exchanges is not None and "collective" not in self._switches.off:
            self.exchanges.open()

    def pass_ended(self) -> None:
        """Say that the forward or backward has ended."""
        if self.exchanges is not None:
            self.exchanges.pass_ended()

    def leave(self) -> None:
        """Look at nothing any more, and remove every patch."""
        if self._buffers is not None:
            self._buffers.close()
        self.close()

    def close(self) -> None:
        """Look no more, until the next deep step."""
        for tap in (self.exchanges, self.regions):
            if tap is not None:
                tap.close()

    # -- judging -------------------------------------------------------------------------------------------------

    def look(self, light: LightStep, *, alone: bool) -> list[Finding]:
        """Return what a deep step showed; collective, unless ``alone``: then no rank is asked, nor told anything."""
        self.close()
        self.mismatch = None
        found: list[Finding] = []
        if self.recompute is not None:
            found += self._switches.ask("recompute", partial(self.recompute.drain, light.step, light.rank))
        if self.collective is not None:
            noted: list[Noted] = []
            sensor = self.collective
            self._switches.do("collective", lambda: noted.extend(sensor.drain()))
            # The comparison happens whatever this rank's own state, so that the others do not wait for it.
            if not alone:
                self.mismatch = self.comparison.compare(self._ranks, noted)
        return found + self._told(light)

    def _told(self, light: LightStep) -> list[Finding]:
        wrong = self.mismatch
        if wrong is None or self._ranks.rank not in (wrong.ranks or (0,)):
            return []
        return [
            Finding(
                "collective",
                wrong.site.at(rank=light.rank, step=light.step),
                Severity.ERROR,
                wrong.text,
                wrong.evidence["collective"],
                light.step,
                light.rank,
            )
        ]

    def dismissed(self, findings: list[Finding]) -> None:
        """Mind that experiments explained nothing of these."""
        if self.recompute is not None:
            self.recompute.dismissed(findings)

    def table(self) -> dict[str, Any]:
        """Return what was looked at, ready for JSON."""
        table: dict[str, Any] = {}
        if self.collective is not None and self.exchanges is not None:
            table["collectives"] = {
                "seen": dict(self.collective.seen),
                "compared": dict(self.comparison.compared),
                "not_compared": dict(self.comparison.skipped),
                "not_understood": dict(self.exchanges.other),
                "mismatches": self.comparison.mismatches,
            }
        if self.recompute is not None and (told := self.recompute.coverage())["regions"]:
            table["recompute"] = told
        return table

    def gaps(self) -> list[str]:
        """Say in words what was not compared."""
        lines = [
            f"collective: {n} calls were not compared ({why})" for why, n in self.comparison.skipped.most_common(3)
        ]
        if self.exchanges is not None and self.exchanges.other:
            names = ", ".join(f"{name} ({n})" for name, n in self.exchanges.other.most_common(3))
            lines.append(f"collective: calls that are not understood: {names}")
        off = {} if self.recompute is None else self.recompute.coverage()["do_not_repeat"]
        if off:
            names = ", ".join(f"{n} in {name}" for name, n in list(off.items())[:3]) + (", ..." if len(off) > 3 else "")
            lines.append(
                f"recompute: {sum(off.values())} values of checkpointed regions do not repeat their bits ({names})"
            )
        return lines
