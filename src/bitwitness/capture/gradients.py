"""A rank's local gradients, before any reduction, described on their device without waiting for it.

How they are reached depends on who owns them:

``hold``      no DistributedDataParallel: ``p.grad`` is local, and is read when a backward has ended, before code that edits it
``callback``  DistributedDataParallel: ``p.grad`` stays local until the reducer's final callback copies the reduced
              buckets back; ours is queued before it
``reduce``    FSDP2: whole local gradients exist at the input of the reduce-scatter (`tap.sharded`)
``hooks``     ``gradient_as_bucket_view=True``: a gradient lives in its bucket and is reduced there as soon as the bucket is
              full, so each is read in its own post-accumulate hook, the last moment at which it is surely local
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import nn

from bitwitness.stats import Features, features_of, norms_of
from bitwitness.tap.compiled import distributed
from bitwitness.tap.ownwork import own_work
from bitwitness.tap.sharded import ReduceTap, sharding_of


def features_with_absent(grads: list[torch.Tensor | None], device: torch.device, *, hashed: bool = True) -> Features:
    """Return the features of gradients some of which are absent (None); an absent one reads as zeros."""
    here = [grad for grad in grads if grad is not None]
    features = features_of(here, hashed=hashed)
    if len(here) == len(grads):
        return features
    index = torch.tensor([i for i, grad in enumerate(grads) if grad is not None], dtype=torch.int64).to(device)

    def spread(values: torch.Tensor) -> torch.Tensor:
        empty = torch.zeros(len(grads), dtype=values.dtype, device=device)
        return empty.index_copy_(0, index, values.to(device)) if here else empty

    digest = spread(features.digest) if hashed else features.digest
    return Features(spread(features.l2), spread(features.absmax), digest, spread(features.high))


class LocalGradients:
    """Describes the local gradients of a root's parameters, once a step.

    Parameters
    ----------
    wrapper
        What the training calls: a DistributedDataParallel instance (also compiled) or the module itself.
    parameters
        In the order of the description.
    norms_only
        Where gradients are still there at the hold point, describe them by their norms alone, which tell whether they are
        finite at a third of the price; `describe` tells more.
    left
        Tells the positions of gradients that an earlier step has left behind: they are none of this step's, and read as zeros.

    """

    def __init__(
        self,
        wrapper: nn.Module,
        parameters: list[nn.Parameter],
        device: torch.device,
        *,
        norms_only: bool = False,
        left: Callable[[], frozenset[int]] = frozenset,
    ) -> None:
        self._wrapper = wrapper
        self._parameters = parameters
        self._device = device
        self._norms_only = norms_only
        self._left_behind = left
        self._latest: Features | None = None
        self._early: dict[int, Features] = {}
        self._parts: list[Features | None] = [None] * len(parameters)
        self._unreduced: dict[int, Features] = {}
        self._handles: list[torch.utils.hooks.RemovableHandle] = []
        self._left: Features | None = None
        self.reduced: torch.Tensor | None = None
        """Norms of the reduced gradients as the backward left them, float32 [P]; None where gradients are local."""
        self.reducing = True
        """Whether the backward that runs leads to a reduction; told by who knows."""
        self.mode, self._unused = "hold", False
        self.reduce_tap: ReduceTap | None = None
        if sharding_of(wrapper).fsdp2:
            self.mode = "reduce"
            self.reduce_tap = ReduceTap(parameters)
        if (reducing := distributed(wrapper)) is not None:
            self.mode = "hooks" if reducing.gradient_as_bucket_view else "callback"
            self._unused = bool(reducing.find_unused_parameters or getattr(reducing, "static_graph", False))
        if self.mode == "hooks":
            for index, parameter in enumerate(parameters):
                handle = parameter.register_post_accumulate_grad_hook(lambda p, i=index: self._one(i, p))
                self._handles.append(handle)

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        if self.reduce_tap is not None:
            self.reduce_tap.close()

    def _one(self, index: int, parameter: torch.Tensor) -> None:
        if parameter.grad is None or not (self.reducing or self._unused):
            return
        with own_work(), torch.no_grad():
            found = features_of([parameter.grad])
        if self.reducing:
            self._parts[index] = found
        else:
            self._unreduced[index] = found  # all there is, if the reducing backward does not use the parameter

    def begin_backward(self, *, reducing: bool, first: bool) -> None:
        """Say whether the backward that begins leads to a reduction, and whether it is the first whose gradients count."""
        self.reducing = reducing
        if first:
            self._unreduced.clear()

    def collect(self, *, hashed: bool = True) -> None:
        """Describe the gradients as they stand: called when a backward has left them local and complete."""
        if self.mode == "reduce":
            return
        if self.mode != "hooks":
            self._latest = features_with_absent(self._grads(), self._device, hashed=hashed)
            return
        self._latest = self.joined([part or self._unreduced.get(index) for index, part in enumerate(self._parts)])
        self._parts = [None] * len(self._parts)
        self._unreduced.clear()

    def collect_early(self, parameters: Iterable[torch.Tensor]) -> None:
        """Describe some gradients that an optimizer is about to use, and to let go, while the backward still runs."""
        wanted = {id(parameter) for parameter in parameters}
        here = [(i, p.grad) for i, p in enumerate(self._parameters) if id(p) in wanted and p.grad is not None]
        with own_work(), torch.no_grad():
            found = features_of([grad for _, grad in here])
        for number, (index, _) in enumerate(here):
            part = slice(number, number + 1)
            self._early[index] = Features(found.l2[part], found.absmax[part], found.digest[part])

    def take_early(self) -> Features | None:
        """Return the description put together by `collect_early`, and forget it; None if there is none."""
        if not self._early:
            return None
        early, self._early = self._early, {}
        return self.joined([early.get(index) for index in range(len(self._parameters))])

    def joined(self, parts: list[Features | None]) -> Features:
        """Put the parameters' descriptions, each of length 1, together; an absent one reads as zeros."""
        zero = torch.zeros(1, device=self._device)
        none = Features(zero, zero, torch.zeros(1, dtype=torch.int64, device=self._device))
        there = [part or none for part in parts]
        return Features(
            torch.cat([part.l2 for part in there]),
            torch.cat([part.absmax for part in there]),
            torch.cat([part.digest for part in there]),
        )

    def take(self, *, hashed: bool = True) -> Features | None:
        """Return the step's description and forget it; None if no synchronising backward was seen.

        Without ``hashed`` the digest may be left out where nothing was read before; `with_hashes` adds it.
        """
        if self.reduce_tap is not None:
            parts = self.reduce_tap.parts
            self._latest = self.joined([parts.get(i) for i in range(len(self._parameters))]) if parts else None
            parts.clear()
        if self.mode == "hold" and (self._latest is None or self._norms_only):
            with own_work(), torch.no_grad():
                if self._norms_only and not hashed:
                    self._latest = self._norms()
                else:
                    self.collect(hashed=hashed)
        latest, self._latest = self._latest, None
        return latest

    def backward_ended(self, *, read: bool = True) -> None:
        """Note the gradients as a backward left them; without ``read`` forget what an earlier one left."""
        with own_work(), torch.no_grad():
            if self.mode != "hold":
                self.reduced = self._norms().l2
            elif not self._norms_only:
                self._latest = self._left = None
                if read:
                    self.collect(hashed=False)
                    self._left = self._latest

    def untouched(self) -> bool:
        """Tell whether the gradients still are what a backward left, where these are local; waits for the device."""
        if self._left is None:
            return True
        now, left = self.describe(), self._left
        pairs = (now.l2, left.l2), (now.absmax, left.absmax), (now.high, left.high)
        return all(torch.equal(after.nan_to_num(), before.nan_to_num()) for after, before in pairs)

    def reduced_untouched(self) -> bool:
        """Tell whether the reduced gradients still have the norms with which a backward left them; waits for the device."""
        if self.reduced is None:
            return True
        with own_work(), torch.no_grad():
            return torch.equal(self._norms().l2.nan_to_num(), self.reduced.nan_to_num())

    @property
    def unreduced(self) -> bool:
        """Whether DistributedDataParallel has reduced nothing since the last step: a backward of one rank's own, perhaps."""
        waiting = self._latest is not None or any(part is not None for part in self._parts) or bool(self._early)
        return self.mode in ("callback", "hooks") and not waiting

    @property
    def brief(self) -> bool:
        """Whether what `take` returned are norms alone."""
        return self._norms_only and self.mode == "hold"

    def describe(self) -> Features:
        """Describe the gradients at the hold point in full, where `take` was brief."""
        with own_work(), torch.no_grad():
            return features_with_absent(self._grads(), self._device, hashed=False)

    def _grads(self) -> list[torch.Tensor | None]:
        """Return the step's gradients; None for absent ones, and for those that an earlier step has left behind."""
        left = self._left_behind()
        return [None if index in left else p.grad for index, p in enumerate(self._parameters)]

    def _norms(self) -> Features:
        none = torch.zeros(0, device=self._device)
        norms = norms_of([none if grad is None else grad for grad in self._grads()], self._device).float()
        return Features(norms, norms, torch.zeros(0, dtype=torch.int64, device=self._device))

    def with_hashes(self, features: Features) -> Features:
        """Return the description with its hashes, which are computed now if they were left out."""
        if features.digest.numel() == len(self._parameters):
            return features
        return self.take() or features
