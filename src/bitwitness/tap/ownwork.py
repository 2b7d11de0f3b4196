"""What a process is doing for bitwitness itself, so that nobody takes it for the training.

Two answers, for two kinds of askers. Who looks at operators asks for *own work*: a norm, a hash, a float64 reference, at a
place of its own or at that of the operator which it repeats. Who looks at modules, gradients and what a script prints asks
for a *replay*: the script's own code running once more.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from types import TracebackType

import torch

from bitwitness.tap.compat import carries, carry, carry_no_more, enable_grad
from bitwitness.tap.modes import scripts_modes_off

OWN = "(bitwitness)"
"""The module path of operators that bitwitness itself runs: a faulty device computes our checks wrongly, too."""
REFERENCE = "(float64)"
"""The same of those that compute what a device's results are held against; an emulated device does not spoil these."""

Place = tuple[str, str, int]
"""Where an operator stands: module path, phase, call index."""

_own: ContextVar[bool] = ContextVar("bitwitness_own_work", default=False)
_place: ContextVar[Place | None] = ContextVar("bitwitness_place", default=None)
_REPLAY = "bitwitness_replay"


class _Marked:
    """Gives what runs inside a place; a class, since it is entered around each operator, where a generator costs four times."""

    __slots__ = ("_own", "_place", "_quiet", "_tokens")

    def __init__(self, place: Place, *, own: bool) -> None:
        self._place = place
        self._own = own

    def __enter__(self) -> None:
        self._tokens = _place.set(self._place), _own.set(self._own or _own.get())
        self._quiet = scripts_modes_off()
        self._quiet.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._quiet.__exit__(kind, error, trace)
        place, own = self._tokens
        _own.reset(own)
        _place.reset(place)


class looking(_Marked):  # noqa: N801 - a context manager by its use
    """A context for hooks that read tensors as they pass: own work, of which no graph is made."""

    __slots__ = ("_graph",)

    def __init__(self) -> None:
        super().__init__((OWN, "forward", 0), own=True)

    def __enter__(self) -> None:
        super().__enter__()
        self._graph = torch.is_grad_enabled()
        if self._graph:
            enable_grad(False)  # noqa: FBT003

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._graph:
            enable_grad(True)  # noqa: FBT003
        super().__exit__(kind, error, trace)


def own_work(module: str = OWN, phase: str = "forward", call: int = 0) -> AbstractContextManager[None]:
    """Mark the operators run inside as bitwitness's own, so that they are not counted among the model's.

    With a place given, they stand in for the model's operator there: a device whose kernel fails on just that operator
    fails on its recomputation, too.
    """
    return _Marked((module, phase, call), own=True)


def standing_in(module: str, phase: str, call: int = 0) -> AbstractContextManager[None]:
    """Have the operators run inside stand at a place, as the training's: what autograd does by itself, done in a replay."""
    return _Marked((module, phase, call), own=False)


def in_own_work() -> bool:
    """Tell whether bitwitness itself is at work."""
    return _own.get()


def given_place() -> Place | None:
    """Return the place at which the operators stand that run now; None where the running module says it."""
    return _place.get()


@contextmanager
def replaying() -> Iterator[None]:
    """Mark what runs inside as a step of the script's that is run again."""
    if in_replay():  # the outermost one ends it
        yield
        return
    carry(_REPLAY)
    try:
        yield
    finally:
        carry_no_more(_REPLAY)


def in_replay() -> bool:
    """Tell whether a step is being run again, so that what runs now is not the training itself.

    Hooks on gradients ask this, too, and on an accelerator they are called in autograd's own threads.
    """
    return not torch.compiler.is_compiling() and carries(_REPLAY)
