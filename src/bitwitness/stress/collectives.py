"""What devices send one another: whole numbers, whose sums are exact in any order, so that each rank knows what it is due."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from bitwitness.stress.workload import Workload, drawn, dtype_name
from bitwitness.trial.call import Call

_ELEMENTS: dict[bool, tuple[int, ...]] = {False: (1 << 10, 1021), True: (1 << 22, 1048573)}
"""Of what a rank gives to one other; the second is odd."""
_LARGEST = 3
SUMS = frozenset({"all_reduce", "reduce_scatter"})
"""Those in which all ranks' contributions are added: of a wrong sum none can be told to be the wrong one."""


def collective_workloads(dtype: torch.dtype, *, large: bool, ranks: int) -> Iterator[Workload]:
    """Yield the collectives among so many ranks in a dtype; none where it cannot hold their sums, and for one rank."""
    if ranks < 2 or dtype.itemsize == 1 or _LARGEST * ranks > _largest(dtype):
        return
    for name, (run, expected) in _COLLECTIVES.items():
        for elements in _ELEMENTS[large]:
            given = partial(_given, elements=elements, ranks=ranks, dtype=dtype)
            due = partial(_due, expected=expected, given=given)
            call = partial(_call, run=run, given=given)
            shape = f"{ranks}x{elements}"
            yield Workload(name, dtype_name(dtype), shape, call, exact=True, collective=True, expected=due)


def _largest(dtype: torch.dtype) -> float:
    """Return up to which number a dtype holds every whole one."""
    return 2 / torch.finfo(dtype).eps if dtype.is_floating_point else torch.iinfo(dtype).max


def _given(variant: int, rank: int, *, elements: int, ranks: int, dtype: torch.dtype) -> Tensor:
    """Return what a rank gives: [ranks, elements] whole numbers of at most two bits, whose sums bfloat16 holds, too."""
    small = drawn((ranks, elements), torch.int32, 1000 * variant + rank) % (_LARGEST + 1)
    return small.to(dtype)


def _call(variant: int, rank: int, *, run: Callable[..., Tensor], given: Callable[[int, int], Tensor]) -> Call:
    return Call(partial(run, root=variant), (given(variant, rank),), gradients=False)


def _due(
    variant: int, rank: int, ranks: int, *, expected: Callable[..., Tensor], given: Callable[[int, int], Tensor]
) -> list[Tensor]:
    return [expected(torch.stack([given(variant, one) for one in range(ranks)]), rank, variant % ranks)]


def _all_reduce(mine: Tensor, root: int) -> Tensor:
    del root
    out = mine.clone()
    dist.all_reduce(out)
    return out


def _broadcast(mine: Tensor, root: int) -> Tensor:
    out = mine.clone()
    dist.broadcast(out, src=root % dist.get_world_size())
    return out


def _all_gather(mine: Tensor, root: int) -> Tensor:
    del root
    out = mine.new_empty(dist.get_world_size(), *mine.shape)
    dist.all_gather(list(out.unbind()), mine)
    return out


def _reduce_scatter(mine: Tensor, root: int) -> Tensor:
    del root
    out = torch.empty_like(mine[0])
    dist.reduce_scatter_tensor(out, mine.reshape(-1))
    return out


def _all_to_all(mine: Tensor, root: int) -> Tensor:
    del root
    out = torch.empty_like(mine)
    dist.all_to_all_single(out, mine)
    return out


_COLLECTIVES: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor]]] = {
    "all_reduce": (_all_reduce, lambda all_, _rank, _root: all_.sum(0).to(all_.dtype)),
    "broadcast": (_broadcast, lambda all_, _rank, root: all_[root]),
    "all_gather": (_all_gather, lambda all_, _rank, _root: all_),
    "reduce_scatter": (_reduce_scatter, lambda all_, rank, _root: all_[:, rank].sum(0).to(all_.dtype)),
    "all_to_all": (_all_to_all, lambda all_, rank, _root: all_[:, rank]),
}


def sources_of(name: str, place: tuple[int, ...], variant: int, ranks: int) -> set[int]:
    """Return the ranks of whose contribution a received element is made."""
    if name in SUMS or not place:
        return set(range(ranks))
    return {variant % ranks} if name == "broadcast" else {place[0]}
