"""What surrounds a forward and decides how it computes: default dtype, kernel choices, the environment, function modes."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

import torch

from bitwitness.tap.compat import (
    enable_mkldnn,
    function_modes,
    mkldnn_enabled,
    pop_function_mode,
    pop_saving_hooks,
    push_function_mode,
    push_saving_hooks,
    saving_hooks,
)
from bitwitness.tap.modes import scripts_modes
from bitwitness.tap.ownwork import in_replay
from bitwitness.tap.patching import replaced

_Switch = tuple[Callable[[], Any], Callable[[Any], Any]]


def _sdp(name: str) -> _Switch:
    cuda = torch.backends.cuda
    return getattr(cuda, f"{name}_sdp_enabled"), getattr(cuda, f"enable_{name}_sdp")


def _attribute(owner: Any, name: str) -> _Switch:
    return lambda: getattr(owner, name), lambda value: setattr(owner, name, value)


def _environment() -> dict[bytes, bytes]:
    """Return the environment's variables as the process has them, without a decoding of each."""
    held = getattr(os.environ, "_data", None)
    if isinstance(held, dict):
        return dict(held)
    return {os.fsencode(key): os.fsencode(value) for key, value in os.environ.items()}  # a script's own mapping


def _set_variables(keys: Iterable[bytes], wanted: dict[bytes, bytes]) -> None:
    """Set some variables to what they are in an environment; others stay, which another thread may be setting."""
    there = _environment()
    for key in keys:
        name, value = os.fsdecode(key), wanted.get(key)
        if value is None:
            os.environ.pop(name, None)
        elif there.get(key) != value:
            os.environ[name] = os.fsdecode(value)


@contextmanager
def _environment_of(wanted: dict[bytes, bytes]) -> Iterator[None]:
    """Have the environment be as a forward found it; what this thread's re-execution sets of it is undone."""
    now, touched = _environment(), set[bytes]()
    touched |= {key for key in now.keys() | wanted.keys() if now.get(key) != wanted.get(key)}

    def noting(original: Callable[..., Any]) -> Callable[..., Any]:
        def note(key: bytes, *args: Any) -> Any:
            if in_replay():
                touched.add(key)
            return original(key, *args)

        return note

    _set_variables(touched, wanted)
    with replaced(os, "putenv", noting), replaced(os, "unsetenv", noting):
        try:
            yield
        finally:
            _set_variables(touched, now)


_OF_DECIMALS = ("prec", "rounding", "Emin", "Emax", "capitals", "clamp")


def _decimals() -> tuple[Any, ...]:
    """Return how this thread computes with decimal numbers; nothing where it does not."""
    if "decimal" not in sys.modules:
        return ()
    context = sys.modules["decimal"].getcontext()
    return tuple(getattr(context, name) for name in _OF_DECIMALS)


def _set_decimals(wanted: tuple[Any, ...]) -> None:
    if not wanted:
        return
    context = sys.modules["decimal"].getcontext()
    for name, value in zip(_OF_DECIMALS, wanted, strict=True):
        setattr(context, name, value)


_PRECISIONS = (
    "cudnn",
    "mkldnn",
    "cuda.matmul",
    "cudnn.conv",
    "cudnn.rnn",
    "mkldnn.matmul",
    "mkldnn.conv",
    "mkldnn.rnn",
)
"""What in ``torch.backends`` holds a precision of float32's products, those first from which others take theirs."""
_DENORMAL = 5e-324


def _flushes_denormals() -> bool:
    """Return whether this thread takes numbers too small for full precision as zero; torch can set that, and not tell it.

    The processor's mode holds for Python's own numbers, too.
    """
    return _DENORMAL * 1.0 == 0.0


def _precision_of_products() -> str | None:
    """Return how float32's products are computed; None where a script has chosen it for each backend, and not for all."""
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        return None


def _set_precision_of_products(value: str | None) -> None:
    if value is not None:
        torch.set_float32_matmul_precision(value)


_SWITCHES: tuple[_Switch, ...] = (
    (_decimals, _set_decimals),
    (_flushes_denormals, torch.set_flush_denormal),
    _attribute(torch.backends, "fp32_precision"),
    *(_attribute(attrgetter(name)(torch.backends), "fp32_precision") for name in _PRECISIONS),
    (_precision_of_products, _set_precision_of_products),
    (sys.getrecursionlimit, sys.setrecursionlimit),
    (torch.get_default_dtype, torch.set_default_dtype),
    (torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms),
    (torch.get_num_threads, torch.set_num_threads),
    (mkldnn_enabled, enable_mkldnn),
    *(_sdp(name) for name in ("flash", "mem_efficient", "math", "cudnn")),
    *(_attribute(torch.backends.cudnn, name) for name in ("enabled", "benchmark", "deterministic")),
)


@dataclass(frozen=True, slots=True)
class Ambient:
    """The settings, the function modes and the hooks on saved tensors under which a forward ran.

    ``dispatch``: dispatch modes of the script's. These are not entered again: what they do besides is not known.
    """

    settings: tuple[Any, ...]
    modes: tuple[Any, ...]
    saving: Any = None
    dispatch: tuple[Any, ...] = ()
    environment: dict[bytes, bytes] = field(default_factory=dict)

    @classmethod
    def read(cls) -> Ambient:
        """Read what holds now; the modes of bitwitness's own are left out."""
        modes, dispatch = scripts_modes()
        return cls(
            tuple(read() for read, _ in _SWITCHES), tuple(modes), hooks_of_saving(), tuple(dispatch), _environment()
        )

    def dispatching(self) -> str | None:
        """Return the name of a dispatch mode of the script's that was on, or is on now; None if there is none."""
        return next((type(mode).__name__ for mode in (*self.dispatch, *Ambient.read().dispatch)), None)

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Let it hold for a while."""
        now = Ambient.read()
        _set(self.settings)
        taken = [pop_function_mode() for _ in function_modes()]
        for mode in self.modes:
            push_function_mode(mode)
        if self.saving is not None:
            push_saving_hooks(*self.saving)
        try:
            with _environment_of(self.environment):
                yield
        finally:
            if self.saving is not None:
                pop_saving_hooks()
            for _ in function_modes():
                pop_function_mode()
            for mode in reversed(taken):
                push_function_mode(mode)
            _set(now.settings)


def hooks_of_saving() -> Any:
    """Return the hooks through which autograd saves tensors now; None if there are none."""
    return saving_hooks(True)  # noqa: FBT003 - it takes no keyword


def _set(wanted: tuple[Any, ...]) -> None:
    for (read, put), value in zip(_SWITCHES, wanted, strict=True):
        if value != read():  # which one that was set before may have changed
            put(value)
