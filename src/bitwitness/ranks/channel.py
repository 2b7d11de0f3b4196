"""The ranks' side channel: a gloo group of its own that carries tensors only, with a deadline on everything.

Built from a prefix of the user's own store right after the user's process group, so that it needs no port, survives
``destroy_process_group`` and never shares a queue with the training's collectives. Values travel as host tensors.

Two timeouts. In a light step a rank may be late for good reasons (rank 0 evaluates, or writes a checkpoint, for
minutes): there an exchange waits as long as the training's own collectives would. Inside `Ranks.together` all ranks are
known to work on the same question, and ``deadline_s`` counts.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from bitwitness.errors import SideChannelError
from bitwitness.liveness import Liveness, LivenessCheck, Progress, store_host
from bitwitness.ranks.packing import pack, unpack
from bitwitness.tap.compat import all_gather_options, default_store, timeouts, without_dispatch_modes

Result = TypeVar("Result")
_GRACE_S = 0.05
"""How long a closed channel's gloo thread has for letting go of the last exchange (`SideChannel.close`); every guard waits for
this once, when it ends. Too short aborts a process that ends at that moment."""
_REASON_KEPT = 200  # characters of gloo's own error: what failed and with which peer, without its stack of C++ calls


class SideChannel:
    """The ranks of one process group, reached over a gloo group of our own.

    Parameters
    ----------
    group
        The group that the training uses; None for the default group.
    deadline_s
        Seconds that any one exchange inside `together` may take; elsewhere it is the group's own timeout.

    Raises
    ------
    SideChannelError
        From every exchange, if a peer closed its connection or missed the deadline; `check_liveness` then tells which.

    """

    def __init__(self, group: dist.ProcessGroup | None = None, *, deadline_s: float) -> None:
        self.rank, self.in_job = dist.get_rank(group), dist.get_rank()
        self.size = dist.get_world_size(group)
        self.deadline_s = deadline_s
        self.broken = False
        self._patience = max(deadline_s, training_timeout(group))
        self._limit = self._patience
        self._progress = Progress()
        members = dist.get_process_group_ranks(group)
        self.members = tuple(members)
        store = default_store()
        name = "bitwitness/" + "-".join(map(str, (members[0], members[-1], len(members))))
        # Every rank builds its guards in the same order, so counting one's own gives all the same number.
        number = store.add(f"{name}/guards/{dist.get_rank()}", 1)
        self._store = dist.distributed_c10d.PrefixStore(f"{name}/{number}", store)
        self._group: Any = dist.ProcessGroupGloo(self._store, self.rank, self.size, self._timeout())
        self._liveness = LivenessCheck(
            self._store, self.rank, self.size, host=store_host(members), progress=self._progress
        )

    @contextmanager
    def together(self) -> Iterator[None]:
        """Have the short deadline count: all ranks are known to be in this block."""
        before, self._limit = self._limit, self.deadline_s
        try:
            yield
        finally:
            self._limit = before

    def expect(self, seconds: float) -> None:
        """Make the short deadline longer, if need be, for work of ``seconds``, up to the training's own timeout."""
        longer = min(self._patience, max(self.deadline_s, seconds))
        self._limit = longer if self._limit == self.deadline_s else self._limit
        self.deadline_s = longer

    def _timeout(self) -> timedelta:
        return timedelta(seconds=self._limit)

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """Return the element-wise sum over the ranks."""
        return self._reduce(values, dist.ReduceOp.SUM, "sum")

    def max(self, values: torch.Tensor) -> torch.Tensor:
        """Return the element-wise maximum over the ranks."""
        return self._reduce(values, dist.ReduceOp.MAX, "max")

    def _reduce(self, values: torch.Tensor, op: Any, what: str) -> torch.Tensor:
        result = values.detach().to("cpu", copy=True).contiguous()
        options = dist.AllreduceOptions()
        options.reduceOp = op
        options.timeout = self._timeout()
        self._guarded(lambda: self._group.allreduce([result], options).wait(), what)
        return result

    def gather(self, row: torch.Tensor) -> torch.Tensor:
        """Return every rank's ``row`` (same shape and dtype everywhere), stacked by rank."""
        mine = row.detach().to("cpu").contiguous()
        rows = [torch.empty_like(mine) for _ in range(self.size)]
        options = all_gather_options()
        options.timeout = self._timeout()
        self._guarded(lambda: self._group.allgather([rows], [mine], options).wait(), "gather")
        return torch.stack(rows)

    def shift(self, tensors: Sequence[torch.Tensor], by: int) -> list[torch.Tensor]:
        """Send tensors of any shape and dtype to the rank ``by`` further on; return those sent to this one."""
        return self._transfer(tensors, (self.rank + by) % self.size, (self.rank - by) % self.size)

    def swap(self, tensors: Sequence[torch.Tensor], other: int) -> list[torch.Tensor]:
        """Send tensors to one rank and return those it sends; only the two take part."""
        return self._transfer(tensors, other, other)

    def broadcast_text(self, text: str, source: int) -> str:
        """Return the text that rank ``source`` gave, on every rank."""
        words = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8) if text else torch.zeros(0).byte()
        length = int(self.sum(torch.tensor([words.numel() if self.rank == source else 0])))
        if not length:
            return ""
        # The sum over ranks of one rank's bytes and the others' zeros: a broadcast by the one reduction that is tried.
        mine = words.to(torch.int64) if self.rank == source else torch.zeros(length, dtype=torch.int64)
        return bytes(self.sum(mine).to(torch.uint8).numpy()).decode()

    def gather_text(self, text: str) -> list[str]:
        """Return every rank's text, by rank."""
        words = torch.frombuffer(bytearray(text.encode() or b" "), dtype=torch.uint8)
        longest = int(self.max(torch.tensor([words.numel()])))
        padded = torch.full((longest,), ord(" "), dtype=torch.uint8)
        padded[: words.numel()] = words
        return [bytes(row.numpy()).decode().rstrip(" ") for row in self.gather(padded)]

    def _transfer(self, tensors: Sequence[torch.Tensor], to: int, source: int) -> list[torch.Tensor]:
        header, payload = pack(tensors)
        size_in = torch.zeros(2, dtype=torch.int64)
        size_out = torch.tensor([header.numel(), payload.numel()], dtype=torch.int64)
        of_all = to != source  # a shift; a swap is two ranks' own affair
        self._exchange(size_out, size_in, to, source, of_all=of_all)
        header_in = torch.empty(int(size_in[0]), dtype=torch.uint8)
        payload_in = torch.empty(int(size_in[1]), dtype=torch.uint8)
        self._exchange(header, header_in, to, source, of_all=of_all)
        if payload_in.numel() or payload.numel():
            self._exchange(payload, payload_in, to, source, of_all=of_all)
        return unpack(header_in, payload_in)

    def _exchange(self, out: torch.Tensor, into: torch.Tensor, to: int, source: int, *, of_all: bool) -> None:
        def both() -> None:
            works = []
            if out.numel():
                works.append(self._group.send([out], to, 0))
            if into.numel():
                works.append(self._group.recv([into], source, 0))
            for work in works:
                work.wait(self._timeout())

        self._guarded(both, f"exchange with ranks {to} and {source}", of_all=of_all)

    def barrier(self, seconds: float) -> None:
        """Wait for all ranks, at most ``seconds`` (a shorter deadline than the channel's)."""
        options = dist.AllreduceOptions()
        options.timeout = timedelta(seconds=seconds)
        self._guarded(lambda: self._group.allreduce([torch.zeros(1)], options).wait(), "barrier")

    def close(self) -> None:
        """Give the channel up.

        A gloo thread lets go of the last exchange's tensors with the interpreter's lock in hand; where the interpreter has
        ended by then, the process aborts (seen with torch 2.13: ``terminate called``). So it is given a moment first.
        """
        self.broken = True
        self._liveness.close()
        time.sleep(_GRACE_S)

    def _guarded(self, action: Callable[[], Result], what: str, *, of_all: bool = True) -> Result:
        if self.broken:
            raise SideChannelError("the side channel broke earlier and is not used again")
        started = time.monotonic()
        self._progress.begun += of_all
        self._progress.waiting = True
        try:
            # A gloo thread keeps the caller's dispatch modes alive and lets go of them with the interpreter's lock, which
            # aborts a process that is ending: so it is given none.
            with without_dispatch_modes():
                result = action()
        except Exception as error:
            self._break()
            waited = time.monotonic() - started
            reason = str(error).splitlines()[0][:_REASON_KEPT]
            raise SideChannelError(
                f"rank {self.rank}: the ranks' side channel broke after {waited:.1f} s in a {what} "
                f"(deadline {self._limit:g} s): {reason}"
            ) from error
        self._progress.waiting = False
        return result

    def _break(self) -> None:
        """Let go of the group, so that whoever waits for this rank's next message learns of it at once."""
        self.broken = True
        held = [self._group]
        self._group = None
        threading.Thread(target=held.clear, name="bitwitness-break", daemon=True).start()

    def check_liveness(self, *, final: bool = True) -> Liveness:
        """Return who does not answer, after an exchange broke or in passing; over within seconds, not collective."""
        return self._liveness.check(final=final)


def training_timeout(group: dist.ProcessGroup | None) -> float:
    """Return how many seconds a collective of the training's own group may wait for a late rank."""
    group = group or dist.group.WORLD
    try:
        return float(max(timeouts(group)))
    except Exception:  # a backend without options
        return float(dist.constants.default_pg_timeout.total_seconds())
