"""Activation checkpointing: what a region's first forward made, and what its recomputation in the backward makes.

The kind without reentrance packs every tensor that autograd saves, twice: once to throw it away, once to use it; both are
shown (``torch.utils.checkpoint.checkpoint``, the composable ``checkpoint`` and FSDP's ``checkpoint_wrapper`` all come by the
same two classes). The reentrant kind saves nothing the first time; there a region's outputs are shown.
"""

from __future__ import annotations

import functools
import sys
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from bitwitness.tap.compat import first_saved, saved_again
from bitwitness.tap.modules import ModuleTracker
from bitwitness.tap.operators import tensors_in
from bitwitness.tap.ownwork import in_own_work, in_replay, own_work
from bitwitness.tap.patching import replaced


@dataclass(slots=True, eq=False)
class Region:
    """A checkpointed region in one forward; ``name``: the module that it runs in, and which one of its regions."""

    name: str
    runs: int = 0


Handler = Callable[[Region, int, Tensor, bool], None]
"""Sees a tensor of a region with its position, before the region goes on; True the second time."""


class RecomputeTap:
    """Shows regions from `open` to `close`.

    Parameters
    ----------
    tracker
        Knows the running module.
    handler
        Sees the tensors.
    fail
        Told of an error of its; nothing is shown any more then.

    """

    def __init__(self, tracker: ModuleTracker, handler: Handler, fail: Callable[[Exception], None]) -> None:
        self._tracker, self._handler, self._fail = tracker, handler, fail
        self._stack: ExitStack | None = None
        self._numbers: Counter[str] = Counter()
        self._frames: WeakKeyDictionary[Any, Region] = WeakKeyDictionary()

    def open(self) -> None:
        """Show regions from now on, numbered anew; a forward or a backward begins."""
        self._numbers.clear()
        if self._stack is not None or "torch.utils.checkpoint" not in sys.modules:
            return
        self._stack = ExitStack()
        for (owner, name), wrap in (
            (first_saved(), self._first),
            (saved_again(), self._again),
            ((sys.modules["torch.utils.checkpoint"].CheckpointFunction, "forward"), self._reentrant),
        ):
            self._stack.enter_context(replaced(owner, name, wrap))

    def close(self) -> None:
        """Show no more."""
        stack, self._stack = self._stack, None
        if stack is not None:
            stack.close()

    def _region(self) -> Region:
        path = self._tracker.running
        self._numbers[path] += 1
        return Region(f"{path}#{self._numbers[path] - 1}")

    @property
    def _idle(self) -> bool:
        return self._stack is None or in_own_work() or in_replay() or torch.compiler.is_compiling()

    def _show(self, region: Region, position: int, tensor: Any, again: bool) -> None:
        if self._stack is None or not isinstance(tensor, Tensor):
            return
        try:
            with own_work(), torch.no_grad():
                self._handler(region, position, tensor, again)
        except Exception as error:
            self.close()
            self._fail(error)

    # -- without reentrance --------------------------------------------------------------------------------------

    def _first(self, original: Any) -> Callable[..., Any]:
        def hooks(frame: Any) -> Any:
            made = original(frame)
            if not self._idle:
                region = self._frames[frame] = self._region()
                made.pack_hook = self._packing(region, made.pack_hook, lambda: region.runs, again=False)
            return made

        return hooks

    def _again(self, original: Any) -> Callable[..., Any]:
        def hooks(frame_ref: Any, graph: Any) -> Any:
            made = original(frame_ref, graph)
            region = None if self._idle else self._frames.get(frame_ref())
            if region is not None:
                counters = frame_ref().recomp_counter
                made.pack_hook = self._packing(region, made.pack_hook, lambda: counters[graph], again=True)
            return made

        return hooks

    def _packing(
        self, region: Region, original: Callable[[Any], Any], position: Callable[[], int], *, again: bool
    ) -> Callable[[Any], Any]:
        def pack(tensor: Any) -> Any:
            at = position()
            region.runs += not again
            self._show(region, at, tensor, again)  # before the original, which ends the recomputation with the last one
            return original(tensor)

        return pack

    # -- reentrant -----------------------------------------------------------------------------------------------

    def _reentrant(self, original: Any) -> Any:
        function = getattr(original, "__func__", original)

        @functools.wraps(function)
        def forward(ctx: Any, run: Callable[..., Any], *args: Any) -> Any:
            return function(ctx, run if self._idle else self._running(self._region(), run), *args)

        return staticmethod(forward)

    def _running(self, region: Region, run: Callable[..., Any]) -> Callable[..., Any]:
        def both(*args: Any) -> Any:
            result = run(*args)
            again = region.runs > 0
            region.runs += 1
            for position, tensor in enumerate(tensors_in(result) if not in_replay() else ()):
                self._show(region, position, tensor, again)
            return result

        return both
