"""What a forward does once only, and what it leaves for the step's next one: nobody is convicted, and a heal is whole."""

from __future__ import annotations

import random

import pytest
import torch
import torch.nn.functional as F
from test_held_objects import Unseen
from torch import nn

import bitwitness as bw
from bitwitness.testing import EVERY_STEP, FaultyDevice, contained, from_mapping

ONCE_AT, STRUCK_AT = 6, 9


class Branching(nn.Module):
    """Does something else at the first large batch; what tells it that it was so is nowhere to be seen."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 16), nn.Linear(16, 4)
        self.tick = Unseen().tick

    def forward(self, x):
        x = F.gelu(self.a(x))
        if x.abs().max() > 20 and self.tick() == 1:
            x = x * 0.5
        return self.b(x)


def branching(watch=None):
    torch.manual_seed(4)
    net = Branching()
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
    for step in range(12) if watch is None else watch(net, optimizer, 12):
        x = torch.randn(6, 8) * (60.0 if step == ONCE_AT else 1.0)
        optimizer.zero_grad()
        net(x).square().mean().backward()
        optimizer.step()
    return net


def test_a_branch_that_is_taken_once_is_no_fault() -> None:
    guards = []

    def watch(net, optimizer, steps):
        with bw.Guard(net, optimizer, act="protect", quiet=True, **EVERY_STEP) as guard:
            guards.append(guard)
            yield from range(steps)

    watched = branching(watch)
    assert all(map(torch.equal, watched.parameters(), branching().parameters()))
    assert guards[0].coverage()["verdicts"] == []
    assert guards[0].coverage()["left_open"] > 0


class Carrying(nn.Module):
    """Keeps something of each forward for the next one, by ``kind``."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 16), nn.Linear(16, 4)
        self.kind = kind
        self.hidden, self.mean, self.gain = None, torch.zeros(16), 1.0
        self.queue, self.array = [0.0], torch.zeros(16).numpy()

    def forward(self, x):
        x = self.a(x)
        with torch.no_grad():
            found = x.mean(0)
        if self.kind == "hidden state":
            x = x if self.hidden is None else x + 0.3 * self.hidden
            self.hidden = x.detach()
        elif self.kind == "running mean":
            x = x - 0.1 * self.mean
            self.mean = 0.9 * self.mean + 0.1 * found
        elif self.kind == "number":
            x = x * self.gain
            self.gain = 0.9 * self.gain + 0.01 * float(found.abs().mean())
        elif self.kind == "list":
            x = x + 0.1 * self.queue[-1]
            self.queue.append(float(found.sum()))
        else:
            x = x + 0.1 * torch.from_numpy(self.array)
            self.array += 0.1 * found.numpy()
        return self.b(torch.tanh(x))

    def carried(self):
        hidden = torch.zeros(1) if self.hidden is None else self.hidden
        return [hidden, self.mean, torch.tensor(self.gain), torch.tensor(self.queue), torch.from_numpy(self.array)]


def accumulated(kind: str, *, struck: bool):
    torch.manual_seed(3)
    net = Carrying(kind)
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
    strike = {"site": "a/addmm#0:forward", "kind": "multiply", "factor": 1e5, "steps": [STRUCK_AT], "times": 1}
    verdicts = []
    with contained(), FaultyDevice(from_mapping({"fault": [strike] if struck else []})):
        guard = bw.Guard(net, optimizer, act="protect", quiet=True, deep_every=1, self_test=False).start()
        for _ in range(14):
            for _ in range(3):
                net(torch.randn(6, 8)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        guard.close()
        verdicts = guard.coverage()["verdicts"]
    return [*net.parameters(), *net.carried()], verdicts


@pytest.mark.parametrize("kind", ["hidden state", "running mean", "number", "list", "array"])
def test_a_heal_reaches_what_a_struck_forward_left_for_the_next_one(kind: str) -> None:
    healthy, none = accumulated(kind, struck=False)
    healed, verdicts = accumulated(kind, struck=True)
    assert none == []
    assert verdicts == [f"step {STRUCK_AT}: transient_hardware [0] healed"]
    assert all(map(torch.equal, healthy, healed))


class Consuming(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(8, 4)

    def forward(self, batches, scales):
        return self.a(next(batches)) * scales.uniform(0.5, 1.5)


def consuming(watch=None):
    torch.manual_seed(5)
    net, draws = Consuming(), random.Random(6)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-2)
    for _ in range(8) if watch is None else watch(net, optimizer, 8):
        optimizer.zero_grad()
        net(iter([torch.randn(6, 8)]), draws).square().mean().backward()
        optimizer.step()
    return net, draws.random()


def test_an_iterator_that_a_forward_is_given_is_not_used_twice() -> None:
    guards = []

    def watch(net, optimizer, steps):
        with bw.Guard(net, optimizer, act="protect", quiet=True, deep_every=1, **EVERY_STEP) as guard:
            guards.append(guard)
            yield from range(steps)

    net, drawn = consuming(watch)
    plain, expected = consuming()
    assert drawn == expected
    assert all(map(torch.equal, net.parameters(), plain.parameters()))
    assert guards[0].reporter.failures == {}
    assert "argument 0 (list_iterator) cannot be given to the forward again" in str(guards[0].coverage())


class Scripts(nn.Module):
    """Two models of one loss, called by the script: the second is given what the first computed."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.out = nn.Linear(8, 16), nn.Linear(16, 4)


def test_a_model_that_was_given_a_struck_ones_output_is_left_out_of_the_heal() -> None:
    torch.manual_seed(2)
    nets = Scripts()
    optimizer = torch.optim.SGD(nets.parameters(), lr=1e-2)
    strike = {"site": "./addmm#0:forward", "kind": "multiply", "factor": 1e5, "steps": [STRUCK_AT], "times": 1}
    with contained(), FaultyDevice(from_mapping({"fault": [strike]})):
        settings = {"act": "protect", "quiet": True, "deep_every": 1, "self_test": False}
        first = bw.Guard(nets.cell, optimizer, **settings).start()
        second = bw.Guard(nets.out, optimizer, **settings).start()
        for step in range(14):
            before = [p.detach().clone() for p in nets.out.parameters()]
            nets.out(torch.tanh(nets.cell(torch.randn(6, 8)))).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if step == STRUCK_AT:
                assert all(map(torch.equal, before, nets.out.parameters()))
        verdicts = [verdict for guard in (first, second) for verdict in guard.verdicts]
        second.close()
        first.close()
    (verdict,) = verdicts
    assert str(verdict.action) == "healed"
    assert "2 parameters outside the model, which the same backward reached, are not stepped" in verdict.message
