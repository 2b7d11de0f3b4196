"""The exact sensors of state, at the moments of a step: replicas and seals when gradients are complete, the optimizer's step.

Parameters and optimizer state are read once on a step that is looked at, for the comparison with other ranks and for the seal
alike; the seal was taken when the step before had ended.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

from torch.optim.optimizer import Optimizer

from bitwitness.capture.light import LightStep
from bitwitness.capture.step import StepRecord
from bitwitness.config import Config
from bitwitness.finding import Finding, Severity
from bitwitness.guard.seals import SealJudgement
from bitwitness.guard.switches import Switches
from bitwitness.judge.replicas import Desync
from bitwitness.ranks import Ranks
from bitwitness.sense.held import HeldState, Reading, read
from bitwitness.sense.optimizerstep import OptimizerSensor
from bitwitness.sense.seal import Broken, Seal
from bitwitness.session.reporter import Reporter
from bitwitness.stats import in_hex
from bitwitness.tap.timer import Timer

Compare = Callable[[StepRecord, LightStep, Reading], Desync | None]
RAREST = 100
"""Steps between two looks where nothing else says how many."""


class StateSensors:
    """Holds one root's.

    Parameters
    ----------
    config
        The sections ``replicas``, ``seal`` and ``update``.
    held
        Finds the tensors.
    ranks, reporter, switches
        As for the other sensors.
    now
        Tells the time, in seconds.
    deep
        Tells whether the step of a number is deep, before it begins; None where no step is.

    """

    def __init__(
        self,
        config: Config,
        held: HeldState,
        ranks: Ranks,
        reporter: Reporter,
        switches: Switches,
        now: Callable[[], float],
        deep: Callable[[int], bool] | None,
    ) -> None:
        self._config, self._held, self._ranks, self._switches, self._deep = config, held, ranks, switches, deep
        self.timed = Timer(now)
        self.seals = SealJudgement(reporter, ranks.rank)
        self._sealed: WeakKeyDictionary[Optimizer, Seal] = WeakKeyDictionary()
        self._buffers: Seal | None = None
        self._broken_buffers: list[Broken] = []
        self.sealed_steps = self.sealed_bytes = self.sealed_tensors = 0
        self._charged = 0.0
        self._reporter = reporter
        self.optimizer = OptimizerSensor()
        self._recompute = False
        self._proven: list[Finding] = []
        self._said: set[str] = set()

    # -- which steps ---------------------------------------------------------------------------------------------

    def _due(self, number: int, every: int | None, *, deep: bool | None = None) -> bool:
        """Tell whether a step is looked at; ``deep``: whether it is a deep one, where that is settled."""
        if every is not None:
            return number % every == 0
        if self._deep is None:
            return number % RAREST == 2
        return self._deep(number) if deep is None else deep

    def seal_due(self, number: int) -> bool:
        """Tell whether what a step works on is to be sealed: the same steps on all ranks."""
        return self._config.seal.enabled and self._due(number, self._config.seal.every)

    # -- when gradients are complete -----------------------------------------------------------------------------

    def look(self, record: StepRecord, light: LightStep, compare: Compare | None, *, deep: bool) -> list[Finding]:
        """Compare with what was sealed, and with other ranks; collective.

        ``compare`` asks the other ranks; None where they do not look. ``deep``: the step is a deep one, on all ranks.
        """
        update, replicas = self._config.update, self._config.replicas
        self._recompute = update.enabled and self._due(record.number, update.every, deep=deep)
        proven, self._proven = self._proven, []
        sealed, self._sealed = self._sealed, WeakKeyDictionary()
        several = replicas.enabled and self._ranks.size > 1
        due = compare is not None and several and self._due(record.number, replicas.every, deep=deep)
        if not due and not len(sealed):
            return proven
        reading = read(self._held.parameters() | self._held.optimizer())
        desync = compare(record, light, reading) if compare is not None and due else None
        findings = [] if desync is None else self._told(desync, light)
        broken, self._broken_buffers = self._broken_buffers, []

        def ask() -> list[Finding]:
            broken.extend(one for seal in sealed.values() for one in seal.broken(reading))
            self.sealed_steps += 1
            compared = all(one.name in reading.compared for one in broken)
            return self.seals.judge(broken, light.step, compared=compared, desync=desync is not None)

        return proven + findings + (self._switches.ask("seal", ask) if len(sealed) else [])

    def _told(self, desync: Desync, light: LightStep) -> list[Finding]:
        if self._ranks.rank not in (desync.ranks or (0,)):
            return []
        site = desync.site.at(rank=light.rank, step=light.step)
        message = f"{desync.name}{desync.others}: other bits than on other ranks"
        mine = in_hex(desync.hash_of(light.rank))
        return [Finding("replicas", site, Severity.ERROR, message, {"hash": mine}, light.step, light.rank)]

    @property
    def holds_buffers(self) -> bool:
        """Whether buffers are sealed now."""
        return self._buffers is not None

    def forward_begins(self) -> None:
        """Compare buffers with what was sealed, before a forward may write them."""
        sealed, self._buffers = self._buffers, None
        if sealed is not None:
            with self.timed():
                now = self._held.buffers()
                self._switches.do("seal", lambda: self._broken_buffers.extend(sealed.broken(read(now))))

    # -- around an optimizer's step ------------------------------------------------------------------------------

    def before_step(self, optimizer: Optimizer) -> None:
        """Let go of what an optimizer is about to write."""
        if not len(self._sealed):
            return
        mine = {id(p) for group in optimizer.param_groups for p in group["params"]}
        names = {name for name, p in self._held.named().items() if id(p) in mine}
        for seal in self._sealed.values():
            seal.drop_parameters(names)

    def before_update(self, optimizer: Optimizer) -> None:
        """Keep what an optimizer is about to step, on a step that is looked at; gradients are as it will use them."""
        if self._recompute:
            with self.timed():
                self._switches.do("optimizer", partial(self.optimizer.before, optimizer))

    def _recomputed(self, optimizer: Optimizer, step: int) -> None:
        """Hold a step against its recomputation; what is proven is said at the next look, which all ranks share."""
        names = {id(p): name for name, p in self._held.named().items()}
        ask = partial(self.optimizer.after, optimizer, names, step, self._ranks.rank)
        for finding in self._switches.ask("optimizer", ask):
            if finding.severity is Severity.ERROR:
                self._proven.append(finding)
            elif str(finding.site.short) not in self._said:
                self._said.add(finding.site.short)
                self._reporter.finding(finding)
        for note in self.optimizer.notes:
            self._reporter.once(note)
        self.optimizer.notes.clear()

    def after_step(self, optimizer: Optimizer, number: int, step: int) -> None:
        """Recompute a share of an optimizer's step; seal what it left, if the step ``number``, the next, is looked at."""
        self._held.stepped(optimizer)
        if self._recompute:
            with self.timed():
                self._recomputed(optimizer, step)
        if self.seal_due(number) or (self._config.seal.enabled and self.seals.watching):
            with self.timed():
                self._switches.do("seal", partial(self._seal, optimizer))

    def _seal(self, optimizer: Optimizer) -> None:
        tensors = self._held.parameters_of(optimizer) | self._held.optimizer(optimizer)
        kept = {name: tensor for name, tensor in tensors.items() if name not in self.seals.by_script}
        self._sealed[optimizer] = seal = Seal(kept)
        buffers = {name: buffer for name, buffer in self._held.buffers().items() if name not in self.seals.by_script}
        self._buffers, self._broken_buffers = (Seal(buffers) if buffers else None), []
        self.sealed_tensors = len(seal) + len(buffers)
        self.sealed_bytes = seal.bytes + (self._buffers.bytes if self._buffers else 0)

    def charge(self) -> float:
        """Return the seconds that were spent outside of the steps' holds since the last time."""
        spent, self._charged = self.timed.seconds - self._charged, self.timed.seconds
        return spent

    def table(self) -> dict[str, Any]:
        """Return what was sealed and recomputed, ready for JSON."""
        sensor = self.optimizer
        return {
            "seal": {"steps": self.sealed_steps, "tensors": self.sealed_tensors, "bytes": self.sealed_bytes},
            "optimizer": {
                "steps": sensor.steps,
                "elements": sensor.elements,
                "of": sensor.of,
                "equal": sensor.equal,
                "within_rounding": sensor.near,
            },
        }
