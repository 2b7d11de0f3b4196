"""Every collective that a training issues: what each rank gives before it begins, and what it has received once it is over.

Those called from Python pass through the methods of ``torch.distributed.ProcessGroup``, whatever name they were imported
by; their end is the ``wait`` of the handle. DistributedDataParallel's reducer calls from C++: its all-reduces and broadcasts
are operators (``c10d::allreduce_``), which an operator tap sees, and they are over when the forward or backward that made
them is. Its broadcast of buffers comes before the forward of the model inside, and is shown by who sees it coming. Nothing is
waited for here that the training does not wait for.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor

from bitwitness.tap.compat import OpOverload, process_groups
from bitwitness.tap.exchange import Exchange, members_of, plain, read_call
from bitwitness.tap.operators import OpCall, tensors_in
from bitwitness.tap.ownwork import in_own_work, in_replay, own_work
from bitwitness.tap.patching import replaced

_METHODS = {
    "allreduce": "all_reduce",
    "broadcast": "broadcast",
    "allgather": "all_gather",
    "all_gather_single": "all_gather",
    "_allgather_base": "all_gather",  # the same up to 2.12
    "reduce_scatter": "reduce_scatter",
    "reduce_scatter_single": "reduce_scatter",
    "_reduce_scatter_base": "reduce_scatter",
    "alltoall": "all_to_all",
    "all_to_all_single": "all_to_all",
    "alltoall_base": "all_to_all",
}
"""Methods of a process group, and what they are."""
_OPERATORS = {"c10d::allreduce_": "all_reduce", "c10d::broadcast_": "broadcast"}
"""Operators that torch calls from C++, and what they are."""

Handler = Callable[[Exchange], None]


class ExchangeTap:
    """Shows collectives to two handlers, from `open` to `close`.

    Parameters
    ----------
    began
        Called before a collective begins, while what it sends is there.
    ended
        Called when it is over, while what was received is there unchanged.
    fail
        Told of an error of either; nothing is shown any more then.

    """

    def __init__(self, began: Handler, ended: Handler, fail: Callable[[Exception], None]) -> None:
        self._began, self._ended, self._fail = began, ended, fail
        self._stack: ExitStack | None = None
        self._calls: Counter[tuple[int, ...]] = Counter()
        self._waited: dict[int, tuple[Any, Exchange]] = {}
        self._inside = threading.local()
        self._running: list[Exchange] = []
        self.other: Counter[str] = Counter()
        """Those that are not understood, by their names."""

    def open(self) -> None:
        """Show collectives from now on, as the first of a step."""
        distributed: Any = sys.modules.get("torch.distributed")
        if self._stack is not None or distributed is None or not process_groups():
            return
        self._calls.clear()
        self._stack = ExitStack()
        for name, op in _METHODS.items():
            if name in vars(distributed.ProcessGroup):
                self._patch(distributed.ProcessGroup, name, functools.partial(self._method, op, name))
        self._patch(distributed.Work, "wait", self._wait)

    def _patch(self, owner: Any, name: str, wrap: Callable[[Any], Any]) -> None:
        assert self._stack is not None  # noqa: S101 - set by `open`
        self._stack.enter_context(replaced(owner, name, wrap))

    def close(self) -> None:
        """Show no more, and forget what is under way."""
        stack, self._stack = self._stack, None
        if stack is not None:
            stack.close()
        self._waited.clear()
        self._running.clear()

    # -- from Python ---------------------------------------------------------------------------------------------

    def _method(self, op: str, name: str, original: Any) -> Callable[..., Any]:
        def collective(group: Any, *args: Any, **kwargs: Any) -> Any:
            if self._stack is None or in_own_work() or in_replay() or self._is_inside():
                return original(group, *args, **kwargs)
            exchange = self._begin(op, name, group, args)
            self._inside.now = True  # the operator of this call is the same collective
            try:
                work = original(group, *args, **kwargs)
            finally:
                self._inside.now = False
            if exchange is not None and work is not None:
                self._waited[id(work)] = work, exchange
            return work

        return collective

    @contextmanager
    def showing_broadcast(self, group: Any, tensors: list[Tensor], root: int) -> Iterator[None]:
        """Show as one what runs inside: a broadcast of several tensors, however torch cuts it into calls."""
        exchange = None if self._stack is None else self._begin_broadcast(group, tensors, root)
        before, self._inside.now = self._is_inside(), True
        try:
            yield
        finally:
            self._inside.now = before
        if exchange is not None:
            self._end(exchange, unchanged=True)

    def _begin_broadcast(self, group: Any, tensors: list[Tensor], root: int) -> Exchange | None:
        try:
            with own_work(), torch.no_grad():
                members = members_of(group)
                together = plain(tensors) and len({tensor.device for tensor in tensors}) == 1
                if len(members) < 2 or not together:
                    return None
                return self._note(Exchange("broadcast", members, group.rank(), 0, tensors, tensors, root=root))
        except Exception as error:
            self._failed(error)
            return None

    def _is_inside(self) -> bool:
        return bool(getattr(self._inside, "now", False))

    def _begin(self, op: str, name: str, group: Any, args: tuple[Any, ...]) -> Exchange | None:
        try:
            with own_work(), torch.no_grad():
                members = members_of(group)
                if len(members) < 2:
                    return None
                exchange = read_call(op, name, members, group.rank(), args)
                if exchange is None:
                    self._calls[members] += 1
                    self.other[name] += 1
                    return None
                return self._note(exchange)
        except Exception as error:
            self._failed(error)
            return None

    def _note(self, exchange: Exchange) -> Exchange:
        exchange.index = self._calls[exchange.group]
        self._calls[exchange.group] += 1
        exchange.versions = tuple(tensor._version for tensor in exchange.sent)
        self._began(exchange)
        return exchange

    def _wait(self, original: Any) -> Callable[..., Any]:
        def wait(work: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(work, *args, **kwargs)
            _, exchange = self._waited.pop(id(work), (None, None))
            if exchange is not None and self._stack is not None:
                self._end(exchange, exchange.in_place or _unchanged(exchange))
            return result

        return wait

    def _end(self, exchange: Exchange, unchanged: bool) -> None:
        try:
            if unchanged:
                with own_work(), torch.no_grad():
                    self._ended(exchange)
        except Exception as error:
            self._failed(error)
        exchange.sent, exchange.received = [], []

    def _failed(self, error: Exception) -> None:
        self.close()
        self._fail(error)

    # -- from C++ ------------------------------------------------------------------------------------------------

    def wants(self, func: OpOverload) -> bool:
        """Tell whether an operator is a collective that torch may have called from C++."""
        return func._schema.name in _OPERATORS

    def before(self, call: OpCall) -> None:
        """Note a collective that is about to be called from C++."""
        if self._stack is None or self._is_inside() or in_replay() or not self.wants(call.func):
            return
        try:
            with own_work(), torch.no_grad():
                self._reduced(call)
        except Exception as error:
            self._failed(error)

    def _reduced(self, call: OpCall) -> None:
        group = sys.modules["torch.distributed"].ProcessGroup.unbox(call.args[1])
        members, op = members_of(group), _OPERATORS[call.func._schema.name]
        tensors = list(tensors_in(call.args[0]))
        if len(members) < 2 or len(tensors) != 1 or not plain(tensors):
            return
        # The reducer asks for sums alone. A ``ReduceOp`` that is an operator's argument cannot be read.
        reduction, root = ("sum", -1) if op == "all_reduce" else ("", int(call.args[2]))
        self._running.append(self._note(Exchange(op, members, group.rank(), 0, tensors, tensors, reduction, root)))

    def after(self, call: OpCall) -> None:
        """Note in what state the operator left its tensors."""
        for exchange in self._running[-1:]:
            if any(tensor is other for tensor in tensors_in(call.args[0]) for other in exchange.sent):
                exchange.versions = tuple(tensor._version for tensor in exchange.received)

    def pass_ended(self) -> None:
        """Say that a forward or a backward has ended, and with it what it has called from C++."""
        running, self._running = self._running, []
        for exchange in running:
            if self._stack is not None:
                self._end(exchange, _unchanged(exchange))


def _unchanged(exchange: Exchange) -> bool:
    return exchange.versions == tuple(tensor._version for tensor in exchange.sent)
