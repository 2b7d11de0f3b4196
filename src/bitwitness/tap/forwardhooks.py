"""Where a root is entered: hooks on its own call or, where a script calls its parts (or methods that do), on theirs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from bitwitness.errors import UsageError
from bitwitness.tap.compiled import EntryPoint, HookedCall
from bitwitness.tap.hooks import ModuleHook, left_out_of_pickles

Before = Callable[[nn.Module | None, tuple[Any, ...], dict[str, Any]], None]
After = Callable[[Any], None]


class ForwardHooks:
    """Tells of the root's outermost calls.

    Parameters
    ----------
    entry, root
        Where the training enters the model, and the user's own module inside.
    before
        Called with the part that is entered (None for the root itself), and the arguments.
    after
        Called with the result (None where the call raised).

    Raises
    ------
    UsageError
        For a scripted module, which takes no hooks.

    """

    def __init__(self, entry: EntryPoint, root: nn.Module, before: Before, after: After) -> None:
        if isinstance(entry.module, torch.jit.ScriptModule):
            raise UsageError(
                "the model is a scripted module, on which torch sets no hooks; call it inside a module of your own (class "
                "Net(nn.Module), whose forward calls it), and give that one"
            )
        self._entry = entry
        self._root = root
        self._before = before
        self._after = after
        self._parts_hooked = False
        self._of_parts: list[torch.utils.hooks.RemovableHandle] = []
        self._in_doubt = False
        self._part: nn.Module | None = None
        self._depth = 0
        self._calls = 0  # of the root, that have not returned
        self._hooks = [ModuleHook(self._root_begins), ModuleHook(self._root_ends)]
        self._handles: list[torch.utils.hooks.RemovableHandle | HookedCall] = []
        self._not_pickled = left_out_of_pickles(entry.module)
        self._not_pickled.__enter__()
        if entry.in_place:
            self._handles.append(HookedCall(entry.module, *self._hooks))
        else:
            self._handles += self._hook(entry.module, *self._hooks)

    def close(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.let_go()
        for handle in (*self._handles, *self._of_parts):
            handle.remove()
        self._not_pickled.__exit__(None, None, None)

    def hook_parts(self, *, in_doubt: bool = False) -> None:
        """Tell of the outermost calls of the root's parts from now on, too: the script does not call the root.

        ``in_doubt``: only if the first call with gradients is one of a part; else these hooks go as they came.
        """
        self._in_doubt &= in_doubt
        if self._parts_hooked or self._entry.in_place:
            return
        self._parts_hooked, self._in_doubt = True, in_doubt
        before, after = ModuleHook(self._part_begins), ModuleHook(self._part_ends)
        self._hooks += [before, after]
        for part in self._root.modules():
            if part is not self._root and not isinstance(part, torch.jit.ScriptModule):
                self._of_parts += self._hook(part, before, after)

    def _unhook_parts(self) -> None:
        self._parts_hooked = self._in_doubt = False
        for hook in self._hooks[2:]:
            hook.let_go()
        del self._hooks[2:]
        while self._of_parts:
            self._of_parts.pop().remove()

    def _hook(
        self, module: nn.Module, before: ModuleHook, after: ModuleHook
    ) -> list[torch.utils.hooks.RemovableHandle]:
        return [
            module.register_forward_pre_hook(before, prepend=True, with_kwargs=True),
            module.register_forward_hook(after, with_kwargs=True, always_call=True),
        ]

    def join(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Tell of a call of ``module`` that has just begun, whose pre-hooks torch had already listed when ours was made."""
        if module is self._entry.module and not self._entry.in_place:
            self._root_begins(module, args, kwargs)

    def _root_begins(self, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._in_doubt:
            self._unhook_parts()
        self._calls += 1
        self._before(None, args, kwargs)

    def _root_ends(self, _module: nn.Module, _args: Any, _kwargs: Any, result: Any) -> None:
        if self._calls:
            self._calls -= 1
            self._after(result)

    def _part_begins(self, part: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if part is self._part:
            self._depth += 1
        elif self._part is None and not self._calls:
            if self._in_doubt and not torch.is_grad_enabled():
                return  # a look at the model before it is trained
            self._in_doubt = False
            self._part, self._depth = part, 0
            self._before(part, args, kwargs)

    def _part_ends(self, part: nn.Module, _args: Any, _kwargs: Any, result: Any) -> None:
        if part is not self._part:
            return
        if self._depth:
            self._depth -= 1
            return
        self._part = None
        self._after(result)
