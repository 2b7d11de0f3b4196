"""The price: what it buys, on made-up times; and that a real guard keeps to what it says."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import bitwitness as bw
from bitwitness.guard.budget import RAREST, Budget, Plan
from bitwitness.store.told import told_of


def measured(
    price: float, *, step: float = 1.0, own: float = 0.004, deep: float = 0.25, checks: float = 0.15
) -> Budget:
    budget = Budget(price)
    for _ in range(20):
        budget.note_light(0.8 * step, own * step, step)
    for _ in range(3):
        budget.note_deep((0.8 + deep) * step, checks * step, 1)
    return budget


@pytest.mark.parametrize("price", [0.01, 0.02, 0.05, 0.1])
def test_the_plan_spends_the_price_and_no_more(price: float) -> None:
    budget = measured(price)
    plan = budget.propose()
    spent = 0.004 + 0.25 / plan.every
    assert spent <= price
    assert plan == Plan(plan.every, 1)
    assert 0.004 + 0.25 / (plan.every - 1) > price
    assert budget.report(plan)["measured"] == pytest.approx(spent, rel=0.01)


def test_where_deep_steps_are_dear_everything_is_still_looked_at_in_a_hundred_steps() -> None:
    budget = measured(0.01, deep=5.0, checks=4.0)
    assert budget.propose() == Plan(RAREST)
    assert budget.report(Plan(RAREST))["persistent_wrong_product_seen_within"] == RAREST
    assert budget.report(Plan(RAREST))["exceeded"]


def test_where_that_would_take_a_tenth_of_the_time_a_share_of_the_products_is_looked_at() -> None:
    budget = measured(0.01, deep=20.0, checks=18.0)
    plan = budget.propose()
    assert plan.every == RAREST
    assert 1 < plan.one_in <= 4
    assert budget.report(plan)["persistent_wrong_product_seen_within"] == RAREST * plan.one_in


def test_a_price_that_light_steps_alone_exceed_is_said_to_be_exceeded() -> None:
    budget = measured(0.01, own=0.05)
    report = budget.report(budget.propose())
    assert report["exceeded"]
    assert report["deep_every"] == RAREST


def test_nothing_is_proposed_before_anything_is_known() -> None:
    assert Budget(0.01).propose() == Plan(0)


def run(net: nn.Module, x: torch.Tensor, steps: int, **settings) -> bw.Guard:
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    with bw.Guard(net, optimizer, self_test=False, **settings) as guard:
        for _ in range(steps):
            net(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return guard


def test_a_guard_says_what_it_costs_and_what_that_buys(capsys: pytest.CaptureFixture) -> None:
    net = nn.Sequential(*(nn.Linear(128, 128) for _ in range(4)))
    guard = run(net, torch.randn(512, 128), 60, budget=0.5)
    price = guard.coverage()["price"]
    assert 0.0 < price["measured"] <= 0.6
    assert guard.coverage()["steps"]["deep"] >= 60 // max(price["deep_every"], 1) - 8
    assert "healthy: 8 of 8 parameters, 60 steps" in capsys.readouterr().err
    said = "\n".join(told_of(guard.coverage()))
    assert "of the time, of 50.00% allowed" in said
    assert f"looked at within {price['persistent_wrong_product_seen_within']} steps" in said


def test_deep_steps_without_work_to_look_at_are_rare() -> None:
    net = nn.Sequential(nn.LayerNorm(16), nn.ReLU(), nn.LayerNorm(16))
    guard = run(net, torch.randn(8, 1, 16, 16), 60, budget=0.9)
    assert guard.coverage()["price"]["deep_every"] == RAREST
