"""A step that is not finite and has no origin in its replay: what is known of it all the same, and no more than that."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from bitwitness.capture.light import LightStep
from bitwitness.capture.step import StepRecord
from bitwitness.finding import Finding, Severity
from bitwitness.nonfinite.flags import all_finite
from bitwitness.nonfinite.messages import SENSOR
from bitwitness.nonfinite.origin import Kind, Trace
from bitwitness.nonfinite.terms import Term, terms_of
from bitwitness.replay.run import Replayer
from bitwitness.site import Site

_LOSS = Site(".", "loss", 0, "forward", "out0")
_NOT_REPEATED = (
    "a re-execution of what was recorded of the step is finite: what made it is not part of that (a hook on a gradient, a "
    "generator, counter or other state of the model's own), or it was made once (a race, hardware). To do: look at what the "
    "step does beside its forward and its loss; the full guard compares devices"
)
_COMPILED = (
    "an eager re-execution of the same step is finite, so the compiled code produced it. To do: run with the "
    "backend 'eager' or 'aot_eager' to tell which compiler stage does"
)


def finding_of(light: LightStep, site: Site, severity: Severity, message: str, evidence: dict[str, Any]) -> Finding:
    """Return a finding about a step as a whole."""
    site = site.at(rank=light.rank, step=light.step)
    return Finding(SENSOR, site, severity, message, evidence, light.step, light.rank)


def came_once(light: LightStep) -> Finding:
    """Suspect an overflow that a gradient scaler would skip, and that does not come again when the step is run again."""
    text = f"not finite under a gradient scaler, and finite when it is run again: {symptom(light)}"
    return finding_of(light, _LOSS, Severity.WARNING, text, {})


def reduction(light: LightStep, severity: Severity) -> Finding:
    """Say that the reduction across ranks made the step non-finite."""
    largest = float(np.max(light.absmax, initial=0.0)) * light.scale
    text = (
        f"the reduction across ranks made {len(light.reduced)} gradients non-finite ({light.reduced[0]} first), while this "
        f"rank's own are finite (up to {largest:.4g}). To do: reduce in a wider dtype (no float16 compression hook, "
        "reduce_dtype=torch.float32), or scale the gradients down before"
    )
    site = Site(Site.of_parameter(light.reduced[0], "comm").module, "all_reduce", 0, "comm", _leaf(light.reduced[0]))
    evidence = {"kind": str(Kind.COLLECTIVE), "reduced": list(light.reduced[:8]), "absmax_here": largest}
    return finding_of(light, site, severity, text, evidence)


def _leaf(name: str) -> str:
    return name.rpartition(".")[2]


def unexplained(trace: Trace, record: StepRecord, light: LightStep, replayer: Replayer, severity: Severity) -> Finding:
    """Say what is known of a step whose replay shows no origin."""
    what = symptom(light)
    suspects = [] if trace.problem is not None and not trace.targets else _terms_behind(record, light, replayer)
    kind = Kind.UNKNOWN
    if trace.problem is not None and not trace.targets and _began_bad(record):
        why = (
            "the gradients were so already when the backward of the model's outputs began: an earlier backward, of "
            "something else, or what was left in them made it"
        )
    elif trace.problem is not None and not trace.targets:
        why = f"who made it cannot be told, since the step cannot be run again: {trace.problem}"
    elif suspects:
        kind, why = Kind.TERM, _of_terms(suspects)
    elif trace.targets:
        outside = trace.problem or "loss code"
        why = f"no operator of the model made it: it came in with the gradient from outside the model ({outside})"
    elif bad_from_the_start(record, light, replayer):
        why = (
            "it was so when the step began: other code changed it. To do: look at what writes this buffer between steps"
        )
    elif light.buffers and np.isfinite(light.absmax).all() and np.isfinite(light.losses).all():
        why = "the step as it was recorded leaves it finite, so other code changed it. To do: look at what writes this buffer"
    else:
        why = _COMPILED if replayer.compiled else _NOT_REPEATED
    evidence = {
        "kind": str(kind),
        "problem": trace.problem,
        "seen_in": what,
        "terms": [f"{term.describe()}; read by {term.read_by()}" for term in suspects],
        "replay_s": round(trace.seconds, 4),
    }
    return finding_of(light, _LOSS, severity, f"not finite: {what}; {why}", evidence)


def _began_bad(record: StepRecord) -> bool:
    return (norm := record.start_norm) is not None and bool(norm.isnan())


def bad_from_the_start(record: StepRecord, light: LightStep, replayer: Replayer) -> list[str]:
    """Return the bad buffers of a step in which nothing else is bad, if they were so before its forward."""
    if not light.buffers or light.reduced or not record.forwards:
        return []
    if not np.isfinite(light.absmax).all() or not np.isfinite(light.losses).all():
        return []
    names = [name for name, _ in replayer.root.named_buffers()]
    fine = dict(zip(names, all_finite(record.forwards[0].buffers), strict=False))
    return list(light.buffers) if not any(fine.get(name, True) for name in light.buffers) else []


def symptom(light: LightStep) -> str:
    """Return what of a step is not finite, in words."""
    bad = _bad_gradients(light)
    parts = ["loss"] if light.losses and not np.isfinite(light.losses).all() else []
    parts += [f"{len(bad)} gradient{'s' * (len(bad) > 1)} ({bad[0]}{' first' * (len(bad) > 1)})"] if bad else []
    return ", ".join(parts + [f"buffer {name}" for name in light.buffers[:1]])


def _bad_gradients(light: LightStep) -> list[str]:
    return [light.names[i] for i in np.flatnonzero(~np.isfinite(light.absmax))]


def _terms_behind(record: StepRecord, light: LightStep, replayer: Replayer) -> list[Term]:
    """Return the terms through which bad gradients may have come that a replay does not go back through."""
    bad = set(_bad_gradients(light))
    return [term for term in terms_of(record, replayer.parameters) if term.parameters & bad]


def _of_terms(terms: Sequence[Term]) -> str:
    first = terms[0]
    more = f" (and {len(terms) - 1} more)" if len(terms) > 1 else ""
    steep = first.steep
    hint = (
        f"the slope is infinite or undefined of {', '.join(steep)}: add an eps there, or clamp; and " if steep else ""
    )
    return (
        "all that the replay repeats is finite; it does not go back through a term of the loss that leads to the bad "
        f"gradients{more}, read by {first.read_by()}: {first.describe()}. To do: {hint}compute it after the model's forward, "
        "so that it is followed, too"
    )
