"""The training that `precheck.py` has pre-checked; its recording by msprobe, and msprobe's own pre-check of that on the CPU.

    python bench/precheck_peer.py train [--tiny]
    PEER bench/precheck_peer.py record --dump DIR [--tiny]
    PEER bench/precheck_peer.py check --dump DIR --out DIR

PEER is a Python that has ``mindstudio-probe`` installed; ``train`` needs torch alone. msprobe's pre-check takes a CUDA or an
NPU device and no other; see `on_the_cpu` for what is put in its place.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch
from rounds import Job, Training

STEPS = 2
"""Of which the last is recorded: the first has made the optimizer's state."""


def job(*, tiny: bool) -> Job:
    """Return what is trained: the GPT of 11.2 million parameters at its defaults, and AdamW as a for-loop."""
    return Job("precheck", level="ops", content="stats", tiny=tiny)


def train(*, tiny: bool) -> None:
    """Train, for somebody who looks on."""
    training = Training(job(tiny=tiny))
    for _ in range(STEPS):
        training.step(training.batch())


def record(dump: Path, *, tiny: bool) -> None:
    """Train the same and have the last step recorded; print how many calls that is."""
    from record_peer import opened, tool

    training = Training(job(tiny=tiny))
    with opened(job(tiny=tiny), training.model, dump) as recording:
        for number in range(STEPS):
            if number == STEPS - 1:
                recording.before_step()
            training.step(training.batch())
        recording.after_step()
    print("\n" + json.dumps({"tool": tool(), "torch": torch.__version__, **_counted(dump_in(dump))}), flush=True)


def dump_in(folder: Path) -> Path:
    """Return the one ``dump.json`` of a folder."""
    (found,) = folder.rglob("dump.json")
    return found


def _counted(dump: Path) -> dict[str, int]:
    """Return how many calls msprobe reads in a dump, and how many it leaves of them if asked to filter (``-f``)."""
    from msprobe.pytorch.api_accuracy_checker.acc_check.acc_check import preprocess_forward_content
    from msprobe.pytorch.common.parse_json import parse_json_info_forward_backward

    forward, backward, _ = parse_json_info_forward_backward(str(dump))
    return {"forward": len(forward), "backward": len(backward), "filtered": len(preprocess_forward_content(forward))}


def on_the_cpu() -> None:
    """Have msprobe's pre-check run on the CPU what it would run on a CUDA device.

    Three names are replaced, and nothing of what it computes: ``current_device`` (``"cuda"``) in the two modules that move
    inputs and run calls, and `torch.cuda.set_device`, which raises where there is none. What it compares then is float32 on
    the CPU with float64 on the CPU, as our own pre-check does.
    """
    from msprobe.pytorch.api_accuracy_checker.acc_check import acc_check, acc_check_utils

    modules: tuple[Any, ...] = (acc_check, acc_check_utils)
    for module in modules:
        if module.current_device != "cuda":
            raise SystemExit(f"{module.__name__}.current_device is {module.current_device!r}; expected 'cuda'")
        module.current_device = "cpu"
    torch.cuda.set_device = lambda _: None


def check(dump: Path, out: Path) -> None:
    """Do what ``msprobe acc_check`` does."""
    from msprobe.msprobe import main as msprobe

    torch.set_num_threads(1)
    on_the_cpu()
    sys.argv = ["msprobe", "acc_check", "-api_info", str(dump_in(dump)), "-o", str(out)]
    msprobe()


def main() -> None:
    """Do one of the three."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("train", "record", "check"))
    parser.add_argument("--dump", type=Path)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--tiny", action="store_true", help="a model that proves only that it runs")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.what == "train":
        train(tiny=args.tiny)
    elif args.what == "record":
        record(args.dump, tiny=args.tiny)
    else:
        check(args.dump, args.out)


if __name__ == "__main__":
    main()
