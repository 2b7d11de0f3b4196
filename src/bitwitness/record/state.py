"""Records what lasts: parameters, buffers, gradients before and after their reduction."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import nn

from bitwitness.capture.lossgraph import version_of
from bitwitness.record.log import Fail, Log, NodeValue
from bitwitness.record.values import Noted
from bitwitness.site import Site, site_at
from bitwitness.stats.local import is_plain
from bitwitness.tap.buffersync import BufferSync
from bitwitness.tap.compiled import distributed
from bitwitness.tap.ownwork import in_replay, looking


class _Found(NamedTuple):
    """A parameter or buffer as a step finds it; ``place``: its address, None of what is no plain tensor."""

    name: str
    tensor: torch.Tensor
    kind: str
    version: int
    place: int | None


class StateRecorder:
    """Adds the rows of one root's parameters, gradients and buffers.

    Parameters
    ----------
    root
        The user's own module.
    log
        Takes the rows.
    fail
        Told of an error in a gradient's hook.

    """

    def __init__(self, root: nn.Module, log: Log, fail: Fail) -> None:
        self._root = root
        self._log = log
        self._fail = fail
        self._reduced = False
        self._local: dict[str, tuple[NodeValue, int]] = {}  # with the gradient's version
        self._pending: dict[str, list[_Found]] = {}
        self._handles: list[torch.utils.hooks.RemovableHandle] = []
        self._hooked: list[nn.Parameter] = []
        self._parameters: list[tuple[str, nn.Parameter]] = []
        self.names: dict[int, str] = {}
        """The parameters' names, by their ids: to hash a tensor costs more."""
        self._buffers: BufferSync | None = None

    def _attach_local(self, *, reduced: bool) -> None:
        """Look at gradients as backward makes them, while they are in the cache; hooks that are there already stay.

        ``reduced``: DistributedDataParallel reduces them later, so that these are recorded as local ones.
        """
        self._reduced = reduced
        self._local.clear()
        named = [
            (name, p) for name, p in self._parameters if p.requires_grad and p.is_leaf
        ]  # others: `functional_call`
        wanted = [parameter for _, parameter in named]
        if len(wanted) == len(self._hooked) and all(map(operator.is_, wanted, self._hooked)):
            return
        self.detach()
        self._hooked = wanted
        for name, parameter in named:
            self._handles.append(parameter.register_post_accumulate_grad_hook(_LocalHook(self, name)))

    def hear_buffers(self, model: nn.Module) -> None:
        """Know of buffers that DistributedDataParallel broadcasts before a forward, which counts no new version of them."""
        wrapper = distributed(model)
        if wrapper is not None and self._buffers is None:
            self._buffers = BufferSync(wrapper, self._broadcast)

    @contextmanager
    def _broadcast(self, _group: object, buffers: list[torch.Tensor], _sender: int) -> Iterator[None]:
        yield
        try:
            self._log.values.changed(buffers)
        except Exception as error:  # in the script's own forward
            self._fail("broadcast buffers", error)

    def close(self) -> None:
        """Look at nothing any more."""
        self.detach()
        if self._buffers is not None:
            self._buffers.close()
            self._buffers = None

    def detach(self) -> None:
        """Take the hooks away."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._hooked = []

    def local(self, name: str, parameter: torch.Tensor) -> None:
        """Record one local gradient."""
        try:
            if parameter.grad is None or in_replay():
                return
            site = Site.of_parameter(name, "grad")
            with looking():
                if self._reduced:
                    self._log.record(site, parameter.grad, self._log.node(), "gradient")
                elif (entry := self._log.see(site, parameter.grad)) is not None:
                    self._local[name] = entry, version_of(parameter.grad)
        except Exception as error:
            self.detach()
            self._fail("local gradients", error)

    def begin_step(self, *, reduced: bool) -> None:
        """Learn parameters and buffers as the step finds them; have backward tell of gradients, ``reduced`` or not by then.

        Each is recorded when its module is about to read it, which brings it into the cache for the module's own work.
        """
        self._list()
        self._attach_local(reduced=reduced)
        self._pending.clear()
        named = [(name, tensor, "parameter") for name, tensor in self._parameters]
        for name, tensor, kind in [*named, *((name, tensor, "buffer") for name, tensor in self._root.named_buffers())]:
            if tensor.is_meta:  # a prototype's, for which a transform's own stand in while it is called
                continue
            self._log.values.name(tensor, name)
            module, _, _ = name.rpartition(".")
            place = tensor.data_ptr() if is_plain(tensor) else None
            self._pending.setdefault(module or ".", []).append(_Found(name, tensor, kind, version_of(tensor), place))

    def _list(self) -> None:
        """Walk through the modules: twice a step, for a model may have thousands of them."""
        self._parameters = list(self._root.named_parameters())
        self.names = {id(parameter): name for name, parameter in self._parameters}

    def read_by(self, module: str) -> dict[int, Noted]:
        """Record what a module is about to read, if the step has not yet; return what is known of it, by the tensors' ids."""
        log, read = self._log, dict[int, Noted]()
        for one in self._pending.pop(module, ()):
            if one.place is None or one.place != one.tensor.data_ptr():  # since then it was put elsewhere
                log.values.name(one.tensor, one.name)
            entry = log.see(Site.of_parameter(one.name, "param"), one.tensor)
            if entry is not None:
                log.add(entry, log.node(), one.kind)
                read[id(one.tensor)] = entry.noted
        return read

    def read_by_none(self) -> None:
        """Record what no module's call announced: modules that were not called, or whose parameters others read.

        What has changed since the step began is left out: what it was is not known any more.
        """
        for module, state in self._pending.items():
            self._pending[module] = [one for one in state if version_of(one.tensor) == one.version]
        for module in list(self._pending):
            self.read_by(module)

    def gradients(self) -> dict[int, Noted]:
        """Record the gradients as they are now, complete and reduced; return what is known of them, by their ids.

        One that is no more what the backward left has that one's row, too.
        """
        known: dict[int, Noted] = {}
        if in_replay():
            return known
        self._list()  # the forward may have made some
        gradients = [(name, p.grad) for name, p in self._parameters if p.grad is not None]
        self._log.values.reread(grad for _, grad in gradients)
        for name, grad in gradients:
            entry = self._log.see(_reduced(name), grad)
            if entry is not None and (left := self._left_by_backward(name, entry, grad)) is not None:
                self._log.add(left, self._log.node(), "gradient")
            if entry is not None:
                self._log.add(entry, self._log.node(), "gradient")
                known[id(grad)] = entry.noted
        self._local.clear()
        return known

    def _left_by_backward(self, name: str, entry: NodeValue, grad: torch.Tensor) -> NodeValue | None:
        """Return what the backward left of a gradient that is another one now; of micro-batches, the last backward."""
        local, version = self._local.get(name, (None, 0))
        if local is None or local.noted.number == entry.noted.number:
            return None
        # What is on an accelerator was read anew, without waiting for what it held.
        return local if grad.device.type == "cpu" or version != version_of(grad) else None


class _LocalHook:
    """A parameter's hook; copied with the model it does nothing."""

    def __init__(self, owner: StateRecorder | None, name: str) -> None:
        self._owner = owner
        self._name = name

    def __call__(self, parameter: torch.Tensor) -> None:
        if self._owner is not None:
            self._owner.local(self._name, parameter)

    def __deepcopy__(self, _memo: dict[int, object]) -> _LocalHook:
        return _LocalHook(None, self._name)

    def __reduce__(self) -> tuple[type[_LocalHook], tuple[None, str]]:
        return _LocalHook, (None, self._name)


def _reduced(name: str) -> Site:
    """Return the site of a parameter's gradient when it is complete."""
    module, _, leaf = name.rpartition(".")
    return site_at(module or ".", leaf, 0, "grad", "reduced")
