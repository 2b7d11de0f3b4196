"""A non-finite step followed back to who made it, on every rank, and told: findings, the frame list, kept tensors.

A rank that has NaN or Inf of its own making replays its step and looks (all ranks together, where parameters are sharded);
then all tell one another, so that a rank whose gradients were spoiled by the reduction knows who fed it.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import torch
from torch.optim.optimizer import Optimizer

from bitwitness.capture.light import LightStep
from bitwitness.capture.lossgraph import LossGraph
from bitwitness.capture.step import StepRecord
from bitwitness.config import Config
from bitwitness.finding import Finding, Severity
from bitwitness.guard.badsince import BadSince
from bitwitness.guard.unexplained import came_once, finding_of, reduction, symptom, unexplained
from bitwitness.nonfinite.kinds import wanted
from bitwitness.nonfinite.messages import as_finding, headline
from bitwitness.nonfinite.origin import Kind, Origin, Told, Trace
from bitwitness.nonfinite.scaling import ScaleLog
from bitwitness.nonfinite.trace import bad_parameters, trace_forward, trace_step
from bitwitness.ranks import Ranks
from bitwitness.replay.run import Replayer, ReplayError
from bitwitness.session.reporter import Reporter
from bitwitness.site import Site

_FRAMES_PRINTED = 5  # the events hold more
_SCALED_ALWAYS, _SCALED_EVERY = (
    10,
    100,
)  # overflows under a scaler that are traced at first, and later one in so many steps
_ALWAYS = 3  # hits that are traced in any case; then the 4th, 8th, 16th …: what stays broken is not traced for ever
_APPLIED = "parameters are not finite since the optimizer applied the gradients of step {}, told of above"


class Tracing:
    """Follows one root's non-finite steps.

    Parameters
    ----------
    config, replayer, ranks, reporter
        Of the guard.

    """

    def __init__(self, config: Config, replayer: Replayer, ranks: Ranks, reporter: Reporter) -> None:
        self._config = config
        self._replayer = replayer
        self._ranks = ranks
        self._reporter = reporter
        self.hits = 0
        self.unused = 0
        self.scaling = ScaleLog(config.nonfinite.drops)
        self._scaled_traced = 0
        self.findings: list[Finding] = []
        self._since = BadSince()
        self._said: set[str] = set()
        self._hit_at: int | None = None
        self._came_once = False
        """Whether the step that was traced last is not finite here, and finite when it is run again."""

    def use(self, replayer: Replayer) -> None:
        """Run steps again by another replayer: other parameters of the same root are trained."""
        self._replayer = replayer

    def clean(self, light: LightStep) -> None:
        """Note that a step was looked at and was finite."""
        self._since.clean(light.step)
        if light.scaled:
            self.scaling.fine()

    def stepped(self, optimizer: Optimizer) -> None:
        """Note who changes parameters, and with which settings: a schedule may change them before the damage is seen."""
        self._since.stepped(optimizer)

    def applied(self, light: LightStep) -> None:
        """Note that a step was questioned, whatever came of it: if it is not finite, what follows is its aftermath."""
        before, clean = self._hit_at, self._since.last_clean
        known = before is not None and (clean is None or clean < before)
        if not known and not light.finite:
            self._hit_at = light.step

    def hit(self, record: StepRecord, light: LightStep) -> list[Finding] | None:
        """Take a step that is not finite on some rank; trace it unless too many were. Collective: all ranks count alike.

        Return what of an overflow that a scaler would skip is to be questioned all the same, for it is finite when it is run
        again on some rank; None if there is nothing.
        """
        self.hits += 1
        self._came_once = False
        told: list[Told] = []
        if self._due(light):
            # A gradient scaler finds its scale by overflows, and skips such steps.
            told = self.follow(record, light, severity=Severity.INFO if light.scaled else Severity.ERROR)
        if light.scaled:
            finding = self.scaling.overflowed(light.step, light.scale, light.rank, told)
            if finding is not None:
                self.tell(finding)
        if not light.scaled or not told or not bool(self._ranks.max(torch.tensor([int(self._came_once)]))):
            return None
        return [came_once(light)] if self._came_once else []

    def _due(self, light: LightStep) -> bool:
        if not light.scaled:
            return _worth_it(self.hits)
        self._scaled_traced += 1
        return self._scaled_traced <= _SCALED_ALWAYS + light.step // _SCALED_EVERY

    def tell(self, finding: Finding) -> None:
        """Record a finding and print it."""
        self.findings.append(finding)
        self._reporter.event(finding)
        self._reporter.say(f"step {finding.step}: {finding.message}")

    def follow(self, record: StepRecord, light: LightStep, *, severity: Severity = Severity.ERROR) -> list[Told]:
        """Trace a step that is not finite on some rank; collective. Return what the ranks found, in rank order."""
        aftermath = self._aftermath(light)
        if aftermath:
            return aftermath
        self._hit_at = light.step
        here = not light.finite_here
        kept_from = self._kept_from(record)
        if kept_from is not None:
            trace = Trace(problem=kept_from)
        else:
            trace = self._trace(record, light) if here or self._replayer.lockstep else Trace()
        mine = [self._since.explained(origin, self._replayer.parameters) for origin in trace.origins]
        told = self._exchange(mine, light, here=here)
        findings = [as_finding(origin, trace, light.step, light.rank, severity) for origin in mine]
        if not any(one.own for one in told if one.rank == light.rank):
            findings = self._without_origin(trace, record, light, told, findings, here=here, severity=severity)
        self._since.bad_buffers(light.buffers, light.step)
        self._tell(findings, trace, light.step)
        return told

    def follow_broken_off(self, record: StepRecord, graph: LossGraph, rank: int) -> None:
        """Trace a step that ended before its backward, if the last number that the script computed is not finite.

        This rank's own affair: others may have gone on, and their hits are counted apart.
        """
        self.unused += 1
        if not _worth_it(self.unused) or self._is_aftermath(record.step):
            return
        try:
            trace = trace_forward(self._replayer, record, graph, mode=self._config.nonfinite.mode)
        except Exception as error:
            self._reporter.once(f"the training ended before a backward; that step cannot be looked at: {error}")
            return
        if not trace.targets:
            return
        mine = [self._since.explained(origin, self._replayer.parameters) for origin in trace.origins]
        self._tell([as_finding(origin, trace, record.step, rank) for origin in mine], trace, record.step)

    def _aftermath(self, light: LightStep) -> list[Told]:
        """Tell whether parameters are bad because an earlier non-finite step was applied to them; collective."""
        here = self._is_aftermath(light.step)
        if not bool(self._ranks.max(torch.tensor([int(here)]))):
            return []
        return [Told(light.rank, Kind.AFTERMATH, "", "", _APPLIED.format(self._hit_at))]

    def _is_aftermath(self, step: int) -> bool:
        """Tell whether parameters are bad on this rank since such a step, and say so once."""
        before, clean = self._hit_at, self._since.last_clean
        since = before is not None and (clean is None or clean < before)
        if not since or not bad_parameters(self._replayer.root):
            return False
        text = f"step {step}: {_APPLIED.format(before)}; what follows from that is not traced"
        self._reporter.once(text, severity=Severity.INFO)
        return True

    def _kept_from(self, record: StepRecord) -> str | None:
        """Return why a step is not run again where all ranks have to do so together; collective."""
        if not self._replayer.lockstep:
            return None
        try:
            self._replayer.check(record, record.passes())
            problem = ""
        except ReplayError as error:
            problem = str(error)
        return next((text for text in self._ranks.gather_text(problem) if text), None)

    def _trace(self, record: StepRecord, light: LightStep) -> Trace:
        try:
            return trace_step(self._replayer, record, mode=self._config.nonfinite.mode, scale=light.scale)
        except ReplayError as error:
            return Trace(problem=str(error))
        except Exception as error:
            self._reporter.failure("trace of a non-finite step", error, record.step)
            return Trace(problem=f"the trace failed: {type(error).__name__}: {error}")

    # -- over the ranks ------------------------------------------------------------------------------------------

    def _exchange(self, mine: list[Origin], light: LightStep, *, here: bool) -> list[Told]:
        """Tell the first origin of each rank to all, or that it has bad values of its own without one; collective."""
        first = [[str(o.kind), o.site.short, _line(o), headline(o)] for o in mine[:1]]
        if here and not first:
            first = [[str(Kind.UNKNOWN), "./loss#0:forward.out0", "", f"not finite: {symptom(light)}"]]
        told = self._ranks.gather_text(json.dumps(first))
        return [
            Told(rank, Kind(kind), site, line, text)
            for rank, words in enumerate(told)
            for kind, site, line, text in (json.loads(words) if words else [])
        ]

    def _without_origin(
        self,
        trace: Trace,
        record: StepRecord,
        light: LightStep,
        told: list[Told],
        found: list[Finding],
        *,
        here: bool,
        severity: Severity,
    ) -> list[Finding]:
        """Say what is known on a rank whose step has no origin of its own."""
        culprits = [one for one in told if one.own]
        if culprits and (light.reduced or found):
            site = found[0].site if found else Site(".", "all_reduce", 0, "comm", "out0")
            return [self._received(light, culprits, severity, site)]
        if found:
            return found
        if trace.passed_over:
            mode = self._config.nonfinite.mode
            self._reporter.once(f"step {light.step} is not finite, by operators that mode {mode!r} does not look at")
            return []
        if here:
            self._came_once = trace.problem is None and not trace.targets
            if self._came_once and light.scaled:
                return []  # the verdict says it
            return [unexplained(trace, record, light, self._replayer, severity)]
        unknown = [one for one in told if one.kind is Kind.UNKNOWN]
        if light.reduced and unknown:
            return [self._received(light, unknown, severity, Site(".", "all_reduce", 0, "comm", "out0"))]
        if light.reduced and not culprits and wanted(self._config.nonfinite.mode, accumulating=True):
            return [reduction(light, severity)]
        return []

    def _received(self, light: LightStep, culprits: list[Told], severity: Severity, site: Site) -> Finding:
        feeders = ", ".join(str(one.rank) for one in culprits)
        text = f"received: rank {feeders} fed NaN or Inf into what all ranks share; there, {culprits[0].text}"
        evidence: dict[str, Any] = {
            "kind": str(Kind.RECEIVED),
            "from": [one.rank for one in culprits],
            "origin": culprits[0].site,
            "line": culprits[0].line,
        }
        return finding_of(light, site, severity, text, evidence)

    # -- telling -------------------------------------------------------------------------------------------------

    def _tell(self, findings: list[Finding], trace: Trace, step: int) -> None:
        """Record all findings; print the earliest (all, where that is configured), each origin's words once."""
        kept = self._reporter.keep_tensors(step, trace.tensors) if trace.tensors else None
        if kept is not None:
            findings = [replace(f, evidence={**f.evidence, "tensors": kept}) for f in findings]
        for number, finding in enumerate(findings):
            self.findings.append(finding)
            self._reporter.event(finding)
            key = f"{finding.site.short} {finding.evidence.get('line')}"
            if (number and not self._config.nonfinite.show_all) or key in self._said:
                continue
            self._said.add(key)
            for line in _lines(finding, first=number == 0, more=len(findings) - 1 if number == 0 else 0):
                self._reporter.say(line)


def _worth_it(times: int) -> bool:
    return times <= _ALWAYS or not times & (times - 1)


def _line(origin: Origin) -> str:
    line = origin.line if origin.line[0] else origin.forward_line
    return f"{line[0]}:{line[1]} in {line[2]}" if line[0] else ""


def _lines(finding: Finding, *, first: bool, more: int) -> list[str]:
    title = "FIRST NON-FINITE VALUE" if first else "also non-finite"
    rest = f" ({more} more origins are recorded; show_all = true prints them)" if more > 0 else ""
    lines = [f"step {finding.step}: {title}{rest}: {finding.message}"]
    frames = finding.evidence.get("last_modules") or []
    # an overflow under a gradient scaler is ordinary: one line, the frames are in the events
    if frames and first and finding.severity is not Severity.INFO:
        starts = [number for number, line in enumerate(frames) if line.startswith(" " * 18)]
        shown = frames[starts[-_FRAMES_PRINTED] :] if len(starts) > _FRAMES_PRINTED else frames[1:]
        lines += [
            "the last modules, in the order in which they ran:",
            f"  {frames[0]}",
            *(f"  {line}" for line in shown),
        ]
    return lines
