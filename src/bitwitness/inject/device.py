"""A device that computes wrongly, as far as everything that runs on it can tell.

`FaultyDevice` strikes what operators compute, in forward and backward, what collectives send and deliver,
and what lies in memory after an optimizer's step. It knows nothing of who watches: entered before anything
else, it is what the training, the guard, its checks and its replays all run on.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from fnmatch import fnmatchcase
from types import TracebackType
from typing import Any, Self

import torch
from torch import nn
from torch.nn.modules import module as nn_module
from torch.optim.optimizer import Optimizer

from bitwitness.config.variables import INJECT
from bitwitness.inject.faults import Fault, load_faults
from bitwitness.inject.moments import DeviceMoments
from bitwitness.inject.outputs import change_contribution, computed, computes, delivered, is_collective, stored
from bitwitness.inject.patterns import corrupt, count_changed, reaches
from bitwitness.inject.schedule import Firing, Trigger, is_again, told_of, told_of_absent, triggers_of
from bitwitness.session.clock import StepClock
from bitwitness.site import Site, matches
from bitwitness.tap.compat import OpOverload, dynamo, without_dispatch_modes
from bitwitness.tap.compiled import unwarned_of_hooks
from bitwitness.tap.emulated import injecting
from bitwitness.tap.modes import put_at_the_bottom
from bitwitness.tap.modules import ModuleTracker
from bitwitness.tap.moments import StepMoments
from bitwitness.tap.operators import OpCall, OperatorTap
from bitwitness.tap.optimizerhooks import told_of_steps
from bitwitness.tap.opwindow import run_eagerly
from bitwitness.tap.ownwork import REFERENCE, own_work
from bitwitness.tap.traffic import world_size

_OPERATOR_PHASES = ("forward", "backward", "comm")


class FaultyDevice:
    """The faulty device of one rank; a context manager, to be entered before anything else.

    Operators are looked at only in steps in which a fault can strike one, and of these only those that it can match cost
    more than a look-up. Where a fault concerns operators, compiled regions run eagerly. Integer, bool, complex, sparse and
    quantized values are never struck, and neither are views.

    Parameters
    ----------
    faults
        Those of all ranks; the others' are ignored.
    rank
        The rank on this device.
    clock
        Numbers the steps; if None, the device counts them itself, by optimizer steps and training forwards.
    seed
        Of the device's own random numbers. Torch's, NumPy's and Python's global ones are never drawn from.
    model
        Names the parameters; if None, they have the names of the modules whose forward was seen.

    Attributes
    ----------
    fired
        What struck so far: `Firing` records, in order.

    """

    def __init__(
        self,
        faults: Sequence[Fault],
        rank: int = 0,
        clock: StepClock | None = None,
        seed: int = 0,
        model: nn.Module | None = None,
    ) -> None:
        self.fired: list[Firing] = []
        self.clock = StepClock() if clock is None else clock
        self._counts_steps = clock is None
        self._rank = rank
        self._declared = f"{len(faults)} declared" + "".join(f", {fault.kind} at {fault.site}" for fault in faults[:3])
        self._triggers = triggers_of(faults, seed=seed, rank=rank)
        self._ranks, self._faults = 1, tuple(faults)
        self._on_operators = [t for t in self._triggers if _can_be_in(t.fault, _OPERATOR_PHASES)]
        self._on_state = [t for t in self._triggers if _can_be_in(t.fault, ("param", "optim"))]
        self._stepped = 0  # the step whose optimizer has just stepped
        self._names_backward = any(_can_be_in(t.fault, ("backward",)) for t in self._on_operators)
        self._targets: dict[OpOverload, list[Trigger]] = {}
        self._tracker = ModuleTracker()
        self._tap = OperatorTap(self._tracker, self._after, self._select, self._before, own_work=True)
        self._awake = self._eager = False
        self._ran_elsewhere = False
        self._thread = 0
        self._stack = ExitStack()
        if model is not None:
            self._tracker.name_tree(model)

    @classmethod
    def from_environment(cls, rank: int = 0, clock: StepClock | None = None, seed: int = 0) -> FaultyDevice | None:
        """Return the device that ``BITWITNESS_INJECT`` (a TOML file) declares, or None where it is not set.

        Raises
        ------
        ConfigError
            The file cannot be read or is not understood.

        """
        path = os.environ.get(INJECT)
        return cls(load_faults(path), rank, clock, seed) if path else None

    def __enter__(self) -> Self:
        self._stack.enter_context(injecting(self._declared))
        self._stack.enter_context(StepMoments(DeviceMoments(self)))
        self._stack.callback(told_of_steps(self._strike_memory, last=True))
        self._stack.enter_context(unwarned_of_hooks())
        self._stack.enter_context(self._tracker)
        if self._counts_steps:
            self._stack.callback(nn_module.register_module_forward_pre_hook(self._before_module).remove)
        self._thread = threading.get_ident()
        self._stack.callback(self._look_away)
        self._look()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def told(self) -> list[str]:
        """Return a line for each fault: how often it struck, and where first; rank 0 tells of those of absent ranks, too."""
        told = [
            told_of(trigger, self.fired, self._rank, ran_elsewhere=self._ran_elsewhere) for trigger in self._triggers
        ]
        return told if self._rank else told + told_of_absent(self._faults, self._ranks)

    # -- operators ---------------------------------------------------------------------------------------

    def _look(self) -> None:
        """Look at operators if a fault can strike one now, and else at none: under a dispatch mode each runs through Python.

        Modes are a thread's own: the device is that of the thread that entered it.
        """
        self._ranks = max(self._ranks, world_size())  # when it is told of, the group may be gone
        if threading.get_ident() != self._thread or not self._on_operators:
            return
        if not self._eager and dynamo() is not None:
            self._eager = True
            run_eagerly(self._stack)
        step = self.clock.step  # and the next one: its backward may run through what was made in this
        due = any(trigger.due(step) or trigger.due(step + 1) for trigger in self._on_operators)
        if not due and self._counts_steps:
            self._look_away()
        elif not self._awake:
            self._awake = True
            self._tap.__enter__()
            put_at_the_bottom(self._tap)

    def _look_away(self) -> None:
        if self._awake:
            self._awake = False
            self._tap.__exit__(None, None, None)

    def _select(self, func: OpOverload) -> bool:
        name = func.overloadpacket.__name__
        targets = [t for t in self._on_operators if fnmatchcase(name, t.fault.op_glob)] if computes(func) else []
        if is_collective(func):
            targets = [t for t in targets if _can_be_in(t.fault, ("comm",))]
        self._targets[func] = targets
        # A backward operator is named after the forward operator of its node: the tracker must see all.
        return bool(targets) or self._names_backward

    def _due(self, call: OpCall) -> list[Trigger]:
        if call.module == REFERENCE:
            return []  # what is compared with float64 is compared with another machine's
        step = self.clock.step
        return [trigger for trigger in self._targets[call.func] if trigger.due(step)]

    def _before(self, call: OpCall) -> None:
        if is_collective(call.func) and (due := self._due(call)):
            change_contribution(
                call, lambda slot, tensor: self._struck(_comm_site(call, slot), tensor, due, again=is_again(call))
            )

    def _after(self, call: OpCall) -> None:
        due = self._due(call)
        if not due:
            return
        if not is_collective(call.func):
            for slot, tensor in computed(call):
                self._strike(call.site(slot), tensor, due, again=is_again(call))
        elif any(_can_strike_delivery(trigger.fault) for trigger in due):  # to look is to wait for the collective
            for slot, tensor in delivered(call):
                self._strike(_comm_site(call, slot), tensor, due, again=is_again(call))

    # -- memory ------------------------------------------------------------------------------------------

    def optimizer_stepped(self) -> None:
        """Mind which step it was, and let it end."""
        self._stepped = self.clock.step
        self.end_step()

    def _strike_memory(self, optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:
        """Strike what lies in memory when all others have seen the step: whoever takes seals has taken them."""
        due = [trigger for trigger in self._on_state if trigger.due(self._stepped)]
        if due:
            with torch.no_grad(), without_dispatch_modes(), own_work():
                self._strike_state(optimizer, due)

    def _strike_state(self, optimizer: Optimizer, due: list[Trigger]) -> None:
        paths = self._tracker.parameters()
        for number, group in enumerate(optimizer.param_groups):
            for index, parameter in enumerate(group["params"]):
                path = paths.get(parameter, f"param_groups.{number}.{index}")
                self._strike(
                    Site(path, path.rpartition(".")[2], phase="param"), stored(parameter), due, step=self._stepped
                )
                for key, value in optimizer.state.get(parameter, {}).items():
                    if isinstance(value, torch.Tensor):
                        self._strike(Site(path, str(key), phase="optim"), stored(value), due, step=self._stepped)

    # -- striking ----------------------------------------------------------------------------------------

    def _strike(
        self, site: Site, tensor: torch.Tensor, due: list[Trigger], *, again: bool = False, step: int | None = None
    ) -> None:
        struck = self._struck(site, tensor, due, again=again, step=step)
        if struck is not None:
            tensor.copy_(struck)

    def _struck(
        self, site: Site, tensor: torch.Tensor, due: list[Trigger], *, again: bool, step: int | None = None
    ) -> torch.Tensor | None:
        """Return a corrupted copy, or None if nothing struck; ``step``: where that is not the one that the clock shows."""
        if not _is_plain(tensor):
            return None
        result, step = None, self.clock.step if step is None else step
        for trigger in due:
            fault = trigger.fault
            if not (matches(fault.site, site) and reaches(fault, tensor) and trigger.due(step)):
                continue
            before = tensor if result is None else result
            rng = trigger.rng(again=again)
            after = corrupt(before, fault, rng) if trigger.draw(rng) else None
            if after is None:
                continue
            trigger.fired += 1
            where = site.at(rank=self._rank, step=step, micro=self.clock.micro)
            self.fired.append(Firing(step, where, trigger.index, count_changed(before, after)))
            result = after
        return result

    # -- steps -------------------------------------------------------------------------------------------

    def begin_backward(self) -> None:
        """Number the operators of the backward pass from zero."""
        self._look()
        self._tracker.restart_calls()

    def end_step(self) -> None:
        """Let the step end, unless somebody else numbers the steps."""
        if self._counts_steps:
            self.clock.end_step()

    def _before_module(self, module: nn.Module, _args: Any) -> None:
        if torch.compiler.is_compiling():
            return  # of a region that was compiled before its first backward told us of it
        self._ran_elsewhere |= threading.get_ident() != self._thread
        if module.training and torch.is_grad_enabled():
            self.clock.begin_forward()
        self._look()


def _can_be_in(fault: Fault, phases: Sequence[str]) -> bool:
    return any(fnmatchcase(phase, fault.phase_glob) for phase in phases)


def _can_strike_delivery(fault: Fault) -> bool:
    return fnmatchcase("out0", fault.slot_glob)


def _comm_site(call: OpCall, slot: str) -> Site:
    return replace(call.site(slot), phase="comm")


def _is_plain(tensor: torch.Tensor) -> bool:
    """Tell whether a tensor is an ordinary dense one; fake, sparse and wrapped ones hold no bits here."""
    return (
        type(tensor) in {torch.Tensor, nn.Parameter} and tensor.layout is torch.strided and tensor.device.type != "meta"
    )
