"""What must hold for a captured step to be run again: it was kept whole, and nothing that it read has changed since."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from bitwitness.capture.gradhooks import parameter_hooks
from bitwitness.capture.reasons import DRAWN_ELSEWHERE, PARAMETER_HOOKS
from bitwitness.capture.step import Pass, StepRecord
from bitwitness.replay.errors import ReplayError
from bitwitness.stats import marks_of
from bitwitness.tap.ownwork import own_work
from bitwitness.tap.threads import working_elsewhere


def check_kept(record: StepRecord, passes: list[Pass]) -> None:
    """Raise `ReplayError` if the step was not kept, or none of its forwards was used."""
    if record.unreplayable is not None:
        raise ReplayError(record.unreplayable)
    if not passes:
        raise ReplayError("no forward of the guarded module took part in the backward")


def shared_generators(passes: Sequence[Pass]) -> bool:
    """Return whether another thread of the script works, so that the global generators have to be left alone.

    Raises
    ------
    ReplayError
        If so, and if numbers were drawn during the step's forwards: it cannot be told by whom, and not be done again.

    """
    thread = working_elsewhere()
    if thread is not None and any(group.draws for group in passes):
        raise ReplayError(DRAWN_ELSEWHERE.format(thread=thread))
    return thread is not None


def check_unchanged(record: StepRecord, root: nn.Module, parameters: Sequence[nn.Parameter]) -> None:
    """Raise `ReplayError` if torch knows of a change since the step's forward."""
    changed = [p for p, version in zip(parameters, record.versions, strict=False) if p._version != version]
    if changed or len(parameters) != len(record.versions):
        raise ReplayError(f"parameters were changed between the forward and the optimizer step{_who(changed, root)}")
    if any(module.training is not mode for module, mode in zip(root.modules(), record.training, strict=True)):
        raise ReplayError("training flags were changed between the forward and the optimizer step")
    if (norm := record.start_norm) is not None and float(norm) != 0:
        raise ReplayError("gradients were not zero when the step began")


def _who(changed: Sequence[nn.Parameter], root: nn.Module) -> str:
    """Name the first of some parameters, and say where the module itself changes it."""
    for path, module in root.named_modules():
        for name, own in module.named_parameters(recurse=False):
            if changed and own is changed[0]:
                by = (
                    " (max_norm has the forward itself change it)"
                    if getattr(module, "max_norm", None) is not None
                    else ""
                )
                return f": {path}{'.' * bool(path)}{name}{by}"
    return ""


def check_unseen(record: StepRecord, parameters: Sequence[nn.Parameter], device: torch.device) -> None:
    """Raise `ReplayError` if something changed that torch does not tell of; waits for the device."""
    if record.parameters is not None:
        with own_work(), torch.no_grad():
            now = marks_of([p.detach() for p in parameters], device)
        if not torch.equal(record.parameters.nan_to_num(), now.nan_to_num()):
            raise ReplayError("parameters were changed (through .data) between the forward and the optimizer step")
    if record.hooks is not None and record.hooks != parameter_hooks(parameters):
        raise ReplayError(PARAMETER_HOOKS)
    for reason, holds in record.doubts:
        with own_work():
            doubtful = bool(holds)
        if doubtful:
            raise ReplayError(reason)
