"""The state that a training holds between its steps: parameters, buffers, and what its optimizers keep of each parameter."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.optim.optimizer import Optimizer

from bitwitness.site import Site
from bitwitness.stats import HashBatch
from bitwitness.stats.local import is_in_shared_memory, is_wrapper, local_parts

GRAD = "grad"


class Name(NamedTuple):
    """A parameter's full name, and the key of the optimizer's state; empty for itself, ``GRAD`` for its gradient."""

    parameter: str
    key: str = ""

    def __str__(self) -> str:
        if self.key == GRAD:
            return f"the gradient of {self.parameter}"
        return f"{self.key} of {self.parameter}" if self.key else self.parameter

    @property
    def site(self) -> Site:
        """Where it lies."""
        if not self.key:
            return Site.of_parameter(self.parameter, "param")
        if self.key == GRAD:
            return replace(Site.of_parameter(self.parameter, "grad"), slot="used")
        module, _, leaf = self.parameter.rpartition(".")
        return Site(module or ".", leaf, 0, "optim", self.key)


@dataclass(slots=True, eq=False)
class Reading:
    """Tensors as they were when they were read.

    ``hashes``: int64 [N] on the host, in the order of ``tensors``. ``compared``: those that other ranks were asked about.
    """

    tensors: dict[Name, torch.Tensor]
    batch: HashBatch
    hashes: torch.Tensor
    compared: frozenset[Name] = frozenset()

    def of(self, names: Iterable[Name]) -> torch.Tensor:
        """Return the hashes of some."""
        place = {name: index for index, name in enumerate(self.tensors)}
        return self.hashes[[place[name] for name in names]]

    @property
    def bytes(self) -> int:
        """How much was read."""
        return sum(local_parts(tensor)[0].nbytes for tensor in self.tensors.values())


class HeldState:
    """Finds one model's parameters and the state of the optimizers that were seen to step them.

    Parameters
    ----------
    root
        The user's own module.
    broadcasts
        Whether buffers are overwritten by another rank's before each forward, which leaves no trace.

    """

    def __init__(self, root: nn.Module, *, broadcasts: bool = False) -> None:
        self._root, self._broadcasts = root, broadcasts
        self._optimizers: WeakKeyDictionary[Optimizer, None] = WeakKeyDictionary()

    def stepped(self, optimizer: Optimizer) -> None:
        """Count an optimizer among those that hold state."""
        self._optimizers[optimizer] = None

    def parameters(self) -> dict[Name, torch.Tensor]:
        """Return all parameters that can be read, frozen ones too."""
        return {Name(name): p.detach() for name, p in self._root.named_parameters() if is_readable(p)}

    def buffers(self) -> dict[Name, torch.Tensor]:
        """Return all buffers that can be read, where they are the rank's own."""
        if self._broadcasts:
            return {}
        return {Name(name): b.detach() for name, b in self._root.named_buffers() if is_readable(b)}

    def named(self) -> dict[str, nn.Parameter]:
        """Return all parameters by name."""
        return dict(self._root.named_parameters())

    def parameters_of(self, optimizer: Optimizer) -> dict[Name, torch.Tensor]:
        """Return the parameters that an optimizer holds, and those that none does."""
        others = _held(other for other in tuple(self._optimizers) if other is not optimizer) - _held([optimizer])
        named = self.named()
        return {name: p for name, p in self.parameters().items() if id(named[name.parameter]) not in others}

    def optimizer(self, *only: Optimizer) -> dict[Name, torch.Tensor]:
        """Return every tensor that optimizers keep of the model's parameters; of some of them, where given."""
        found: dict[Name, torch.Tensor] = {}
        names = {id(p): name for name, p in self._root.named_parameters()}
        for optimizer in only or tuple(self._optimizers):
            for parameter, state in list(getattr(optimizer, "state", {}).items()):
                name = names.get(id(parameter))
                if name is not None and isinstance(state, dict):
                    found |= {Name(name, key): value for key, value in _tensors(state)}
        return found


@torch.no_grad()
def read(tensors: dict[Name, torch.Tensor]) -> Reading:
    """Hash tensors, each read once; waits for their devices."""
    batch = HashBatch()
    batch.add_all(tensors.values())
    return Reading(tensors, batch, batch.on_host())


def _held(optimizers: Iterable[Optimizer]) -> set[int]:
    return {id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}


def _tensors(state: dict[Any, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    for key, value in state.items():
        if isinstance(value, torch.Tensor) and is_readable(value):
            yield str(key), value.detach()


def is_readable(tensor: torch.Tensor) -> bool:
    """Tell whether a tensor's bits can be read where it lies, and are this process's own."""
    if tensor.is_meta or tensor.is_quantized or tensor.layout != torch.strided or is_wrapper(tensor):
        return False
    values = local_parts(tensor.detach())[0]
    # shards that are gathered elsewhere leave none
    return values.untyped_storage().nbytes() >= values.nbytes and not is_in_shared_memory(values)
