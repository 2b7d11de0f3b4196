"""A model computes wrongly in another one's step: whose gradients come from there is healed, too."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional

from bitwitness import Guard
from bitwitness.testing import FaultyDevice, from_mapping


def train(
    fault: dict[str, object] | None = None, *, guarded: bool = True, times: int = 1
) -> tuple[list[nn.Module], list[Guard]]:
    """Train a GAN; the critic's are the even steps, and the generator's the odd ones, if it steps once a round."""
    torch.manual_seed(7)
    generator = nn.Sequential(nn.Linear(8, 32), nn.ReLU(inplace=True), nn.Linear(32, 16), nn.Tanh())
    critic = nn.Sequential(nn.Linear(16, 32), nn.LeakyReLU(0.2, inplace=True), nn.Linear(32, 1))
    models = [generator, critic]
    optimizers = [torch.optim.Adam(model.parameters(), 1e-3) for model in models]
    ones, zeros = torch.ones(24, 1), torch.zeros(24, 1)
    loss = functional.binary_cross_entropy_with_logits
    guards = [
        Guard(model, optimizer, deep_every=1, act="protect", quiet=True)
        for model, optimizer in zip(models, optimizers, strict=True)
    ]
    with FaultyDevice(from_mapping({"fault": [fault] if fault else []}), rank=0, seed=0):
        for guard in guards if guarded else ():
            guard.start()
        for _ in range(14):
            critic.zero_grad()
            fake = generator(torch.randn(24, 8))
            (loss(critic(torch.randn(24, 16)), ones) + loss(critic(fake.detach()), zeros)).backward()
            optimizers[1].step()
            for _ in range(times):
                generator.zero_grad()
                loss(critic(generator(torch.randn(24, 8))), ones).backward()
                optimizers[0].step()
        for guard in guards if guarded else ():
            guard.close()
    return models, guards


def same(one: list[nn.Module], other: list[nn.Module]) -> bool:
    return all(
        torch.equal(a, b)
        for x, y in zip(one, other, strict=True)
        for a, b in zip(x.state_dict().values(), y.state_dict().values(), strict=True)
    )


@pytest.fixture(scope="module")
def plain() -> list[nn.Module]:
    return train(guarded=False)[0]


def test_a_healthy_training_of_two_is_not_suspected(plain) -> None:
    models, guards = train()
    assert same(models, plain)
    assert not any(guard.findings or guard.verdicts or guard.reporter.failures for guard in guards)


@pytest.mark.parametrize("op", ["1/leaky_relu_:forward", "0/mm:backward"])
@pytest.mark.parametrize("step", [18, 19], ids=["its own", "the generator's"])
def test_a_critic_that_computes_wrongly_once_spoils_no_generator(op, step, plain) -> None:
    fault = {"site": op, "kind": "multiply", "factor": -50.0, "pattern": "tile", "steps": [step], "times": 1}
    models, guards = train(fault)
    causes = {str(verdict.cause) for guard in guards for verdict in guard.verdicts}
    assert causes == {"transient_hardware"}
    assert same(models, plain)


def test_a_generator_that_steps_again_before_its_critic_is_asked_once() -> None:
    fault = {
        "site": "1/leaky_relu_:forward",
        "kind": "multiply",
        "factor": -50.0,
        "pattern": "tile",
        "steps": [41],
        "times": 1,
    }
    (models, guards), plain = train(fault, times=3), train(guarded=False, times=3)[0]
    assert [str(verdict.cause) for verdict in guards[0].verdicts] == ["transient_hardware"]
    assert same(models, plain)
