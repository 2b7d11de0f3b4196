"""Trainings whose forward depends on something that is otherwise when it is repeated: each a way to hold a switch.

``SCOPED``: on only while the forward runs, from some step on; ``CONSUMED``: set by the script now and then, taken back by the
forward; ``OVERWRITTEN``: what the step read is overwritten before the optimizer steps.
"""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import os
from array import array
from unittest import mock

import elsewhere
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

STEPS, FIRST = 7, 4
MAIN = {"scale": 1.0}


class Config:
    def __init__(self) -> None:
        self.scale = 1.0


READ = {
    "attribute": lambda net: net.scale,
    "attribute_dict": lambda net: net.settings["scale"],
    "attribute_object": lambda net: net.config.scale,
    "class_attribute": lambda net: Net.scale_of_class,
    "main_dict": lambda net: MAIN["scale"],
    "module_global": lambda net: elsewhere.scale,
    "module_dict": lambda net: elsewhere.settings["scale"],
    "module_class": lambda net: elsewhere.Flags.scale,
    "namespace": lambda net: elsewhere.namespace.scale,
    "thread_local": lambda net: elsewhere.local.scale,
    "context_variable": lambda net: elsewhere.variable.get(),
    "environment": lambda net: float(os.environ.get("SWITCH", "1")),
    "parameter_attribute": lambda net: getattr(net.a.weight, "scale", 1.0),
    "queue": lambda net: 1.0 if elsewhere.waiting.empty() else elsewhere.waiting.get(),
    "event": lambda net: 1.2 if elsewhere.event.is_set() else 1.0,
}


class Net(nn.Module):
    scale_of_class = 1.0

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.a, self.b = nn.Linear(8, 16), nn.Linear(16, 4)
        self.drop = nn.Dropout(0.1 if kind == "drop" else 0.0)
        self.scale, self.settings, self.config = 1.0, {"scale": 1.0}, Config()
        self.act = torch.tanh
        self.plain = torch.ones(16)

    def factor(self) -> float:
        return READ[self.kind](self) if self.kind in READ else 1.0

    def forward(self, x):
        h = self.drop(F.relu(self.a(x))) * self.factor()
        match self.kind:
            case "function_attribute":
                h = elsewhere.scaled(h)
            case "default_argument":
                h = elsewhere.with_default(h)
            case "partial":
                h = elsewhere.bound(h)
            case "rebound_function":
                h = self.act(h)
            case "patched_torch":
                h = F.gelu(h)
            case "patched_helper":
                h = elsewhere.activation(h)
            case "plain_tensor":
                h = h * self.plain
        return self.b(h)


class Consuming(Net):
    """Takes the switch back in its forward, as models do that reset a state once."""

    def factor(self) -> float:
        factor = super().factor()
        set_to(self.kind, self, 1.0)
        return factor


class _Dispatch(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        return result * 1.2 if func is torch.ops.aten.relu.default else result


def switch(kind: str, net: Net) -> contextlib.AbstractContextManager:
    """Return a context in which the switch is on."""
    patch = mock.patch.object
    linear = nn.Linear.forward
    made = {
        "attribute": lambda: patch(net, "scale", 1.2),
        "attribute_dict": lambda: mock.patch.dict(net.settings, scale=1.2),
        "attribute_object": lambda: patch(net.config, "scale", 1.2),
        "class_attribute": lambda: patch(Net, "scale_of_class", 1.2),
        "main_dict": lambda: mock.patch.dict(MAIN, scale=1.2),
        "module_global": lambda: patch(elsewhere, "scale", 1.2),
        "module_dict": lambda: mock.patch.dict(elsewhere.settings, scale=1.2),
        "module_class": lambda: patch(elsewhere.Flags, "scale", 1.2),
        "namespace": lambda: patch(elsewhere.namespace, "scale", 1.2),
        "thread_local": lambda: patch(elsewhere.local, "scale", 1.2),
        "context_variable": _variable,
        "environment": lambda: mock.patch.dict(os.environ, SWITCH="1.2"),
        "parameter_attribute": lambda: patch(net.a.weight, "scale", 1.2, create=True),
        "function_attribute": lambda: patch(elsewhere.scaled, "scale", 1.2),
        "default_argument": lambda: mock.patch.dict(elsewhere.with_default.__kwdefaults__["held"], scale=1.2),
        "partial": lambda: mock.patch.dict(elsewhere.bound.keywords["settings"], scale=1.2),
        "rebound_function": lambda: patch(net, "act", torch.sigmoid),
        "patched_torch": lambda: patch(F, "gelu", F.silu),
        "patched_helper": lambda: patch(elsewhere, "activation", elsewhere.swapped),
        "patched_class": lambda: patch(Net, "forward", lambda self, x: self.b(torch.tanh(self.a(x)))),
        "patched_linear": lambda: patch(nn.Linear, "forward", lambda self, x: linear(self, x) * 1.1),
        "drop": lambda: patch(net.drop, "p", 0.5),
        "hook": lambda: _removed(net.a.register_forward_hook(lambda _m, _a, out: out * 1.2)),
        "pre_hook": lambda: _removed(net.b.register_forward_pre_hook(lambda _m, args: (args[0] * 1.2,))),
        "root_hook": lambda: _removed(net.register_forward_hook(lambda _m, _a, out: out * 1.2)),
        "global_hook": lambda: _removed(nn.modules.module.register_module_forward_hook(_every_linear)),
        "dispatch_mode": _Dispatch,
        "saved_tensors": lambda: torch.autograd.graph.saved_tensors_hooks(_halved, lambda x: x.float()),
        "bound_hook": lambda: patch(elsewhere.scaler, "scale", 1.2),
    }
    return made[kind]()


@contextlib.contextmanager
def _variable():
    token = elsewhere.variable.set(1.2)
    yield
    elsewhere.variable.reset(token)


@contextlib.contextmanager
def _removed(handle):
    yield
    handle.remove()


def _every_linear(module, _args, out):
    return out * 1.1 if isinstance(module, nn.Linear) else None


def _halved(x):
    return x.to(torch.bfloat16) if x.is_floating_point() else x


SCOPED = (
    *(
        "attribute",
        "attribute_dict",
        "attribute_object",
        "class_attribute",
        "main_dict",
        "module_global",
        "module_dict",
    ),
    *("module_class", "namespace", "thread_local", "context_variable", "environment", "parameter_attribute"),
    *("function_attribute", "default_argument", "partial", "rebound_function", "patched_torch", "patched_helper"),
    *("patched_class", "patched_linear", "drop", "hook", "pre_hook", "root_hook", "global_hook", "dispatch_mode"),
    *("saved_tensors", "bound_hook"),
)


def set_to(kind: str, net: Net, value: float) -> None:
    """Set the switch for a forward, which takes it back."""
    on = value != 1.0
    ways = {
        "attribute": lambda: setattr(net, "scale", value),
        "attribute_dict": lambda: net.settings.update(scale=value),
        "class_attribute": lambda: setattr(Net, "scale_of_class", value),
        "main_dict": lambda: MAIN.update(scale=value),
        "module_global": lambda: setattr(elsewhere, "scale", value),
        "module_dict": lambda: elsewhere.settings.update(scale=value),
        "thread_local": lambda: setattr(elsewhere.local, "scale", value),
        "context_variable": lambda: elsewhere.variable.set(value),
        "environment": lambda: os.environ.update(SWITCH=str(value)),
        "parameter_attribute": lambda: setattr(net.a.weight, "scale", value),
        "queue": lambda: elsewhere.waiting.put(value) if on else None,
        "event": lambda: elsewhere.event.set() if on else elsewhere.event.clear(),
    }
    ways[kind]()


CONSUMED = (
    *("attribute", "attribute_dict", "class_attribute", "main_dict", "module_global", "module_dict", "thread_local"),
    *("context_variable", "environment", "parameter_attribute", "queue", "event"),
)


def overwrite(kind: str, net: Net, x: torch.Tensor, y: torch.Tensor, weight: torch.Tensor) -> None:
    """Overwrite what the step read."""
    match kind:
        case "input":
            x.data.normal_()
        case "input_by_numpy":
            x.numpy()[:] = 1.0
        case "target":
            y.data.zero_()
        case "target_by_numpy":
            y.numpy()[:] = 0
        case "weight":
            weight.data.mul_(0.5)
        case "weight_by_numpy":
            weight.numpy()[:] = 2.0
        case "weight_in_place":
            weight.mul_(0.5)
        case "plain_tensor":
            net.plain.data.mul_(0.9)
        case "plain_rebound":
            net.plain = net.plain * 0.9


OVERWRITTEN = (
    *("input", "input_by_numpy", "target", "target_by_numpy", "weight", "weight_by_numpy", "weight_in_place"),
    *("plain_tensor", "plain_rebound"),
)


class Counting(Net):
    """Counts its forwards where a re-execution would count on, and draws once for several."""

    def __init__(self, kind: str) -> None:
        super().__init__("")
        self.held = {
            "array": lambda: array("d", [0.0]),
            "shared": lambda: multiprocessing.Value("d", 0.0),
            "generator": lambda: (float(number) for number in range(10_000)),
            "zip": lambda: zip(range(10_000), range(10_000), strict=True),
            "cached_draw": lambda: functools.lru_cache(lambda number: torch.randn(16)),
        }[kind]()
        self.kind_of_state, self.calls = kind, 0

    def count(self) -> torch.Tensor | float:
        self.calls += 1
        match self.kind_of_state:
            case "array":
                self.held[0] += 1
                return self.held[0]
            case "shared":
                self.held.value += 1
                return self.held.value
            case "generator":
                return next(self.held)
            case "zip":
                return float(next(self.held)[0])
            case _:
                return self.held(self.calls // 3)

    def forward(self, x):
        h = F.dropout(F.relu(self.a(x)), 0.1)
        return self.b(h * (1.0 + 0.1 * self.count()))


COUNTED = ("array", "shared", "generator", "zip", "cached_draw")


def train(way: str, kind: str, guarded=lambda _net, _optimizer: contextlib.nullcontext()) -> list[torch.Tensor]:
    """Train; return the final weights. ``guarded(net, optimizer)`` is entered around it."""
    torch.manual_seed(0)
    read = "plain_tensor" if kind.startswith("plain") else kind
    net = (
        Counting(kind)
        if way == "counted"
        else (Consuming if way == "consumed" else Net)(read if way != "overwritten" or kind.startswith("plain") else "")
    )
    if kind == "bound_hook":
        net.a.register_forward_hook(elsewhere.scaler.hook)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    with guarded(net, optimizer):
        for step in range(STEPS):
            x, weight = torch.randn(16, 8), torch.rand(16)
            y = x[:, :4].argmax(1)
            late = step >= FIRST
            if way == "consumed" and late and step % 2:
                set_to(kind, net, 1.2)
            with switch(kind, net) if way == "scoped" and late else contextlib.nullcontext():
                out = net(x)
            loss = (F.cross_entropy(out, y, reduction="none") * weight).mean()
            optimizer.zero_grad()
            loss.backward()
            if way == "overwritten" and late:
                overwrite(kind, net, x, y, weight)
            optimizer.step()
    return [p.detach().clone() for p in net.parameters()]
