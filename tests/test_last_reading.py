"""A gradient that several products of a backward read is read once, and each of them is checked as before."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from bitwitness import Finding
from bitwitness.sense.checksum import ChecksumSensor
from bitwitness.stats.reader import built
from bitwitness.tap.modules import ModuleTracker
from bitwitness.tap.operators import OpCall, OperatorTap

aten = torch.ops.aten
needs_reader = pytest.mark.skipif(built() is None, reason="the compiled reader is not built")


def call(func, *args, out=None, **kwargs) -> OpCall:
    result = func(*args, **kwargs) if out is None else out
    return OpCall(func, args, kwargs, result, func.overloadpacket.__name__, "net.fc", "backward", 0)


def factors(rows=64, inputs=40, outputs=96):
    g = torch.Generator().manual_seed(3)
    return (torch.randn(shape, generator=g) for shape in ((rows, outputs), (outputs, inputs), (rows, inputs)))


def spoiled(x: torch.Tensor, row: int, column: int) -> torch.Tensor:
    bad = x.clone()
    bad[row, column] += 3
    return bad


def look(*calls: OpCall, deferred: bool = False) -> list[Finding]:
    sensor = ChecksumSensor(deferred=deferred, elsewhere=lambda: None)
    for one in calls:
        sensor(one)
    return sensor.drain(7, 3)


class Counting:
    """Counts the elements that the compiled reader is given."""

    def __init__(self, monkeypatch) -> None:
        self.elements = 0
        for name in ("products", "many"):
            monkeypatch.setattr(type(built()), name, self._counted(getattr(type(built()), name)))

    def _counted(self, read):
        def counted(reader, x, *rest):
            self.elements += x.numel()
            return read(reader, x, *rest)

        return counted


@needs_reader
def test_the_gradient_of_a_linear_layer_is_read_once_for_three_checks(monkeypatch):
    grad, weight, x = factors()
    dx, dw, db = grad @ weight, grad.t() @ x, grad.sum(0, keepdim=True)
    counting = Counting(monkeypatch)
    sensor = ChecksumSensor(elsewhere=lambda: None, rows_one_in=1)
    for one in (
        call(aten.mm.default, grad, weight, out=dx),
        call(aten.mm.default, grad.t(), x, out=dw),
        call(aten.sum.dim_IntList, grad, [0], True, out=db),
    ):
        sensor(one)
    assert not sensor.drain(0, 0)
    assert sensor.checked_calls["sum"][0] == 1
    assert counting.elements == sum(t.numel() for t in (grad, weight, dx, x, dw))


@pytest.mark.parametrize("deferred", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
def test_a_wrong_element_of_a_weights_gradient_is_found_where_it_is(deferred, transposed):
    grad, weight, x = factors()
    first = call(aten.mm.default, grad, weight)
    if transposed:  # of a layer that keeps its weight as [inputs, outputs]
        second = call(aten.mm.default, x.t(), grad, out=spoiled(x.t() @ grad, 17, 5))
        row, column = 17, 5
    else:
        second = call(aten.mm.default, grad.t(), x, out=spoiled(grad.t() @ x, 5, 17))
        row, column = 5, 17
    (found,) = look(first, second, deferred=deferred)
    known = {"row": row, "column": column}
    shown = known if not deferred else {key: value for key, value in known.items() if key in found.evidence}
    assert shown
    assert found.evidence.items() >= shown.items()
    assert any(f"in {key} {value}" in found.message for key, value in shown.items())


@needs_reader
def test_a_wrong_sum_of_a_gradient_that_was_read_before_is_found():
    grad, weight, _ = factors()
    db = grad.sum(0, keepdim=True)
    db[0, 9] += 3
    calls = call(aten.mm.default, grad, weight), call(aten.sum.dim_IntList, grad, [0], True, out=db)
    assert [found.site.op for found in look(*calls)] == ["sum"]


@pytest.mark.parametrize("change", ["in place", "through a view", "other memory", "freed memory", "a part"])
def test_a_reading_holds_for_the_same_numbers_alone(change):
    grad, weight, x = factors()
    sensor = ChecksumSensor(elsewhere=lambda: None)
    sensor(call(aten.mm.default, grad, weight))
    if change == "in place":
        grad.mul_(3)
    elif change == "through a view":
        grad.t()[5].zero_()
    elif change == "other memory":
        grad = grad * 2
    elif change == "freed memory":
        kind = grad.shape
        del grad
        grad = torch.full(kind, 7.0)
    else:
        grad, x = grad[:32], x[:32]
    sensor(call(aten.mm.default, grad.t(), x))
    assert not sensor.drain(0, 0)
    assert not sensor.coverage()["unconfirmed"]


def test_inference_tensors_are_checked_too():
    with torch.inference_mode():
        grad, weight, x = factors()
        assert not look(call(aten.mm.default, grad, weight), call(aten.mm.default, grad.t(), x))
        bad = call(aten.mm.default, grad.t(), x, out=spoiled(grad.t() @ x, 5, 17))
        assert look(call(aten.mm.default, grad, weight), bad)


@pytest.mark.parametrize("layer", [nn.Linear(40, 96), nn.Linear(40, 1), nn.Linear(40, 96, bias=False)])
@pytest.mark.parametrize("shape", [(7, 9, 40), (12, 40), (1, 40)])
def test_layers_train_without_a_suspicion(layer, shape):
    sensor = ChecksumSensor(elsewhere=lambda: None, rows_one_in=1)
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1)).requires_grad_()
    with OperatorTap(tracker := ModuleTracker(), sensor, sensor.select):
        tracker.name_tree(layer)
        y = F.gelu(layer(x))
        y.square().sum().backward()
    assert not sensor.drain(0, 0)
    assert not sensor.coverage()["unconfirmed"]
