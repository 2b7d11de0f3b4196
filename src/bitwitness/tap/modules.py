"""Which module is running: names for operators, in forward by global module hooks, in backward by sequence number.

Autograd gives every node a sequence number when the forward makes it. While a `ModuleTracker` is on, each operator's
node is remembered with the module that called it, so that an operator of the backward pass gets the module (and the
forward operator) that it belongs to.
"""

from __future__ import annotations

import sys
import threading
from types import TracebackType
from typing import Any, Self
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.nn.modules import module as nn_module

from bitwitness.tap.compat import current_node, sequence_number
from bitwitness.tap.ownwork import given_place
from bitwitness.tap.threads import is_another_thread

ROOT = "."
_NODES_KEPT = 200_000  # micro-batches may be pipelined, so the nodes of some earlier forwards are kept: about 20 MB


def in_backward() -> bool:
    """Tell whether a backward is running in this thread: a module called now is recomputed."""
    node: Any = current_node()
    return node is not None


def unwrap(module: nn.Module) -> nn.Module:
    """Return the user's own module inside DistributedDataParallel and ``torch.compile`` wrappers."""
    while True:
        if isinstance(module, nn.parallel.DistributedDataParallel | nn.DataParallel):
            module = module.module
        elif isinstance(inner := getattr(module, "_orig_mod", None), nn.Module):
            module = inner
        else:
            return module


def keywords_of_call() -> dict[str, Any] | None:
    """Return the keyword arguments of the module call whose global pre-hook asks; torch hands such hooks only the others."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename == nn_module.__file__:
            kwargs = frame.f_locals.get("kwargs")
            return kwargs if isinstance(kwargs, dict) else None
        frame = frame.f_back
    return None


class ModuleTracker:
    """Knows the path of the module that runs now; a context manager that leaves no hook behind.

    Each tap has a tracker of its own, since each counts the calls that it sees. It may be entered again while it is on;
    the hooks go when the last user leaves.
    """

    def __init__(self) -> None:
        self._names: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()
        self._stack: list[nn.Module] = []
        self._nodes: dict[int, tuple[str, str]] = {}
        self._calls: dict[tuple[str, str, str], int] = {}
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        self._users = 0
        self._thread = 0
        self._recomputed_in: int | None = None
        self._focus: nn.Module | None = None
        self._elsewhere: list[tuple[int, int]] = []
        self._left_focus = 0
        self._foreign: nn.Module | None = None  # another model, whose call runs

    def __enter__(self) -> Self:
        self._users += 1
        if self._users == 1:
            self._thread = threading.get_ident()
            self._hooks = [
                nn_module.register_module_forward_pre_hook(self._enter_module),
                nn_module.register_module_forward_hook(self._leave_module, always_call=True),
            ]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._users -= 1
        if self._users == 0:
            for hook in self._hooks:
                hook.remove()
            self._hooks.clear()
            self._stack.clear()  # the nodes stay: a backward comes after its forward, often in a context of its own
            self._foreign = None

    def name_tree(self, root: nn.Module) -> None:
        """Learn the paths of all modules below ``root`` (wrappers looked through), each by its first name."""
        root = unwrap(root)
        for name, module in root.named_modules():
            self._names[module] = name or ROOT

    def parameters(self) -> dict[nn.Parameter, str]:
        """Return the parameters of the modules named so far with their paths, each by its first name."""
        paths: dict[nn.Parameter, str] = {}
        for module, path in self._names.items():
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    paths.setdefault(parameter, name if path == ROOT else f"{path}.{name}")
        return paths

    def focus_on(self, root: nn.Module) -> None:
        """Say whose operators matter from now on, so that `in_focus` can tell them from those of another model."""
        self._focus = root
        self._elsewhere = [(-1, sequence_number())]
        self.name_tree(root)

    def begin(self, root: nn.Module) -> None:
        """Say that a module's call has begun whose global pre-hooks torch had already listed when ours were made."""
        if not self._stack:
            self._enter_module(root, ())

    @property
    def running(self) -> str:
        """The path of the module that runs now; ``.`` outside of all."""
        return self._names.get(self._stack[-1], ROOT) if self._stack else ROOT

    @property
    def in_focus(self) -> bool:
        """Whether what runs now belongs to the module given to `focus_on`, or to code outside of all models."""
        node = self.backward_node()
        if node is not None:
            number = node._sequence_nr()
            return not any(first <= number < last for first, last in self._elsewhere)
        return self._foreign is None

    def _is_focus(self, module: nn.Module) -> bool:
        return module in self._names or unwrap(module) is self._focus

    def _is_in_focus(self, module: nn.Module) -> bool:
        """Tell whether it is of that model, or no model at all: a loss without parameters is the script's own code."""
        return self._is_focus(module) or next(module.parameters(), None) is None

    def _enter_module(self, module: nn.Module, _args: Any) -> None:
        if is_another_thread(self._thread):
            return
        if not self._stack:
            running: Any = current_node()
            self._recomputed_in = None if running is None else running._sequence_nr()
            if module not in self._names and self._focus is None:
                self.name_tree(module)
            self._foreign = None
            if running is None and (self._focus is None or self._is_focus(module)):
                self.restart_calls()  # a recomputation inside backward goes on counting
        self._mind_focus(module)
        self._stack.append(module)

    def _mind_focus(self, module: nn.Module) -> None:
        """Note that another model's call begins, perhaps inside a module that is no model itself."""
        if self._focus is None or self._foreign is not None or (self._stack and self._is_focus(self._stack[0])):
            return
        if not self._is_in_focus(module):
            self._foreign, self._left_focus = module, sequence_number()

    def _leave_module(self, module: nn.Module, _args: Any, _result: Any) -> None:
        if (
            not is_another_thread(self._thread) and module in self._stack
        ):  # a hook that raised may have kept us from entering
            while self._stack and self._stack.pop() is not module:
                pass
            if self._foreign is not None and self._foreign not in self._stack:
                self._elsewhere.append((self._left_focus, sequence_number()))
                self._foreign = None

    def restart_calls(self) -> None:
        """Count operator calls from zero: a new forward or a new backward begins."""
        self._calls.clear()
        if len(self._nodes) > 2 * _NODES_KEPT:
            oldest = sequence_number() - _NODES_KEPT
            self._nodes = {number: place for number, place in self._nodes.items() if number >= oldest}

    def backward_node(self) -> Any | None:
        """Return autograd's node that runs now, in a backward; None in a forward, also one that is recomputed in a backward."""
        node = current_node()
        if node is None or torch.is_grad_enabled():
            return None
        # A custom operator's forward, and what runs without gradients, in a module that a checkpoint recomputes.
        return None if self._stack and node._sequence_nr() == self._recomputed_in else node

    def locate(self, op: str) -> tuple[str, str, int]:
        """Return (module path, phase, call index) for an operator that is being dispatched now."""
        if (place := given_place()) is not None:
            return place
        node = self.backward_node()
        if node is not None:
            module, _ = self._nodes.get(node._sequence_nr(), (ROOT, ""))
            phase = "backward"
        else:
            module = self._names.get(self._stack[-1], ROOT) if self._stack else ROOT
            phase = "forward"
            self._nodes.setdefault(sequence_number() - 1, (module, op))
        key = (module, op, phase)
        call = self._calls.get(key, 0)
        self._calls[key] = call + 1
        return module, phase, call

    def node(self) -> int:
        """Return the sequence number of the autograd node to which the operator that runs now belongs."""
        node = self.backward_node()
        if node is not None:
            return int(node._sequence_nr())
        return sequence_number() - 1

    def forward_op(self) -> str:
        """Return the forward operator to which the backward node that runs now belongs; empty if unknown."""
        node = current_node()
        return "" if node is None else self._nodes.get(node._sequence_nr(), ("", ""))[1]
