"""In-place operators are held against what they read, as the functional ones are."""

from __future__ import annotations

from contextlib import suppress

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from watching import found_in, suspected, watched

from bitwitness import Guard, TrainingStopped
from bitwitness.tap.inplace import functional_of
from bitwitness.testing import FaultyDevice, from_mapping


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


WORK = {
    "relu_": lambda x, _: x.relu_(),
    "silu_": lambda x, _: functional.silu(x, inplace=True),
    "hardswish_": lambda x, _: functional.hardswish(x, inplace=True),
    "hardtanh_": lambda x, _: functional.hardtanh(x, inplace=True),
    "tanh_": lambda x, _: x.tanh_(),
    "add_": lambda x, y: x.add_(y, alpha=2),
    "sub_": lambda x, y: x.sub_(y),
    "mul_": lambda x, y: x.mul_(y),
    "div_": lambda x, _: x.div_(0.9),
    "pow_": lambda x, _: x.pow_(2),
    "clamp_": lambda x, _: x.clamp_(-1, 1),
    "masked_fill_": lambda x, y: x.masked_fill_(y > 1, 0.5),
    "index_put_": lambda x, y: x.index_put_((torch.tensor([1, 2]),), y[:2]),
    "addmm_": lambda x, y: x.addmm_(y, y.new_ones(24, 24)),
    "zero_": lambda x, _: x.zero_(),
}


@pytest.mark.parametrize("op", WORK)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_wrong_element_is_found_at_the_operator_that_wrote_it(op, dtype) -> None:
    def run() -> None:
        WORK[op](drawn(16, 24).to(dtype), drawn(16, 24, seed=1).to(dtype))

    def spoil(out: Tensor) -> None:
        out[2, 7] = out[2, 7] * 30 + 40

    assert not suspected(run)
    assert f"./{op}#0" in str(found_in(run, op, 0, spoil).site)


def test_what_cannot_be_shown_otherwise_is_left_as_it_is() -> None:
    def run() -> None:
        x, y = drawn(16, 24), drawn(16, 24, seed=1)
        x[:, :12].add_(x[:, 12:])  # reads what lies beside
        x[:, ::2].relu_()
        x.bfloat16().add_(y)  # is not rounded as an operator's own result would be
        x.add_(y.t().contiguous().t()), x.mul_(x), x.add_(x)
        x.bernoulli_(0.5), x.normal_(), x.t_(), x.long().add_(1), x.to_sparse().mul_(2)
        x.gt_(0), x.squeeze_(), x.copy_(y.t()), x.resize_(3, 4)

    assert not suspected(run)
    assert functional_of(torch.ops.aten.bernoulli_.float) is None
    assert functional_of(torch.ops.aten.t_.default) is None
    assert functional_of(torch.ops.aten.relu.default) is None
    assert functional_of(torch.ops.aten.pow_.Scalar) is torch.ops.aten.pow.Tensor_Scalar


def test_all_of_them_are_counted_as_what_they_compute() -> None:
    checked = watched(lambda: [work(drawn(16, 24), drawn(16, 24, seed=1)) for work in WORK.values()])[1]
    assert {op.removesuffix("_") for op in WORK} <= set(checked)


class Net(nn.Module):
    """A small convnet as people write them: activations and dropout in place."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.ReLU(inplace=True), nn.MaxPool2d(2),
            nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.SiLU(inplace=True), nn.Dropout(0.1, inplace=True),
        )  # fmt: skip
        self.head = nn.Linear(16, 10)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.body(x)
        x += 0.1
        return functional.cross_entropy(self.head(x.mean((2, 3))), y)


def train(fault: dict[str, object] | None = None, *, guarded: bool = True) -> tuple[nn.Module, Guard]:
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    device = FaultyDevice(from_mapping({"fault": [fault]} if fault else {"fault": []}), rank=0, seed=0)
    guard = Guard(model, optimizer, deep_every=1, act="protect", quiet=True)
    with device:
        if guarded:
            guard.start()
        with suppress(TrainingStopped):
            for _ in range(14):
                optimizer.zero_grad()
                model(torch.randn(8, 3, 16, 16), torch.randint(0, 10, (8,))).backward()
                optimizer.step()
        guard.close()
    return model, guard


def test_trainings_with_in_place_operators_keep_their_bits_and_are_not_suspected() -> None:
    (plain, _), (model, guard) = train(guarded=False), train()
    assert all(map(torch.equal, plain.state_dict().values(), model.state_dict().values()))
    assert not guard.findings
    assert not guard.reporter.failures


@pytest.mark.parametrize("site", ["body.2/relu_", "body.6/silu_", "body.7/mul_", "./add_"])
@pytest.mark.parametrize("times", [1, None], ids=["once", "always"])
def test_a_fault_in_one_is_named_and_the_device_convicted(site, times) -> None:
    fault = {"site": f"{site}:forward.out0", "kind": "multiply", "factor": -40.0, "steps": [11], "pattern": "tile"}
    guard = train(fault | ({"times": 1} if times else {}))[1]
    assert site in str(guard.findings[0].site)
    cause = "transient_hardware" if times else "persistent_hardware"
    assert {str(verdict.cause) for verdict in guard.verdicts} == {cause}
