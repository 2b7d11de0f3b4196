"""The truth of a call: its float64 results, and how far rounding moves each element of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from bitwitness.numerics import FLOAT8, is_inexact, unit_roundoff
from bitwitness.oracle.float64 import wide_dtype
from bitwitness.oracle.kept import kept_as
from bitwitness.oracle.noise import Noise
from bitwitness.oracle.quantised import loss_of
from bitwitness.oracle.rounding import Rounding
from bitwitness.oracle.shown import DeviceDtypes
from bitwitness.tap.compat import heard
from bitwitness.tap.ownwork import REFERENCE, own_work
from bitwitness.trial.call import Call, Results, as_laid_out, output_gradients

_MOST_OPERATORS = 2000


class Oracle:
    """Answers for one call what its results should be, on the CPU; each answer is computed when it is first asked for.

    Parameters
    ----------
    call
        The call on trial.
    reference
        What is run in float64 in the place of the call's own function, where there is something more trustworthy.
    like
        The device's results: output gradients are drawn once for both.

    """

    def __init__(self, call: Call, like: Results, reference: Callable[..., Any] | None = None) -> None:
        self._call = call
        self._reference = reference
        self._given = [
            None if g is None else kept_as(g.cpu().to(wide_dtype(g.dtype)), g.dtype)
            for g in output_gradients(like.outputs, call.seed)
        ]
        self._dtypes = [t.dtype for t in like.outputs]
        self.dtype = coarsest(call.tensors)
        self._noisy: dict[bool, list[Results]] = {}
        self._own: dict[bool, list[Results]] = {}

    @cached_property
    def _run(self) -> tuple[Results, Rounding]:
        return self._once(None)

    @property
    def has_reference(self) -> bool:
        """Whether something else than the call's own function is run."""
        return self._reference is not None

    @property
    def given(self) -> list[Tensor]:
        """The tensors among the call's arguments."""
        return self._call.tensors_once

    @property
    def exact(self) -> Results:
        """The results in float64. Raises whatever the function raises in float64 on the CPU."""
        return self._run[0]

    @property
    def mode(self) -> Rounding:
        """What the float64 run saw: operators, random draws, results that are not unique."""
        return self._run[1]

    @cached_property
    def unsteady(self) -> str:
        """The first result that differs when the same is run again in float64; empty where none does."""
        return self.exact.differs_at(self._once(None)[0])

    def noisy(self, *, stepwise: bool, draws: int) -> list[Results]:
        """Return several runs with random roundings; ``stepwise``: intermediate results are rounded to the dtype, too."""
        made = self._noisy.setdefault(stepwise, [])
        while len(made) < draws:
            made.append(self._once(len(made) + 1, stepwise=stepwise)[0])
        return made[:draws]

    @cached_property
    def _steady(self) -> Results | None:
        """What the call's own function gives without noise, twice: what it varies by itself is no rounding.

        One of very many operators, a loop over single numbers, is not run so often.
        """
        try:
            first, mode = self._once(None, own=True)
            again = len(mode.operators) <= _MOST_OPERATORS and not first.differs_at(self._once(None, own=True)[0])
        except Exception:  # a kernel that the CPU does not have
            return None
        return first if again else None

    def own(self, *, draws: int, stepwise: bool) -> list[Results]:
        """Return runs of the call's own function, not of the reference: one without noise, and several with it.

        How far its own formula's rounding takes it: computed in float32 whatever it casts to on its way; ``stepwise``: with
        each operator's result in its own dtype. None where it cannot be run in float64.
        """
        if self._steady is None:
            return []
        made = self._own.setdefault(stepwise, [] if stepwise else [self._steady])
        try:
            while len(made) < draws + 1:
                made.append(self._once(len(made) or None, stepwise=stepwise, own=True)[0])
        except Exception:  # a kernel that the CPU does not have
            return []
        return made[: draws + 1]

    @cached_property
    def as_it_is(self) -> Results | None:
        """What the reference gives on the CPU in the arguments' own dtypes; None where there is none, or none that runs."""
        if self._reference is None:
            return None
        try:
            with own_work(REFERENCE), torch.random.fork_rng(devices=[]):
                torch.manual_seed(self._call.seed)
                return self._call.on_cpu().run(self._reference)
        except Exception:  # one that is written for float64 alone
            return None

    def on_quantised(self, dtype: torch.dtype, *, draws: int) -> list[Results]:
        """Return several runs on arguments and output gradients that are off by what a cast to a float8 type takes."""
        return [self._off(Noise(torch.Generator().manual_seed(draw)), dtype) for draw in range(draws)]

    def _off(self, noise: Noise, dtype: torch.dtype) -> Results:
        copied = self._call.on(lambda t: loss_of(noise, _wide(t), dtype))
        given = [None if g is None else loss_of(noise, g, dtype) for g in self._given]
        with _apart(self._call.seed):
            return copied.run(self._reference or self._call.fn, given)

    def _once(self, seed: int | None, *, stepwise: bool = False, own: bool = False) -> tuple[Results, Rounding]:
        generator = None if seed is None else torch.Generator().manual_seed(seed)
        wide = torch.float64 if self.dtype is torch.float64 else torch.float32
        mode = Rounding(self.dtype, generator, stepwise=stepwise, only=wide if own and not stepwise else None)
        fn = self._call.fn if own or self._reference is None else self._reference
        copied = self._call.on(_wide)  # before the mode is on: inputs are what they are
        try:
            with _apart(self._call.seed), heard(), mode, DeviceDtypes(mode):
                found = copied.run(fn, self._given)
            return self._seen(replace(found, changed=copied.written()), mode), mode
        finally:
            mode.release()

    def _seen(self, found: Results, mode: Rounding) -> Results:
        """Return results as they are before their own rounding: what is judged is rounded once more."""
        leaves = [t.dtype for t in self._call.tensors_once if t.requires_grad]
        wanted = [*([None] if self.has_reference else self._dtypes), *[None] * len(found.outputs)]
        gradients = zip(found.gradients, leaves, strict=False)
        return Results(
            tuple(_before_rounding(t, due, mode) for t, due in zip(found.outputs, wanted, strict=False)),
            tuple(None if t is None else _before_rounding(t, due, mode) for t, due in gradients),
            {i: mode.clean(t).detach() for i, t in found.changed.items()},
            {f"out{i}": mode.kept_dtype(t) for i, t in enumerate(found.outputs)},
            found.tracked,
        )


def _before_rounding(tensor: Tensor, due: torch.dtype | None, mode: Rounding) -> Tensor:
    """Return a result before its own rounding; after it where what follows keeps it wider, in ``due``, and rounds no more."""
    if due is None:
        return mode.clean(tensor).detach()
    coarser = (
        is_inexact(tensor) and due.is_floating_point and unit_roundoff(mode.kept_dtype(tensor)) > unit_roundoff(due)
    )
    return (tensor if coarser else mode.clean(tensor)).detach()


def coarsest(tensors: list[Tensor]) -> torch.dtype:
    """Return the floating dtype of the largest unit roundoff among tensors that can be computed with; float32 of none."""
    found = [t.dtype.to_real() if t.is_complex() else t.dtype for t in tensors if is_inexact(t)]
    return max((d for d in found if d not in FLOAT8), key=unit_roundoff, default=torch.float32)


def _wide(tensor: Tensor) -> Tensor:
    """Return a float64 copy on the CPU of the same layout: an operator may look at all of a tensor's memory."""
    copy = as_laid_out(tensor.detach().cpu())
    if not is_inexact(copy):
        return copy
    wide = wide_dtype(copy.dtype)
    if copy.layout is not torch.strided or copy.is_conj() or copy.is_neg():
        return kept_as(copy.to(wide), tensor.dtype)
    memory = torch.empty(0, dtype=copy.dtype).set_(copy.untyped_storage()).to(wide)
    return kept_as(memory.as_strided(copy.size(), copy.stride(), copy.storage_offset()), tensor.dtype)


@contextmanager
def _apart(seed: int) -> Iterator[None]:
    """Run as work of our own, on a seeded generator; what is made of integers, or from nothing, is made in float64."""
    before = torch.get_default_dtype()
    with own_work(REFERENCE), torch.random.fork_rng(devices=[]):
        torch.set_default_dtype(torch.float64)
        try:
            torch.manual_seed(seed)
            yield
        finally:
            torch.set_default_dtype(before)
