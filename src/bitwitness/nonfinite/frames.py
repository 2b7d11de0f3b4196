"""The last modules' ranges in the list that users of Hugging Face's overflow detector know: abs min, abs max, what."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from bitwitness.capture.structure import tensors_of
from bitwitness.nonfinite.flags import measurable
from bitwitness.stats.local import local_values
from bitwitness.tap.modules import ROOT
from bitwitness.tap.ownwork import own_work

SHOWN = 21
"""As many frames as ``DebugUnderflowOverflow`` of transformers shows, whose report this follows."""
HEADER = "abs min  abs max  metadata"


def extent(tensor: torch.Tensor) -> torch.Tensor:
    """Return smallest and largest magnitude, float32 [2] on the tensor's device, without waiting for it.

    NaN where a value is NaN.
    """
    values = local_values(tensor.detach()).abs()
    if values.dtype.itemsize == 1:
        values = values.float()
    return torch.stack(torch.aminmax(values)).float()


@dataclass(slots=True)
class ModuleFrame:
    """One module's forward: its path, class, and the extents of what went in and came out."""

    path: str
    kind: str
    module: nn.Module
    extents: list[tuple[str, torch.Tensor]] = field(default_factory=list)

    def lines(self) -> list[str]:
        """Return the frame as text."""
        rows = [
            (name, extent(parameter))
            for name, parameter in self.module.named_parameters(recurse=False)
            if measurable(parameter)
        ]
        text = [f"{'':18}{self.path} {self.kind}"]
        for label, values in [*rows, *self.extents]:
            low, high = values.tolist()
            text.append(f"{low:8.2e} {high:8.2e} {label}")
        return text


class FrameLog:
    """Notes every module's forward while `watching`."""

    def __init__(self) -> None:
        self.frames: list[ModuleFrame] = []
        self._last: str | None = None
        self._full = False

    def end_after(self, module: str) -> None:
        """Note no more once ``module``, where the first origin is, has run; what comes later is not shown."""
        self._last = self._last or module

    @contextmanager
    def watching(self, root: nn.Module) -> Iterator[None]:
        """Hook all modules of a root; the hooks are gone afterwards."""
        handles = [
            module.register_forward_hook(self._hook(name or ROOT), with_kwargs=True)
            for name, module in root.named_modules()
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _hook(self, path: str) -> Any:
        def note(module: nn.Module, args: Any, kwargs: Any, result: Any) -> None:
            if self._full:
                return
            self._full = path == self._last
            with own_work(), torch.no_grad():
                given = [(f"input[{i}]", t) for i, t in enumerate(tensors_of(args))]
                given += [(name, t) for name, value in kwargs.items() for t in tensors_of(value)]
                made = tensors_of(result)
                labels = [f"output[{i}]" for i in range(len(made))] if len(made) > 1 else ["output"]
                rows = [*given, *zip(labels, made, strict=True)]
                extents = [(label, extent(tensor)) for label, tensor in rows if measurable(tensor)]
            self.frames.append(ModuleFrame(path, type(module).__name__, module, extents))

        return note

    def text(self, module: str, begun: int | None) -> list[str]:
        """Return the list for an origin in ``module``: the frames before it and its own module's.

        ``begun`` is how many frames there were when it appeared; None for one in the backward, whose module's last forward
        counts.
        """
        if begun is None:
            own = [number for number, frame in enumerate(self.frames) if frame.path == module]
            end = own[-1] if own else len(self.frames) - 1
        else:
            after = range(begun, len(self.frames))
            end = next((number for number in after if self.frames[number].path == module), begun - 1)
        shown = self.frames[max(0, end + 1 - SHOWN) : end + 1]
        if not shown:
            return []
        return [HEADER, *(line for frame in shown for line in frame.lines())]
