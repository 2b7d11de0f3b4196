"""Jobs ended from outside at random moments: nothing is left running, nothing half-named passes, and the state is told right.

    python bench/kills.py --trials 30

Each trial starts `bitwitness run`, `record` or `demo`, alone or under torchrun, and sends SIGTERM, SIGINT or SIGKILL after some
seconds (under torchrun: to torchrun, or to one rank). It is wrong if a process is left, a run says `running` or `finished` that
was ended, a run that was killed counts as healthy, or a file that bears its name cannot be read.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

SCRIPT = """
import os, time, torch
torch.manual_seed(0)
net = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
if "RANK" in os.environ:
    torch.distributed.init_process_group("gloo")
    net = torch.nn.parallel.DistributedDataParallel(net)
optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
while True:
    net(torch.randn(8, 16)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    time.sleep(0.002)
"""
PATIENCE_S = 60.0
BEGUN_S = 200.0  # the demo trains without a guard first
ENDED = {signal.SIGTERM: "terminated", signal.SIGINT: "interrupted", signal.SIGKILL: "killed"}


def left(mark: str) -> list[int]:
    """Return the processes that carry a mark in their environment."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if mark.encode() in path.read_bytes().split(b"\0"):
                found.append(int(path.parent.name))
        except OSError:
            continue
    return found


def status(run: Path) -> tuple[int, dict]:
    """Ask bitwitness for the state of a run."""
    command = [sys.executable, "-m", "bitwitness", "status", str(run), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.returncode, json.loads(done.stdout) if done.stdout.startswith("{") else {}


def trial(draw: random.Random, folder: Path) -> tuple[str, str | None]:
    """Make one; return what it was, and what went wrong."""
    verb = draw.choice(("run", "record", "record tensors", "demo"))
    launched = verb != "demo" and draw.random() < 0.5
    number = draw.choice(tuple(ENDED))
    (folder / "train.py").write_text(SCRIPT)
    name, *more = verb.split()
    words = ["-m", "bitwitness", name, "--out", "out", *(["--content", "tensors"] * bool(more))]
    words += [] if name == "demo" else ["train.py"]
    torchrun = [
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        "--rdzv-backend",
        "c10d",
        "--rdzv-endpoint",
        "localhost:0",
    ]
    command = [sys.executable, *(torchrun if launched else []), *words]
    mark = f"KILLS_TRIAL={folder.name}"  # no BITWITNESS_ variable: one that is no setting is refused
    env = {**os.environ, "OMP_NUM_THREADS": "1", "KILLS_TRIAL": folder.name}
    what = f"{verb}{' under torchrun' * launched}, {number.name}"
    with (folder / "log").open("w") as log:
        # a shell's background jobs ignore Ctrl-C, and so would what they start
        listening = signal.signal(signal.SIGINT, signal.default_int_handler)
        job = subprocess.Popen(command, cwd=folder, env=env, stdout=log, stderr=log, start_new_session=True)
        signal.signal(signal.SIGINT, listening)
    run = folder / "out" / ("runs/attempt-1" if name == "demo" else "")
    started = time.monotonic()
    while not (run / "run.json").exists() and time.monotonic() - started < BEGUN_S:
        time.sleep(0.05)
    time.sleep(draw.uniform(0.0, 6.0))
    job.send_signal(number)
    asked = time.monotonic()
    while left(mark) and time.monotonic() - asked < PATIENCE_S:
        time.sleep(0.2)
        job.poll()
    took = time.monotonic() - asked
    orphans = [pid for pid in left(mark) if pid != job.pid]
    for pid in left(mark):
        os.kill(pid, signal.SIGKILL)
    job.wait()
    if orphans and not (
        launched and number is signal.SIGKILL
    ):  # whose agent is killed, torchrun's ranks are torchrun's affair
        return what, f"{len(orphans)} processes are left after {took:.0f} s"
    if not (run / "run.json").exists():
        return what, "no run began"
    code, told = status(run)
    expected = {ENDED[number], "killed"} if launched or name == "demo" else {ENDED[number]}
    expected |= (
        {"terminated", "failed", "interrupted"} if launched or name == "demo" else set()
    )  # torchrun ends ranks in its own way
    expected |= {"stopped"} if name == "demo" else set()  # by its own verdict, where the signal came after that
    if told.get("state") not in expected:
        return what, f"state {told.get('state')!r}, expected one of {sorted(expected)}"
    if told["state"] == "killed" and code == 0:
        return what, "killed, and called healthy"
    damaged = [problem for problem in told["problems"] if "damaged" in problem]
    return what, damaged[0] if damaged else None


def main() -> int:
    """Make the trials; return 1 if any went wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    draw = random.Random(args.seed)
    wrong: list[str] = []
    seen: Counter[str] = Counter()
    for number in range(args.trials):
        with tempfile.TemporaryDirectory(prefix="bitwitness-kill-") as scratch:
            what, problem = trial(draw, Path(scratch))
        seen[what.rpartition(" ")[2]] += 1
        print(f"{number}: {what}: {problem or 'right'}", flush=True)
        wrong += [f"{what}: {problem}"] if problem else []
    print(
        f"{args.trials} trials ({', '.join(f'{count} {name}' for name, count in sorted(seen.items()))}), {len(wrong)} wrong"
    )
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
