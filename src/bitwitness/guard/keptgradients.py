"""Whether gradients are at their use what their backward has left: read at its end and before the step, on deep steps.

Between the two lie memory, and what the script does to them. A reduction has delivered them by then, so that ranks which were
given the same bits answer for one another: a script's write (``p.grad.data``) comes on each of them, memory's fault on one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from bitwitness.capture.light import LightStep
from bitwitness.finding import Finding, Severity
from bitwitness.guard.seals import GRADIENTS, SealJudgement
from bitwitness.guard.switches import Switches
from bitwitness.ranks import Ranks
from bitwitness.sense.held import GRAD, Name, is_readable, read
from bitwitness.sense.seal import Broken, Seal
from bitwitness.session.reporter import Reporter


class KeptGradients:
    """Holds one root's gradients against what their backward has left.

    Parameters
    ----------
    parameters
        Returns those whose gradients are read, by name.
    ranks, reporter, switches
        As for the other sensors.
    due
        Tells whether a step of a number is looked at: the same steps on all ranks.

    """

    def __init__(
        self,
        parameters: Callable[[], Mapping[str, nn.Parameter]],
        ranks: Ranks,
        reporter: Reporter,
        switches: Switches,
        due: Callable[[int], bool],
    ) -> None:
        self._parameters, self._ranks, self._switches, self._due = parameters, ranks, switches, due
        self.seals = SealJudgement(reporter, ranks.rank, GRADIENTS)
        self._sealed: Seal | None = None
        self.lost_here = False
        """Whether it is proven that this rank's gradients are not what the backward has left."""
        self.steps = self.tensors = self.bytes = 0

    def left(self, number: int) -> None:
        """Read what the backward of a step has left, if the step is looked at."""
        self._sealed = None
        # among ranks what one alone has proven is settled by all, on the steps that all look at
        if self._due(number) or (self.seals.watching and self._ranks.size == 1):
            self._switches.do("gradients", self._seal)

    def _seal(self) -> None:
        gradients = self._gradients()
        self._sealed = Seal({name: grad for name, grad in gradients.items() if name not in self.seals.by_script})
        self.tensors, self.bytes = len(self._sealed), self._sealed.bytes

    def _gradients(self) -> dict[Name, torch.Tensor]:
        found = {Name(name, GRAD): p.grad.detach() for name, p in self._parameters().items() if p.grad is not None}
        return {name: grad for name, grad in found.items() if is_readable(grad)}

    def look(self, light: LightStep, number: int, *, alone: bool) -> list[Finding]:
        """Compare what is about to be used with what was left; collective, unless ``alone``."""
        sealed, self._sealed = self._sealed, None
        broken: list[Broken] = []
        if sealed is not None:
            self._switches.do("gradients", lambda: broken.extend(sealed.broken(read(self._gradients()))))
            self.steps += 1
        several = self._ranks.size > 1 and not alone and self._due(number)
        others = self._ask_others(sealed, broken) if several else _Others()
        if sealed is None:
            told = []
        else:
            here = self._ranks.rank in others.lost
            ask = partial(self.seals.judge, broken, light.step, compared=others.alike and not others.lost, desync=here)
            told = self._switches.ask("gradients", ask)
        self.lost_here = any(finding.severity is Severity.ERROR for finding in told)
        return told

    def table(self) -> dict[str, int]:
        """Return what was compared, ready for JSON."""
        return {"steps": self.steps, "tensors": self.tensors, "bytes": self.bytes}

    def _ask_others(self, sealed: Seal | None, broken: list[Broken]) -> _Others:
        """Learn who else was given the same gradients, and has them still; collective."""
        word = 0 if sealed is None or not len(sealed) else sealed.word
        told = self._ranks.gather(torch.tensor([word, len(broken)], dtype=torch.int64)).tolist()
        words = [word for word, _ in told]
        return _Others(lost_alone(told), words.count(words[self._ranks.rank]) > 1)


@dataclass(frozen=True, slots=True)
class _Others:
    """What the ranks said: who alone has lost something, and whether others were given the same as this one."""

    lost: tuple[int, ...] = ()
    alike: bool = False


def lost_alone(told: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """Return the ranks whose gradients have changed, while those of another that was given the same bits have not.

    Parameters
    ----------
    told
        By rank: the hash of what it was given (0: nothing was read), and how many tensors have changed since.

    """
    kept = {word for word, changed in told if word and not changed}
    return tuple(rank for rank, (word, changed) in enumerate(told) if changed and word in kept)
