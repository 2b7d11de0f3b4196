"""One rank's captured step as a flat list of tensors, to be run on another rank's device.

Only tensors travel: what is no tensor goes as JSON inside a uint8 tensor, nothing is pickled. Non-tensor arguments
(flags, sizes) are not sent but must be the same on both ranks, which the capsule's head lets the receiver check; the
receiver's own call gives the nesting.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from bitwitness.replay.run import ReplayError
from bitwitness.tap.capture import ForwardRecord
from bitwitness.tap.randomness import RandomState
from bitwitness.tap.structure import map_tensors, plain_leaves, tensors_of

Passes = list[list[ForwardRecord]]


def _plain(record: ForwardRecord) -> str:
    return hashlib.sha256("\n".join(plain_leaves((record.args, record.kwargs))).encode()).hexdigest()


def pack(passes: Passes) -> list[torch.Tensor]:
    """Return the tensors that make up a captured step; the first is the head."""
    head: list[list[dict[str, Any]]] = []
    tensors: list[torch.Tensor] = []
    for group in passes:
        head.append([])
        for record in group:
            inputs = tensors_of((record.args, record.kwargs))
            grads = [grad for grad in record.output_grads if grad is not None]
            state = record.random
            device_state = [] if state.device is None else [state.device]
            head[-1].append(
                {
                    "plain": _plain(record),
                    "inputs": [tensor.requires_grad for tensor in inputs],
                    "grads": [grad is not None for grad in record.output_grads],
                    "buffers": len(record.buffers),
                    "device_state": len(device_state),
                    "python": state.python,
                    "numpy": None if state.numpy is None else [_listed(part) for part in state.numpy],
                }
            )
            tensors += [*inputs, *grads, *record.buffers, state.host, *device_state]
    text = torch.frombuffer(bytearray(json.dumps(head).encode()), dtype=torch.uint8)
    return [text, *tensors]


def unpack(tensors: list[torch.Tensor], template: Passes, device: torch.device) -> Passes:
    """Rebuild another rank's captured step, nested as this rank's own.

    Raises
    ------
    ReplayError
        If the two ranks called the model differently, so that the one's step cannot run on the other.

    """
    head = json.loads(bytes(tensors[0].numpy()).decode())
    if [len(group) for group in head] != [len(group) for group in template]:
        raise ReplayError("the ranks ran a different number of micro-batches")
    rest = iter(tensors[1:])
    return [
        [_record(meta, own, rest, device) for meta, own in zip(metas, group, strict=True)]
        for metas, group in zip(head, template, strict=True)
    ]


def _record(
    meta: dict[str, Any], own: ForwardRecord, rest: Iterator[torch.Tensor], device: torch.device
) -> ForwardRecord:
    if meta["plain"] != _plain(own):
        raise ReplayError("the ranks called the model with different non-tensor arguments")
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
    )


def _listed(part: Any) -> Any:
    return part.tolist() if hasattr(part, "tolist") else part
