"""An origin in words: what happened, in which dtypes, where in the user's code, and what to do about it."""

from __future__ import annotations

from typing import Any

import torch

from bitwitness.finding import Finding, Severity
from bitwitness.nonfinite.origin import Extent, Kind, Origin, Trace
from bitwitness.tap.frames import line_text

SENSOR = "nonfinite"
_SHOWN = 3
_CASTS = ("_to_copy", "to", "copy_")
_DIVISIONS = (
    "div",
    "div_",
    "reciprocal",
    "reciprocal_",
    "rsqrt",
    "rsqrt_",
    "sqrt",
    "pow",
    "_foreach_div",
    "true_divide",
)
_LOGARITHMS = ("log", "log2", "log10", "log1p", "xlogy", "log_", "logit")
_EXPONENTIALS = ("exp", "exp_", "expm1", "exp2", "cosh", "sinh")
_SOFTMAX = ("_softmax", "_log_softmax", "softmax", "log_softmax", "logsumexp")


def dtype_name(dtype: torch.dtype) -> str:
    """Return a dtype's name without torch's prefix."""
    return str(dtype).removeprefix("torch.")


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
    extras = [f"{stats.zeros} zeros"] if stats.zeros else []
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
    dtypes = [extent.dtype for extent in origin.outputs if extent.stats.pos_inf + extent.stats.neg_inf]
    return f"; {dtype_name(dtypes[0])} holds at most {torch.finfo(dtypes[0]).max:.5g}" if dtypes else ""


def headline(origin: Origin) -> str:
    """Return one sentence: who made what, out of what, where."""
    line = f" at {line_text(origin.line)}" if origin.line[0] else ""
    reader = f"; first read{line} by {origin.detail}" if origin.detail else ""
    size = f" ({_size(origin.inputs[0])})" if origin.inputs else ""
    name = f"{origin.site.module}.{origin.site.op}".removeprefix("..").removeprefix(".")
    more = f" (and {len(origin.others)} more: {origin.others[0]}, …)" if origin.others else ""
    match origin.kind:
        case Kind.PARAMETER:
            return f"parameter {name}{more} was not finite when the step began{size}{reader}"
        case Kind.OPTIMIZER:
            return f"parameter {name}{more} became non-finite in an optimizer's update{size}{reader}"
        case Kind.BUFFER:
            return f"buffer {name}{more} was not finite when the step began{size}{reader}"
        case Kind.BATCH:
            return f"the batch was not finite: {origin.site.slot}{size}{reader}"
        case Kind.RECEIVED:
            return f"module {origin.site.module} received non-finite parameters from another rank (all-gather)"
        case Kind.COLLECTIVE:
            return f"the reduction across ranks made non-finite gradients of finite ones: {origin.detail}"
        case Kind.UNKNOWN:
            return (
                "the gradient that reaches the model's outputs is not finite, and no operator of the model made it: it comes "
                "from the code between the model's output and the loss, which could not be run again"
            )
        case Kind.CONSTANT:
            return (
                f"a non-finite constant that {origin.site.op}{_of_backward(origin)} puts in or reads is not masked away; "
                f"{place(origin)}"
            )
        case _:
            given = ", ".join(_given(extent) for extent in origin.inputs[:_SHOWN]) or "finite values"
            out = dtype_name(origin.outputs[0].dtype) if origin.outputs else "its output"
            return (
                f"{origin.site.op}{_of_backward(origin)} made {what_came_out(origin)} ({out}) from finite inputs ({given}"
                f"{_largest(origin)}); {place(origin)}"
            )


def _size(extent: Extent) -> str:
    stats = extent.stats
    return (
        f"{stats.nan} NaN and {stats.pos_inf + stats.neg_inf} Inf of {stats.count} values, {dtype_name(extent.dtype)}"
    )


def advice(origin: Origin) -> str:
    """Return one sentence that says what to do."""
    op = origin.site.op
    narrow = next((e.dtype for e in origin.outputs if e.dtype.itemsize < 4), None)
    given = _FOR_KIND.get(origin.kind)
    if given is not None:
        return given
    if narrow is not None and origin.flags.inf and origin.inputs:
        if op in _CASTS:
            return f"keep this tensor in a wider dtype than {dtype_name(narrow)}, or scale or clamp it before the cast"
        return f"run this operator in a wider dtype than {dtype_name(narrow)} (bfloat16 or float32), or make its inputs smaller"
    for names, text in _FOR_OPERATORS:
        if op in names or (origin.site.phase == "backward" and origin.forward_op in names):
            return text
    if origin.site.phase == "backward":
        return "look at the derivative at these inputs: clamp the forward's input away from where it has none"
    if origin.flags.inf and not origin.flags.nan:
        return "the result is beyond the dtype: make the inputs smaller, clamp, or use a wider dtype"
    return "look at these inputs: the result is not defined for them; guard the expression with a clamp or a where on its input"


_FOR_KIND = {
    Kind.PARAMETER: "look at what wrote it: loading, initialisation, or the step before (an optimizer or your own code)",
    Kind.OPTIMIZER: "look at the optimizer's settings (eps, learning rate, betas) and state for this parameter",
    Kind.BUFFER: "look at what wrote it: loading, or running statistics of a batch that was not finite; reset it",
    Kind.BATCH: "look at the data: find the samples, and drop or repair them where they are read",
    Kind.CONSTANT: "where everything is masked nothing is left to choose from: make sure that something stays unmasked",
    Kind.LOSS_SCALE: "use a smaller loss scale (GradScaler finds it by itself), or bfloat16, which needs none",
    Kind.COLLECTIVE: "reduce in a wider dtype (no float16 compression hook, reduce_dtype=torch.float32), or scale before",
    Kind.UNKNOWN: "have the model return its loss, so that the loss's operators are run again, too",
    Kind.RECEIVED: "look at the rank that fed it",
}
_FOR_OPERATORS = (
    (_SOFTMAX, "no entry of some row may be chosen: make sure that each row keeps one unmasked, or skip such rows"),
    (
        _DIVISIONS,
        "it divides by zero (or takes a root whose slope is infinite): add an eps to, or clamp, what it divides by",
    ),
    (
        _LOGARITHMS,
        "it takes the logarithm of zero or less: clamp its input from below (or use log_softmax, logsigmoid)",
    ),
    (_EXPONENTIALS, "its input is too large: subtract the maximum first, or clamp it from above"),
    (("mul", "mul_"), "zero times infinity: replace a mask that multiplies by torch.where or masked_fill"),
    (
        ("var", "std", "var_mean", "std_mean"),
        "a single value has no unbiased variance: use correction=0 or more values",
    ),
)


def as_finding(origin: Origin, trace: Trace, step: int, rank: int, severity: Severity = Severity.ERROR) -> Finding:
    """Return an origin as a finding of its rank."""
    evidence: dict[str, Any] = {
        "kind": str(origin.kind),
        "line": line_text(origin.line),
        "forward_line": line_text(origin.forward_line),
        "forward_op": origin.forward_op,
        "backward_node": origin.node,
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
    message = f"{headline(origin)}; it reaches {_reached(origin)}. To do: {advice(origin)}"
    return Finding(SENSOR, origin.site.at(rank=rank, step=step), severity, message, evidence, step, rank)


def _reached(origin: Origin) -> str:
    shown = ", ".join(origin.reaches[:2])
    more = len(origin.reaches) - 2
    return shown + (f" and {more} more" if more > 0 else "")
