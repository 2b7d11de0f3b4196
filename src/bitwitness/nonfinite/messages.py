"""An origin in words: what happened, in which dtypes, where in the user's code, and what to do about it."""

from __future__ import annotations

from typing import Any

import torch

from bitwitness.finding import Finding, Severity
from bitwitness.nonfinite.advice import advice_for, claim
from bitwitness.nonfinite.dtypes import dtype_name
from bitwitness.nonfinite.making import Making, making_of
from bitwitness.nonfinite.origin import Extent, Kind, Origin, Trace
from bitwitness.tap.frames import line_text

SENSOR = "nonfinite"
_SHOWN = 3  # names in one sentence


def what_came_out(origin: Origin) -> str:
    """Return ``NaN``, ``Inf`` or both, with their number where it is known."""
    parts = []
    nan = sum(extent.stats.nan for extent in origin.outputs)
    inf = sum(extent.stats.pos_inf + extent.stats.neg_inf for extent in origin.outputs)
    if origin.flags.nan:
        parts.append(f"{nan} NaN" if nan else "NaN")
    if origin.flags.inf:
        parts.append(f"{inf} Inf" if inf else "Inf")
    count = sum(extent.stats.count for extent in origin.outputs)
    return " and ".join(parts) + (f" of {count} values" if count else "")


def _given(extent: Extent) -> str:
    stats = extent.stats
    text = f"{extent.slot} {dtype_name(extent.dtype)} [{stats.min:.4g}, {stats.max:.4g}]"
    extras = [f"{stats.zeros} zero{'s' * (stats.zeros != 1)}"] if stats.zeros else []
    extras += [f"{stats.pos_inf + stats.neg_inf} Inf"] if stats.pos_inf + stats.neg_inf else []
    return text + (f" with {', '.join(extras)}" if extras else "")


def place(origin: Origin) -> str:
    """Return where in the model and the user's code an origin is."""
    where = f"module {origin.site.module}" if origin.site.module != "." else "the root module or the code around it"
    text = line_text(origin.line)
    forward = line_text(origin.forward_line)
    if forward and forward != text:
        text = f"{text}, in the backward of {forward}" if text else f"its forward is {forward}"
    return f"{where}, {text or 'no line of yours'}"


def _of_backward(origin: Origin) -> str:
    if origin.site.phase != "backward":
        return ""
    of = " of ".join(part for part in (origin.node, origin.forward_op) if part)
    return f" (backward: {of})" if of else " (backward)"


def _largest(origin: Origin) -> str:
    """Say what the dtype that comes out can hold, where the result is beyond it."""
    if making_of(origin) not in (Making.OVERFLOW, Making.OVERFLOW_INSIDE):
        return ""
    dtypes = [extent.dtype for extent in origin.outputs if extent.bad]
    return f"; {dtype_name(dtypes[0])} holds at most {torch.finfo(dtypes[0]).max:.5g}" if dtypes else ""


def headline(origin: Origin) -> str:
    """Return one sentence: who made what, out of what, where."""
    line = f" at {line_text(origin.line)}" if origin.line[0] else ""
    reader = f"; first read{line} by {origin.detail}" if origin.detail else ""
    size = f" ({_size(origin.inputs[0])})" if origin.inputs else ""
    name = f"{origin.site.module}.{origin.site.op}".removeprefix("..").removeprefix(".")
    more = f" (and {len(origin.others)} more: {origin.others[0]}, …)" if origin.others else ""
    entered = f"{size}{reader}"
    texts = {
        Kind.PARAMETER: f"parameter {name}{more} was not finite when the step began{entered}",
        Kind.OPTIMIZER: f"parameter {name}{more} became non-finite in an optimizer's update{entered}",
        Kind.BUFFER: f"buffer {name}{more} was not finite when the step began{entered}",
        Kind.BATCH: f"{_given_as(origin)} was not finite: {origin.site.slot}{entered}",
        Kind.GIVEN: f"what the model was given was not finite, and was computed before it: {origin.site.slot}{entered}",
        Kind.TERM: f"a term of the loss was not finite that the replay does not compute again{entered}",
        Kind.RECEIVED: f"module {origin.site.module} received non-finite parameters from another rank (all-gather)",
        Kind.COLLECTIVE: f"the reduction across ranks made non-finite gradients of finite ones: {origin.detail}",
        Kind.UNKNOWN: (
            "the gradient that reaches the model's outputs is not finite, and no operator of the model made it: it comes "
            "from the code between the model's output and the loss, which could not be run again"
        ),
    }
    if origin.kind is Kind.CONSTANT:
        return _constant(origin, entered)
    return texts.get(origin.kind) or _made(origin)


def _given_as(origin: Origin) -> str:
    return "a tensor that the script gave to its loss" if origin.site.slot.startswith("loss[") else "the batch"


def _constant(origin: Origin, entered: str) -> str:
    if origin.detail:
        return f"a tensor that no operator of the replayed step made holds {_what_entered(origin)}{entered}"
    return (
        f"a non-finite constant that {origin.site.op}{_of_backward(origin)} puts in is not masked away; {place(origin)}"
    )


def _what_entered(origin: Origin) -> str:
    return " and ".join(["NaN"] * origin.flags.nan + ["infinities"] * origin.flags.inf)


def _made(origin: Origin) -> str:
    given = ", ".join(_given(extent) for extent in origin.inputs[:_SHOWN]) or "no values"
    inputs = "inputs without NaN" if any(e.stats.pos_inf + e.stats.neg_inf for e in origin.inputs) else "finite inputs"
    out = dtype_name(origin.outputs[0].dtype) if origin.outputs else "its output"
    how = claim(origin)
    return (
        f"{origin.site.op}{_of_backward(origin)} made {what_came_out(origin)} ({out}) from {inputs} ({given}"
        f"{_largest(origin)}){f': {how}' if how else ''}; {place(origin)}"
    )


def _size(extent: Extent) -> str:
    stats = extent.stats
    return (
        f"{stats.nan} NaN and {stats.pos_inf + stats.neg_inf} Inf of {stats.count} values, {dtype_name(extent.dtype)}"
    )


def advice(origin: Origin) -> str:
    """Return one sentence that says what to do."""
    match origin.kind:
        case Kind.LOSS_SCALE if any(
            e.bad and e.dtype is not torch.float16 and e.dtype.itemsize > 1 for e in origin.outputs
        ):
            return "use a smaller loss scale: this dtype needs none"
        case Kind.CONSTANT if not origin.detail and origin.flags.nan:
            return "look at the code that puts this number in: no mask is made of it"
        case Kind.CONSTANT if origin.flags.nan:
            return "look at where it was computed: outside the step, or in memory that was never written (torch.empty)"
        case Kind.BATCH if origin.site.slot.startswith("loss["):
            return "look at where it comes from: labels, weights, or a number that was computed without a gradient"
        case _:
            given = _FOR_KIND.get(origin.kind)
            return advice_for(origin) if given is None else given


_FOR_KIND = {
    Kind.PARAMETER: "look at what wrote it: loading, initialisation, or the step before (an optimizer or your own code)",
    Kind.OPTIMIZER: "look at the optimizer's settings (eps, learning rate, betas) and state for this parameter",
    Kind.BUFFER: "look at what wrote it: loading, an evaluation, or your own code; reset it",
    Kind.BATCH: "look at the data: find the samples, and drop or repair them where they are read",
    Kind.GIVEN: "look at what computes it, before this model: where that is a guarded model, its own verdict names it",
    Kind.TERM: "look at how it is computed; after the model's forward, and with its operators, it would be followed, too",
    Kind.CONSTANT: "where everything is masked nothing is left to choose from: make sure that something stays unmasked",
    Kind.LOSS_SCALE: "use a smaller loss scale (GradScaler finds it by itself), or bfloat16, which needs none",
    Kind.COLLECTIVE: "reduce in a wider dtype (no float16 compression hook, reduce_dtype=torch.float32), or scale before",
    Kind.UNKNOWN: "have the model return its loss, so that the loss's operators are run again, too",
    Kind.RECEIVED: "look at the rank that fed it",
}


def as_finding(origin: Origin, trace: Trace, step: int, rank: int, severity: Severity = Severity.ERROR) -> Finding:
    """Return an origin as a finding of its rank."""
    evidence: dict[str, Any] = {
        "kind": str(origin.kind),
        "line": line_text(origin.line),
        "forward_line": line_text(origin.forward_line),
        "forward_op": origin.forward_op,
        "backward_node": origin.node,
        "making": str(making_of(origin)) if origin.kind in (Kind.OPERATOR, Kind.LOSS_SCALE) else None,
        "inputs": [extent.to_dict() for extent in origin.inputs],
        "outputs": [extent.to_dict() for extent in origin.outputs],
        "holds_at_most": {dtype_name(e.dtype): torch.finfo(e.dtype).max for e in origin.outputs},
        "reaches": list(origin.reaches[:8]),
        "reached": len(origin.reaches),
        "others": list(origin.others),
        "order": origin.number,
        "advice": advice(origin),
        "last_modules": trace.frames.get(origin.number, []),
        "replay_s": round(trace.seconds, 4),
    }
    why = f" ({trace.problem})" if origin.kind is Kind.UNKNOWN and trace.problem else ""
    message = f"{headline(origin)}{why}; it reaches {_reached(origin)}. To do: {advice(origin)}"
    return Finding(SENSOR, origin.site.at(rank=rank, step=step), severity, message, evidence, step, rank)


def _reached(origin: Origin) -> str:
    shown = ", ".join(origin.reaches[:2])
    more = len(origin.reaches) - 2
    return shown + (f" and {more} more" if more > 0 else "")
