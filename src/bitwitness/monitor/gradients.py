"""A rank's local gradients, before any reduction, and the same as the optimizer reads them.

How local ones are reached depends on who owns them (as in `bitwitness.capture.gradients`): alone, they are what the backward
left; under DistributedDataParallel they are read before its last callback, or one by one where they lie in its buckets; under
FSDP2 at the input of the reduce-scatter.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from bitwitness.capture.backward import LocalGradientsFirst
from bitwitness.monitor.activations import Fail
from bitwitness.monitor.sheet import Sheet, measured
from bitwitness.tap.compiled import distributed
from bitwitness.tap.ownwork import in_replay, own_work
from bitwitness.tap.sharded import ReduceTap, reduces, sharding_of

Found = tuple[list[str], list[int], torch.Tensor]
"""Names, how many values each has, and their figures."""


class LocalGradients:
    """Measures the local gradients of a model's parameters, once a step.

    Parameters
    ----------
    model
        What the training calls.
    parameters
        Those that are looked at, by name.
    zeros
        Count zeros, too.
    fail
        Told of an error; local gradients are not looked at any more then.

    """

    def __init__(self, model: nn.Module, parameters: dict[str, nn.Parameter], *, zeros: bool, fail: Fail) -> None:
        self._model = model
        self._parameters = parameters
        self._zeros = zeros
        self._fail = fail
        self._on = True
        self._latest: Found | None = None
        self._parts: dict[str, tuple[int, torch.Tensor]] = {}
        self._handles: list[torch.utils.hooks.RemovableHandle] = []
        self._tap: ReduceTap | None = None
        self._first = LocalGradientsFirst(self._collect)
        self._reducing = True
        wrapper = distributed(model)
        self.mode = "hold" if wrapper is None else "hooks" if wrapper.gradient_as_bucket_view else "callback"
        if sharding_of(model).fsdp2:
            self.mode = "reduce"
        self._wrapper = wrapper

    def attach(self) -> None:
        """Look at the gradients of the step that begins."""
        if not self._on or self._handles or self._tap is not None:
            return
        if self.mode == "reduce":
            self._tap = _LocalTap(list(self._parameters.values()), self)
        elif self.mode == "hooks":
            for name, parameter in self._parameters.items():
                if parameter.requires_grad:
                    self._handles.append(parameter.register_post_accumulate_grad_hook(_Accumulated(self, name)))

    def detach(self) -> None:
        """Look no more, and forget."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        if self._tap is not None:
            self._tap.close()
            self._tap = None
        self._latest = None
        self._parts.clear()

    def backward_begins(self, roots: Sequence[Any]) -> None:
        """Have the gradients read at the backward's end, if it reduces them."""
        if not self._on:
            return
        self._reducing = reduces(self._model) if self.mode == "reduce" else _syncs(self._wrapper)
        if self.mode == "callback" and self._reducing:
            self._first.queue(roots)

    def backward_ended(self) -> None:
        """Take the hook of that away."""
        self._first.done()

    def take(self, sheet: Sheet) -> bool:
        """Add the step's local gradients; return whether any were read before their reduction."""
        if self.mode in ("reduce", "hooks") and self._parts:
            names = list(self._parts)
            figures = torch.cat([figures for _, figures in self._parts.values()])
            self._latest = names, [count for count, _ in self._parts.values()], figures
            self._parts.clear()
        found, self._latest = self._latest, None
        if found is not None:
            sheet.add_all("grad", *found)
        return found is not None

    def _collect(self) -> None:
        if in_replay():
            return
        try:
            with own_work(), torch.no_grad():
                there = present(self._parameters)
                self._latest = (list(there), *measured(list(there.values()), zeros=self._zeros))
        except Exception as error:
            self.give_up(error)

    def see(self, name: str, grad: torch.Tensor | None) -> None:
        """Measure one local gradient; the last time counts, when all micro-batches have added to it."""
        if grad is None or in_replay() or not self._on:
            return
        try:
            with own_work(), torch.no_grad():
                counts, figures = measured([grad], zeros=self._zeros)
            self._parts[name] = counts[0], figures
        except Exception as error:
            self.give_up(error)

    def see_all(self, named: dict[str, torch.Tensor]) -> None:
        """Measure some at once."""
        if in_replay() or not named or not self._on:
            return
        try:
            with own_work(), torch.no_grad():
                counts, figures = measured(list(named.values()), zeros=self._zeros)
            rows = figures.split(1)
            self._parts.update({name: (counts[i], rows[i]) for i, name in enumerate(named)})
        except Exception as error:
            self.give_up(error)

    def give_up(self, error: BaseException) -> None:
        """End, and say why."""
        self._on = False
        self.detach()
        self._fail("local gradients", error)


class _LocalTap(ReduceTap):
    """Hands what enters FSDP2's reduce-scatters to `LocalGradients`."""

    def __init__(self, parameters: Sequence[nn.Parameter], owner: LocalGradients) -> None:
        super().__init__(parameters)
        self._owner = owner
        self._names = list(owner._parameters)

    def _describe(self, fsdp_params: list[Any], grads: list[torch.Tensor]) -> None:
        found = {
            self._names[index]: grad
            for param, grad in zip(fsdp_params, grads, strict=True)
            if (index := self._index.get(id(param.sharded_param))) is not None
        }
        self._owner.see_all(found)


class _Accumulated:
    """A parameter's hook; copied with the model it does nothing."""

    def __init__(self, owner: LocalGradients | None, name: str) -> None:
        self._owner = owner
        self._name = name

    def __call__(self, parameter: torch.Tensor) -> None:
        if self._owner is not None:
            self._owner.see(self._name, parameter.grad)

    def __deepcopy__(self, _memo: dict[int, object]) -> _Accumulated:
        return _Accumulated(None, self._name)

    def __reduce__(self) -> tuple[type[_Accumulated], tuple[None, str]]:
        return _Accumulated, (None, self._name)


def present(parameters: dict[str, nn.Parameter]) -> dict[str, torch.Tensor]:
    """Return the gradients that are there; what was left in a parameter that a script has frozen is none."""
    return {name: p.grad for name, p in parameters.items() if p.grad is not None and p.requires_grad}


def _syncs(wrapper: Any) -> bool:
    """Tell whether the backward that begins now reduces: not under ``no_sync``."""
    return wrapper is None or bool(wrapper.require_backward_grad_sync)
