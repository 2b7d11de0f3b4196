"""The demo's frame: a fault-free run, a run with faults under guard, and the story of what happened."""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from bitwitness.config import load_config
from bitwitness.demo.launch import Launched, fresh_folder, torchrun
from bitwitness.demo.story import tell
from bitwitness.files.shown import shown

RANKS = 4  # one for each fault, and as many healthy ones
FAULTS = """\
# A transient: one bit of one number, once, in the backward of one matrix product on rank 1.
[[fault]]
site = "layers.1.mlp.up/mm:backward"
rank = 1
steps = [20]
times = 1
kind = "exponent_msb"

# A defect: from step 40 on, one column of one matrix product on rank 2 comes out 64 times too large, every time.
[[fault]]
site = "layers.2.mlp.up/addmm:forward"
rank = 2
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
    faults = out / "faults.toml"
    faults.write_text(FAULTS)
    clean, guarded = out / "clean", out / "guarded"
    clean.mkdir(exist_ok=True)
    guarded.mkdir(exist_ok=True)
    print(
        f"1. {steps} steps of a byte-level GPT on {RANKS} gloo ranks, no fault, no guard (for comparison later)\n"
        "2. the same steps in the same processes, under guard (act = protect), on devices that compute wrongly:",
        flush=True,
    )
    print("".join(f"     {line}\n" for line in FAULTS.splitlines() if line.startswith("#")), end="", flush=True)
    where = ["--clean", str(clean), "--out", str(guarded), "--faults", str(faults)]
    launched = launch(RANKS, ["-m", "bitwitness.demo.train", "--steps", str(steps), *where], out / "logs", echo=False)
    for log in launched.logs:
        if log.name == "stderr.log":
            print("".join(f"   {line}\n" for line in log.read_text().splitlines() if "VERDICT" in line), end="")
    print(f"   torchrun's exit code: {launched.code}")
    for line in last_words(launched):
        print(f"   {line}")
    print("3. the story, from the run folder:")
    for line in tell(guarded / "run", guarded / "weights.jsonl", clean / "weights.jsonl"):
        print(f"   {line}" if line else "")
    print(f"\n({time.monotonic() - started:.0f} s in all)")
    return 0 if launched.code else 1


def last_words(launched: Launched) -> list[str]:
    """Return, where no verdict was told, what each rank that died of an error said last."""
    told = {log.parent.name: log.read_text(errors="replace") for log in launched.logs if log.name == "stderr.log"}
    if any("VERDICT" in text for text in told.values()):
        return []
    dead = {rank: text.strip().splitlines()[-1] for rank, text in sorted(told.items()) if "Traceback" in text}
    return [f"rank {rank} died: {shown(words)}" for rank, words in dead.items()]
