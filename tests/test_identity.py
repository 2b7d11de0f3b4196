"""A guarded run without faults has the bits of the unguarded one, though every step is replayed, here and elsewhere."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

JOBS = Path(__file__).parent / "jobs"
sys.path.insert(0, str(JOBS))

from extent import chosen  # noqa: E402
from ranks import forked  # noqa: E402
from scenarios import RANKS, SINGLE, Scenario, train  # noqa: E402 - the jobs' folder is no package

from bitwitness import Guard  # noqa: E402

ALWAYS_SUSPICIOUS = {"trend": {"z": 1e-9, "warmup": 1}, "replay": {"rest": False}}


@pytest.mark.parametrize("scenario", SINGLE, ids=str)
def test_single_process(scenario: Scenario) -> None:
    plain = train(scenario)
    guards: list[Guard] = []

    def guarded(model, optimizer):
        guards.append(Guard(model, optimizer, deep_every=2, **ALWAYS_SUSPICIOUS))
        return guards[-1]

    assert train(scenario, guarded) == plain
    table = guards[0].coverage()
    assert table["failures"] == {}
    assert table["verdicts"] == []
    assert table["suspicions"] >= 3
    # Float64 cannot judge a fused recurrent layer: one process leaves open what depends on it.
    left_open = table["left_open"] if scenario.model == "lstm" else 0
    assert table["dismissed"] + left_open == table["suspicions"]
    assert table["steps"]["deep"] > 0


@pytest.mark.ranks
@pytest.mark.parametrize("ranks", [3])  # an odd number: sums and buckets are split unevenly; healing is tried on four
def test_ranks(ranks: int, tmp_path: Path) -> None:
    with_gpt2 = ("transformers.models.gpt2.modeling_gpt2",)
    scenarios = chosen(range(len(RANKS)), (2, 5, 7))  # healing goes through the others, too
    launched = forked(ranks, [str(JOBS / "identity.py"), *map(str, scenarios)], tmp_path, imported=with_gpt2)
    told = "\n".join(log.read_text() for log in launched.logs)
    lines = [line for line in told.splitlines() if line.startswith(("same", "DIFFERS"))]
    assert launched.code == 0, told[-4000:]
    assert len(lines) == len(scenarios)
    assert all(line.startswith("same") for line in lines), lines


def test_nothing_stays_patched_or_hooked() -> None:
    import torch
    from torch.amp import GradScaler
    from torch.nn.modules import module as nn_module
    from torch.nn.utils import clip_grad
    from torch.optim import optimizer as optim

    def patched():
        return (
            torch.autograd._engine_run_backward,
            clip_grad._group_tensors_by_device_and_dtype,
            GradScaler.unscale_,
            GradScaler.update,
            torch.nn.functional.layer_norm,
            len(optim._global_optimizer_pre_hooks),
            len(optim._global_optimizer_post_hooks),
            len(nn_module._global_forward_pre_hooks),
            len(nn_module._global_forward_hooks),
        )

    before = patched()
    models = []

    def guarded(model, optimizer):
        models.append(model)
        return Guard(model, optimizer, deep_every=1, feature={"schemes": ("v1", "v2", "v3", "combined")})

    train(Scenario("gpt", steps=2), guarded)
    assert patched() == before
    for module in models[0].modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks


def test_a_guarded_model_can_be_copied_and_saved(tmp_path: Path) -> None:
    import copy

    import torch

    def guarded(model, optimizer):
        twin = copy.deepcopy(model)
        twin(torch.zeros(1, 4, dtype=torch.long), torch.zeros(1, 4, dtype=torch.long))
        guard = Guard(model, optimizer)
        guard.__enter__()
        copied = copy.deepcopy(model)
        torch.save(model, tmp_path / "model.pt")
        loaded = torch.load(tmp_path / "model.pt", weights_only=False)
        for other in (copied, loaded):
            other.train()
            other(torch.zeros(1, 4, dtype=torch.long), torch.zeros(1, 4, dtype=torch.long)).backward()
        assert guard.watch is not None
        assert guard.coverage()["steps"]["training_forwards"] == 0
        guard.close()
        return Guard(model, optimizer)

    train(Scenario("gpt", steps=2), guarded)
