"""``bw.ascend``: what MindSpore's users have, in the same words: feature values at places of your own choice.

    hidden = bw.ascend.watch_gradient(hidden, "after attention")

checks the gradient of ``hidden`` at every step, by the rule of the V1 scheme (`sense.feature`). Without a
guard that has the scheme on, the line does nothing. `ASDBase` is the same for an operator, with the interface
that MindSpore gave it.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import re
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor

from bitwitness.site import Site
from bitwitness.tap.collector import active_collector

_NOT_IN_A_SITE = re.compile(r"[/#:@]")
Params = tuple[Tensor, Tensor, Tensor, Tensor]


def watch_gradient(x: Tensor, name: str) -> Tensor:
    """Have the gradient of ``x`` checked, from all its uses; return ``x`` itself.

    Parameters
    ----------
    x
        bfloat16, float16 or float32, of any shape. Its gradient's L2 norm is the feature value.
    name
        What the tap is called in findings; taps of one name share a history.

    """
    if torch.compiler.is_compiling():
        return x
    collector = active_collector()
    if collector is not None and isinstance(x, Tensor):
        collector.watch(x, Site(_NOT_IN_A_SITE.sub(".", name) or ".", "watched", 0, "backward", "grad"))
    return x


class ASDBase:
    """An operator that checks the gradient of one or more of its inputs.

        class GatherASD(ASDBase):
            def __init__(self):
                super().__init__(torch.nn.functional.embedding)
                self.pre_val, self.min_val, self.max_val, self.cnt = self.generate_params()

            def __call__(self, indices, weight):
                if self.enable_check:
                    weight = self.check_op(weight, self.pre_val, self.min_val, self.max_val, self.cnt, None)
                    self.cnt += 1
                return self.op(indices, weight)

    Parameters
    ----------
    op
        A function, or a class that is instantiated with the other arguments. Arguments given with a function
        are given to it at each call, first.

    """

    _numbers: ClassVar[Callable[[], int]] = itertools.count().__next__

    def __init__(self, op: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        self.op: Any
        if inspect.isclass(op):
            self.op = op(*args, **kwargs)
        else:
            self.op = functools.partial(op, *args, **kwargs) if args or kwargs else op
        self._name = f"{type(self).__name__}{ASDBase._numbers()}"
        self._taps: list[Tensor] = []

    def __getattr__(self, name: str) -> Any:
        if name in ("op", "_name", "_taps"):  # not there yet, as in a copy that is being built
            raise AttributeError(name)
        return getattr(self.op, name)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.op!r})"

    @property
    def enable_check(self) -> bool:
        """Whether a guard is listening."""
        return active_collector() is not None

    def generate_params(self) -> Params:
        """Return ``pre_val, min_val, max_val`` (float32) and ``cnt`` (int32): zeros, 0-d, one tap's.

        The tap's history itself is kept by the guard on the host, so that no check waits for a device; these
        tell an operator's taps apart. ``cnt`` is the caller's, to count its calls with.
        """
        zeros = [torch.zeros(()) for _ in range(3)]
        self._taps.append(zeros[0])
        return zeros[0], zeros[1], zeros[2], torch.zeros((), dtype=torch.int32)

    def check_op(
        self,
        x: Tensor,
        pre_val: Tensor,
        min_val: Tensor,  # noqa: ARG002 - same
        max_val: Tensor,  # noqa: ARG002 - same
        cnt: Tensor,  # noqa: ARG002 - same
        dout: Tensor | None = None,  # noqa: ARG002 - same
    ) -> Tensor:
        """Have the gradient of ``x`` checked, for the tap that the others stand for; return ``x`` itself."""
        number = next((i for i, known in enumerate(self._taps) if known is pre_val), len(self._taps))
        return watch_gradient(x, f"{self._name}.{number}")
