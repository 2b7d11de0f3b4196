"""Keeping what one forward of a root needs to be run again, and what it gave."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from bitwitness.capture.ambient import Ambient
from bitwitness.capture.autocast import Autocast
from bitwitness.capture.buffers import BufferKeeper
from bitwitness.capture.graphwalk import ForwardSpan
from bitwitness.capture.heldstate import HeldState
from bitwitness.capture.lossgraph import Held
from bitwitness.capture.memory import Memory
from bitwitness.capture.randomness import RandomState
from bitwitness.capture.reasons import FROZEN_MOVED, OWN_OUTPUTS
from bitwitness.capture.step import ForwardRecord, StepRecord
from bitwitness.capture.structure import fresh, map_tensors, nbytes, objects_in, tensors_of, tensors_within
from bitwitness.capture.window import LossWindow
from bitwitness.stats import bit_hash
from bitwitness.tap.compat import sequence_number
from bitwitness.tap.timer import file_clock
from bitwitness.tap.traffic import Reading, groups_between, read_traffic

OutputGrad = Callable[[ForwardRecord, int, torch.Tensor], None]


class Capturer:
    """Captures one root's forwards.

    Parameters
    ----------
    root, device
        The user's module, and where its parameters are.
    window
        What tapes the loss code.
    private
        Collectives inside the forward are the sharding's own (FSDP2, tensor parallel), and known.

    """

    def __init__(
        self,
        root: nn.Module,
        device: torch.device,
        window: LossWindow,
        *,
        private: bool,
    ) -> None:
        self._root = root
        self._device = device
        self._limit = 0
        self._hashed = False
        self._window = window
        self._private = private
        self._several = False
        self.held = HeldState(root)
        self.buffers = BufferKeeper(root)
        self.traffic: Reading = read_traffic()
        """What ranks had exchanged when the latest forward ended."""

    def use(self, limit: int, *, hashed: bool) -> None:
        """Let one step's captures take ``limit`` bytes together; hash the outputs, if asked, for replays to compare with."""
        self._limit, self._hashed = limit, hashed

    def begin(
        self,
        step: StepRecord,
        part: nn.Module | None,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        number: int,
        sync: bool,
        broadcast: bool,
    ) -> ForwardRecord:
        """Keep what a forward is about to read, in its step's record."""
        state = self.held.forward_begins(objects_in((args, kwargs)))
        if (used := None if state is None else state.used_up()) is not None:
            step.give_up(f"{used} cannot be given to the forward again")
        self.buffers.forward_begins()
        given = tensors_of((args, kwargs))
        self.account(step, nbytes(given) + (0 if state is None else state.nbytes), "the batch is")
        kept = step.unreplayable is None
        record = ForwardRecord(
            args=map_tensors(args, fresh) if kept else (),
            kwargs=map_tensors(kwargs, fresh) if kept else {},
            random=RandomState.read(self._device),
            autocast=Autocast.read(self._device),
            buffers=self.buffers.take(),
            sync=sync,
            began=file_clock(),
            number=number,
            state=state,
            redirect=vars(self._root).get("forward"),
            ambient=Ambient.read(),
            surroundings=self.held.surroundings(),
            module=part,
            broadcast=broadcast,
        )
        self._compare_with_left(step, record)
        begin = sequence_number()
        record.span = ForwardSpan(number, begin, begin)
        record.span.enter(given)
        if not self._window.note_forward(number, given):
            step.unhealable = step.unhealable or OWN_OUTPUTS
        step.forwards.append(record)
        self.traffic = read_traffic()
        return record

    def _compare_with_left(self, step: StepRecord, record: ForwardRecord) -> None:
        """See whether a step's later forward finds buffers and state as the one before left them."""
        self._several |= bool(step.forwards)
        before = step.forwards[-1] if step.forwards else None
        if before is None or before.number + 1 != record.number:
            return
        if before.left is not None:
            now = self.buffers.digest()
            if now is not None and now.shape == before.left.shape:
                record.untouched = (now == before.left).all()
        if before.state_left is not None:
            record.state_untouched = not before.state_left.changed()
            before.state_left = None

    def account(self, step: StepRecord, size: int, what: str) -> None:
        """Count what a step's captures take together; give up the step beyond the limit."""
        step.nbytes += size
        if step.nbytes > self._limit:
            step.give_up(f"{what} larger than the capture limit of {self._limit >> 20} MiB")

    def end(self, step: StepRecord, record: ForwardRecord, result: Any, output_grad: OutputGrad) -> None:
        """Note a forward's differentiable results, and what else it did.

        ``output_grad`` is called with the record, the output's position and the gradient that arrives there.
        """
        assert record.span is not None  # noqa: S101 - made with the record
        record.span.end = sequence_number()
        record.drawn = RandomState.read(self._device)
        if record.surroundings is not None:
            self.held.forward_ended(record.surroundings)
        if self.buffers.forward_ended():
            step.give_up(FROZEN_MOVED)
        record.left = self.buffers.digest() if self._several else None
        record.versions = self.buffers.versions()
        record.state_left = self.held.volatile() if self._several and record.state is not None else None
        if not self._private and (groups := groups_between(self.traffic, read_traffic())):
            record.communicates = True
            step.partners |= {rank for group in groups for rank in torch.distributed.get_process_group_ranks(group)}
        for position, tensor in enumerate(tensors_within(result)):
            digest = bit_hash(tensor.detach()) if self._hashed else torch.zeros((), dtype=torch.int64)
            record.results.append(Memory.of(tensor, digest) if self._hashed else None)
            if tensor.requires_grad and not tensor.is_leaf:
                self._take(record, record.span, tensor, digest, output_grad)
            elif not tensor.requires_grad and not any(tensor is buffer for buffer in self.buffers.tensors()):
                self._window.add_output(tensor, record.number, -1 - position)
        self.traffic = read_traffic()

    def _take(
        self,
        record: ForwardRecord,
        span: ForwardSpan,
        tensor: torch.Tensor,
        digest: torch.Tensor,
        output_grad: OutputGrad,
    ) -> None:
        index = len(record.output_digests)
        record.output_digests.append(digest)
        record.output_grads.append(None)
        span.add(tensor, index)
        tensor.register_hook(lambda grad: output_grad(record, index, grad))
        self._window.add_output(tensor, record.number, index)

    def find_held(self, step: StepRecord, tensor: torch.Tensor) -> Held | None:
        """Return where in the root's attributes a tensor that a forward of the step made is kept."""
        forward = forward_of(step, tensor)
        path = None if forward is None else self.held.find(tensor)
        return None if path is None or forward is None else Held(path, forward.number)


def forward_of(step: StepRecord, tensor: torch.Tensor) -> ForwardRecord | None:
    """Return the recorded forward of a step that made a tensor's history; None if none did."""
    node: Any = tensor.grad_fn
    if node is None:
        return None
    sequence = node._sequence_nr()
    for record in reversed(step.forwards):
        if record.span is not None and record.span.begin <= sequence < record.span.end:
            return record
    return None
