"""What the reference's V1 scheme looks at: gradients of norm layers' inputs and of embedding weights.

A norm layer is torch's own, or a module without submodules whose class is called ...Norm (``LlamaRMSNorm``);
outside of such modules ``F.layer_norm`` and ``F.rms_norm`` are looked at where they are called through
`torch.nn.functional`. Not seen: what is called by a name imported earlier (``from torch.nn.functional import
layer_norm``), compiled regions (`NormTap.unseen` names their modules), and embeddings looked up without a
module.

The V2 scheme looks at the first weight's gradient (`first_weight`) and at what a backward communicates: the
local gradients, which the light step holds already.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from contextlib import ExitStack
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn

from bitwitness.site import Site
from bitwitness.tap.collector import GradientCollector
from bitwitness.tap.compat import RunningNorm
from bitwitness.tap.hooks import ModuleHook
from bitwitness.tap.modules import ROOT, unwrap

_NORMS = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, RunningNorm)
_NORM_NAME = re.compile(r"norm(\d+d)?$", re.IGNORECASE)
_EMBEDDING_NAME = re.compile(r"embedding(bag)?$", re.IGNORECASE)
_FUNCTIONS = ("layer_norm", "rms_norm")


def is_norm(module: nn.Module) -> bool:
    """Tell whether a module normalises its input."""
    if isinstance(module, _NORMS):
        return True
    # torch.nn.utils has parametrizations called _WeightNorm and _SpectralNorm, which change weights
    foreign = type(module).__module__.startswith("torch.nn.utils.")
    return not foreign and not module._modules and _NORM_NAME.search(type(module).__name__) is not None


def is_embedding(module: nn.Module) -> bool:
    """Tell whether a module looks rows of its ``weight`` up."""
    if isinstance(module, nn.Embedding | nn.EmbeddingBag):
        return True
    weight = getattr(module, "weight", None)
    named = not module._modules and _EMBEDDING_NAME.search(type(module).__name__) is not None
    return named and isinstance(weight, Tensor) and weight.ndim == 2


def first_weight(model: nn.Module) -> str | None:
    """Return the path of the first weight of the outermost module that is trained: V2's tap.

    The first in the order of registration, where the reference takes the first in the order of execution; in
    models that are written top down both are the embedding.
    """
    trained = (name for name, parameter in unwrap(model).named_parameters() if parameter.requires_grad)
    return next(trained, None)


class NormTap:
    """Takes V1's feature values while entered; leaves neither hook nor patch behind.

    Parameters
    ----------
    model
        The guarded model; wrappers are looked through.
    collector
        Where the values go; one of its own by default.

    """

    def __init__(self, model: nn.Module, collector: GradientCollector | None = None) -> None:
        self._root = unwrap(model)
        self._own = collector is None
        self.collector = collector or GradientCollector()
        self._stack = ExitStack()
        self._inside = 0  # norm modules being run: what they call is theirs
        self._calls: dict[str, int] = {}
        self._silent: dict[str, Site] = {}
        self._on = False

    def __enter__(self) -> Self:
        self._on = True
        self._stack.callback(self._turn_off)
        for path, module in self._root.named_modules():
            if is_norm(module):
                self._hook_norm(module, path or ROOT)
            elif is_embedding(module):
                self._hook_embedding(module, path or ROOT)
        for name in _FUNCTIONS:
            self._patch(name)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()
        if self._own:
            self.collector.close()

    @property
    def uncovered(self) -> dict[str, str]:
        """Taps whose gradient cannot be read, and why."""
        return self.collector.uncovered

    @property
    def unseen(self) -> list[str]:
        """Norm modules that have not been run eagerly, in training, since the tap was entered."""
        return list(self._silent)

    def drain(self) -> tuple[tuple[Site, ...], Tensor]:
        """Return the sites and their norms, float32 [K], since the last time (`GradientCollector.drain`)."""
        self._calls.clear()
        return self.collector.drain()

    def _turn_off(self) -> None:
        self._on = False

    # -- modules

    def _hook_norm(self, module: nn.Module, path: str) -> None:
        site = Site(path, "norm", 0, "backward", "grad_in0")
        self._silent[path] = site

        def before(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._inside += 1
            if not torch.compiler.is_compiling():
                self._watch_first(args, kwargs, site)
                self._silent.pop(path, None)

        def after(*_: Any) -> None:
            self._inside = max(0, self._inside - 1)

        hooks = (ModuleHook(before), ModuleHook(after))
        handles = (
            module.register_forward_pre_hook(hooks[0], with_kwargs=True),
            module.register_forward_hook(hooks[1], always_call=True),
        )
        for hook, handle in zip(hooks, handles, strict=True):
            self._stack.callback(hook.let_go)
            self._stack.callback(handle.remove)

    def _watch_first(self, args: tuple[Any, ...], kwargs: dict[str, Any], site: Site) -> None:
        for value in (*args, *kwargs.values()):
            if isinstance(value, Tensor):
                self.collector.watch(value, site)
                return

    def _hook_embedding(self, module: nn.Module, path: str) -> None:
        weight = module.weight
        site = Site(path, "weight", 0, "grad", "local")
        if not isinstance(weight, Tensor):
            return
        if hasattr(weight, "to_local"):
            self.uncovered[site.short] = "a sharded weight's hook does not fire before its gradient is reduced"
            return
        with torch.enable_grad():
            self.collector.watch(weight, site)

    # -- functions

    def _patch(self, name: str) -> None:
        original = getattr(nn.functional, name)
        ours = self._wrap(name, original)
        setattr(nn.functional, name, ours)

        def restore() -> None:
            # where somebody has wrapped ours since, it stays, as a plain pass-through
            if getattr(nn.functional, name) is ours:
                setattr(nn.functional, name, original)

        self._stack.callback(restore)

    def _wrap(self, name: str, original: Callable[..., Tensor]) -> Callable[..., Tensor]:
        @functools.wraps(original)
        def normalise(*args: Any, **kwargs: Any) -> Tensor:
            if self._on and not self._inside and torch.is_grad_enabled() and not torch.compiler.is_compiling():
                call = self._calls.get(name, 0)
                self._calls[name] = call + 1
                self._watch_first(args, kwargs, Site(ROOT, name, call, "backward", "grad_in0"))
            return original(*args, **kwargs)

        return normalise
