"""A module of the script's own, in which trainings keep what their models read (`switches.py`)."""

from __future__ import annotations

import contextvars
import functools
import queue
import threading
import types

scale = 1.0
settings = {"scale": 1.0}
namespace = types.SimpleNamespace(scale=1.0)
local = threading.local()
local.scale = 1.0
variable = contextvars.ContextVar("scale", default=1.0)
waiting: queue.Queue = queue.Queue()
event = threading.Event()


class Flags:
    scale = 1.0


class Scaler:
    def __init__(self) -> None:
        self.scale = 1.0

    def hook(self, _module, _args, output):
        return output * self.scale


scaler = Scaler()


def scaled(x):
    return x * scaled.scale


scaled.scale = 1.0


def with_default(x, *, held={"scale": 1.0}):  # noqa: B006 - that it is shared is the point
    return x * held["scale"]


def with_keywords(x, settings):
    return x * settings["scale"]


bound = functools.partial(with_keywords, settings={"scale": 1.0})


def activation(x):
    return x


def swapped(x):
    return x * 1.2
