"""``torch.compile``: where a compiled model is entered, and how it is looked at without being recompiled or run eagerly.

Three rules keep a compiled training as it is. Hooks sit *outside* the compiled region: a hook inside is traced or skipped.
No dispatch mode is entered around compiled code: dynamo would run that code eagerly, and go on doing so. And to look at
operators, a step is executed once more under the stance ``force_eager``, which ends without a trace.
"""

from __future__ import annotations

import functools
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from bitwitness.tap.compat import compiled_frames, dynamo, has_default_stance, running_wrapper

_GLOBAL_HOOKS = re.compile(r"Using `torch\.compile\(module\)` when there are global hooks")
_MODULE: Any = nn.Module

Before = Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None]
After = Callable[[nn.Module, tuple[Any, ...], dict[str, Any], Any], Any]


@contextmanager
def unwarned_of_hooks() -> Iterator[None]:
    """Keep torch from warning at each call of a compiled module of global hooks that are ours.

    The filter is put in by hand: any of `warnings`' own ways has Python say again what it has warned of once.
    """
    ours = ("ignore", _GLOBAL_HOOKS, UserWarning, None, 0)
    warnings.filters.insert(0, ours)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        with suppress(ValueError):  # the script has put in its own meanwhile
            warnings.filters.remove(ours)  # type: ignore[attr-defined]


def is_wrapped(module: nn.Module) -> bool:
    """Tell whether a module is what ``torch.compile(module)`` returned."""
    parts = module._modules  # a scripted module's is no dictionary
    return "_orig_mod" in parts and isinstance(parts["_orig_mod"], nn.Module)


def is_compiled(module: nn.Module) -> bool:
    """Tell whether calling a module runs compiled code: ``torch.compile(module)`` or ``module.compile()``."""
    return is_wrapped(module) or module._compiled_call_impl is not None


def distributed(model: nn.Module) -> DistributedDataParallel | None:
    """Return the DistributedDataParallel around a model or, with ``torch.compile`` around that, inside."""
    while is_wrapped(model):
        model = model._modules["_orig_mod"]  # type: ignore[assignment]
    return model if isinstance(model, DistributedDataParallel) else None


def broadcasts(model: nn.Module) -> bool:
    """Tell whether a DistributedDataParallel ``model`` makes buffers the same on all ranks in the forward that runs now.

    Not in the one after a forward under ``no_sync``, for example.
    """
    wrapper = distributed(model)
    return wrapper is not None and bool(wrapper.will_sync_module_buffers())


@dataclass(frozen=True)
class EntryPoint:
    """Where the training enters a model.

    ``module`` is the outermost compiled module or, where none is compiled, the root: hooks on its calls see what enters and
    leaves, and are never traced. ``call`` runs the root again as the training runs it, without DistributedDataParallel;
    ``problem`` says why compiled code cannot be run again, if so.
    """

    module: nn.Module
    call: Callable[..., Any]
    problem: str | None = None

    @property
    def in_place(self) -> bool:
        """Whether the module was compiled by ``module.compile()``, so that its own hooks lie inside the region."""
        return self.module._compiled_call_impl is not None

    def bypasses(self, model: nn.Module) -> bool:
        """Tell whether a forward that begins now goes around a DistributedDataParallel ``model``: nobody reduces then."""
        wrapper = distributed(model)
        if wrapper is None or wrapper._use_python_reducer or self.call is not self.module or self.in_place:
            return False
        return running_wrapper() is not wrapper


def find_entry(model: nn.Module, root: nn.Module) -> EntryPoint:
    """Return where a training that calls ``model`` enters it; ``root`` is the user's own module inside."""
    module: nn.Module | None = model
    while module is not None and module is not root and not is_compiled(module):
        module = dict(module._modules.items()).get("module")  # DistributedDataParallel's
    module = root if module is None else module
    if not is_compiled(module):
        return EntryPoint(module, module)
    problem = _cuda_graphs(module)
    wrapper = distributed(module)
    if wrapper is None:
        return EntryPoint(module, module, problem)
    if not is_wrapped(module):
        return EntryPoint(module, root, "DistributedDataParallel.compile(): compile the module inside it instead")
    if wrapper.broadcast_buffers and next(root.buffers(), None) is not None:
        problem = (
            problem or "torch.compile around a DistributedDataParallel that broadcasts buffers: compile the inside"
        )
    # Dynamo leaves its region where DistributedDataParallel calls the module, and compiles that call by itself: the same
    # context around the same call finds the same compiled code.
    return EntryPoint(module, module.dynamo_ctx(wrapper.module.__call__), problem)  # type: ignore[operator]


def _cuda_graphs(module: nn.Module) -> str | None:
    """Refuse to run CUDA graphs again: their outputs live in memory that the next run overwrites."""
    compiled = module if is_wrapped(module) else module._compiled_call_impl
    config = getattr(compiled, "get_compiler_config", lambda: None)()
    on_device = any(parameter.device.type == "cuda" for parameter in module.parameters())
    if on_device and isinstance(config, dict) and config.get("triton.cudagraphs"):
        return "compiled with CUDA graphs, whose outputs a replay would overwrite"
    return None


class HookedCall:
    """Stands in a module's ``_compiled_call_impl``: runs hooks before and after the compiled call, outside of it.

    It belongs to the module: torch leaves the attribute out of copies and pickles.
    """

    def __init__(self, module: nn.Module, before: Before, after: After) -> None:
        self._module = module
        self._before = before
        self._after = after
        self._original = module._compiled_call_impl
        self._on = True
        module._compiled_call_impl = self

    def remove(self) -> None:
        """Put the compiled call back, or, should others stand before us by now, let it through."""
        self._on = False
        if self._module._compiled_call_impl is self:
            self._module._compiled_call_impl = self._original

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the compiled module."""
        assert self._original is not None  # noqa: S101 - it stands in for one
        if not self._on:
            return self._original(*args, **kwargs)
        self._before(self._module, args, kwargs)
        result = None
        try:
            result = self._original(*args, **kwargs)
        finally:
            changed = self._after(self._module, args, kwargs, result)
        return result if changed is None else changed


class CompileNotices:
    """Tells of calls of modules that are compiled in place from now on; global module hooks would hear nothing of them.

    Meanwhile torch does not warn that such hooks are called twice for what ``torch.compile(module)`` returned.
    """

    def __init__(self, meet: Callable[[nn.Module, tuple[Any, ...]], None]) -> None:
        self._calls: list[HookedCall] = []
        self._on = True
        self._original = original = _MODULE.compile
        self._unwarned = ExitStack()
        self._unwarned.enter_context(unwarned_of_hooks())

        @functools.wraps(original)
        def compile_in_place(module: nn.Module, *args: Any, **kwargs: Any) -> None:
            original(module, *args, **kwargs)
            if self._on:
                self._calls.append(HookedCall(module, lambda m, a, _: meet(m, a), lambda *_: None))

        self._ours = compile_in_place
        _MODULE.compile = compile_in_place

    def remove(self) -> None:
        """Leave torch as it was."""
        self._on = False
        for call in self._calls:
            call.remove()
        self._calls.clear()
        if _MODULE.compile is self._ours:
            _MODULE.compile = self._original
        self._unwarned.close()


class RecompileError(Exception):
    """Something was to run as it is compiled, and is not compiled for this."""


class CompiledRegions:
    """Knows whether anything inside a root runs compiled."""

    def __init__(self, model: nn.Module) -> None:
        self._found = any(is_compiled(module) for module in model.modules())
        self._calm = False
        self._compiled_so_far: int | None = None
        self._outside = False

    def present(self) -> bool:
        """Tell whether compiled code may run inside the root.

        Compiled functions leave no trace in the modules, so anything that dynamo has compiled in this process counts, and so
        does a first forward once dynamo is loaded, since that may be when a function is compiled.
        """
        if not self._found and dynamo("utils") is not None:
            self._found = bool(compiled_frames())
            if not self._calm and not self._found:
                return True
        return self._found

    @property
    def known(self) -> bool:
        """Whether compiled code was found inside the root, or anywhere in the process."""
        return self._found

    def forward_begins(self) -> None:
        """Say that a forward of the root begins: what was compiled since the last one ended lies outside the root."""
        if self._compiled_so_far is not None:
            self._outside |= compiled_frames() > self._compiled_so_far

    def forward_ended(self) -> None:
        """Say that a forward of the root ran to its end: what it compiles, it has compiled now."""
        self._calm = True
        self._compiled_so_far = compiled_frames()

    def inside_only(self) -> bool:
        """Tell whether nothing outside the root was compiled since its first forward, as far as the steps so far showed."""
        return not self._outside

    def eagerly(self) -> AbstractContextManager[object]:
        """Run compiled code eagerly for a while, so that its operators are seen; the compiled code is kept."""
        return nullcontext() if dynamo() is None else torch.compiler.set_stance("force_eager")

    @contextmanager
    def as_compiled(self) -> Iterator[None]:
        """Run compiled code and compile nothing anew: that (another rank's shapes, say) would change the training's own.

        Raises
        ------
        RecompileError
            If it would have to be compiled.

        """
        if not has_default_stance():
            yield
            return
        try:
            with torch.compiler.set_stance("fail_on_recompile"):
                yield
        except RuntimeError as error:
            if "Detected recompile" not in str(error):
                raise
            raise RecompileError("it would have to be compiled anew, for shapes or settings not seen here") from error

    @contextmanager
    def replayed_eagerly(self) -> Iterator[None]:
        """Do so in a replay of ours, and keep torch from warning of the hooks that name the modules meanwhile."""
        with unwarned_of_hooks(), self.eagerly():
            yield
