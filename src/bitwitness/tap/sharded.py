"""Models whose parameters are spread over the ranks: what kind of sharding it is, and where local gradients are seen.

FSDP2 (``fully_shard``) has a rank's whole, unreduced gradients only for a moment: at the input of the reduce-scatter. There
`ReduceTap` describes them; a replay, which all ranks make in lockstep through the module itself, is described there, too.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from bitwitness.stats import Features, features_of
from bitwitness.stats.local import is_wrapper
from bitwitness.tap.compat import fsdp_groups, fsdp_module
from bitwitness.tap.compiled import distributed
from bitwitness.tap.modules import unwrap
from bitwitness.tap.ownwork import own_work

WRAPPED = (
    "parameter {0} is a {1}, a class that wraps other tensors: gradients of such are sensed, and not computed again"
)


@dataclass(frozen=True, slots=True)
class Sharding:
    """How a model is spread.

    ``fsdp2``: replays must be made by all ranks together. ``problem``: why its steps cannot be run again, if so.
    ``mesh``: the device mesh of its parameters.
    """

    fsdp2: bool = False
    problem: str | None = None
    mesh: Any = None

    @property
    def spread(self) -> bool:
        """Whether parameters are not whole on every rank."""
        return self.mesh is not None or self.problem is not None

    def group(self) -> dist.ProcessGroup | None:
        """Return the process group of all ranks that train the model together; None for the default group."""
        if self.mesh is None or self.mesh.size() == dist.get_world_size():
            return None
        mesh = self.mesh if self.mesh.ndim == 1 else self.mesh._flatten()
        group: dist.ProcessGroup = mesh.get_group()
        return group


def sharding_of(model: nn.Module) -> Sharding:
    """Look at a model's modules and parameters."""
    if left_out := getattr(distributed(model), "parameters_to_ignore", None):
        kept = sorted({name for name, _ in unwrap(model).named_parameters()} & set(left_out))
        if kept:
            return Sharding(problem=f"DistributedDataParallel is told to leave out {kept[0]}: each rank has its own")
    fsdp = sys.modules.get("torch.distributed.fsdp")
    kinds = () if fsdp is None else (fsdp.FSDPModule,)
    if fsdp is not None and any(isinstance(m, fsdp.FullyShardedDataParallel) for m in model.modules()):
        return Sharding(problem="FullyShardedDataParallel keeps no local gradients; use fully_shard (FSDP2)")
    if wrapped := [(name, type(p).__name__) for name, p in model.named_parameters() if is_wrapper(p)]:
        return Sharding(problem=WRAPPED.format(*wrapped[0]))
    meshes: list[Any] = [getattr(p, "device_mesh", None) for p in model.parameters() if hasattr(type(p), "to_local")]
    if not meshes:
        return Sharding()
    modules = [m for m in model.modules() if isinstance(m, kinds)]
    owned = {id(p.sharded_param) for m in modules for p in _fsdp_params(m)}
    largest = max(meshes, key=lambda mesh: mesh.size())
    tensor_parallel = any(hasattr(type(p), "to_local") and id(p) not in owned for p in model.parameters())
    tensor_parallel |= any(getattr(p, "is_dtensor", False) for m in modules for p in _fsdp_params(m))
    if tensor_parallel:
        return Sharding(
            problem="tensor parallel: another rank holds other parts, and cannot repeat this one's", mesh=largest
        )
    return Sharding(fsdp2=True, mesh=largest)


def _fsdp_params(module: Any) -> Iterator[Any]:
    for group in fsdp_groups(module):
        yield from group.fsdp_params


def reduces(model: nn.Module) -> bool:
    """Tell whether the next backward of an FSDP2 model reduces its gradients (``set_requires_gradient_sync``)."""
    for module in model.modules():
        for group in fsdp_groups(module):
            return bool(group.reduce_grads)
    return True


class ReduceTap:
    """Describes the gradients that enter FSDP2's reduce-scatters, while on; leaves torch as it found it.

    Parameters
    ----------
    parameters
        The root's sharded parameters, in the order of the description.

    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._index = {id(parameter): index for index, parameter in enumerate(parameters)}
        self.parts: dict[int, Features] = {}
        self._on = True
        self._module = fsdp_module()
        self._original: Callable[..., Any] = self._module.foreach_reduce
        self._ours = self._wrapped
        self._module.foreach_reduce = self._ours  # type: ignore[attr-defined]

    def close(self) -> None:
        """Stop looking."""
        self._on = False
        if self._module.foreach_reduce is self._ours:
            self._module.foreach_reduce = self._original  # type: ignore[attr-defined]

    def _wrapped(self, fsdp_params: list[Any], grads: list[torch.Tensor], *args: Any, **kwargs: Any) -> Any:
        if self._on:
            self._describe(fsdp_params, grads)
        return self._original(fsdp_params, grads, *args, **kwargs)

    def _describe(self, fsdp_params: list[Any], grads: list[torch.Tensor]) -> None:
        here = [
            (index, grad)
            for param, grad in zip(fsdp_params, grads, strict=True)
            if (index := self._index.get(id(param.sharded_param))) is not None
        ]
        with own_work(), torch.no_grad():
            found = features_of([grad for _, grad in here])
        for number, (index, _) in enumerate(here):
            part = slice(number, number + 1)
            self.parts[index] = Features(found.l2[part], found.absmax[part], found.digest[part])

    @contextmanager
    def aside(self) -> Iterator[dict[int, Features]]:
        """Collect what is reduced meanwhile, a replay's, apart from the training's."""
        training, self.parts = self.parts, {}
        try:
            yield self.parts
        finally:
            self.parts = training
