"""Tensors of the script's own classes: their ``__torch_function__`` sees what the script computes, and nothing of ours."""

from __future__ import annotations

import contextlib

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

import bitwitness as bw
from bitwitness.testing import EVERY_STEP

ALWAYS = {"act": "protect", **EVERY_STEP}
STEPS = 8


class Counting(torch.Tensor):
    """Its products depend on how many functions were called before."""

    calls = 0

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        Counting.calls += 1
        out = super().__torch_function__(func, types, args, kwargs or {})
        return out * (1 + 1e-4 * (Counting.calls % 7)) if func is F.linear else out


class Strict(torch.Tensor):
    """Knows few functions, and refuses the others."""

    refused: list[str] = []  # noqa: RUF012
    known = frozenset(("linear", "tanh", "cross_entropy", "__get__", "__set__", "backward", "item", "detach"))

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        name = getattr(func, "__name__", str(func))
        if name not in cls.known:
            cls.refused.append(name)
            raise TypeError(f"Strict does not implement {name}")
        return super().__torch_function__(func, types, args, kwargs or {})


def train(guard, kind=torch.Tensor, weights=lambda weight: weight):
    torch.manual_seed(0)
    Counting.calls = 0
    net = nn.Sequential(nn.Linear(8, 24), nn.Tanh(), nn.Linear(24, 3))
    for layer in (net[0], net[2]):
        layer.weight = nn.Parameter(weights(layer.weight.detach()))
    optimizer = torch.optim.SGD(net.parameters(), 0.1, foreach=False)
    with guard(net, optimizer) as watching:
        for _ in range(STEPS):
            x = torch.randn(16, 8)
            loss = F.cross_entropy(net(x.as_subclass(kind)), (x[:, 0] > 0).long())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return [p.detach() for p in net.parameters()], watching


def plain(*_):
    return contextlib.nullcontext()


def questioned(*given):
    return bw.Guard(*given, **ALWAYS)


def quiet(*given):
    return bw.Guard(*given)


@pytest.mark.parametrize("guard", [quiet, questioned])
def test_a_class_that_counts_is_called_as_often_as_without_the_guard(guard):
    wanted, _ = train(plain, Counting)
    calls = Counting.calls
    got, watching = train(guard, Counting)
    assert Counting.calls == calls
    assert all(torch.equal(a, b) for a, b in zip(wanted, got, strict=True))
    assert watching.coverage()["verdicts"] == []


def test_a_class_that_refuses_what_it_does_not_know_is_asked_nothing_else_and_run_again(capsys):
    Strict.refused.clear()
    wanted, _ = train(plain, Strict)
    got, watching = train(questioned, Strict)
    assert Strict.refused == []
    assert all(torch.equal(a, b) for a, b in zip(wanted, got, strict=True))
    assert watching.coverage()["dismissed"] == STEPS - 1, capsys.readouterr().err


def test_parameters_that_wrap_others_are_sensed_and_it_is_said_that_they_are_not_run_again(capsys):
    def twice(weight):
        return TwoTensor(weight, weight.clone())

    wanted, _ = train(plain, weights=twice)
    got, watching = train(questioned, weights=twice)
    assert all(torch.equal(a.a, b.a) for a, b in zip(wanted, got, strict=True) if isinstance(a, TwoTensor))
    said = capsys.readouterr().err
    assert "failed" not in said
    assert "parameter 0.weight is a TwoTensor, a class that wraps other tensors" in said
    assert watching.coverage()["steps"]["held"] == STEPS
    assert watching.coverage()["verdicts"] == []
