"""One rank's captured step as a flat list of tensors, to be run on another rank's device.

Only tensors travel: what is no tensor goes as JSON inside a uint8 tensor, nothing is pickled. Non-tensor arguments
(flags, sizes) and the loss code itself are not sent but must be the same on both ranks, which the payload's head lets the
receiver check; the receiver's own call gives the nesting, and its own tape the functions.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from bitwitness.capture.contents import Snapshot
from bitwitness.capture.leaves import is_generator
from bitwitness.capture.lossgraph import LossGraph, Outside, Result, TapedCall, TensorSource, map_sources
from bitwitness.capture.randomness import RandomState
from bitwitness.capture.step import ForwardRecord, Pass
from bitwitness.capture.structure import map_tensors, plain_leaves, tensors_of
from bitwitness.replay.errors import ReplayError

Parameters = set[int]
"""The ``id`` of each of the root's parameters: a loss code that reads them reads the receiver's own."""


def _plain(record: ForwardRecord) -> str:
    return _digest(plain_leaves((record.args, record.kwargs)))


def _digest(lines: list[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def pack(passes: list[Pass], own: Parameters) -> list[torch.Tensor]:
    """Return the tensors that make up a captured step; the first is the head."""
    tensors: list[torch.Tensor] = []
    head = [
        {"forwards": [_packed(record, tensors) for record in group.forwards], **_loss(group.graph, own, tensors)}
        for group in passes
    ]
    text = torch.frombuffer(bytearray(json.dumps(head).encode()), dtype=torch.uint8)
    return [text, *tensors]


def _packed(record: ForwardRecord, tensors: list[torch.Tensor]) -> dict[str, Any]:
    inputs = tensors_of((record.args, record.kwargs))
    grads = [grad for grad in record.output_grads if grad is not None]
    state = record.random
    device_state = [] if state.device is None else [state.device]
    tensors += [*inputs, *grads, *record.buffers, state.host, *device_state]
    return {
        "plain": _plain(record),
        "inputs": [tensor.requires_grad for tensor in inputs],
        "grads": [grad is not None for grad in record.output_grads],
        "buffers": len(record.buffers),
        "untouched": bool(record.untouched),
        "device_state": len(device_state),
        "python": state.python,
        "numpy": None if state.numpy is None else [_listed(part) for part in state.numpy],
        "state": has_state(record.state),
    }


def has_state(state: Snapshot | None) -> bool:
    """Tell whether a forward may have read something that only this rank holds.

    A generator that has not moved since it began was not drawn from.
    """
    if state is None:
        return False
    still = {id(leaf.thing) for leaf in state.leaves if is_generator(leaf.thing) and leaf.exact and not leaf.changed()}
    held = [one.held.values() if isinstance(one.held, dict) else one.held for one in state.containers]
    return any(id(thing) not in still for thing in itertools.chain((leaf.thing for leaf in state.leaves), *held))


def _loss(graph: LossGraph | None, own: Parameters, tensors: list[torch.Tensor]) -> dict[str, Any]:
    """Describe a pass's loss code, and add the tensors that it reads."""
    if graph is None or graph.problem is not None:
        return {"loss": None}
    outside = [graph.value_of(source) for source in graph.outside() if id(source.tensor) not in own]
    given = [grad for grad in graph.grads if grad is not None]
    random = [state for call in graph.calls.values() for state in _states(call)]
    tensors += [*outside, *given, *random]
    return {
        "loss": _digest(_described(graph, own)),
        "outside": [tensor.requires_grad for tensor in outside],
        "given": len(given),
        "random": len(random),
    }


def _states(call: TapedCall) -> list[torch.Tensor]:
    """Return the random states that a taped call starts from: the global ones, and those of generators given to it."""
    drawn = [] if call.random is None else [call.random.host]
    drawn += [call.random.device] if call.random is not None and call.random.device is not None else []
    return drawn + [state for _, state in call.generators]


def _described(graph: LossGraph, own: Parameters) -> list[str]:
    """Return the calls in words that are the same on every rank that ran the same code."""
    numbers = {number: position for position, number in enumerate(graph.calls)}

    def word(source: TensorSource) -> Any:
        if isinstance(source, Outside):
            return "parameter" if id(source.tensor) in own else "outside"
        return f"result {numbers[source.call]} {source.index}" if isinstance(source, Result) else repr(source)

    lines = []
    for call in graph.calls.values():
        func = call.func
        where = f"{getattr(func, '__module__', '')}.{getattr(func, '__qualname__', type(func).__qualname__)}"
        lines += [where, str(call.grad), *plain_leaves((map_sources(call.args, word), map_sources(call.kwargs, word)))]
    for number, chain in graph.chains.items():
        lines.append(f"forward {number} is given {[None if one is None else word(one) for one in chain.inputs]}")
    return lines + [str(word(root)) for root in graph.roots]


def unpack(tensors: list[torch.Tensor], template: list[Pass], device: torch.device, own: Parameters) -> list[Pass]:
    """Rebuild another rank's captured step, nested as this rank's own.

    Raises
    ------
    ReplayError
        If the two ranks called the model differently, so that the one's step cannot run on the other.

    """
    head = json.loads(bytes(tensors[0].numpy()).decode())
    if [len(group["forwards"]) for group in head] != [len(group.forwards) for group in template]:
        raise ReplayError("the ranks ran a different number of micro-batches")
    rest = iter(tensors[1:])
    passes = []
    for meta, mine in zip(head, template, strict=True):
        forwards = [
            _record(one, own_one, rest, device) for one, own_one in zip(meta["forwards"], mine.forwards, strict=True)
        ]
        passes.append(replace(mine, forwards=forwards, graph=_graph(meta, mine.graph, rest, device, own)))
    return passes


def _record(
    meta: dict[str, Any], own: ForwardRecord, rest: Iterator[torch.Tensor], device: torch.device
) -> ForwardRecord:
    if meta["plain"] != _plain(own):
        raise ReplayError("the ranks called the model with different non-tensor arguments")
    if meta["state"] or has_state(own.state):
        raise ReplayError(
            "the model's forward reads what each rank holds for itself (a generator, a counter, a memory)"
        )
    inputs = iter([next(rest).to(device).requires_grad_(flag) for flag in meta["inputs"]])
    grads = [next(rest).to(device) if present else None for present in meta["grads"]]
    buffers = [next(rest).to(device) for _ in range(meta["buffers"])]
    numpy = meta["numpy"]
    version, words, gauss = meta["python"]
    state = RandomState(
        host=next(rest),
        device=next(rest) if meta["device_state"] else None,
        device_type=own.random.device_type,
        numpy=None if numpy is None else tuple(numpy),
        python=(version, tuple(words), gauss),
    )
    count = len(tensors_of((own.args, own.kwargs)))
    if count != len(meta["inputs"]) or len(grads) != len(own.output_grads):
        raise ReplayError("the ranks called the model with a different number of tensors")
    return replace(
        own,
        args=map_tensors(own.args, lambda _: next(inputs)),
        kwargs=map_tensors(own.kwargs, lambda _: next(inputs)),
        random=state,
        buffers=buffers,
        output_grads=grads,
        output_digests=[],
        results=[],
        state=None,
        began=None,
        untouched=meta["untouched"],
        surroundings=None,
        drawn=None,
    )


def _graph(
    meta: dict[str, Any], mine: LossGraph | None, rest: Iterator[torch.Tensor], device: torch.device, own: Parameters
) -> LossGraph | None:
    """Rebuild the loss code of another rank from this rank's own, with the other's tensors in it."""
    if meta["loss"] is None:
        return None
    outside = [next(rest).to(device).requires_grad_(flag) for flag in meta["outside"]]
    given = [next(rest).to(device) for _ in range(meta["given"])]
    random = [next(rest) for _ in range(meta["random"])]
    if mine is None or mine.problem is not None or meta["loss"] != _digest(_described(mine, own)):
        return None
    places = [id(source.tensor) for source in mine.outside() if id(source.tensor) not in own]
    if len(places) != len(outside) or len(random) != sum(len(_states(call)) for call in mine.calls.values()):
        return None
    theirs = dict(zip(places, outside, strict=True))
    states = iter(random)

    def change(source: TensorSource) -> TensorSource:
        if isinstance(source, Outside) and id(source.tensor) in theirs:
            tensor = theirs[id(source.tensor)]
            return Outside(tensor, tensor._version)
        return source

    def changed(call: TapedCall) -> TapedCall:
        drawn = None if call.random is None else replace(call.random, host=next(states))
        if drawn is not None and drawn.device is not None:
            drawn = replace(drawn, device=next(states))
        generators = tuple((generator, next(states)) for generator, _ in call.generators)
        args, kwargs = map_sources(call.args, change), map_sources(call.kwargs, change)
        return replace(call, args=args, kwargs=kwargs, random=drawn, generators=generators)

    grads = iter(given)
    return LossGraph(
        {number: changed(call) for number, call in mine.calls.items()},
        [change(root) for root in mine.roots],
        [None if grad is None else next(grads) for grad in mine.grads],
        chains={
            number: replace(chain, inputs=tuple(None if one is None else change(one) for one in chain.inputs))
            for number, chain in mine.chains.items()
        },
    )


def _listed(part: Any) -> Any:
    return part.tolist() if hasattr(part, "tolist") else part
