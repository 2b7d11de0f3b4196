"""A pass, forward and backward, run again: the parameters' gradients, had without autograd's accumulation.

``torch.autograd.grad`` is asked for them (or, where a reentrant checkpoint refuses that, leaves that share the parameters'
memory are put in their place), so that neither ``p.grad`` nor any hook behind the accumulation (DistributedDataParallel's
reducer, an optimizer inside backward) takes part. Gradients of several micro-batches are added in the order in which autograd
added them.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from itertools import compress

import torch
from torch import nn

from bitwitness.capture.gradhooks import parameter_hooks
from bitwitness.capture.step import Pass
from bitwitness.replay.execution import Around, Execution
from bitwitness.replay.forwards import ForwardReplay
from bitwitness.replay.quiet import run_backward
from bitwitness.replay.start import Starts, starts_of
from bitwitness.tap.compat import reparametrized
from bitwitness.tap.modules import ROOT
from bitwitness.tap.ownwork import standing_in


class PassReplay:
    """Runs passes of one root again. ``parameters``: those whose gradients are wanted, by name, in order."""

    def __init__(self, root: nn.Module, parameters: dict[str, nn.Parameter], forwards: ForwardReplay) -> None:
        self._root = root
        self._parameters = parameters
        self._forwards = forwards
        self._through_leaves: bool | None = None
        self._had_gradients: list[bool] = []

    def begin(self, left: frozenset[int]) -> None:
        """Say that an execution begins; note which parameters the training gave a gradient, but for those ``left`` behind."""
        self._had_gradients = [p.grad is not None and i not in left for i, p in enumerate(self._parameters.values())]

    def run(
        self,
        group: Pass,
        totals: list[torch.Tensor | None],
        outputs: list[torch.Tensor],
        done: Execution,
        *,
        around: Around,
        zero_start: bool,
    ) -> None:
        """Run a pass, and add its gradients to ``totals``, in the order in which autograd accumulated them.

        ``outputs`` takes the outputs' bit hashes. ``zero_start``: the training's gradients began as zeros, not as None.
        """
        new = self._gradients(group, outputs, done, around)
        for index, grad in enumerate(new):
            if grad is None:
                continue
            total = totals[index]
            if total is None and zero_start:
                total = torch.zeros_like(grad)
            totals[index] = grad.detach() if total is None else self._added(index, total, grad, around)

    def _added(self, index: int, total: torch.Tensor, grad: torch.Tensor, around: Around) -> torch.Tensor:
        """Add a later micro-batch's gradient, as an operator of the parameter's module where operators are looked at."""
        if around is nullcontext:
            return total.add_(grad)
        with around(), standing_in(list(self._parameters)[index].rpartition(".")[0] or ROOT, "grad"):
            return total.add_(grad)

    def _gradients(
        self, group: Pass, outputs: list[torch.Tensor], done: Execution, around: Around
    ) -> Sequence[torch.Tensor | None]:
        """Run one group forward and backward; return the parameters' gradients, in order."""
        missed = self._had_gradients
        hashes: list[torch.Tensor] = []
        if not self._through_leaves:
            new, found = self._asked_for(group, hashes, around)
            missed = [grad is None and there for grad, there in zip(new or (), self._had_gradients, strict=False)]
            if new is not None and (not any(missed) or self._through_leaves is False):
                outputs += hashes
                done.note(found)
                return new
        hashes = []
        new, found = self._accumulated(group, hashes, around)
        if self._through_leaves is None:
            # A reentrant checkpoint hides the parameters used inside it from torch.autograd.grad; a parameter that was
            # simply not used has no gradient either way.
            self._through_leaves = any(grad is not None and gap for grad, gap in zip(new, missed, strict=True))
        outputs += hashes
        done.note(found)
        return new

    def _asked_for(
        self, group: Pass, hashes: list[torch.Tensor], around: Around
    ) -> tuple[Sequence[torch.Tensor | None] | None, Starts]:
        """Ask autograd for the gradients; None where a reentrant checkpoint refuses that."""
        found = self.starts(group, hashes, around, {})
        # One that the script has frozen since the step before is still among those that are watched, and not asked; one
        # that it froze after this step's backward has a gradient, and autograd refuses: the step cannot be run again.
        parameters = list(self._parameters.values())
        asked = [p.requires_grad or had for p, had in zip(parameters, self._had_gradients, strict=True)]
        try:
            wanted = [*compress(parameters, asked)]
            with self._forwards.noting(), around():
                ways = found.roots, wanted, found.grads
                grads = iter(run_backward(self._root, group.began, torch.autograd.grad, *ways, allow_unused=True))
            return [next(grads) if is_asked else None for is_asked in asked], found
        except RuntimeError as error:
            if "use_reentrant" not in str(error):
                raise
        self._through_leaves = True
        return None, found

    def _accumulated(
        self, group: Pass, hashes: list[torch.Tensor], around: Around
    ) -> tuple[Sequence[torch.Tensor | None], Starts]:
        leaves = {name: parameter.detach().requires_grad_() for name, parameter in self._parameters.items()}
        for leaf, hooks in zip(leaves.values(), parameter_hooks(list(self._parameters.values())), strict=True):
            for hook in hooks:
                leaf.register_hook(hook)
        with reparametrized(self._root, leaves, tie_weights=True):
            found = self.starts(group, hashes, around, {id(p): leaves[name] for name, p in self._parameters.items()})
            with self._forwards.noting(), around():
                run_backward(self._root, group.began, torch.autograd.backward, found.roots, found.grads)
        return [leaf.grad for leaf in leaves.values()], found

    def starts(
        self, group: Pass, hashes: list[torch.Tensor], around: Around, leaves: dict[int, torch.Tensor]
    ) -> Starts:
        """Run a group's forwards, and its loss code; return what to go back from."""
        standing = leaves.values() if leaves else self._parameters.values()
        made = self._forwards.run(group, hashes, around, parameters=standing, leaves=leaves)
        with around():
            return starts_of(group, made, strict=self._forwards.strict)
