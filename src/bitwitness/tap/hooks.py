"""Module hooks that a copy or a pickle of the module does not carry along."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from bitwitness.tap.compat import being_traced
from bitwitness.tap.patching import replaced

_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
_MARKS = ("_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_forward_pre_hooks_with_kwargs")


class ModuleHook:
    """A module hook that does nothing once copied, pickled or let go.

    `left_out_of_pickles` keeps it out of most copies and pickles.
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


@contextmanager
def left_out_of_pickles(model: nn.Module) -> Iterator[None]:
    """Leave module hooks of ours out of what is pickled or copied of a model.

    So a whole model that a script saves can be loaded where bitwitness is not installed, and with ``weights_only``.
    """
    kinds = {type(module) for module in model.modules() if not isinstance(module, torch.jit.ScriptModule)}
    telling = {next(base for base in kind.__mro__ if "__getstate__" in vars(base)) for kind in kinds}
    with ExitStack() as stack:
        for kind in telling - {object}:
            stack.enter_context(replaced(kind, "__getstate__", _without_hooks))
        yield


def _without_hooks(original: Callable[[nn.Module], Any]) -> Callable[[nn.Module], Any]:
    def state_of(module: nn.Module) -> Any:
        state = original(module)
        ours = {
            number for name in _HOOKS for number, hook in vars(module).get(name, {}).items() if type(hook) is ModuleHook
        }
        if not ours or not isinstance(state, dict):
            return state
        kept = {
            name: type(state[name])((number, hook) for number, hook in state[name].items() if number not in ours)
            for name in (*_HOOKS, *_MARKS)
            if name in state
        }
        return state | kept

    return state_of
