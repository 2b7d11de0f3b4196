"""Who made the first NaN: operator, module, line; and nobody where all is well."""

from __future__ import annotations

import weakref

import nonfinite_zoo as zoo
import pytest
import torch

import bitwitness as bw
from bitwitness.nonfinite.entrances import EnteringTensor, Entrances
from bitwitness.nonfinite.frames import FrameLog
from bitwitness.nonfinite.origin import Kind
from bitwitness.nonfinite.strays import Strays
from bitwitness.nonfinite.taint import Provenance


def one(trace, case: zoo.Case):
    told = [(f.site.op, f.site.module, f.site.phase, f.evidence["kind"], f.message) for f in trace.findings]
    assert len(told) == 1, told
    assert told[0][:4] == (case.op, case.module, case.phase, case.kind), told
    if case.line is not None:
        evidence = trace.findings[0].evidence
        lines = evidence["line"] + " | " + evidence["forward_line"]
        assert case.line in lines, (case.line, lines)
        assert case.line in told[0][4]
    return trace.findings[0]


@pytest.mark.filterwarnings("ignore:std")
@pytest.mark.parametrize("checkpointed", [None, "plain", "reentrant"])
@pytest.mark.parametrize("case", zoo.CASES, ids=lambda case: case.how)
def test_the_operator_that_made_it_is_named(case: zoo.Case, checkpointed: str | None) -> None:
    torch.manual_seed(0)
    net = zoo.Net(checkpointed)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    with bw.trace_nonfinite(net, optimizer) as trace:
        zoo.train(net, optimizer, case.how, half=case.half)
    finding = one(trace, case)
    assert finding.step == zoo.STRUCK
    assert "To do: " in finding.message


@pytest.mark.parametrize(("loop", "case"), zoo.LOOPS, ids=[loop.__name__ for loop, _ in zoo.LOOPS])
def test_what_came_from_outside_the_model_is_named(loop, case: zoo.Case) -> None:
    torch.manual_seed(0)
    net = zoo.Net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    with bw.trace_nonfinite(net, optimizer) as trace:
        for step in range(4):
            loop(net, optimizer, step)
    assert one(trace, case).step == zoo.STRUCK


def test_an_optimizer_that_divides_by_zero_is_named_with_its_settings() -> None:
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Embedding(5, 4), torch.nn.Flatten(), torch.nn.Linear(8, 2))
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3, eps=0.0, fused=True)
    with bw.trace_nonfinite(net, optimizer) as trace:
        for step in range(3):
            optimizer.zero_grad()
            net(torch.tensor([[0, 1], [2, 1]]) + min(step, 1)).square().mean().backward()
            optimizer.step()
    (finding,) = trace.findings
    assert (finding.evidence["kind"], finding.site.op, finding.site.module) == ("optimizer", "weight", "0")
    assert finding.step == 1
    assert "AdamW(lr=0.001" in finding.message
    assert "divides by sqrt(exp_avg_sq) + eps, which is zero there (eps = 0.0)" in finding.message


def test_a_parameter_that_goes_bad_long_after_an_overcome_nan_is_not_taken_for_its_aftermath() -> None:
    torch.manual_seed(0)
    net = zoo.Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    with bw.trace_nonfinite(net, optimizer) as trace:
        for step in range(6):
            net.inner.how = "log" if step == 1 else ""
            if step == 4:
                net.head.weight.data[0, 0] = float("nan")
            x, y = zoo.batch(step)
            torch.nn.functional.cross_entropy(net(x), y).backward()
            norm = torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            if torch.isfinite(norm):
                optimizer.step()
            optimizer.zero_grad()
    assert [(f.step, f.site.op) for f in trace.findings[:2]] == [(1, "log"), (4, "weight")]
    assert "since the update of step 3" in trace.findings[1].message


@pytest.mark.parametrize("half", [None, torch.bfloat16, torch.float16])
def test_healthy_steps_say_nothing(half: torch.dtype | None) -> None:
    net = zoo.Net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    with bw.trace_nonfinite(net, optimizer) as trace:
        for step in range(6):
            x, y = zoo.batch(step)
            with torch.autocast("cpu", half, enabled=half is not None):
                loss = torch.nn.functional.cross_entropy(net(x).float(), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    assert trace.findings == []


def compiled_training(net, backend) -> list:
    model = torch.compile(net, backend=backend)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    with bw.trace_nonfinite(model, optimizer) as trace:
        for step in range(3):
            x, y = zoo.batch(step)
            if step == zoo.STRUCK:
                x.zero_()
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
    return trace.findings


class Logarithm(torch.nn.Module):
    """Takes the logarithm of its input's size."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = torch.nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(x) + x.abs().sum(-1, keepdim=True).log()


def test_a_compiled_model_is_replayed_eagerly() -> None:
    torch.compiler.reset()
    (finding,) = compiled_training(Logarithm(), "aot_eager")
    assert (finding.site.op, finding.site.module, finding.step) == ("log", ".", zoo.STRUCK)
    assert "test_tracing.py:" in finding.evidence["line"]


def test_what_only_compiled_code_makes_is_said_to_be_the_compilers() -> None:
    torch.compiler.reset()

    def wrong(graph, _inputs):
        def run(*args):
            results = graph(*args)
            struck = any(a.dim() == 2 and a.shape[1] == 8 and not a.any() for a in args)
            return [result + float("nan") if struck else result for result in results]

        return run

    net = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 4))
    (finding,) = compiled_training(net, wrong)
    assert finding.evidence["kind"] == "unknown"
    assert "an eager re-execution of the same step is finite, so the compiled code produced it" in finding.message


def test_what_enters_a_step_keeps_its_memory_while_it_is_known_by_its_address():
    # Seen once: a batch was let go by the forward, a gathered NaN parameter came to lie there and was told as the batch.
    entrances = Entrances({}, Strays(), FrameLog(), [], Provenance())
    batch = torch.randn(1000)
    gone = weakref.ref(batch)
    entrances.name(batch, EnteringTensor(Kind.BATCH, "args[0]"))
    del batch
    assert gone() is not None
