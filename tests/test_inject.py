"""Fault injection: when and where a fault strikes, and that it stays away else."""

import os
import random
import sys
import threading
from contextlib import nullcontext

import numpy as np
import pytest
import torch
import torch.distributed as dist
from ranks import forked
from torch import nn

import bitwitness as bw
from bitwitness import ConfigError
from bitwitness.inject.schedule import triggers_of
from bitwitness.session.clock import StepClock
from bitwitness.tap.ownwork import own_work
from bitwitness.testing import Fault, FaultyDevice


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(8, 16)
        self.fc2 = nn.Linear(16, 4)

    def forward(self, x):
        return self.fc2(torch.relu(self.fc1(x)))


def net(seed=0):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return Net()


def train(model, steps=4, optimizer=None, replays=0):
    """Train; return each execution's loss. A step is run ``1 + replays`` times before the optimizer steps."""
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=1e-2)
    data = torch.randn(steps, 6, 8, generator=torch.Generator().manual_seed(1))
    losses = []
    for batch in data:
        for _ in range(1 + replays):
            optimizer.zero_grad()
            loss = model(batch).square().mean()
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
    return losses


def struck_sites(device):
    return [str(firing.site.short) for firing in device.fired]


# -- the device ----------------------------------------------------------------------------------------------


def test_a_device_that_does_not_fire_leaves_bits_and_randomness_alone():
    def run(context):
        torch.manual_seed(0)
        np.random.seed(0)
        random.seed(0)
        model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.5), nn.Linear(16, 4))
        with context:
            losses = train(model)
        drawn = (torch.rand(1).item(), np.random.rand(), random.random())
        return losses, [p.detach().clone() for p in model.parameters()], drawn

    hooks = len(nn.modules.module._global_forward_pre_hooks)
    faults = [
        Fault(kind="bitflip", from_step=1000),
        Fault(kind="bitflip", probability=1e-12),
        Fault(kind="nullify", site="nowhere.*"),
        Fault(kind="nullify", rank=3),
    ]
    device = FaultyDevice(faults)
    plain, watched = run(nullcontext()), run(device)
    assert device.fired == []
    assert plain[0] == watched[0]
    assert all(torch.equal(a, b) for a, b in zip(plain[1], watched[1], strict=True))
    assert plain[2] == watched[2]
    assert len(nn.modules.module._global_forward_pre_hooks) == hooks


@pytest.mark.parametrize(
    ("glob", "expected"),
    [
        ("fc1/addmm:forward", ["fc1/addmm#0:forward.out0"]),
        ("fc1/mm:backward", ["fc1/mm#0:backward.out0"]),
        ("fc2/mm:backward", ["fc2/mm#0:backward.out0", "fc2/mm#1:backward.out0"]),
        ("*/mm#1:backward", ["fc2/mm#1:backward.out0"]),
        ("./relu", ["./relu#0:forward.out0"]),
        ("*/threshold_backward", ["./threshold_backward#0:backward.out0"]),
        ("./_foreach_lerp_:*.out2", ["./_foreach_lerp_#0:forward.out2"]),
    ],
)
def test_sites_are_selected_by_glob(glob, expected):
    model = net()
    with FaultyDevice([Fault(kind="multiply", site=glob, steps=[1], factor=1.5)]) as device:
        train(model, optimizer=torch.optim.AdamW(model.parameters(), foreach=True))
    assert struck_sites(device) == expected
    assert {firing.step for firing in device.fired} == {1}
    assert all(firing.changed <= 1 for firing in device.fired)


def test_forward_and_backward_are_computed_wrongly():
    x = torch.ones(2, 8)
    clean, model = net(), net()
    clean(x).sum().backward()
    faults = [Fault(kind="nullify", site="fc2/mm:backward", pattern="all")]
    with FaultyDevice(faults):
        y = model(x)
        y.sum().backward()
    assert torch.equal(y, clean(x))
    assert torch.equal(model.fc2.bias.grad, clean.fc2.bias.grad)
    different = sum(
        not torch.equal(p.grad, q.grad) for p, q in zip(model.parameters(), clean.parameters(), strict=True)
    )
    assert different == 3  # all but fc2's bias, whose gradient is no matmul
    with FaultyDevice([Fault(kind="bitflip", site="fc1/addmm", element=3, bit=30)], model=model):
        corrupt = model.fc1(x)
    assert torch.nonzero(corrupt != clean.fc1(x)).tolist() == [[0, 3]]


def test_in_place_and_several_outputs_are_struck_and_views_are_not():
    x = torch.ones(4, 8)
    with FaultyDevice([Fault(kind="nullify", pattern="all")]) as device:
        view = x.view(8, 4).t()[1:].detach()
        torch.ops.aten._unsafe_view(x, [32])
        torch.empty(3).resize_(4)
    assert device.fired == []
    assert view.sum() == 24
    with FaultyDevice([Fault(kind="nullify", pattern="all", site="*/mul_")]) as device:
        y = x.clone()
        assert y.mul_(3) is y
    assert y.sum() == 0
    assert x.sum() == 32
    with FaultyDevice([Fault(kind="nullify", pattern="all", site="*/native_layer_norm:*.out2")]) as device:
        out, mean, rstd = torch.native_layer_norm(x + torch.arange(8.0), [8], None, None, 0.0)
    assert rstd.sum() == 0
    assert mean.sum() != 0
    assert out.abs().sum() != 0
    assert struck_sites(device) == ["./native_layer_norm#0:forward.out2"]


def test_integers_short_tensors_and_narrow_dtypes_are_not_struck():
    faults = [Fault(kind="bitflip", bit=20), Fault(kind="nullify", element=9)]
    with FaultyDevice(faults) as device:
        torch.arange(20) + 1
        torch.ones(4, dtype=torch.bfloat16) + 1
    assert device.fired == []


def test_sparse_gradients_pass_through():
    table = nn.Embedding(10, 4, sparse=True)
    with FaultyDevice([Fault(kind="multiply", pattern="all", site="*:*ward")]) as device:
        table(torch.tensor([1, 2])).sum().backward()
        torch.optim.SparseAdam(table.parameters()).step()
    assert table.weight.grad.is_sparse
    assert device.fired


def test_a_transient_does_not_strike_the_replay_and_a_persistent_fault_does():
    clean = train(net(), replays=2)
    site = "fc2/addmm:forward"
    with FaultyDevice([Fault(kind="exponent_msb", site=site, steps=[2], times=1)]) as device:
        transient = train(net(), replays=2)
    assert [firing.step for firing in device.fired] == [2]
    assert [i for i in range(12) if transient[i] != clean[i]] == [6]
    with FaultyDevice([Fault(kind="multiply", site=site, from_step=2, element=0)]) as device:
        persistent = train(net(), replays=2)
    assert [firing.step for firing in device.fired] == [2, 2, 2, 3, 3, 3]
    assert persistent[6] == persistent[7] == persistent[8] != clean[6]


def test_intermittent_faults_strike_as_often_as_declared():
    x = torch.ones(50, 20)
    with FaultyDevice([Fault(kind="multiply", site="*/neg", probability=0.2)], seed=5) as device:
        for _ in range(500):
            torch.neg(x)
    assert 70 < len(device.fired) < 130
    with FaultyDevice([Fault(kind="multiply", site="*/neg", element_probability=1e-3)], seed=5) as elements:
        for _ in range(500):
            torch.neg(x)
    assert 420 < sum(firing.changed for firing in elements.fired) < 580
    again = FaultyDevice([Fault(kind="multiply", site="*/neg", probability=0.2)], seed=5)
    with again:
        for _ in range(500):
            torch.neg(x)
    assert again.fired == device.fired


def test_weights_are_struck_after_the_optimizers_step():
    model, clean = net(), net()
    train(clean, steps=3)
    fault = Fault(kind="bitflip", site="fc1.weight/weight:param", steps=[2], element=5, bit=28)
    with FaultyDevice([fault]) as device:
        train(model, steps=3)
    assert struck_sites(device) == ["fc1.weight/weight#0:param.out0"]
    assert device.fired[0].changed == 1
    assert torch.nonzero(model.fc1.weight.flatten() != clean.fc1.weight.flatten()).tolist() == [[5]]
    assert torch.equal(model.fc2.weight, clean.fc2.weight)


def test_optimizer_state_is_struck_and_unseen_models_are_named_if_given():
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    fault = Fault(kind="nullify", site="fc2.*/exp_avg:optim", steps=[0], pattern="all")
    with FaultyDevice([fault], model=model) as device:
        train(model, steps=1, optimizer=optimizer)
    assert struck_sites(device) == ["fc2.weight/exp_avg#0:optim.out0", "fc2.bias/exp_avg#0:optim.out0"]
    assert optimizer.state[model.fc2.weight]["exp_avg"].abs().sum() == 0
    assert optimizer.state[model.fc1.weight]["exp_avg"].abs().sum() > 0
    assert optimizer.state[model.fc2.weight]["exp_avg_sq"].abs().sum() > 0

    lone = nn.Parameter(torch.ones(3, requires_grad=True))
    with FaultyDevice([Fault(kind="nullify", site="*:param")]) as device:
        lone.sum().backward()
        torch.optim.SGD([lone], lr=0.1).step()
    assert struck_sites(device) == ["param_groups.0.0/0#0:param.out0"]


def test_only_faults_of_this_rank_count_and_a_given_clock_is_obeyed():
    clock = StepClock(7)
    faults = [
        Fault(kind="nullify", site="*/neg", rank=1),
        Fault(kind="nullify", site="*/neg", rank=0, steps=[7]),
    ]
    with FaultyDevice(faults, rank=0, clock=clock) as device:
        torch.neg(torch.ones(2))
        clock.end_step()
        clock.begin_forward()
        torch.neg(torch.ones(2))
    (firing,) = device.fired
    assert (firing.step, firing.fault, firing.site.rank, firing.site.step) == (7, 1, 0, 7)


def test_evaluation_does_not_count_steps_and_a_scaler_that_skips_does():
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    with FaultyDevice([Fault(kind="bitflip", site="*/neg")]) as device:
        for _ in range(2):
            scaler.scale(model(torch.full((2, 8), float("inf"))).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
            with torch.no_grad():
                model(torch.ones(2, 8))
            torch.neg(torch.ones(2))
    assert [firing.step for firing in device.fired] == [0, 1]


def test_the_guards_own_operators_run_on_the_same_device():
    with FaultyDevice([Fault(kind="nullify", pattern="all", site="(bitwitness)/*")]) as device:
        healthy = torch.neg(torch.ones(2))
        with own_work():
            check = torch.neg(torch.ones(2))
    assert healthy.tolist() == [-1, -1]
    assert check.tolist() == [0, 0]
    assert {firing.site.module for firing in device.fired} == {"(bitwitness)"}


def test_what_is_told_of_a_fault_names_the_models_own_site_and_a_glob_without_an_operator():
    x = torch.ones(4)
    with FaultyDevice([Fault(kind="nullify"), Fault(kind="nullify", site="*mm:forward")]) as device:
        with own_work():
            x + 1
        x.neg()
    first, second = device.told()
    assert first.startswith("fault 0 (nullify at *) struck 2 times, first in step 0 at ")
    assert "/neg#0:forward.out0 on rank 0" in first
    assert (
        "never struck on rank 0: nothing of that site, which names modules and no operator (that is MODULE/" in second
    )


def test_a_model_that_runs_in_another_thread_is_not_struck_and_that_is_said():
    net = torch.nn.Linear(2, 2)
    with FaultyDevice([Fault(kind="nullify", site="*/addmm")]) as device:
        worker = threading.Thread(target=net, args=(torch.ones(1, 2),))
        worker.start()
        worker.join()
    (told,) = device.told()
    assert "never struck on rank 0: models ran in other threads than the one that entered the device" in told


def test_from_environment(tmp_path, monkeypatch):
    monkeypatch.delenv("BITWITNESS_INJECT", raising=False)
    assert FaultyDevice.from_environment() is None
    (tmp_path / "faults.toml").write_text('[[fault]]\nkind = "nullify"\nsite = "*/neg"\nrank = 3\n')
    monkeypatch.setenv("BITWITNESS_INJECT", str(tmp_path / "faults.toml"))
    with FaultyDevice.from_environment(rank=3) as device:
        torch.neg(torch.ones(2))
    assert len(device.fired) == 1


# -- collectives ---------------------------------------------------------------------------------------------

COMM_CASES = {
    "contribution": [Fault(kind="nullify", pattern="all", site="*/allreduce_:comm.in0", rank=1)],
    "delivery": [Fault(kind="nullify", pattern="all", site="*/allreduce_:comm.out0", rank=1)],
    "gathered": [Fault(kind="multiply", pattern="all", factor=10.0, site="*/*gather*:comm.in0", rank=1)],
    "functional": [Fault(kind="multiply", pattern="all", factor=10.0, site="*/all_reduce:comm.out0", rank=0)],
}


def sharded_neg(rank):
    """Return the local sums of a DTensor's negation and of a sharded parameter; faults nullify one each."""
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2,))
    placements = [torch.distributed.tensor.Shard(0)]
    sharded = torch.distributed.tensor.DTensor.from_local(torch.ones(2, 3), mesh, placements)
    weight = nn.Parameter(sharded.clone())
    faults = [
        Fault(kind="nullify", pattern="all", site="*/neg", rank=1),
        Fault(kind="nullify", pattern="all", site="*:param", rank=0),
    ]
    with FaultyDevice(faults, rank=rank):
        out = torch.neg(sharded)
        weight.grad = torch.zeros_like(weight)
        torch.optim.SGD([weight], lr=0.1).step()
    return [out.to_local().sum().item(), weight.detach().to_local().sum().item()]


def rank_main(rank, store):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    results = {}
    for case, faults in COMM_CASES.items():
        model = net()
        wrapped = nn.parallel.DistributedDataParallel(model)
        with FaultyDevice(faults, rank=rank) as device:
            wrapped(torch.full((2, 8), rank + 1.0)).sum().backward()
            sent = torch.full((2,), rank + 1.0)
            received = [torch.zeros(2), torch.zeros(2)]
            dist.all_gather(received, sent)
            functional = dist._functional_collectives.all_reduce(sent, "sum", dist.group.WORLD) + 0
        results[case] = {
            "grad": model.fc2.bias.grad.tolist(),
            "sent": sent.tolist(),
            "received": [x[0].item() for x in received],
            "functional": functional.tolist(),
            "sites": struck_sites(device),
        }
        del wrapped
    results["sharded"] = sharded_neg(rank)
    torch.save(results, f"{store}.{rank}")
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.ranks
@pytest.mark.skipif(not dist.is_available(), reason="this torch is built without torch.distributed")
def test_collectives_of_two_ranks(tmp_path):
    store = tmp_path / "store"
    launched = forked(2, [__file__, str(store)], tmp_path / "logs")
    assert launched.code == 0, [log.read_text() for log in launched.logs]
    first, second = (torch.load(f"{store}.{rank}") for rank in range(2))
    # each rank's local gradient of fc2's bias is 2 (a batch of two, summed); the reducer averages
    assert first["contribution"]["grad"] == second["contribution"]["grad"] == [1.0] * 4
    assert second["contribution"]["sites"] == ["./allreduce_#0:comm.in0"]
    assert first["contribution"]["sites"] == []
    assert first["delivery"]["grad"] == [2.0] * 4
    assert second["delivery"]["grad"] == [0.0] * 4
    assert first["gathered"]["received"] == second["gathered"]["received"] == [1.0, 20.0]
    assert second["gathered"]["sent"] == [2.0, 2.0]  # what it read in its memory is untouched
    assert first["functional"]["functional"] == [30.0, 30.0]
    assert second["functional"]["functional"] == [3.0, 3.0]
    assert first["functional"]["sites"] == ["./all_reduce#0:comm.out0"]
    assert first["sharded"] == [-6.0, 0.0]
    assert second["sharded"] == [0.0, 6.0]


@pytest.mark.parametrize("how", [{}, {"probability": 0.4}])
def test_the_training_is_struck_alike_whether_a_guard_asks_or_not(how):
    def run(guard):
        model = net()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        fault = Fault(kind="multiply", factor=1e4, site="fc1/addmm:forward", from_step=2, **how)
        with FaultyDevice([fault]), bw.Guard(model, optimizer, deep_every=1) if guard else nullcontext() as watch:
            return train(model, steps=8, optimizer=optimizer), watch

    losses, guard = run(guard=True)
    assert guard.verdicts
    assert losses == run(guard=False)[0]


def test_a_fault_of_a_slot_follows_the_device_whichever_rank_computes_on_it(monkeypatch):
    fault = Fault(kind="nullify", slot=2)
    for rank, local_rank, slots, struck in ((2, "2", "", 1), (0, "0", "2,3", 1), (2, "2", "0,1,3", 0), (2, "0", "", 0)):
        monkeypatch.setenv("LOCAL_RANK", local_rank)
        monkeypatch.setenv("BITWITNESS_SLOTS", slots)
        assert len(triggers_of([fault], seed=0, rank=rank)) == struck
    with pytest.raises(ConfigError, match="rank and slot are both given"):
        Fault(kind="nullify", rank=1, slot=1)


if __name__ == "__main__":  # a rank of `test_collectives_of_two_ranks`
    rank_main(int(os.environ["RANK"]), sys.argv[1])
