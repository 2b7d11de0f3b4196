"""When a fault strikes: its steps, its probability, and how often it struck already."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from bitwitness.device import this_slot
from bitwitness.files.shown import shown
from bitwitness.inject.faults import Fault
from bitwitness.site import Site
from bitwitness.tap.operators import OpCall
from bitwitness.tap.ownwork import OWN, in_replay


@dataclass(frozen=True, slots=True)
class Firing:
    """A fault that struck. ``changed`` elements have other bits now; 0 where the fault was masked."""

    step: int
    site: Site
    fault: int
    changed: int


class Trigger:
    """One fault of one device, with random numbers of its own, the same in every run with the same seed.

    The training draws from others than what is executed besides, so that it is struck alike whether a guard asks or not.
    """

    def __init__(self, fault: Fault, index: int, *, seed: int, rank: int) -> None:
        self.fault = fault
        self.index = index
        self.fired = 0
        self._of_training = np.random.default_rng([seed, rank, index])
        self._of_others = np.random.default_rng([seed, rank, index, 1])

    def rng(self, *, again: bool) -> np.random.Generator:
        """Return the random numbers of the training, or of what is executed again."""
        return self._of_others if again else self._of_training

    def due(self, step: int) -> bool:
        """Tell whether the fault can strike in a step."""
        return (self.fault.times is None or self.fired < self.fault.times) and self.fault.due(step)

    def draw(self, rng: np.random.Generator) -> bool:
        """Tell whether this execution is struck."""
        return self.fault.probability >= 1.0 or bool(rng.random() < self.fault.probability)


def triggers_of(faults: Sequence[Fault], *, seed: int, rank: int) -> list[Trigger]:
    """Return the triggers of the faults that a rank has, each with its number among all."""
    slot = this_slot()
    mine = [(i, fault) for i, fault in enumerate(faults) if fault.rank in (None, rank) and fault.slot in (None, slot)]
    return [Trigger(fault, index, seed=seed, rank=rank) for index, fault in mine]


def is_again(call: OpCall) -> bool:
    """Tell whether an operator is not the training's own: of a step that is run again, or of a check."""
    return call.own or in_replay()


def told_of(trigger: Trigger, fired: Sequence[Firing], rank: int, *, ran_elsewhere: bool = False) -> str:
    """Say how often a fault struck, and where first; or that it never did, which a misspelt site may be the reason of.

    ``ran_elsewhere``: modules ran in threads that the device is not in.
    """
    what = f"fault {trigger.index} ({trigger.fault.kind} at {shown(trigger.fault.site)})"
    mine = [firing for firing in fired if firing.fault == trigger.index]
    if not mine:
        named = "" if "/" in trigger.fault.site else ", which names modules and no operator (that is MODULE/OPERATOR),"
        if ran_elsewhere:
            return (
                f"{what} never struck on rank {rank}: models ran in other threads than the one that entered the device, and "
                "operators are struck in that alone"
            )
        return (
            f"{what} never struck on rank {rank}: nothing of that site{named} was computed in a step in which it is due; "
            "bitwitness record shows what sites there are, and a step ends where an optimizer of torch's steps"
        )
    times = "once," if len(mine) == 1 else f"{len(mine)} times, first"
    # A device that strikes everything strikes the guard's own operators first: the user looks for the model's.
    first = next((firing for firing in mine if firing.site.module != OWN), mine[0])
    return f"{what} struck {times} in step {first.step} at {first.site.short} on rank {rank}"


def told_of_absent(faults: Sequence[Fault], ranks: int) -> list[str]:
    """Return a line for each fault of a rank that a job of so many ``ranks`` does not have."""
    return [
        f"fault {index} never struck: it is for rank {fault.rank}, and the job has {ranks} rank{'s' * (ranks > 1)}"
        for index, fault in enumerate(faults)
        if fault.rank is not None and fault.rank >= ranks
    ]
