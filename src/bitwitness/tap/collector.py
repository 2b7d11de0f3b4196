"""Feature values of chosen gradients: the L2 norm of each, left on its device until somebody drains them.

A gradient is reached by a hook on the tensor itself, which stays the tensor that it was: an inserted alias
would change the order in which autograd adds a tensor's gradients up, and so the training's bits. What is
seen is therefore the whole gradient of the tensor, from all its uses. Hooks sit on activations, and die with
their graph; those on leaves (weights) are removed when the collector is closed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from functools import partial

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakTensorKeyDictionary

from bitwitness.site import Site
from bitwitness.tap.ownwork import in_replay, own_work

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_MOST = 1 << 16  # values kept where nobody drains them, as in a script that never steps an optimizer

_active: ContextVar[GradientCollector | None] = ContextVar("bitwitness_collector", default=None)


class GradientCollector:
    """Takes the L2 norm of every watched gradient as it is computed, without waiting for the device.

    Attributes
    ----------
    uncovered
        Watched tensors whose gradient cannot be read, by their printable site, each with the reason.

    """

    def __init__(self) -> None:
        self.uncovered: dict[str, str] = {}
        self._taken: deque[tuple[Site, Tensor]] = deque(maxlen=_MOST)
        self._leaves: MutableMapping[Tensor, dict[Site, RemovableHandle]] = WeakTensorKeyDictionary()
        self._closed = False

    @property
    def closed(self) -> bool:
        """Whether `close` was called; nothing is taken any more."""
        return self._closed

    def close(self) -> None:
        """Forget everything, and remove the hooks on leaves; those on activations become inert."""
        self._closed = True
        self._taken.clear()
        for handles in self._leaves.values():
            for handle in handles.values():
                handle.remove()
        self._leaves.clear()

    def watch(self, tensor: Tensor, site: Site) -> None:
        """Take the norm of ``tensor``'s gradient under the name ``site`` whenever a backward computes it.

        A tensor without a gradient is passed over; one whose gradient cannot be read is named in `uncovered`.
        """
        if self._closed or not tensor.requires_grad or not torch.is_grad_enabled():
            return
        if tensor.dtype not in DTYPES:
            self.uncovered[site.short] = f"its gradient is {tensor.dtype}; bfloat16, float16 and float32 are read"
            return
        try:
            if not tensor.is_leaf:
                self._hook(tensor, site)
            elif tensor not in self._leaves:
                self._leaves[tensor] = {site: self._hook(tensor, site)}
            elif site not in self._leaves[tensor]:
                self._leaves[tensor][site] = self._hook(tensor, site)
        except (
            RuntimeError,
            TypeError,
        ) as error:  # a tensor subclass or a functorch level that takes no hooks
            self.uncovered[site.short] = f"it takes no hook: {error}"

    def _hook(self, tensor: Tensor, site: Site) -> RemovableHandle:
        hook = partial(self._take, site)
        handle: RemovableHandle = tensor.register_hook(hook)
        return handle

    def _take(self, site: Site, grad: Tensor) -> None:
        if self._closed or torch.compiler.is_compiling() or in_replay():
            return
        if grad.layout is not torch.strided:
            self.uncovered[site.short] = f"its gradient is sparse ({grad.layout})"
            return
        try:
            with own_work(), torch.no_grad():
                self._taken.append((site, _norm(grad.detach())))
        except Exception as error:
            self.uncovered[site.short] = f"its norm cannot be computed: {type(error).__name__}: {error}"

    def drain(self) -> tuple[tuple[Site, ...], Tensor]:
        """Return what was taken since the last time, in the order of the backward, and forget it.

        Returns
        -------
        tuple
            K sites (one comes once for every backward that reached it), and their norms, float32 [K], on the
            device of the first. Nothing is waited for.

        """
        taken = list(self._taken)
        self._taken.clear()
        if not taken:
            return (), torch.zeros(0)
        with own_work(), torch.no_grad():
            device = taken[0][1].device
            values = torch.stack([value.to(device, non_blocking=True) for _, value in taken])
        return tuple(site for site, _ in taken), values


def _norm(grad: Tensor) -> Tensor:
    """Return the L2 norm as a float32 0-d tensor; of a DTensor, that of this rank's shard."""
    local = grad.to_local() if hasattr(grad, "to_local") else grad
    norm: Tensor = torch.linalg.vector_norm(local, dtype=torch.float32)
    return norm


def active_collector() -> GradientCollector | None:
    """Return the collector of the innermost guard in this thread, or None."""
    collector = _active.get()
    return None if collector is None or collector.closed else collector


@contextmanager
def collecting(collector: GradientCollector) -> Iterator[GradientCollector]:
    """Make a collector the active one; it is closed at the end.

    It is kept in a `ContextVar`, so that guards may nest and another thread's training is not looked at.
    """
    token = _active.set(collector)
    try:
        yield collector
    finally:
        collector.close()
        with suppress(ValueError):  # left in another context than entered; a closed collector is never active
            _active.reset(token)
