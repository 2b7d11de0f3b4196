"""Recording a script that knows nothing of us: the models that it runs are found as it runs."""

from __future__ import annotations

import os
import sys
from types import TracebackType
from typing import Any, Self

from torch import nn

from bitwitness.config.recording import RecordConfig
from bitwitness.errors import BitwitnessError
from bitwitness.ranks.process_groups import wrappers_noticed
from bitwitness.record.recorder import Recorder
from bitwitness.record.recording import ModelRecording
from bitwitness.session.reporter import Reporter
from bitwitness.session.roots import root_of
from bitwitness.session.search import ModelSearch
from bitwitness.session.session import sessions
from bitwitness.tap.modules import in_backward, keywords_of_call, unwrap


class AutoRecorder(ModelSearch[Recorder]):
    """Records every model with parameters that is called by no other module inside the ``with``.

    Parameters
    ----------
    config
        What to record of each.
    out
        The first model's run folder; a second one's is called ``OUT-2``.

    """

    def __init__(self, config: RecordConfig, out: str) -> None:
        super().__init__()
        self._config = config
        self._out = out
        self._reporter = Reporter(None, int(os.environ.get("RANK", "0")))
        self._folders: list[str] = []
        self._recorders: list[Recorder] = []
        self._speaks = False

    def __enter__(self) -> Self:
        self._stack.enter_context(wrappers_noticed(self._wrapped))
        self._begin_search()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._calls.end()
        for recorder in reversed(self.entered):
            recorder.__exit__(kind, error, trace)
        self._stack.close()

    @property
    def incomplete(self) -> bool:
        """Whether something that was asked for was not recorded."""
        return not self._folders or any(one.problem or one.is_empty for one in self._recorders)

    @property
    def folders(self) -> list[str]:
        """Where it was recorded."""
        return list(self._folders)

    def say(self, *, quiet: bool = False) -> None:
        """Print where the recordings are, or that there is none; if ``quiet``, only what is wrong."""
        if self._folders and self._speaks:
            problems = [one.problem for one in self._recorders if one.problem]
            how = f", NOT ALL of it: {problems[0]}" if problems else ""
            full = list(dict.fromkeys(str(one.folder) for one in self._recorders if not one.is_empty))
            if full and not (quiet and not problems):
                sys.stderr.write(f"bitwitness: recorded in {', '.join(full)}{how}\n")
        elif not self._folders:
            sys.stderr.write("bitwitness: nothing was recorded: no module with parameters was called\n")

    # -- the search ----------------------------------------------------------------------------------------------

    def _failed(self, error: Exception) -> None:
        self._reporter.failure("search for models", error, 0)

    def _watched_already(self) -> list[nn.Module]:
        return [one.root for one in sessions() if any(isinstance(other, ModelRecording) for other in one.instruments)]

    def _consider(self, module: nn.Module, args: Any) -> None:
        if module in self._passed or in_backward():
            return
        first = next(unwrap(module).parameters(), None)
        if first is None or first.is_meta:  # the latter holds no numbers
            self._passed.update(module.modules())
        elif root_of(module) is not None and self._take_over(module, module):  # else it comes back as, or in, a model
            self._passed.update(module.modules())
            self._record(module, args)

    def _record(self, module: nn.Module, args: Any) -> None:
        recorder = Recorder(module, out=self._out, config=self._config)
        try:
            recorder.start()
        except BitwitnessError as error:
            self._reporter.say(f"{type(unwrap(module)).__name__} is not recorded: {error}")
            return
        self.entered.append(recorder)
        self._folders.append(str(recorder.folder))
        self._recorders.append(recorder)
        self._speaks |= recorder.is_first_rank
        recorder.join(module, args, keywords_of_call() or {})

    def _left(self, one: Recorder) -> None:
        if not one.let_go():
            self._folders.remove(str(one.folder))
            self._recorders.remove(one)
