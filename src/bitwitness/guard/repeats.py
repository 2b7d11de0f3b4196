"""What keeps a script from repeating its bits: noted while it runs, each with the script's line where there is one.

Operators name themselves: torch's deterministic mode is on, and only warns (`torch.use_deterministic_algorithms`). Generators
that were used and never seeded are told by their states, before and after. What is set about the process is read at the end.
"""

from __future__ import annotations

import os
import random
import re
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch
from torch.utils.data import DataLoader

from bitwitness.tap.frames import NOWHERE, Line, current_line
from bitwitness.tap.patching import replaced

SETTINGS = (
    (
        "torch.use_deterministic_algorithms(True)",
        "operators that have a deterministic form take it; others raise an error",
    ),
    ("CUBLAS_WORKSPACE_CONFIG=:4096:8", "before the first CUDA call: cuBLAS adds up in one order"),
    ("torch.backends.cudnn.benchmark = False", "cuDNN takes the same kernel each time"),
    ("torch.manual_seed(0); random.seed(0); numpy.random.seed(0)", "before the model is made, on every rank"),
    ("PYTHONHASHSEED=0", "in the environment: sets of strings have one order"),
    ("the same number of threads, ranks and devices, of the same kind", "sums are split in the same way"),
)
"""What makes a script repeat its bits, and why."""

_FILLS = "fill_uninitialized_memory"  # torch makes the module have it as it is imported
_MESSAGE = re.compile(r"(\S+) does not have a deterministic implementation")
_ATOMIC = (
    "index_add scatter_add index_put embedding_dense_backward embedding_bag bincount put histc kthvalue median "
    "upsample_bilinear2d_backward upsample_bicubic2d_backward grid_sampler_2d_backward adaptive_avg_pool2d_backward "
    "max_pool3d_with_indices_backward nll_loss2d ctc_loss_backward cumsum"
)
"""Operators whose CUDA kernels add with atomics, or may (torch's documentation of its deterministic mode)."""


@dataclass(frozen=True, slots=True)
class Reason:
    """Why bits may not repeat: what was seen, the script's line, and what to do; ``sure``: it is bound to differ."""

    what: str
    to_do: str
    line: str = ""
    sure: bool = True

    def words(self) -> str:
        """Return it as one line."""
        return f"{f'{self.line}: ' if self.line else ''}{self.what}: {self.to_do}"


class Repeats:
    """Notes, while entered, what keeps a script from repeating its bits.

    The process is put right on leaving. Within, kernels are those of torch's deterministic mode, where there are two.
    """

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._operators: dict[tuple[str, Line], None] = {}
        self._seeded: set[str] = set()
        self._unseeded_numpy: dict[Line, None] = {}
        self._loaders: dict[Line, None] = {}
        self._before: dict[str, Any] = {}

    def __enter__(self) -> Self:
        self._mode()
        self._stack.enter_context(replaced(warnings, "showwarning", self._warned))
        for owner, name, what in ((random, "seed", "random"), (np.random, "seed", "numpy.random")):
            self._stack.enter_context(replaced(owner, name, self._seeding(what)))
        self._stack.enter_context(replaced(np.random, "default_rng", self._generator))
        self._stack.enter_context(replaced(DataLoader, "__iter__", self._loader))
        self._before = _states()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def _mode(self) -> None:
        if torch.are_deterministic_algorithms_enabled():
            return
        fills = getattr(torch.utils.deterministic, _FILLS)
        setattr(torch.utils.deterministic, _FILLS, False)
        torch.use_deterministic_algorithms(mode=True, warn_only=True)
        self._stack.callback(setattr, torch.utils.deterministic, _FILLS, fills)
        self._stack.callback(partial(torch.use_deterministic_algorithms, mode=False))
        before = list(warnings.filters)
        warnings.filterwarnings("always", message=f".*{_MESSAGE.pattern[5:]}")
        self._stack.callback(_take_out, [one for one in warnings.filters if one not in before])

    # -- what is noticed -----------------------------------------------------------------------------------------

    def _warned(self, shown: Callable[..., None]) -> Callable[..., None]:
        def show(message: Any, *args: Any, **kwargs: Any) -> None:
            found = _MESSAGE.search(str(message))
            if found is None:
                shown(message, *args, **kwargs)
            else:  # it comes of our having asked for it
                self._operators.setdefault((found[1], current_line()))

        return show

    def _seeding(self, what: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        def wrap(seed: Callable[..., Any]) -> Callable[..., Any]:
            def noted(*args: Any, **kwargs: Any) -> Any:
                if args or kwargs:
                    self._seeded.add(what)
                return seed(*args, **kwargs)

            return noted

        return wrap

    def _generator(self, default_rng: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*args: Any, **kwargs: Any) -> Any:
            if (args or (kwargs.get("seed"),))[0] is None and (line := current_line()) != NOWHERE:
                self._unseeded_numpy.setdefault(line)
            return default_rng(*args, **kwargs)

        return noted

    def _loader(self, iterate: Callable[..., Any]) -> Callable[..., Any]:
        def noted(loader: Any) -> Any:
            if loader.num_workers and not getattr(loader, "in_order", True):
                self._loaders.setdefault(current_line())
            return iterate(loader)

        return noted

    # -- what is told --------------------------------------------------------------------------------------------

    def reasons(self, called: dict[str, int] | None = None) -> list[Reason]:
        """Return why bits may not repeat, the surest first; ``called``: operators that ran on deep steps, by name."""
        found = [
            Reason(f"{op} has no deterministic kernel here", "use another operator, or another device", short(line))
            for op, line in self._operators
        ]
        found += self._generators()
        found += [
            Reason("numpy.random.default_rng() without a seed", "give it one", short(line))
            for line in self._unseeded_numpy
        ]
        found += [
            Reason(
                "DataLoader(in_order=False) with workers: batches come as they are ready", "in_order=True", short(line)
            )
            for line in self._loaders
        ]
        return [*found, *_of_cuda(called or {}), *_of_process()]

    def _generators(self) -> list[Reason]:
        now = _states()
        found = []
        for name, advice in (
            ("torch", "torch.manual_seed(0) before the model is made"),
            ("random", "random.seed(0)"),
            ("numpy.random", "numpy.random.seed(0)"),
        ):
            seed, state = self._before[name]
            seeded = name in self._seeded or (name == "torch" and now[name][0] != seed)
            if now[name][1] != state and not seeded:
                found.append(Reason(f"{name}'s generator is used and was never seeded", advice))
        return found


def _take_out(ours: list[Any]) -> None:
    for one in ours:
        if one in warnings.filters:
            warnings.filters.remove(one)  # type: ignore[attr-defined]


def _states() -> dict[str, tuple[Any, Any]]:
    numpy_state = np.random.get_state(legacy=True)  # noqa: NPY002 - the script's own generator
    return {
        "torch": (torch.initial_seed(), torch.get_rng_state().numpy().tobytes()),
        "random": (None, random.getstate()),
        "numpy.random": (None, (numpy_state[1].tobytes(), *numpy_state[2:])),  # type: ignore[index]
    }


def _of_cuda(called: dict[str, int]) -> list[Reason]:
    if not torch.cuda.is_available():
        return []
    found = [
        Reason(f"{op} adds with atomics on CUDA, in any order", "torch.use_deterministic_algorithms(True)")
        for op in called
        if op.strip("_").startswith(tuple(_ATOMIC.split()))
    ]
    if torch.backends.cudnn.benchmark:
        found.append(
            Reason("cudnn.benchmark is on: kernels are chosen by their times", "torch.backends.cudnn.benchmark = False")
        )
    if os.environ.get("CUBLAS_WORKSPACE_CONFIG") not in (":4096:8", ":16:8"):
        found.append(Reason("cuBLAS may add up in any order", "CUBLAS_WORKSPACE_CONFIG=:4096:8", sure=False))
    if torch.backends.cuda.matmul.fp32_precision != "ieee":
        found.append(Reason("TF32 products: other bits on a device without it", "the same kind of device", sure=False))
    return found


def _of_process() -> list[Reason]:
    if os.environ.get("PYTHONHASHSEED", "random") == "random":
        return [Reason("PYTHONHASHSEED is not set: sets of strings change their order", "PYTHONHASHSEED=0", sure=False)]
    return []


def short(line: Line) -> str:
    """Return ``file:line``; empty for no line."""
    return f"{Path(line[0]).name}:{line[1]}" if line[0] else ""


def make_repeatable() -> None:
    """Set in this process what makes a script repeat its bits, where it sets nothing else; what only warns goes on."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    setattr(torch.utils.deterministic, _FILLS, False)
    torch.use_deterministic_algorithms(mode=True, warn_only=True)
    torch.backends.cudnn.benchmark = False
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002 - the script's own generator
