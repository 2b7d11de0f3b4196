"""One rank of a trial of bench/lost.py: trains under guard, and is killed, stopped or slowed at the drawn moment.

lost_job.py '{"victim": 1, "how": "stop", "stage": "heal", "call": 1, "delay": 0.004, ...}' FOLDER
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from bitwitness import Guard
from bitwitness.demo.model import ByteGPT
from bitwitness.guard.investigation import Investigation
from bitwitness.judge import proof, verdict
from bitwitness.judge.experiments import ReplayExperiments
from bitwitness.ranks import SideChannel
from bitwitness.replay.run import Replayer
from bitwitness.respond import act
from bitwitness.testing import FaultyDevice, from_mapping

STEPS = 8
FROM_STEP = 4
SITE = "layers.1.mlp.up/mm:backward"
FAULTS: dict[str, list[dict[str, Any]]] = {
    "none": [],
    "transient": [{"rank": 1, "steps": [FROM_STEP], "times": 1, "kind": "exponent_msb", "site": SITE}],
    "persistent": [{"rank": 1, "from_step": FROM_STEP, "kind": "exponent_msb", "site": SITE}],
}
# Where a stage of the experiments begins, and the fault that leads there.
STAGES: dict[str, tuple[Any, str, str]] = {
    "exchange": (SideChannel, "_guarded", "none"),
    "replay": (Replayer, "run", "none"),
    "elsewhere": (ReplayExperiments, "_elsewhere", "none"),
    "calibrate": (ReplayExperiments, "calibrate", "none"),
    "locate": (proof, "locate", "persistent"),
    "evidence": (verdict.VerdictBuilder, "evidence", "persistent"),
    "stop barrier": (SideChannel, "barrier", "persistent"),
    "heal": (act, "heal_together", "transient"),
    "telling": (Investigation, "_suspicions", "transient"),
}


def strike(trial: dict[str, Any], folder: Path, inside: threading.Event, over: threading.Event) -> None:
    """Do to this process what was drawn, a moment later, or when the stage is over, if that is earlier."""
    over.wait(trial["delay"])
    me = os.getpid()
    while True:
        inside.wait()
        (folder / "struck").write_text(str(time.time()))
        if inside.is_set():
            break
        (folder / "struck").unlink()
    if trial["how"] == "kill":
        os.kill(me, signal.SIGKILL)
    if trial["how"] == "slow":  # runs a tenth of the time
        duty = f"for i in $(seq 120); do kill -STOP {me} || exit 0; sleep 0.45; kill -CONT {me} || exit 0; sleep 0.05; done"
        subprocess.Popen(["/bin/sh", "-c", duty], stderr=subprocess.DEVNULL)
    if trial["how"] == "freeze":  # longer than the deadline, and back
        subprocess.Popen(
            ["/bin/sh", "-c", f"sleep {2 * trial['deadline']:g}; kill -CONT {me}"], stderr=subprocess.DEVNULL
        )
    if trial["how"] in ("stop", "freeze"):
        os.kill(me, signal.SIGSTOP)


def arm(trial: dict[str, Any], folder: Path, step: Callable[[], int]) -> None:
    """Have the victim struck at the drawn call of the drawn stage."""
    owner, name, _ = STAGES[trial["stage"]]
    original = getattr(owner, name)
    inside, over, calls = threading.Event(), threading.Event(), 0
    together = SideChannel.together
    channels: list[SideChannel] = []

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        if inside.is_set() and (step() >= FROM_STEP or trial["stage"] == "calibrate"):
            calls += 1
            if calls == trial["call"] and trial["how"] == "stall":
                (folder / "struck").write_text(str(time.time()))
                # slow ranks wait longer
                time.sleep(2 * max(trial["deadline"], *(channel.deadline_s for channel in channels)))
            elif calls == trial["call"] and trial["stage"] == "stop barrier":
                strike(trial | {"delay": 0.0}, folder, inside, over)  # it is over too soon for a delay
            elif calls == trial["call"]:
                thread = threading.Thread(target=strike, args=(trial, folder, inside, over), daemon=True)
                thread.start()
                try:
                    return original(*args, **kwargs)
                finally:
                    over.set()
                    thread.join()
        return original(*args, **kwargs)

    @contextmanager
    def entered(channel: SideChannel) -> Iterator[None]:
        with together(channel):
            channels[:] = [channel]
            inside.set()
            try:
                yield
            finally:
                inside.clear()

    SideChannel.together = entered  # type: ignore[method-assign]
    setattr(owner, name, counted)


def train(trial: dict[str, Any], folder: Path) -> None:
    """Train, on the rank that the environment names."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    (folder / f"pid{rank}").write_text(str(os.getpid()))
    fault = STAGES[trial["stage"]][2]
    torch.manual_seed(0)
    model = DistributedDataParallel(ByteGPT(width=32, layers=2, heads=2, context=16))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(7 + rank)
    # Every step is questioned, except where calibration is to come: that takes steps that nobody suspects.
    trend = {} if trial["stage"] == "calibrate" else {"z": 1e-9, "warmup": 1}
    settings: dict[str, Any] = {"trend": trend, "replay": {"rest": False}, "ranks": {"deadline_s": trial["deadline"]}}
    guard = Guard(model, optimizer, act="protect", deep_every=0, out=folder / "run", **settings)
    with FaultyDevice(from_mapping({"fault": FAULTS[fault]}), rank=rank), guard:
        if rank == trial["victim"]:
            arm(trial, folder, lambda: guard.session.step if guard.watch else 0)
        for _ in range(STEPS):
            text = torch.randint(0, 256, (3, 17), generator=generator)
            model(text[:, :-1], text[:, 1:]).backward()
            optimizer.step()
            optimizer.zero_grad()
    print("trained to the end", flush=True)


if __name__ == "__main__":
    train(json.loads(sys.argv[1]), Path(sys.argv[2]))
