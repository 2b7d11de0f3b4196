"""One case run on the device under test, and judged."""

from __future__ import annotations

import time
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from bitwitness.errors import BitwitnessError
from bitwitness.precheck import msprobe, recorded, suite
from bitwitness.precheck.case import Case, Damaged, Maker, NotJudged, Prepared
from bitwitness.precheck.reproducer import write_reproducer
from bitwitness.trial.call import Results
from bitwitness.trial.given import said
from bitwitness.trial.judging import judge_all, undecidable
from bitwitness.trial.oracle import Oracle
from bitwitness.trial.result import ERROR, FAIL, NOT_JUDGED, PASS, WARN, CaseResult, OutputResult, worst
from bitwitness.trial.standards import judge_by

MODEL = "model"
"""The project's own standard; others are `bitwitness.trial.standards.STANDARDS`."""
MAKERS: dict[str, Maker] = {recorded.KIND: recorded.prepare, msprobe.KIND: msprobe.prepare, suite.KIND: suite.prepare}


@dataclass(frozen=True, slots=True)
class Terms:
    """How cases are tried: ``device``, ``standard``, and ``reproducers``: the folder for failing ones, None for none."""

    device: str = "cpu"
    standard: str = MODEL
    reproducers: str | None = None


def attempt(case: Case, terms: Terms) -> CaseResult:
    """Return what a case gives; it never raises but for what ends the process."""
    began = time.process_time()
    verdict, reason, outputs, prepared = _tried(case, terms)
    result = CaseResult(
        case.name,
        case.operator,
        case.dtype,
        case.shapes,
        verdict,
        reason,
        case.calls,
        outputs,
        time.process_time() - began,
    )
    if verdict == FAIL and prepared is not None and terms.reproducers is not None:
        result = _with_reproducer(result, prepared, terms)
    return result


def prepared_of(case: Case, device: torch.device) -> Prepared:
    """Return a case with its tensors. Raises `NotJudged` where they cannot be had."""
    return MAKERS[case.made_of["kind"]](case.made_of, device)


def _tried(case: Case, terms: Terms) -> tuple[str, str, tuple[OutputResult, ...], Prepared | None]:
    if case.refused:
        return ERROR if case.damaged else NOT_JUDGED, case.refused, (), None
    device = torch.device(terms.device)
    try:
        prepared = prepared_of(case, device)
    except Damaged as error:
        return ERROR, str(error), (), None
    except (NotJudged, BitwitnessError) as error:
        return NOT_JUDGED, str(error), (), None
    try:
        torch.manual_seed(0)
        results = prepared.call.run()
    except Exception as error:
        return ERROR, f"it raises on {device}: {said(error)}", (), prepared
    if not results.outputs:
        return NOT_JUDGED, "it returned no tensor", (), prepared
    oracle = Oracle(prepared.call, results)
    try:
        outputs, reason = _judged(results, oracle, prepared, case, terms)
    except Exception as error:
        return NOT_JUDGED, f"it cannot be run in float64 on the CPU: {said(error)}", (), prepared
    verdict = NOT_JUDGED if reason else worst(o.verdict for o in outputs)
    if verdict in (FAIL, WARN):
        bad = next(o for o in outputs if o.verdict == verdict)
        reason = f"{bad.slot}: {bad.reason}"
    if verdict == PASS and (other := _other_bits(prepared, results)):
        verdict, reason = WARN, other
    return verdict, reason, outputs, prepared


def _judged(
    results: Results, oracle: Oracle, prepared: Prepared, case: Case, terms: Terms
) -> tuple[tuple[OutputResult, ...], str]:
    """Return what is said of the run, and of the results that were recorded."""
    if terms.standard != MODEL and oracle.mode.is_unique:
        reason = undecidable(oracle)
        return ((), reason) if reason else (_by(terms.standard, results, oracle, prepared, case), "")
    outputs, reason = judge_all(results, oracle)
    if reason:
        return outputs, reason
    if terms.standard != MODEL:
        return _by(terms.standard, results, oracle, prepared, case), ""
    if prepared.recorded and list(prepared.recorded) == [f"out{i}" for i in range(len(results.outputs))]:
        kept = Results(tuple(prepared.recorded.values()))
        outputs += tuple(replace(o, slot=f"recorded {o.slot}") for o in judge_all(kept, oracle)[0])
    return outputs, ""


def _by(standard: str, results: Results, oracle: Oracle, prepared: Prepared, case: Case) -> tuple[OutputResult, ...]:
    due, benchmark = oracle.exact.slots(), {}
    if standard == "benchmark":
        benchmark = prepared.call.on_cpu().run(prepared.call.fn).slots()
    found = []
    for slot, tensor in results.slots().items():
        said_of = judge_by(standard, tensor, due[slot], benchmark.get(slot), case.operator)
        ratio = said_of.figures.get("ratio", 0.0)
        kind = str(tensor.dtype).removeprefix("torch.")
        found.append(OutputResult(slot, said_of.verdict, said_of.reason, kind, tuple(tensor.shape), ratio))
    return tuple(found)


def _other_bits(prepared: Prepared, results: Results) -> str:
    """Run it again; return what is to be told if its bits are others."""
    torch.manual_seed(0)
    slot = results.differs_at(prepared.call.run())
    return (
        f"{slot}: other bits when it is run again, within what rounding allows: it is not deterministic" if slot else ""
    )


def _with_reproducer(result: CaseResult, prepared: Prepared, terms: Terms) -> CaseResult:
    if not prepared.source or any(o.slot.startswith("recorded") and o.verdict == FAIL for o in result.outputs):
        return result
    wanted = [name for name, tensor in prepared.tensors.items() if tensor.requires_grad]
    try:
        Path(str(terms.reproducers)).mkdir(parents=True, exist_ok=True)
        place = write_reproducer(
            str(terms.reproducers),
            result,
            call_source=prepared.source,
            tensors=prepared.tensors,
            requires_grad=wanted,
            device=terms.device,
        )
    except (
        BitwitnessError
    ):  # no file holds such a tensor, or the call is more than literals: the verdict stands without
        return result
    return replace(result, reproducer=str(place))


def cases_in(group: Mapping[str, Any], terms: Terms) -> list[dict[str, Any]]:
    """Return the cases of a group: those that it holds, or that torch's samples make in the process that runs them."""
    if "cases" in group:
        return list(group["cases"])
    found = [case.as_dict() for case in suite.cases_of(group, torch.device(terms.device))]
    return found[: group.get("most") or None]


def attempt_all(group: Mapping[str, Any], terms: Terms) -> list[dict[str, Any]]:
    """Return the results of a group of cases, small enough to be sent to another process."""
    torch.set_num_threads(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's samples try what is deprecated, too
        return [attempt(Case(**one), terms).as_dict() for one in cases_in(group, terms)]
