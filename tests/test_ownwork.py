"""What the process does for bitwitness itself is known wherever it is asked, also in autograd's own threads."""

from __future__ import annotations

import threading
from typing import Any

import torch

from bitwitness.tap.ownwork import OWN, given_place, in_own_work, in_replay, own_work, replaying, standing_in

NESTED = 70  # autograd leaves the calling thread where more than 60 backwards run inside one another


class Nested(torch.autograd.Function):
    """A backward that runs another one, as reentrant checkpoints do."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, depth: int, seen: list[tuple[int, bool]]) -> torch.Tensor:
        ctx.depth, ctx.seen = depth, seen
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        if ctx.depth:
            with torch.enable_grad():
                backward(ctx.depth - 1, ctx.seen)
        return grad, None, None


def backward(depth: int, seen: list[tuple[int, bool]]) -> None:
    x = torch.ones(1, requires_grad=True)
    x.register_hook(lambda _: seen.append((threading.get_ident(), in_replay())))
    Nested.apply(x, depth, seen).sum().backward()


def test_a_replay_is_known_in_the_threads_of_its_backward_and_nowhere_afterwards():
    during: list[tuple[int, bool]] = []
    after: list[tuple[int, bool]] = []
    with replaying():
        backward(NESTED, during)
    backward(NESTED, after)
    for seen, replay in ((during, True), (after, False)):
        assert len({thread for thread, _ in seen}) > 1, "all of it ran in one thread, so nothing was tried"
        assert [told for _, told in seen] == [replay] * (NESTED + 1)


def test_another_threads_training_is_no_replay():
    told: list[bool] = []
    with replaying():
        thread = threading.Thread(target=lambda: told.append(in_replay()))
        thread.start()
        thread.join()
    assert told == [False]


def test_a_replay_inside_another_does_not_end_it():
    with replaying():
        with replaying():
            assert in_replay()
        assert in_replay()
    assert not in_replay()


def test_own_work_has_a_place():
    assert not in_own_work()
    assert given_place() is None
    with own_work():
        assert given_place() == (OWN, "forward", 0)
        with own_work("blocks.0", "backward", 2):
            assert given_place() == ("blocks.0", "backward", 2)
        assert in_own_work()
        assert not in_replay()
    assert not in_own_work()


def test_what_stands_in_for_the_training_is_no_own_work():
    with standing_in("blocks.0", "grad"):
        assert given_place() == ("blocks.0", "grad", 0)
        assert not in_own_work()
    assert given_place() is None
