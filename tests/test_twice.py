"""Operators that nothing else checks are computed again on deep steps: what comes out otherwise is seen, proven and healed."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from bitwitness import Guard
from bitwitness.sense.twice import TwiceSensor, is_repeatable
from bitwitness.tap.modules import ModuleTracker
from bitwitness.tap.operators import OperatorTap
from bitwitness.testing import FaultyDevice, from_mapping

STRIKE = 11


class Tagger(nn.Module):
    """A recurrent model with what has no checksum: embedding, LSTM, batch norm, dropout, GELU, pooling, a loss with weights."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 32)
        self.lstm = nn.LSTM(32, 32, batch_first=True)
        self.norm = nn.BatchNorm1d(32)
        self.drop = nn.Dropout(0.1)
        self.head = nn.Linear(32, 50)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the loss of the next token of tokens [B, T + 1]."""
        hidden, _ = self.lstm(self.embed(tokens[:, :-1]))
        hidden = functional.max_pool1d(hidden, 1)
        hidden = self.norm(hidden.transpose(1, 2)).transpose(1, 2)
        scores = self.head(self.drop(functional.gelu(hidden)))
        return functional.cross_entropy(scores.flatten(0, 1), tokens[:, 1:].flatten())


def train(fault: dict | None = None, *, guarded: bool = True, steps: int = 14):
    torch.manual_seed(0)
    model = Tagger()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    device = FaultyDevice(from_mapping({"fault": [fault]} if fault else {"fault": []}), rank=0, seed=0)
    guard = Guard(model, optimizer, deep_every=1, act="protect", quiet=True)
    with device:
        if guarded:
            guard.start()
        for _ in range(steps):
            tokens = torch.randint(0, 50, (8, 17))
            optimizer.zero_grad()
            model(tokens).backward()
            optimizer.step()
        guard.close()
    return model, guard


def same(one: nn.Module, other: nn.Module) -> bool:
    return all(map(torch.equal, one.state_dict().values(), other.state_dict().values()))


@pytest.fixture(scope="module")
def plain() -> nn.Module:
    return train(guarded=False)[0]


def test_a_healthy_training_keeps_its_bits_and_its_running_statistics(plain) -> None:
    model, guard = train()
    assert same(model, plain)
    assert not guard.findings
    assert not guard.reporter.failures
    table = guard.coverage()["twice"]
    assert table["operators"] > 5
    assert table["do_not_repeat"] == []


@pytest.mark.parametrize(
    "site",
    [
        "*/nll_loss_forward:forward.out1",
        "*/gelu:forward.out0",
        "*/embedding:forward.out0",
        "*/embedding_dense_backward:backward.out0",
        "*/sum:backward.out0",
        "*/native_batch_norm:forward.out0",
        "*/native_batch_norm_backward:backward.out0",
    ],
)
def test_a_number_that_is_wrong_once_is_proven_and_healed(site, plain) -> None:
    model, guard = train({"site": site, "kind": "multiply", "factor": -3.0, "steps": [STRIKE], "times": 1})
    (verdict,) = guard.verdicts
    assert (str(verdict.cause), str(verdict.action), verdict.step) == ("transient_hardware", "healed", STRIKE)
    assert {"twice", "checksum"} & {f.sensor for f in guard.findings[:1]}
    assert site.partition("/")[2].partition(":")[0] in guard.findings[0].message
    assert same(model, plain)


def test_a_recurrent_layer_that_comes_out_otherwise_is_seen(plain) -> None:
    site = "*/mkldnn_rnn_layer:forward.out0"
    _, guard = train({"site": site, "kind": "multiply", "factor": -3.0, "steps": [STRIKE], "times": 1})
    told = {(f.sensor, f.step, f.site.op) for f in guard.findings}
    assert told == {(sensor, STRIKE, "mkldnn_rnn_layer") for sensor in ("checksum", "twice")}


def looked_at(run, sensor: TwiceSensor | None = None) -> tuple[TwiceSensor, list]:
    sensor = sensor or TwiceSensor(one_in=1)
    with OperatorTap(ModuleTracker(), sensor, sensor.select):
        run()
    return sensor, sensor.drain(0, 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_healthy_operators_repeat_their_bits(dtype) -> None:
    torch.manual_seed(3)
    x = torch.randn(6, 40).to(dtype)
    index = torch.randint(0, 40, (6, 40))

    def run() -> None:
        for one in (
            torch.exp,
            torch.sigmoid,
            torch.tanh,
            functional.silu,
            functional.relu,
            torch.rsqrt,
            torch.neg,
            torch.abs,
        ):
            one(x)
        x.sum(0), x.mean(), x.cumsum(1), x.sort(1), x.topk(3), x.amax(1), x.var(1), x.softmax(1)
        (
            torch.cat([x, x]),
            x.gather(1, index),
            x.scatter_add(1, index, x),
            torch.where(x > 0, x, -x),
            x.flip(1),
            x.clone(),
        )
        functional.max_pool1d(x, 2), functional.avg_pool1d(x, 2), functional.mse_loss(x, x.roll(1))
        functional.conv1d(x[None, :, :], x[:, None, :3].repeat(1, 6, 1)), x.repeat(2, 1), functional.pad(x, (1, 1))
        (x / x.add(3)).square().reciprocal()

    sensor, found = looked_at(run)
    assert not found
    assert len(sensor.calls) > 20
    assert sensor.coverage()["do_not_repeat"] == []


def test_what_draws_writes_or_shows_is_not_computed_again() -> None:
    aten = torch.ops.aten
    for func in (aten.add_.Tensor, aten.view.default, aten.empty_like.default, aten.t.default, aten.relu_.default):
        assert not is_repeatable(func), func
    torch.manual_seed(5)
    x = torch.randn(300)
    state = torch.get_rng_state()

    def run() -> None:
        functional.dropout(x), torch.bernoulli(x.sigmoid()), torch.rand_like(x), torch.randperm(30)

    run()
    expected = torch.get_rng_state()
    torch.set_rng_state(state)
    sensor, found = looked_at(run)
    assert torch.equal(torch.get_rng_state(), expected)
    assert not found
    assert not {"bernoulli", "rand_like", "native_dropout", "randperm"} & set(sensor.calls)


def test_results_that_are_sparse_or_nested_are_left_alone() -> None:
    embed = nn.Embedding(40, 8, sparse=True)
    nested = torch.nested.nested_tensor([torch.randn(3, 4), torch.randn(2, 4)], layout=torch.jagged)

    def run() -> None:
        embed(torch.randint(0, 40, (5,))).sum().backward()
        torch.sparse.mm(torch.eye(4).to_sparse(), torch.randn(4, 4))
        torch.sigmoid(nested)
        torch.randn(3, dtype=torch.complex64).exp()

    _, found = looked_at(run)
    assert not found


def test_large_operators_take_turns_and_small_ones_are_always_looked_at() -> None:
    large, small = torch.randn(600, 600), torch.randn(20)
    sensor = TwiceSensor(one_in=4)
    for _ in range(4):
        looked_at(lambda: [torch.exp(large), torch.exp(small), torch.exp(large)], sensor)
    assert sensor.calls["exp"] == 4 + 2


@pytest.mark.parametrize("names", [("mm", "addmm"), ("gelu", "_softmax", "_log_softmax")])
def test_a_script_whose_own_mode_changes_results_convicts_nobody(names) -> None:
    class Rounding(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            return (result * 8).round() / 8 if func.overloadpacket.__name__ in names else result

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with Guard(model, optimizer, deep_every=1, act="protect", quiet=True) as guard:
        for _ in range(20):
            with Rounding():
                optimizer.zero_grad()
                scores = model(torch.randn(32, 64))
                functional.cross_entropy(scores, torch.randint(0, 10, (32,))).backward()
            optimizer.step()
    assert not guard.verdicts
    assert not [finding for finding in guard.findings if finding.sensor in ("checksum", "twice")]
    assert [line for line in guard.coverage()["not_covered"] if "the script's Rounding was on" in line]


def test_an_operator_that_does_not_repeat_its_bits_is_left_alone_and_named() -> None:
    library = torch.library.Library("aten", "IMPL")
    calls = []

    def unsteady(x: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return x + len(calls)

    sensor = TwiceSensor()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that an operator of torch's is replaced
        library.impl("special_entr", unsteady, "CPU")
    try:
        for _ in range(3):
            assert not looked_at(lambda: torch.special.entr(torch.ones(8)), sensor)[1]
    finally:
        library._destroy()
    assert sensor.coverage()["do_not_repeat"] == ["special_entr on cpu"]
    assert len(calls) == 3 + 3  # the first call thrice again; then never


def test_sparse_gradients_do_not_disturb_a_training() -> None:
    torch.manual_seed(0)
    embed, head = nn.Embedding(40, 8, sparse=True), nn.Linear(8, 3)
    model = nn.Sequential(embed, head)
    optimizers = [torch.optim.SparseAdam(embed.parameters(), 1e-2), torch.optim.SGD(head.parameters(), 1e-2)]
    with Guard(model, optimizers[1], deep_every=1, quiet=True) as guard:
        for _ in range(6):
            for optimizer in optimizers:
                optimizer.zero_grad()
            model(torch.randint(0, 40, (9,))).square().mean().backward()
            for optimizer in optimizers:
                optimizer.step()
    assert not guard.reporter.failures
    assert not [line for line in guard.coverage()["not_covered"] if "cannot be told" in line]
