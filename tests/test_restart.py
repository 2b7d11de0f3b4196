"""What a guard has learned survives a restart; guards in notebooks; scripts whose models come late or in other processes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from ranks import script
from torch import nn

import bitwitness as bw


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(layer for _ in range(5) for layer in (nn.Linear(8, 8), nn.Tanh())))


def train(net: nn.Module, guard: bw.Guard, steps: int, *, first: int = 0, spoiled: int = -1) -> None:
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    del guard
    for step in range(first, first + steps):
        x = torch.randn(16, 8, generator=torch.Generator().manual_seed(step))
        loss = net(x * (1e4 if step == spoiled else 1.0)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def test_a_restart_with_the_history_sees_at_once_what_a_fresh_guard_has_to_learn_for(tmp_path: Path) -> None:
    net = model()
    with bw.Guard(net) as guard:
        train(net, guard, 60)
        torch.save(guard.state_dict(), tmp_path / "guard.pt")
    state = torch.load(tmp_path / "guard.pt", weights_only=True)
    for load, suspicions in ((False, 0), (True, 1)):
        with bw.Guard(net) as again:
            if load:
                again.load_state_dict(state)
            train(net, again, 1, first=60, spoiled=60)
        assert again.coverage()["suspicions"] == suspicions


def test_the_history_of_another_model_is_refused() -> None:
    net, other = model(), nn.Linear(3, 3)
    with bw.Guard(net) as guard:
        state = guard.state_dict()
    with bw.Guard(other) as again:
        with pytest.raises(
            bw.UsageError, match=r"10 parameters, this one has 2; .* '0\.weight' there and 'weight' here"
        ):
            again.load_state_dict(state)
        with pytest.raises(bw.UsageError, match="version 7, expected 3"):
            again.load_state_dict({**state, "version": 7})
    with pytest.raises(bw.UsageError, match="not on yet"):
        bw.Guard(model()).state_dict()


def test_in_a_notebook_a_guard_is_started_and_closed_and_a_cell_run_twice_says_what_to_do() -> None:
    net = model()
    guard = bw.Guard(net).start()
    train(net, guard, 3)
    with pytest.raises(bw.UsageError, match=r"guarded already; .* close\(\) the earlier one first"):
        bw.Guard(net).start()
    guard.close()
    with bw.Guard(net) as again:
        train(net, again, 3)
    assert again.coverage()["steps"]["held"] == 3


SCRIPT = """
import os, sys, torch
import torch.distributed as dist, torch.multiprocessing as mp
from torch import nn

def steps(net, count):
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(count):
        net(torch.ones(2, 3)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

def worker(rank):
    store = dist.FileStore(sys.argv[1], 2)
    dist.init_process_group("gloo", rank=rank, world_size=2, store=store)
    steps(nn.parallel.DistributedDataParallel(nn.Linear(3, 2)), 4)
    dist.destroy_process_group()

if __name__ == "__main__":
    torch.set_num_threads(1)
    steps(nn.Linear(3, 1), 3)
    steps(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1)), 5)
    mp.spawn(worker, args=(), nprocs=2)
    sys.exit(3)
"""


@pytest.mark.ranks
def test_a_script_is_guarded_wherever_and_whenever_it_trains(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    done = script(["-m", "bitwitness", "run", str(path), str(tmp_path / "store")], tmp_path)
    assert done.returncode == 3, done.stderr
    assert "2 of 2 parameters, 4 steps" in done.stderr  # the children's model
    assert "2 of 2 parameters, 3 steps" in done.stderr  # the first model
    assert "4 of 4 parameters, 5 steps" in done.stderr  # the late one, from its first step on
