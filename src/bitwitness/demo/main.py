"""The demo's frame: a fault-free run, a run with faults that is launched under guard, and the story of what happened."""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from bitwitness.config import load_config
from bitwitness.config.variables import INJECT
from bitwitness.demo.launch import Launched, bitwitness, fresh_folder, torchrun
from bitwitness.demo.story import finished_alike, tell
from bitwitness.files.shown import shown

SCRIPT = "bitwitness.demo.train"
RANKS = 4  # one for each fault, and as many healthy ones
FAULTS = """\
# A transient: one bit of one number, once, in the backward of one matrix product on device 1.
[[fault]]
site = "layers.1.mlp.up/mm:backward"
slot = 1
steps = [20]
times = 1
kind = "exponent_msb"

# A defect: from step 40 on, one column of one matrix product on device 2 comes out 64 times too large, every time.
[[fault]]
site = "layers.2.mlp.up/addmm:forward"
slot = 2
from_step = 40
kind = "multiply"
factor = 64.0
pattern = "column"
element = 7
"""


def main(args: argparse.Namespace, launch: Callable[..., Launched] = torchrun) -> int:
    """Run the demo; return 0 if it ended as told in its heading.

    ``launch``: what starts the ranks, as `torchrun` does.
    """
    load_config()  # what is wrong in the environment is said now, once, and not by every rank in its log
    if args.seed:
        from bitwitness.demo.seed import main as seed

        code: int = seed(args, launch)
        return code
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="bitwitness-demo-") as scratch:
        out = fresh_folder(args.out, scratch)
        return _run(out, args.steps, started, launch)


def _run(out: Path, steps: int, started: float, launch: Callable[..., Launched]) -> int:
    (out / "faults.toml").write_text(FAULTS)
    clean, guarded = out / "clean", out / "guarded"
    clean.mkdir(exist_ok=True)
    guarded.mkdir(exist_ok=True)
    print(
        f"1. {steps} steps of a byte-level GPT on {RANKS} gloo ranks, no fault, no guard (for comparison later)",
        flush=True,
    )
    launched = launch(RANKS, ["-m", SCRIPT, "--steps", str(steps), "--out", str(clean)], out / "logs", echo=False)
    for line in last_words(launched):
        print(f"   {line}")
    print(
        f"2. the same script by 'bitwitness launch --nproc-per-node {RANKS} --spares 1', on devices that compute wrongly:\n"
        + "".join(f"     {line}\n" for line in FAULTS.splitlines() if line.startswith("#")),
        end="",
        flush=True,
    )
    code = _launch_guarded(out, guarded, steps)
    print(f"   exit code: {code}")
    print("3. the story, from the run folders:")
    attempts = sorted((out / "runs").glob("attempt-*"))
    for line in tell(attempts, guarded / "weights.jsonl", clean / "weights.jsonl"):
        print(f"   {line}" if line else "")
    print(f"\n({time.monotonic() - started:.0f} s in all)")
    return 0 if code == 0 and finished_alike(guarded / "weights.jsonl", clean / "weights.jsonl") else 1


def _launch_guarded(out: Path, guarded: Path, steps: int) -> int:
    """Launch it, show verdicts and what the launcher says as they come; return its exit code."""
    order = ["launch", "--nproc-per-node", str(RANKS), "--spares", "1", "--standalone", "--out", str(out / "runs")]
    own = ["--quarantine", str(out / "quarantine.json"), "-m", SCRIPT, "--steps", str(steps), "--out", str(guarded)]
    variables = {INJECT: str(out / "faults.toml"), "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    with bitwitness([*order, *own], {**os.environ, **variables}) as process:
        assert process.stdout is not None  # noqa: S101 - it is asked for
        for line in process.stdout:
            if "VERDICT" in line or line.startswith("bitwitness launch:"):
                print(f"   {line}", end="", flush=True)
        return process.wait()


def last_words(launched: Launched) -> list[str]:
    """Return, where no verdict was told, what each rank that died of an error said last."""
    told = {log.parent.name: log.read_text(errors="replace") for log in launched.logs if log.name == "stderr.log"}
    if any("VERDICT" in text for text in told.values()):
        return []
    dead = {rank: text.strip().splitlines()[-1] for rank, text in sorted(told.items()) if "Traceback" in text}
    return [f"rank {rank} died: {shown(words)}" for rank, words in dead.items()]
