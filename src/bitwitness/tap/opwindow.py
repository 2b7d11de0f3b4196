"""An operator tap that stays on from one hook to another, and is taken out of torch's stack wherever it stands then.

A recording wants the operators between a root's forward and its backward, too, where the script computes its loss; so the
tap is entered at one hook and left at another, and what the script enters meanwhile may still be open.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch

from bitwitness.tap.compat import dynamo, reaches_modes
from bitwitness.tap.modules import in_backward
from bitwitness.tap.operators import OperatorTap

_MOST_INTERRUPTIONS = 16
"""Evaluations of the model between its forward and its backward: a target made by itself, a reference's log-probabilities."""


class OperatorWindow:
    """Opens and closes a tap; compiled code runs eagerly while it is open, so that its operators are seen."""

    def __init__(self, tap: OperatorTap) -> None:
        self._tap = tap
        self._eager: ExitStack | None = None
        self._interruptions = 0

    def open(self) -> None:
        """Show operators from now on."""
        self._interruptions = 0
        self._open()

    @contextmanager
    def interrupted(self) -> Iterator[None]:
        """Show none meanwhile, and go on after it, but for many of them: then an evaluation runs, and no backward comes."""
        was_open, self._interruptions = self._eager is not None, self._interruptions + 1
        self.close()
        try:
            yield
        finally:
            if was_open and self._interruptions <= _MOST_INTERRUPTIONS:
                self._open()

    def _open(self) -> None:
        if self._eager is not None:
            return
        self._eager = ExitStack()
        if self._tap.is_on_here:  # and was closed from another thread
            self._tap.wake()
        else:
            self._tap.__enter__()

    def mend(self) -> None:
        """Show them again where a compiled wrapper around the model's call has undone it.

        It restores the thread's dispatch keys as they were before the call, with the mode still on the stack.
        """
        if self._eager is not None and self._tap.is_on_here and not reaches_modes():
            self.close()
            self._open()

    def close(self) -> None:
        """Show them no more; other modes stay as they are."""
        eager, self._eager = self._eager, None
        # An optimizer that runs inside a backward ends the window there, where the stack is autograd's copy of the thread's.
        inside = in_backward()
        if eager is None:
            if self._tap.is_asleep and self._tap.is_on_here and not inside:
                self._tap.wake()
                self._tap.__exit__(None, None, None)
            return
        if self._tap.is_on_here and not inside:
            self._tap.__exit__(None, None, None)
        else:
            self._tap.sleep()
        eager.close()


def run_eagerly(stack: ExitStack) -> None:
    """Have compiled code run eagerly until the stack is closed; the compiled code is kept."""
    if dynamo() is not None:
        stack.enter_context(torch.compiler.set_stance("force_eager"))
