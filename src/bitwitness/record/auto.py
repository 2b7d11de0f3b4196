"""Recording a script that knows nothing of us: the models that it runs are found as it runs."""

from __future__ import annotations

import sys
from typing import Any

from torch import nn

from bitwitness.config.recording import RecordConfig
from bitwitness.record.recorder import Recorder
from bitwitness.record.recording import ModelRecording
from bitwitness.session.everymodel import EveryModel


class AutoRecorder(EveryModel[Recorder]):
    """Records every model with parameters that is called by no other module inside the ``with``.

    Parameters
    ----------
    config
        What to record of each.
    out
        The first model's run folder; a second one's is called ``OUT-2``.

    """

    instrument, done = ModelRecording, "recorded"

    def __init__(self, config: RecordConfig, out: str) -> None:
        super().__init__()
        self._config = config
        self._out = out
        self._speaks = False

    def _made_for(self, module: nn.Module) -> Recorder:
        return Recorder(module, out=self._out, config=self._config)

    def _take(self, module: nn.Module, args: Any) -> None:
        super()._take(module, args)
        self._speaks |= any(one.is_first_rank for one in self.taken[-1:])

    def say(self, *, quiet: bool = False) -> None:
        """Print where the recordings are, or that there is none; if ``quiet``, only what is wrong."""
        if self.taken and self._speaks:
            problems = [one.problem for one in self.taken if one.problem]
            how = f", NOT ALL of it: {problems[0]}" if problems else ""
            full = list(dict.fromkeys(str(one.folder) for one in self.taken if not one.is_empty))
            if full and not (quiet and not problems):
                sys.stderr.write(f"bitwitness: recorded in {', '.join(full)}{how}\n")
        elif not self.taken:
            sys.stderr.write("bitwitness: nothing was recorded: no module with parameters was called\n")
