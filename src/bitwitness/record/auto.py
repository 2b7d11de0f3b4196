"""Recording a script that knows nothing of us: the models that it runs are found as it runs."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from types import TracebackType
from typing import Any, Self

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from bitwitness.config.recording import RecordConfig
from bitwitness.errors import BitwitnessError
from bitwitness.record.recorder import Recorder
from bitwitness.tap.compiled import CompileNotices
from bitwitness.tap.modules import in_backward, keywords_of_call, unwrap


class AutoRecorder:
    """Records every model with parameters that is called by no other module inside the ``with``.

    Parameters
    ----------
    config
        What to record of each.
    out
        The first model's run folder; a second one's is called ``OUT-2``.

    """

    def __init__(self, config: RecordConfig, out: str) -> None:
        self._config = config
        self._out = out
        self._stack = ExitStack()
        self._met: set[int] = set()
        self._alive: list[nn.Module] = []
        self.recorders: list[Recorder] = []

    def __enter__(self) -> Self:
        for handle in (register_module_forward_pre_hook(self._meet), CompileNotices(self._meet)):
            self._stack.callback(handle.remove)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.__exit__(kind, error, trace)

    def say(self) -> None:
        """Print where the recordings are, or that there is none."""
        folders = [recorder.folder for recorder in self.recorders if recorder.folder is not None]
        if folders and any(recorder.is_first_rank for recorder in self.recorders):
            sys.stderr.write(f"bitwitness: recorded in {', '.join(folders)}\n")
        elif not folders:
            sys.stderr.write("bitwitness: nothing was recorded: no module with parameters was called\n")

    def _meet(self, module: nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling() or id(module) in self._met or in_backward():
            return
        self._met |= {id(part) for part in module.modules()}
        self._alive.append(module)  # or its identity could be given to another
        if next(unwrap(module).parameters(), None) is None:
            return
        recorder = Recorder(module, out=self._out, config=self._config)
        try:
            self._stack.enter_context(recorder)
        except BitwitnessError as error:
            sys.stderr.write(f"bitwitness: {type(unwrap(module)).__name__} is not recorded: {error}\n")
            return
        self.recorders.append(recorder)
        recorder.join(module, args, keywords_of_call() or {})
