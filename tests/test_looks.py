"""Looks at what modules compute on light steps: what they see, what they leave alone, and what they say they cannot see."""

from __future__ import annotations

import contextlib

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import bitwitness as bw
from bitwitness.capture.light import LightStep
from bitwitness.capture.lookedat import modules_to_look_at
from bitwitness.capture.looks import ModuleLooks
from bitwitness.sense.weights import WeightsSensor
from bitwitness.stats.rows import sample

LIGHT = {"deep_every": 0, "self_test": False, "replay": {"calibrate": False}}


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(width)
        self.gate, self.up = nn.Linear(width, 2 * width, bias=False), nn.Linear(width, 2 * width, bias=False)
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Net(nn.Module):
    """Gated blocks; one returns a tuple with None in it, one part is called twice, one not at all."""

    def __init__(self, width: int = 32, *, recompute: bool = False) -> None:
        super().__init__()
        self.enter = nn.Linear(8, width)
        self.layers = nn.ModuleList(Block(width) for _ in range(2))
        self.lstm = nn.LSTM(width, width, batch_first=True)
        self.idle = nn.Linear(width, width)
        self.head = nn.Linear(width, 4)
        self.recompute = recompute

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.enter(x)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.recompute else layer(x)
        x, _ = self.lstm(x)
        return self.head(x) + self.head(torch.dropout(x, 0.1, True))


def train(net: nn.Module, steps: int, *, strike: tuple[str, int] | None = None, **settings) -> bw.Guard | None:
    """Train; at one step a tile of a module's output is multiplied by thousands. Without settings there is no guard."""
    torch.manual_seed(1)
    optimizer = torch.optim.AdamW(net.parameters(), 1e-3)
    with bw.Guard(net, optimizer, **settings) if settings else contextlib.nullcontext() as guard:
        for step in range(steps):
            if strike is not None and step == strike[1]:
                handle = net.get_submodule(strike[0]).register_forward_hook(_tile)
            x = torch.randn(16, 16, 8)
            net(x).sub(x[..., :4].cumsum(1)).square().mean().backward()
            torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            if strike is not None and step == strike[1]:
                handle.remove()
    return guard


def _tile(_module: nn.Module, _args: object, result: object) -> object:
    tensor = result[0] if isinstance(result, tuple) else result
    mask = torch.ones_like(tensor).flatten(0, -2)
    mask[32:48, :16] = 4096.0
    struck = tensor * mask.view_as(tensor)
    return (struck, *result[1:]) if isinstance(result, tuple) else struck


@pytest.mark.parametrize("module", ["layers.0.up", "layers.1.up", "lstm"])
def test_a_tile_is_seen_in_its_step_where_it_was_made(module: str, capfd: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    guard = train(Net(), 42, strike=(module, 40), **LIGHT)
    said = capfd.readouterr().err
    assert f"step 40: suspicion (activations): {module}: " in said
    assert "of the output is" in said
    assert ", its usual " in said
    assert guard.coverage()["suspicions"] == 1
    assert guard.coverage()["failures"] == {}


@pytest.mark.parametrize("recompute", [False, True])
def test_a_guarded_run_has_the_bits_of_an_unguarded_one_and_no_hook_is_left(recompute: bool) -> None:
    ends = []
    for settings in ({}, LIGHT):
        torch.manual_seed(0)
        net = Net(recompute=recompute)
        guard = train(net, 30, **settings)
        ends.append([*(p.detach().clone() for p in net.parameters()), torch.get_rng_state()])
        assert not any(module._forward_hooks for module in net.modules())
    assert all(torch.equal(a, b) for a, b in zip(*ends, strict=True))
    assert guard.coverage()["suspicions"] == 0


def test_what_is_called_twice_or_never_and_recomputed_is_counted_once_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bitwitness.capture.lookedat._MODULES", 32)  # all of them
    torch.manual_seed(0)
    seen = {}
    for recompute in (False, True):
        net = Net(recompute=recompute)
        net.load_state_dict(seen["state"]) if seen else seen.update(state=net.state_dict())
        looks = ModuleLooks(net)
        torch.manual_seed(5)
        looks.forward_begins()
        result = net(torch.randn(4, 16, 8))
        looks.forward_ended()
        result.square().mean().backward()
        keys, table = looks.take(torch.device("cpu"))
        calls = {path: sum(key[:2] == (i, 0) for key in keys) for i, path in enumerate(looks.paths)}
        assert (calls["head"], calls["idle"], calls["layers.0.gate"]) == (2, 0, 1)
        seen[recompute] = looks.looks(keys, table.double().numpy(), 1.0).figures
        assert np.isnan(seen[recompute][:, :, looks.paths.index("idle")]).all()
        looks.close()
    assert np.array_equal(seen[False][0], seen[True][0], equal_nan=True)


def test_loss_scale_and_number_of_micro_batches_do_not_move_what_is_seen() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    looks, found = ModuleLooks(net), []
    for scale, times in ((1.0, 1), (1024.0, 3)):
        for _ in range(times):
            looks.forward_begins()
            result = net(torch.ones(8, 4))
            looks.forward_ended()
            (result.sum() * scale).backward()
        keys, table = looks.take(torch.device("cpu"))
        found.append(looks.looks(keys, table.double().numpy(), scale).figures)
    np.testing.assert_allclose(found[0], found[1], rtol=1e-5)


def test_evaluations_and_calls_of_parts_alone_meet_no_hook() -> None:
    net = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    with bw.Guard(net, optimizer, **LIGHT):
        net(torch.randn(2, 3, 8)).sum().backward()
        optimizer.step()
        inner = [module for name, module in net.named_modules() if name]
        assert not any(module._forward_hooks for module in inner)


def test_results_that_cannot_be_read_are_named_and_the_training_goes_on() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4)
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, x):
            return None if x is None else {"told": "nothing", "much": self.inner(x) * self.scale}

    class Holder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.odd = Odd()

        def forward(self, x):
            self.odd(None)
            return self.odd(x)["much"]

    net = Holder()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    with bw.Guard(net, optimizer, **LIGHT) as guard:
        for _ in range(3):
            net(torch.randn(2, 4)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    table = guard.coverage()
    assert table["failures"] == {}
    assert any(
        "results of odd cannot be read: it returned no tensor of real numbers but NoneType" in gap
        for gap in table["not_covered"]
    )


def test_a_recurrent_layers_packed_result_is_read() -> None:
    class Packed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn, self.head = nn.LSTM(4, 8, batch_first=True), nn.Linear(8, 2)

        def forward(self, x):
            packed = nn.utils.rnn.pack_padded_sequence(x, [5, 3], batch_first=True)
            out, _ = self.rnn(packed)
            return self.head(out.data)

    net = Packed()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    with bw.Guard(net, optimizer, **LIGHT) as guard:
        for _ in range(3):
            net(torch.randn(2, 5, 4)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert not any("cannot be read" in gap for gap in guard.coverage()["not_covered"])


def test_rows_that_torch_scales_in_the_forward_are_no_suspicion() -> None:
    torch.manual_seed(9)
    table, head = nn.Embedding(100, 8, max_norm=1.0), nn.Linear(8, 2)
    net = nn.Sequential(table, head)
    optimizer = torch.optim.Adam(net.parameters(), 1e-2)
    with bw.Guard(net, optimizer, **LIGHT) as guard:
        for _ in range(80):
            ids = torch.randint(0, 100, (8,))
            nn.functional.cross_entropy(net(ids), ids % 2).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert guard.findings == []


def test_a_parameter_that_the_forward_itself_changes_is_named() -> None:
    table, head = nn.Embedding(100, 8, max_norm=1.0), nn.Linear(8, 2)
    net = nn.Sequential(table, head)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    with bw.Guard(net, optimizer, quiet=True) as guard:
        for _ in range(20):
            ids = torch.randint(0, 100, (8,))
            nn.functional.cross_entropy(net(ids), ids % 2).backward()
            optimizer.step()
            optimizer.zero_grad()
    told = " ".join(guard.coverage()["not_covered"])
    assert "forward and the optimizer step: 0.weight (max_norm has the forward itself change it)" in told


def test_few_modules_are_looked_at_in_a_large_model() -> None:
    net = nn.Module()
    net.layers = nn.ModuleList(Block(4) for _ in range(100))
    chosen = modules_to_look_at(net)
    assert len(chosen) == 8
    assert sum(one.path.count(".") == 1 for one in chosen) >= 4  # blocks among them
    assert chosen[-1].path.startswith("layers.99")


@pytest.mark.parametrize(
    "value",
    [
        torch.arange(4096.0).view(64, 64),
        torch.arange(4096.0).view(4, 16, 8, 8).to(memory_format=torch.channels_last),
        torch.arange(4096.0).view(64, 64).t(),
        torch.arange(64.0).expand(64, 64),
        torch.arange(4096.0),
        torch.tensor(3.0),
        torch.zeros(0, 3),
        torch.ones(64, 64).to(torch.float8_e4m3fn),
        torch.ones(64, 64).to_sparse(),
    ],
)
def test_samples_of_any_layout_are_bounded(value: torch.Tensor) -> None:
    rows = sample(value, 512, 3)
    assert rows.dim() == 2
    assert rows.numel() <= max(512, rows.shape[1])


def _weights(step: int, spoil: float = 1.0, common: float = 1.0) -> LightStep:
    moved = np.cumsum(np.random.default_rng(0).normal(1e-3, 2e-4, (200, 2, 8)), axis=0)[step]
    weights = np.exp(moved) * common
    weights[1, 3] *= spoil
    return LightStep(step, 0, tuple(f"w{i}" for i in range(8)), np.ones(8), np.ones(8), weights=weights)


def test_weights_names_the_parameter_whose_largest_value_jumped_and_not_a_loaded_checkpoint() -> None:
    sensor = WeightsSensor(8, z=9.0)
    for step in range(60):
        assert not sensor.look(_weights(step))
        sensor.learn(_weights(step))
    (found,) = sensor.look(_weights(60, spoil=1.2))
    assert found.message.startswith("w3: its largest value went from ")
    assert not sensor.look(_weights(60, common=3.0))
