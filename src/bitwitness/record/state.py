"""Records what lasts: parameters, gradients before and after their reduction, what the optimizer read and wrote, buffers."""

from __future__ import annotations

import json
import operator
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import nn
from torch.optim.optimizer import Optimizer

from bitwitness.capture.lossgraph import version_of
from bitwitness.record.log import Fail, Log, NodeValue
from bitwitness.site import Site
from bitwitness.tap.buffersync import BufferSync
from bitwitness.tap.compiled import distributed
from bitwitness.tap.ownwork import in_replay, own_work

_NOT_SETTINGS = ("params", "param_names")


class StateRecorder:
    """Adds the rows of one root's parameters, gradients, buffers and optimizers.

    Parameters
    ----------
    root
        The user's own module.
    log
        Takes the rows.
    optimizer_state
        Record exponential averages and the like, too.
    fail
        Told of an error in a gradient's hook.

    """

    def __init__(self, root: nn.Module, log: Log, fail: Fail, *, optimizer_state: bool) -> None:
        self._root = root
        self._log = log
        self._fail = fail
        self._with_state = optimizer_state
        self._reduced = False
        self._local: dict[str, NodeValue] = {}
        self._pending: dict[str, list[tuple[str, torch.Tensor, str, int]]] = {}
        self._began: dict[Optimizer, dict[nn.Parameter, int]] = {}
        self._handles: list[torch.utils.hooks.RemovableHandle] = []
        self._hooked: list[nn.Parameter] = []
        self._parameters: list[tuple[str, nn.Parameter]] = []
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
            with own_work(), torch.no_grad():
                if self._reduced:
                    self._log.record(site, parameter.grad, self._log.node(), "gradient")
                else:
                    self._keep_local(name, self._seen_local(site, parameter.grad))
        except Exception as error:
            self.detach()
            self._fail("local gradients", error)

    def _seen_local(self, site: Site, grad: torch.Tensor) -> NodeValue | None:
        # Of several micro-batches' the sum alone is recorded, at the end; an accelerator has no cache that would help.
        return None if self._log.micro or grad.device.type != "cpu" else self._log.see(site, grad)

    def _keep_local(self, name: str, entry: NodeValue | None) -> None:
        if entry is None:
            self._local.pop(name, None)
        else:
            self._local[name] = entry

    def begin_step(self, *, reduced: bool) -> None:
        """Learn parameters and buffers as the step finds them; have backward tell of gradients, ``reduced`` or not by then.

        Each is recorded when its module is about to read it, which brings it into the cache for the module's own work.
        """
        self._list()
        self._attach_local(reduced=reduced)
        self._pending.clear()
        named = [(name, tensor, "parameter") for name, tensor in self._parameters]
        for name, tensor, kind in [*named, *((name, tensor, "buffer") for name, tensor in self._root.named_buffers())]:
            self._log.values.name(tensor, name)
            module, _, _ = name.rpartition(".")
            self._pending.setdefault(module or ".", []).append((name, tensor, kind, version_of(tensor)))

    def _list(self) -> None:
        """Walk through the modules: twice a step, for a model may have thousands of them."""
        self._parameters = list(self._root.named_parameters())

    def read_by(self, module: str) -> None:
        """Record what a module is about to read, if the step has not yet."""
        for name, tensor, kind, _ in self._pending.pop(module, ()):
            self._log.record(Site.of_parameter(name, "param"), tensor, self._log.node(), kind)

    def read_by_none(self) -> None:
        """Record what no module's call announced: modules that were not called, or whose parameters others read.

        What has changed since the step began is left out: what it was is not known any more.
        """
        for module, state in self._pending.items():
            self._pending[module] = [one for one in state if version_of(one[1]) == one[3]]
        for module in list(self._pending):
            self.read_by(module)

    def gradients(self) -> None:
        """Record the gradients as they are now: complete and reduced.

        One that is no more what the backward left has that one's row, too.
        """
        if in_replay():
            return
        self._list()  # the forward may have made some
        gradients = [(name, p.grad) for name, p in self._parameters if p.grad is not None]
        self._log.values.reread(grad for _, grad in gradients)
        for name, grad in gradients:
            entry, local = self._log.see(_reduced(name), grad), self._local.get(name)
            if local is not None and entry is not None and local.noted.number != entry.noted.number:
                self._log.add(local, self._log.node(), "gradient")
            if entry is not None:
                self._log.add(entry, self._log.node(), "gradient")
        self._local.clear()

    def reread(self, optimizer: Optimizer) -> None:
        """Look again at the gradients that an optimizer is about to read: code that ran since may have edited them."""
        self._log.values.reread(p.grad for _, p, _ in self._held(optimizer) if p.grad is not None)

    def before_optimizer(self, optimizer: Optimizer) -> None:
        """Record what an optimizer is about to read: gradients (clipped by now), parameters, its state."""
        nodes: dict[nn.Parameter, int] = {}
        for name, parameter, settings in self._held(optimizer):
            node = nodes[parameter] = self._log.node()
            inputs = {"grad": parameter.grad, "param": parameter}
            if self._with_state:
                inputs |= {f"state.{key}": value for key, value in _state(optimizer, parameter)}
            for slot, tensor in inputs.items():
                if tensor is not None:
                    self._log.record(_update(name, optimizer, slot), tensor, node, "optimizer", args=settings)
        self._began[optimizer] = nodes

    def after_optimizer(self, optimizer: Optimizer) -> None:
        """Record what it made of the parameters."""
        nodes = self._began.pop(optimizer, {})
        self._log.values.changed(nodes)  # some optimizers write through .data, which no version counts
        for name, parameter, _ in self._held(optimizer):
            if parameter in nodes:
                node = nodes[parameter]
                self._log.values.made(parameter, node)
                result = self._log.see(_update(name, optimizer, "out"), parameter)
                if result is not None:
                    self._log.add(result, node, "optimizer")
                    self._log.values.lasts(parameter, result.noted)
                for key, value in _state(optimizer, parameter) if self._with_state else ():
                    self._log.record(_update(name, optimizer, f"out.{key}"), value, node, "optimizer")

    def _held(self, optimizer: Optimizer) -> Iterator[tuple[str, nn.Parameter, str]]:
        """Yield the root's parameters that an optimizer holds: name, parameter, its group's settings as JSON."""
        names = {parameter: name for name, parameter in self._parameters}
        for number, group in enumerate(optimizer.param_groups):
            settings = {"group": number, **_settings(group)}
            texts: dict[str, str] = {}  # by what is known of the state; of few kinds in a group
            for parameter in group["params"]:
                if parameter in names:
                    state = _age(optimizer.state.get(parameter) or {})
                    if state not in texts:
                        texts[state] = json.dumps({"f": type(optimizer).__name__, "k": {**settings, "state": state}})
                    yield names[parameter], parameter, texts[state]


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
    return replace(Site.of_parameter(name, "grad"), slot="reduced")


def _update(name: str, optimizer: Optimizer, slot: str) -> Site:
    """Return a site of one parameter's update: the parameter's path stands for the module."""
    return Site(name, type(optimizer).__name__, 0, "optim", slot)


def _state(optimizer: Optimizer, parameter: nn.Parameter) -> Iterable[tuple[str, torch.Tensor]]:
    state = optimizer.state.get(parameter, {})
    return [(key, value) for key, value in state.items() if isinstance(value, torch.Tensor)]


def _age(state: dict[str, object]) -> str:
    """Return how many steps an optimizer's state of one parameter has seen, or what it holds, or that there is none."""
    step = state.get("step")
    if isinstance(step, torch.Tensor):
        step = step.item() if step.numel() == 1 and step.device.type == "cpu" else None
    if isinstance(step, int | float):
        # Made before the first step, it is as good as none; set back to zero later, it has averages of its own.
        return f"of {int(step)} steps" if step or _holds_averages(state) else "none"
    return ", ".join(sorted(key for key, value in state.items() if value is not None)) or "none"


def _holds_averages(state: dict[str, object]) -> bool:
    """Return whether a state on the CPU holds anything but zeros beside the number of its steps."""
    found = [value for key, value in state.items() if key != "step" and isinstance(value, torch.Tensor)]
    return any(value.device.type == "cpu" and bool(value.any()) for value in found)


def _settings(group: dict[str, object]) -> dict[str, object]:
    def plain(value: object) -> object:
        if isinstance(value, torch.Tensor):  # a learning rate in a tensor
            return value.item() if value.numel() == 1 and value.device.type == "cpu" else str(value.dtype)
        if isinstance(value, list | tuple):
            return [plain(item) for item in value]
        return value if isinstance(value, bool | int | float | str | None) else type(value).__name__

    return {key: plain(value) for key, value in group.items() if key not in _NOT_SETTINGS}
