"""Module hooks that a copy or a pickle of the module does not carry along in working order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from bitwitness.tap.compat import being_traced


class ModuleHook:
    """A module hook that does nothing once copied, pickled or let go.

    So ``copy.deepcopy(model)`` (an EMA, say) and ``torch.save(model)`` work as without it.
    """

    def __init__(self, call: Callable[..., Any] | None = None) -> None:
        self._call = call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Pass the call on while the hook is in force; what a compiler traces is not the training itself."""
        if self._call is None or torch.compiler.is_compiling() or being_traced():
            return None
        return self._call(*args, **kwargs)

    def __deepcopy__(self, _memo: dict[int, Any]) -> ModuleHook:
        return ModuleHook()

    def __reduce__(self) -> tuple[type[ModuleHook], tuple[()]]:
        return ModuleHook, ()

    def let_go(self) -> None:
        """Become inert, also in modules that were copied by reference."""
        self._call = None

    @property
    def inert(self) -> bool:
        """Whether it does nothing."""
        return self._call is None
