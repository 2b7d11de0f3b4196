"""Two ranks, without a third to decide: a fault that wanders is convicted by float64; a GAN's two models do not disturb."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from ranks import forked

JOB = str(Path(__file__).parent / "jobs" / "two_ranks.py")
ALWAYS = 'act = "protect"\nself_test = false\nout = "{out}"\n[trend]\nz = 1e-9\nwarmup = 1\n[replay]\nrest = false\n'
pytestmark = pytest.mark.ranks


def run(tmp_path: Path, case: str, faults: str = "") -> tuple[int, str]:
    config, declared = tmp_path / "config.toml", tmp_path / "faults.toml"
    config.write_text(ALWAYS.format(out=tmp_path / "run"))
    declared.write_text(faults)
    environment = {"BITWITNESS_INJECT": str(declared)} if faults else {}
    arguments = ["-m", "bitwitness", "run", "--config", str(config), JOB, case]
    launched = forked(2, arguments, tmp_path / "logs", environment=environment)
    return launched.code, "\n".join(log.read_text() for log in launched.logs)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_fault_that_wanders_is_convicted(rank: int, tmp_path: Path) -> None:
    fault = f'[[fault]]\nsite = "2/addmm*:forward*"\nrank = {rank}\nsteps = [6]\nkind = "bitflip"\nbit = 30\n'
    code, told = run(tmp_path, "plain", fault)
    assert code == 1, told
    assert f"VERDICT step 6: persistent_hardware, action stopped: rank {rank}:" in told
    assert "in 2/addmm#0:forward.out0" in told
    assert told.count("VERDICT") == 1


def test_a_heal_does_not_take_its_own_replay_for_the_scripts_change_of_the_buffers(tmp_path: Path) -> None:
    fault = (
        '[[fault]]\nsite = "0/addmm#0:forward.out0"\nrank = 1\nfrom_step = 6\ntimes = 1\nkind = "multiply"\nfactor = 64.0\n'
        'pattern = "all"\n'
    )
    code, told = run(tmp_path, "normed", fault)
    assert code == 0, told
    assert "VERDICT step 6: transient_hardware, action healed: rank 1:" in told
    assert "stay as they are" not in told


def test_a_gradient_that_only_an_earlier_micro_batch_gave_is_no_fault(tmp_path: Path) -> None:
    code, told = run(tmp_path, "branching")
    assert code == 0, told
    assert "VERDICT" not in told
    dismissed = [int(count) for count in re.findall(r"(\d+) dismissed", told)]
    assert dismissed, told
    assert min(dismissed) > 10, told


def test_the_other_models_reduction_is_no_exchange_in_the_loss(tmp_path: Path) -> None:
    code, told = run(tmp_path, "gan")
    assert code == 0, told
    assert "VERDICT" not in told
    covered = re.findall(r"(?:healthy|known.*|NOT.*): (\d+) of (\d+) parameters, (\d+) steps", told)
    assert covered == [("4", "4", "9"), ("4", "4", "9")], told
    kept_from = [int(count) for count in re.findall(r"in (\d+) of 9 steps the loss code outside the model", told)]
    assert max(kept_from, default=0) <= 2, told  # the buckets are made anew once
