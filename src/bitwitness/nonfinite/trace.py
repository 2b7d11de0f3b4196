"""A step replayed under the eyes of `OriginWatch`: from a non-finite loss, gradient or buffer back to who made it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import nn

from bitwitness.capture.lossgraph import LossGraph, Outside, sources_in
from bitwitness.capture.step import StepRecord
from bitwitness.capture.structure import tensors_of
from bitwitness.nonfinite.entrances import EnteringTensor
from bitwitness.nonfinite.flags import all_finite, flags_of, measurable
from bitwitness.nonfinite.frames import FrameLog
from bitwitness.nonfinite.kinds import Mode, wanted
from bitwitness.nonfinite.origin import Kind, Origin, Trace
from bitwitness.nonfinite.strays import Strays
from bitwitness.nonfinite.taint import Origins
from bitwitness.nonfinite.terms import terms_of
from bitwitness.nonfinite.watch import OriginWatch
from bitwitness.replay.run import Execution, Replayer
from bitwitness.tap.timer import stopwatch

_FROM_OUTSIDE = (
    Kind.PARAMETER,
    Kind.BUFFER,
    Kind.BATCH,
    Kind.GIVEN,
    Kind.TERM,
    Kind.CONSTANT,
    Kind.RECEIVED,
    Kind.UNKNOWN,
)


def trace_step(replayer: Replayer, record: StepRecord, *, mode: Mode = "all", scale: float = 1.0) -> Trace:
    """Replay a step and find who made its non-finite values.

    With a `replay.lockstep.LockstepReplayer` all ranks must call this together.

    Parameters
    ----------
    replayer, record
        The step, and what runs it again.
    mode
        Which operators to report: those that compute, those that accumulate, or all.
    scale
        The loss scale of a gradient scaler.

    Raises
    ------
    ReplayError
        If the step cannot be run again.

    """
    scale *= max((graph.factor for graph in record.graphs.values()), default=1.0)
    now = stopwatch(replayer.device)
    with _watching(replayer, record, scale) as (watch, frames):
        started = now()
        done = replayer.run(record, keep=True, around=watch.tap, strict=False)
    targets = _targets(replayer, record, watch, done)
    trace = _conclude(watch, frames, targets, mode)
    trace.problem, trace.seconds = done.no_loss, now() - started
    return trace


def trace_forward(replayer: Replayer, record: StepRecord, graph: LossGraph, *, mode: Mode = "all") -> Trace:
    """Replay a step that broke off before its backward, up to the last number that the script computed from it.

    Raises
    ------
    ReplayError
        If it cannot be run again.

    """
    now = stopwatch(replayer.device)
    with _watching(replayer, record, 1.0) as (watch, frames):
        started = now()
        values = [watch.value(number) for number in replayer.run_forward(record, graph, watch.tap)]
    bad = [value.origins for value in values if value.flags]
    trace = _conclude(watch, frames, {"loss": frozenset().union(*bad)} if bad else {}, mode)
    trace.seconds = now() - started
    return trace


@contextmanager
def _watching(replayer: Replayer, record: StepRecord, scale: float) -> Iterator[tuple[OriginWatch, FrameLog]]:
    frames = FrameLog()
    read = [tensor for tensor, _ in _read_by_the_loss(record)]
    watch = OriginWatch(_entries(replayer.root, record), frames, scale=scale, strays=Strays(read))
    if replayer.sharded:
        watch.gathered_from(bad_parameters(replayer.root))
    with _batch_seen(replayer.root, watch), frames.watching(replayer.root):
        yield watch, frames


def _conclude(watch: OriginWatch, frames: FrameLog, targets: dict[str, Origins], mode: Mode) -> Trace:
    trace = Trace(targets=list(targets))
    reaching = _reaching(watch, targets)
    trace.origins = [origin for origin in reaching if _of_interest(origin, mode)]
    trace.passed_over = len(reaching) - len(trace.origins)
    for origin in trace.origins:
        begun = origin.frame if origin.site.phase == "forward" else None
        trace.frames[origin.number] = frames.text(origin.site.module, begun)
    reported = tuple(f"origin{origin.number}." for origin in trace.origins)
    trace.tensors = {name: tensor for name, tensor in watch.kept.items() if name.startswith(reported)}
    return trace


def _of_interest(origin: Origin, mode: Mode) -> bool:
    return origin.kind in _FROM_OUTSIDE or wanted(mode, accumulating=origin.accumulating)


def _entries(root: nn.Module, record: StepRecord) -> dict[int, EnteringTensor]:
    """Return what enters the step, by address."""
    entries: dict[int, EnteringTensor] = {}
    for tensor, entry in _entering(root, record):
        local = tensor.to_local() if hasattr(type(tensor), "to_local") else tensor  # type: ignore[attr-defined]
        if measurable(local):
            entries[local.untyped_storage().data_ptr()] = entry
    return entries


def _entering(root: nn.Module, record: StepRecord) -> Iterator[tuple[torch.Tensor, EnteringTensor]]:
    """Yield what the script gave to its loss code, gradients from outside, buffers and parameters."""
    yield from _read_by_the_loss(record)
    for term in terms_of(record, dict(root.named_parameters())):
        yield term.tensor, EnteringTensor(Kind.TERM, f"loss[{term.reader}]", term.describe())
    for forward in record.forwards:
        for grad in forward.output_grads:
            if grad is not None:
                yield grad, EnteringTensor(Kind.UNKNOWN, "gradient")
    for name, buffer in root.named_buffers():
        yield buffer, EnteringTensor(Kind.BUFFER, name)
    for name, parameter in root.named_parameters():
        yield parameter, EnteringTensor(Kind.PARAMETER, name)


def _read_by_the_loss(record: StepRecord) -> Iterator[tuple[torch.Tensor, EnteringTensor]]:
    for graph in record.graphs.values():
        for call in graph.calls.values():
            for source in sources_in((call.args, call.kwargs)):
                if isinstance(source, Outside):
                    yield source.tensor, EnteringTensor(Kind.BATCH, f"loss[{getattr(call.func, '__name__', 'call')}]")


def bad_parameters(root: nn.Module) -> list[str]:
    """Return the names of the parameters that hold NaN or Inf (of a sharded one: in this rank's shard)."""
    named = dict(root.named_parameters())
    fine = all_finite([p.to_local() if hasattr(type(p), "to_local") else p for p in named.values()])  # type: ignore[attr-defined]
    return [name for name, is_fine in zip(named, fine, strict=True) if not is_fine]


@contextmanager
def _batch_seen(root: nn.Module, watch: OriginWatch) -> Iterator[None]:
    """Know the model's inputs by their address, as they are in the replay."""

    def note(_root: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        named = [(f"args[{i}]", value) for i, value in enumerate(args)] + list(kwargs.items())
        for name, value in named:
            for tensor in tensors_of(value):
                if measurable(tensor):
                    # what asks for a gradient was computed: by another model, say
                    watch.name(tensor, EnteringTensor(Kind.GIVEN if tensor.requires_grad else Kind.BATCH, name))

    handle = root.register_forward_pre_hook(note, with_kwargs=True, prepend=True)
    try:
        yield
    finally:
        handle.remove()


def _targets(replayer: Replayer, record: StepRecord, watch: OriginWatch, done: Execution) -> dict[str, Origins]:
    """Return what of the replay is not finite and matters, with the origins that it descends from."""
    found: dict[str, Origins] = {}
    for number, loss in enumerate(done.losses):
        value = watch.value(loss)
        if value.flags:
            found["loss" if len(done.losses) == 1 else f"loss[{number}]"] = value.origins
    for number, output in enumerate(done.starts):
        value = watch.value(output)
        if value.flags:
            found[f"output {number} of the model"] = value.origins
    names = list(replayer.parameters)
    if replayer.sharded:  # what is whole and local is described only, before it is reduced
        sizes = done.features.absmax.cpu().double().numpy()
        return found | {f"gradient of {names[i]}": frozenset() for i in np.flatnonzero(~np.isfinite(sizes))}
    for name, grad in zip(names, done.grads or [], strict=False):
        if grad is not None and measurable(grad) and flags_of(grad):
            found[f"gradient of {name}"] = watch.value(grad).origins
    return found | _buffers_spoiled(replayer.root, record, done.buffers or [])


def _buffers_spoiled(root: nn.Module, record: StepRecord, after: list[torch.Tensor]) -> dict[str, Origins]:
    """Return the buffers that were finite when the step began, and are not now."""
    names = [name for name, _ in root.named_buffers()]
    began, ended = all_finite(record.forwards[0].buffers), all_finite(after)
    return {
        f"buffer {name}": frozenset()
        for name, before, now in zip(names, began, ended, strict=False)
        if before and not now
    }


def _reaching(watch: OriginWatch, targets: dict[str, Origins]) -> list[Origin]:
    """Return the origins that reach something, each once, in order; constants only where nothing else explains it."""
    everyone = frozenset(range(len(watch.origins)))
    reached: dict[int, list[str]] = {}
    for name, origins in targets.items():
        possible = origins or everyone
        for number in possible - watch.constants or possible:
            reached.setdefault(number, []).append(name)
    found: dict[tuple[Any, ...], Origin] = {}
    for number in sorted(reached):
        origin = watch.origins[number]
        known = found.get(origin.same)
        if known is None:
            found[origin.same] = origin.reaching(tuple(reached[number]))
        else:
            found[origin.same] = replace(known, reaches=tuple(dict.fromkeys((*known.reaches, *reached[number]))))
    return _one_of_each(list(found.values()))


def _one_of_each(origins: list[Origin]) -> list[Origin]:
    """Tell of all bad parameters in one origin, and of an operator's slope not beside the operator itself."""
    later = (Kind.RECEIVED, Kind.UNKNOWN)
    if any(origin.kind not in later for origin in origins):  # what comes back reduced, or from outside, began here
        origins = [origin for origin in origins if origin.kind not in later]
    parameters = [origin for origin in origins if origin.kind is Kind.PARAMETER]
    forward = {(o.site.op, o.line) for o in origins if o.site.phase == "forward"}
    others = tuple(f"{o.site.module}.{o.site.op}".removeprefix("..") for o in parameters[1:])
    return [
        replace(origin, others=others) if parameters and origin is parameters[0] else origin
        for origin in origins
        if origin not in parameters[1:] and (origin.forward_op, origin.forward_line) not in forward
    ]
