"""The models of a script that knows nothing of us: every call of a module is told, until whoever looks has found enough."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from bitwitness.tap.compat import being_traced
from bitwitness.tap.compiled import CompileNotices


class ModuleCalls:
    """Tells of every call of a module in the process while it is on, of compiled ones, too; not of what a compiler traces.

    Torch would compile a hook on all modules into what is compiled meanwhile: whoever finds a compiled module ends it.

    Parameters
    ----------
    tell
        Called with the module and its positional arguments (`tap.modules.keywords_of_call` finds the others).

    """

    def __init__(self, tell: Callable[[nn.Module, Any], None]) -> None:
        self._tell = tell
        self._handles: list[Any] = []

    def begin(self) -> None:
        """Tell of calls from now on."""
        if not self._handles:
            self._handles = [register_module_forward_pre_hook(self._called), CompileNotices(self._called)]

    def end(self) -> None:
        """Tell of no more; nothing stays hooked."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _called(self, module: nn.Module, args: Any) -> None:
        if not (torch.compiler.is_compiling() or being_traced()):
            self._tell(module, args)
