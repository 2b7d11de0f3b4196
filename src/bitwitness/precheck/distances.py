"""One recorded call: how far its results are from the CPU's float64, and how far those of a benchmark's recording are."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from bitwitness.errors import UsageError
from bitwitness.precheck.attempt import Terms, attempt, prepared_of
from bitwitness.precheck.case import Case, NotJudged
from bitwitness.precheck.sources import run_cases
from bitwitness.trial.call import Results
from bitwitness.trial.judging import judge_all
from bitwitness.trial.oracle import Oracle
from bitwitness.trial.result import CaseResult

_RECORDED = "recorded "


@dataclass(frozen=True, slots=True)
class Distances:
    """What is said of a recorded call.

    Attributes
    ----------
    result
        The call, run again on the device under test, and its recorded results where they were kept.
    benchmark
        Euclidean distance of the benchmark's recorded result to float64, by slot; empty without one.
    ratios
        The device's distance over the benchmark's, by slot: 1 is as good, more is worse.

    """

    result: CaseResult
    benchmark: dict[str, float]
    ratios: dict[str, float]

    @property
    def verdict(self) -> str:
        """The call's verdict."""
        return self.result.verdict

    def as_dict(self) -> dict[str, Any]:
        """Return the fields by name."""
        return asdict(self)

    def __str__(self) -> str:
        case = self.result
        lines = [f"{case.verdict}: {case.name} ({case.operator}, {case.dtype} {case.shapes})"]
        lines += [f"  {case.reason}"] if case.reason else []
        for one in case.outputs:
            line = f"  {one.verdict:<10} {one.slot}: Euclidean distance to float64 {one.euclidean:.4g}"
            line += f" ({one.relative:.3g} of it)"
            if one.slot in self.benchmark:
                line += f"; the benchmark's {self.benchmark[one.slot]:.4g}, ratio {self.ratios[one.slot]:.4g}"
            lines.append(line + f"; largest error {one.ulp_max:.4g} ULP")
        return "\n".join(lines)


def distances(run: str, site: str, *, benchmark: str | None = None, device: str = "cpu") -> Distances:
    """Judge one recorded call, beside the same call of a benchmark's recording.

    Parameters
    ----------
    run, site
        A recording, and a call in it by the beginning of its printed site.
    benchmark
        Another recording, with tensors.
    device
        On which it is run again.

    Raises
    ------
    UsageError
        If there is no such recording or call, or several, or the benchmark has no tensors of it.

    """
    case = _one(run, site)
    result = attempt(case, Terms(device))
    if benchmark is None:
        return Distances(result, {}, {})
    theirs = _kept_distances(_one(benchmark, site), benchmark)
    slots = {o.slot: o.euclidean for o in result.outputs}
    beside = {slot: theirs[slot.removeprefix(_RECORDED)] for slot in slots if slot.removeprefix(_RECORDED) in theirs}
    return Distances(result, beside, {slot: _ratio(slots[slot], size) for slot, size in beside.items()})


def _one(run: str, site: str) -> Case:
    wanted = site.rsplit(".out", 1)[0]
    found = list(run_cases(run, site=wanted, alike=False))
    exact = [c for c in found if c.name.split(" ")[0] == wanted] or found
    if not exact:
        raise UsageError(
            f"{run} has no operator call at {site!r}; expected a site such as layers.3.fc1/addmm#0:forward"
        )
    names = sorted({c.name.split(" ")[0] for c in exact})
    if len(names) > 1:
        raise UsageError(f"{len(names)} calls of {run} begin with {site!r}: {', '.join(names[:5])}; name one of them")
    return replace(exact[0], calls=len(exact))


def _kept_distances(case: Case, run: str) -> dict[str, float]:
    """Return the distances of recorded results from float64 of their own recorded inputs."""
    try:
        prepared = prepared_of(case, torch.device("cpu"))
    except NotJudged as error:
        raise UsageError(f"the call of the benchmark {run} cannot be judged: {error}") from error
    if not prepared.recorded:
        raise UsageError(f"the benchmark {run} holds no tensors of this call; record it with --content tensors")
    kept = Results(tuple(prepared.recorded.values()))
    outputs, _ = judge_all(kept, Oracle(prepared.call, kept))
    return {one.slot: one.euclidean for one in outputs}


def _ratio(ours: float, theirs: float) -> float:
    return ours / theirs if theirs else math.inf if ours else 1.0
