"""What is done about a verdict: heal, skip, stop, or only report."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import nn

from bitwitness.capture.step import StepRecord
from bitwitness.errors import EXIT_CONVICTED, SideChannelError
from bitwitness.finding import Action, Cause, Verdict
from bitwitness.judge.fingerprint import Fingerprint
from bitwitness.judge.verdict import Outcome
from bitwitness.ranks import Ranks
from bitwitness.replay.heal import buffers_moved, heal_alone, heal_together, stateful_reduction, write_results
from bitwitness.replay.run import Replayer
from bitwitness.respond.skip import Skip
from bitwitness.respond.watchdog import Watchdog
from bitwitness.stats import Features
from bitwitness.tap.frames import line_text

Act = Literal["observe", "protect", "stop"]
_TRIES = 3  # a transient fault may strike a heal, too, hardly three; a fault that stays is stopped at, not healed


@dataclass(frozen=True, slots=True)
class HealTarget:
    """What healing works on.

    ``describe`` is called in each backward of a lockstep replay once the local gradients are there; ``take`` returns
    what it described. ``unguarded`` returns, of some parameters of other models, those that no other guard can speak for
    (`guard.roots`).
    """

    wrapper: nn.Module
    module: nn.Module
    parameters: list[nn.Parameter]
    replayer: Replayer
    describe: Callable[[], None]
    take: Callable[[], Features | None]
    unguarded: Callable[..., list[nn.Parameter]]


class Responder:
    """Acts on verdicts as configured. ``observe`` never touches the training."""

    def __init__(self, act: Act, ranks: Ranks, root: HealTarget, watchdog: Watchdog) -> None:
        self._act = act
        self._ranks = ranks
        self._root = root
        self._watchdog = watchdog
        self.skip = Skip(root.parameters)

    def respond(self, outcome: Outcome, record: StepRecord) -> tuple[Verdict, int | None]:
        """Act; return the verdict with the action taken, and the exit code if the training is to end. Collective."""
        verdict, judgement = outcome.verdict, outcome.judgement
        if self._act == "observe" or verdict.cause in (Cause.DISMISSED, Cause.INCONCLUSIVE):
            return verdict, None
        if verdict.cause in (Cause.PERSISTENT_HARDWARE, Cause.CORRUPT_STATE):
            return replace(verdict, action=Action.STOPPED), EXIT_CONVICTED
        if self._act == "stop" and verdict.cause is Cause.TRANSIENT_HARDWARE:
            return replace(verdict, action=Action.STOPPED), EXIT_CONVICTED
        if judgement is None or verdict.cause is not Cause.TRANSIENT_HARDWARE:
            return verdict, None
        unhealable = self._unhealable(record)
        moved = buffers_moved(self._root.replayer, record)  # asked before a heal, which moves them itself
        if judgement.heal and unhealable is None and self._heal(outcome, record, moved):
            self._heal_results(outcome)
            also = self._leave_out(record, emptied=True, outcome=outcome) + _unhealed(record, moved=moved)
            return replace(verdict, action=Action.HEALED, message=f"{verdict.message}; healed with it{also}"), None
        if judgement.heal or judgement.skip:
            self.skip.begin(record.number)
            why = "the gradient that entered the model was computed from wrong outputs, or executions do not agree"
            if unhealable is not None:
                why = unhealable
            elif outcome.experiments is None or outcome.experiments.good is None:
                why = "the step cannot be run again"
            elif judgement.heal:
                why = f"{_TRIES} lockstep replays did not give the agreed gradients"
            also = self._leave_out(record, emptied=False, outcome=outcome)
            return replace(
                verdict, action=Action.SKIPPED, message=f"{verdict.message}; step skipped: {why}{also}"
            ), None
        return verdict, None

    def _leave_out(self, record: StepRecord, *, emptied: bool, outcome: Outcome) -> str:
        """Keep what the step gave to other parameters from being used; return what is to be said of it.

        Those that are guarded by themselves are trusted to their guard, unless they were given what was wrong here.
        """
        fed = _outputs_were_wrong(outcome)
        waiting, stepped = (self._root.unguarded(others, fed=fed) for others in record.others())
        said, kept = "", self.skip.leave_out(waiting, emptied=emptied)
        if kept:
            said = f"; {kept} parameters outside the model, which the same backward reached, are not stepped"
        if stepped:
            said += f"; {len(stepped)} parameters outside the model were stepped with what the same backward gave them"
        return said

    def _unhealable(self, record: StepRecord) -> str | None:
        """Say why the gradients cannot be put right, on any rank; the same answer everywhere: they heal together."""
        together = self._ranks.size > 1 and not self._root.replayer.sharded
        reason = record.unhealable or (stateful_reduction(self._root.wrapper) if together else None)
        anywhere = bool(self._ranks.max(torch.tensor([float(reason is not None)])))
        return reason or ("the gradients of another rank cannot be put right" if anywhere else None)

    def _heal_results(self, outcome: Outcome) -> None:
        found = outcome.experiments
        if found is not None and found.good is not None:
            write_results(found.good)

    def _heal(self, outcome: Outcome, record: StepRecord, moved: bool) -> bool:
        """Replace all gradients by ones that two executions agree on; return whether that succeeded on every rank."""
        found = outcome.experiments
        if found is None or found.good is None:
            return False
        root = self._root
        if self._ranks.size == 1 or root.replayer.sharded:
            # where parameters are sharded the replay was made by all ranks together, and its gradients are reduced
            heal_alone(root.replayer, root.parameters, record, found.good, keep_buffers=moved)
            return True
        agreed = Fingerprint.of(found.good)
        for _ in range(_TRIES):
            try:
                with self._watchdog.over(record.step):
                    heal_together(
                        root.replayer, root.wrapper, record, root.describe, root.parameters, keep_buffers=moved
                    )
                features = root.take()
                same = features is not None and found.agree(Fingerprint.from_features(features, agreed.outputs), agreed)
            except SideChannelError:
                raise
            except Exception:
                same = False
            if not float(self._ranks.max(torch.tensor([float(not same)]))):
                return True
        return False


def _outputs_were_wrong(outcome: Outcome) -> bool:
    """Tell whether the model gave, in the training, other outputs than when it was run again, as far as that is known."""
    found = outcome.experiments
    if found is None or (original := found.executions[0]) is None or (good := found.executions[2]) is None:
        return True
    return not torch.equal(original.outputs, good.outputs)


def _unhealed(record: StepRecord, *, moved: bool) -> str:
    """Return what is to be said of what stays as it is, though it came from what was wrong."""
    said = ""
    if (line := next((p.graph.read for p in record.passes() if p.graph and p.graph.read), None)) is not None:
        said = f"; a number that the script took from it before ({line_text(line)}), and what it did with that, stay"
    return said + ("; the buffers, which the script has changed since the forward, stay as they are" if moved else "")
