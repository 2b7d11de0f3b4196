"""What a script carries from one step into the next: a heal puts right what the faulty forward returned, too."""

from __future__ import annotations

import pytest
import torch
from extent import chosen
from torch import nn
from torch.nn import functional as F

from bitwitness import Guard
from bitwitness.testing import EVERY_STEP, FaultyDevice, load_faults

ALWAYS = {"act": "protect", **EVERY_STEP}
STEPS = 6
FAULT = """
[[fault]]
kind = "multiply"
factor = 64.0
site = "cell/tanh_#0:forward.out0"
from_step = 3
times = 1
"""


class Recurrent(nn.Module):
    def __init__(self, *, detached: bool = False) -> None:
        super().__init__()
        self.cell, self.out, self.detached = nn.GRUCell(6, 10), nn.Linear(10, 3), detached

    def forward(self, x, h):
        h = self.cell(x, h)
        return self.out(h), h.detach() if self.detached else h


def as_it_is(h):
    return h


def at_once(h):
    return h.detach()


def in_a_view(h):
    return h.detach()[:, torch.arange(10)[0] :]


def train(carry=as_it_is, *, guarded: bool, later=as_it_is, detached: bool = False, chunk: int = 3):
    torch.manual_seed(0)
    model = Recurrent(detached=detached)
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    guard = Guard(model, optimizer, **ALWAYS) if guarded else None
    if guard:
        guard.__enter__()
    generator = torch.Generator().manual_seed(1)
    h = torch.zeros(4, 10)
    for _ in range(STEPS):
        h, loss = h.detach(), 0
        for _ in range(chunk):
            x = torch.randn(4, 6, generator=generator)
            y, h = model(x, h)
            loss = loss + F.mse_loss(y, x[:, :3])
        h = carry(h)
        optimizer.zero_grad()
        loss.backward()
        h = later(h)
        optimizer.step()
    if guard:
        guard.close()
    return [p.detach().clone() for p in model.parameters()] + [h.detach().clone()], guard


@pytest.mark.parametrize("chunk", [1, 3])
@pytest.mark.parametrize("carry", [as_it_is, at_once, in_a_view])
def test_a_hidden_state_is_healed(carry, chunk: int, tmp_path) -> None:
    plain, _ = train(carry, guarded=False, chunk=chunk)
    check(plain, tmp_path, carry, chunk=chunk)


@pytest.mark.parametrize("chunk", [1, 3])
def test_a_hidden_state_that_the_model_detaches_is_healed(chunk: int, tmp_path) -> None:
    plain, _ = train(guarded=False, detached=True, chunk=chunk)
    check(plain, tmp_path, detached=True, chunk=chunk)


def check(plain, tmp_path, carry=as_it_is, **how) -> None:
    faults = tmp_path / "faults.toml"
    faults.write_text(FAULT)
    with FaultyDevice(load_faults(faults)) as device:
        healed, guard = train(carry, guarded=True, **how)
    assert len(device.fired) == 1
    assert guard.coverage()["verdicts"] == ["step 3: transient_hardware [0] healed"]
    assert all(map(torch.equal, plain, healed))


def test_what_the_script_has_changed_since_is_its_own(tmp_path) -> None:
    def halved(h):
        return h.detach().mul_(0.5)

    plain, _ = train(later=halved, guarded=False)
    guarded, guard = train(later=halved, guarded=True)
    assert all(map(torch.equal, plain, guarded))
    faults = tmp_path / "faults.toml"
    faults.write_text(FAULT)
    with FaultyDevice(load_faults(faults)):
        _, guard = train(later=halved, guarded=True)
    assert guard.coverage()["verdicts"] == ["step 3: transient_hardware [0] healed"]


class Writer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.cell, self.out = nn.Embedding(7, 6), nn.GRUCell(6, 10), nn.Linear(10, 7)

    def forward(self, word, h):
        h = self.cell(self.words(word), h)
        return self.out(h), h


def write(how, *, guarded: bool):
    """Train on what the model itself has written so far."""
    torch.manual_seed(0)
    model = Writer()
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    guard = Guard(model, optimizer, **ALWAYS) if guarded else None
    if guard:
        guard.__enter__()
    for step in range(STEPS):
        target = torch.arange(4) + step
        h, word, loss, written = torch.zeros(4, 10), target % 7, 0, torch.zeros(4, 4, dtype=torch.int64)
        for position in range(4):
            y, h = model(word, h)
            loss = loss + F.cross_entropy(y, (target + position) % 7)
            word = how(y, written, position)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    if guard:
        guard.close()
    return [p.detach().clone() for p in model.parameters()], guard


def greedy(y, _written, _position):
    return y.argmax(1)


def drawn(y, _written, _position):
    return torch.multinomial(y.detach().softmax(1), 1)[:, 0]


def noted(y, written, position):
    written[:, position] = y.argmax(1)
    return written[:, position].clone()


@pytest.mark.parametrize("how", [greedy, drawn, *chosen([noted], [])])
def test_what_the_model_reads_of_its_own_writing_is_healed_or_skipped(how, tmp_path) -> None:
    plain, _ = write(how, guarded=False)
    clean, guard = write(how, guarded=True)
    assert all(map(torch.equal, plain, clean))
    assert guard.coverage()["verdicts"] == []
    assert guard.coverage()["replay"]["this_step"] == "can be run again"
    faults = tmp_path / "faults.toml"
    faults.write_text(FAULT.replace("64.0", "-64.0"))
    with FaultyDevice(load_faults(faults)) as device:
        healed, guard = write(how, guarded=True)
    assert len(device.fired) == 1
    if how is noted:
        assert guard.coverage()["verdicts"] == ["step 3: transient_hardware [0] skipped"]
        assert "computed from an earlier one's outputs" in guard.verdicts[0].message
    else:
        assert guard.coverage()["verdicts"] == ["step 3: transient_hardware [0] healed"]
        assert all(map(torch.equal, plain, healed))


def weighted(*, guarded: bool, weight):
    """Weight each loss by how it compares with the earlier ones."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    guard = Guard(model, optimizer, **ALWAYS).start() if guarded else None
    state, losses = {}, []
    for _ in range(STEPS):
        x = torch.randn(32, 8)
        loss = F.cross_entropy(model(x), x[:, :3].argmax(1))
        optimizer.zero_grad()
        (loss * weight(loss, state)).backward()
        optimizer.step()
        losses.append(loss)
    if guard:
        guard.close()
    return [*(p.detach() for p in model.parameters()), *(loss.detach() for loss in losses)], guard


def by_a_running_mean(loss, state):
    now = loss.detach()
    state["mean"] = 0.9 * state["mean"] + 0.1 * now if state else now
    return (now / state["mean"]).clamp(0.5, 2)


def by_a_number(loss, state):
    return min(2.0, 1.0 / float(loss.detach()))


WRONG_PRODUCT = FAULT.replace("cell/tanh_#0", "2/addmm#0")


def test_what_the_script_makes_of_its_losses_for_later_ones_is_healed(tmp_path) -> None:
    plain, _ = weighted(guarded=False, weight=by_a_running_mean)
    (tmp_path / "faults.toml").write_text(WRONG_PRODUCT)
    with FaultyDevice(load_faults(tmp_path / "faults.toml")):
        healed, guard = weighted(guarded=True, weight=by_a_running_mean)
    assert guard.coverage()["verdicts"] == ["step 3: transient_hardware [0] healed"]
    assert all(map(torch.equal, plain, healed))


def test_a_number_that_was_taken_before_is_named(tmp_path, capsys) -> None:
    (tmp_path / "faults.toml").write_text(WRONG_PRODUCT)
    with FaultyDevice(load_faults(tmp_path / "faults.toml")):
        weighted(guarded=True, weight=by_a_number)
    said = capsys.readouterr().err
    assert "healed with it; a number that the script took from it before" in said
    assert "in by_a_number" in said
