"""Kills in the middle of recoveries: any process of a job, at any moment from the verdict on; nothing hangs, nothing is lost.

    python bench/recovery_kills.py               # 50 kills in jobs of 8 ranks and a spare
    python bench/recovery_kills.py --trials 2 --ranks 2

A device computes wrongly from some step on; it is convicted, quarantined, and the job begins again on a spare. Meanwhile one
process of the job (a rank or the launcher) gets SIGKILL. A trial is right where, within its deadline, the launcher ended with
code 0 and the final loss is there, or with another code and a line that says why; where no process of the job is left; and
where every checkpoint that was there when the process was killed is there and intact, beside none that is half-written.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

from kills import left

import bitwitness as bw

HERE = Path(__file__).parent
_DEADLINE = 300.0  # seconds for a job whose process was killed
_LEFT = 45.0  # seconds in which processes that outlive their launcher have to end
FAULT = """\
[[fault]]
site = "layers.1.mlp.up/addmm:forward"
slot = 1
from_step = 8
kind = "multiply"
factor = 64.0
pattern = "column"
element = 7
"""


class Job:
    """One launched job in a folder of its own."""

    def __init__(self, folder: Path, ranks: int, steps: int) -> None:
        self.folder, self.checkpoints = folder, folder / "checkpoints"
        (folder / "faults.toml").write_text(FAULT)
        self.log = (folder / "log").open("wb")
        command = [
            *(sys.executable, "-m", "bitwitness", "launch", "--nproc-per-node", str(ranks), "--spares", "1"),
            *("--quarantine", str(folder / "quarantine.json"), "--out", str(folder / "run"), "--standalone"),
            *(str(HERE / "recovery_job.py"), str(self.checkpoints), str(steps)),
        ]
        env = {**os.environ, "OMP_NUM_THREADS": "1", "BITWITNESS_INJECT": str(folder / "faults.toml")}
        self.began = time.monotonic()
        self.process = subprocess.Popen(
            command, env=env, stdout=self.log, stderr=self.log, stdin=subprocess.DEVNULL, start_new_session=True
        )

    @property
    def convicted(self) -> bool:
        """Whether a device is in quarantine by now."""
        path = self.folder / "quarantine.json"
        return path.exists() and path.stat().st_size > 0

    def processes(self) -> list[int]:
        """Return all living processes of the job: those whose environment names its faults, ranks and launcher."""
        return sorted(left(f"BITWITNESS_INJECT={self.folder / 'faults.toml'}"))

    def await_conviction(self) -> None:
        """Wait until a device is in quarantine, the job has ended, or the deadline is over."""
        while not self.convicted and self.process.poll() is None and time.monotonic() - self.began < _DEADLINE:
            time.sleep(0.05)

    def wait(self, seconds: float) -> int | None:
        """Return the launcher's exit code, or None where it did not end in time."""
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None

    def sealed(self) -> list[str]:
        """Return the names of the checkpoints that are there."""
        return (
            sorted(p.name for p in self.checkpoints.glob("step-*") if p.is_dir()) if self.checkpoints.exists() else []
        )

    def end(self) -> None:
        """Leave nothing."""
        for pid in self.processes():
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()
        self.log.close()


def trial(folder: Path, ranks: int, steps: int, rng: random.Random, window: float) -> dict[str, Any]:
    """Run a job, kill one of its processes within ``window`` seconds from the conviction on; return what came of it."""
    job = Job(folder, ranks, steps)
    try:
        job.await_conviction()
        time.sleep(rng.random() * window)
        living = job.processes()
        victim = rng.choice(living) if living and rng.random() < 0.85 else job.process.pid
        there = job.sealed()
        with suppress(OSError):
            os.kill(victim, signal.SIGKILL)
        code = job.wait(_DEADLINE)
        until = time.monotonic() + _LEFT
        while (remaining := job.processes()) and time.monotonic() < until:
            time.sleep(0.2)
        return judged(job, code, remaining, there) | {"who": "launcher" if victim == job.process.pid else "rank"}
    finally:
        job.end()


def judged(job: Job, code: int | None, remaining: list[int], there: list[str]) -> dict[str, Any]:
    """Say what is wrong with how a job ended; nothing, if all is well."""
    problems, now = [], job.sealed()
    lines = [line for line in (job.folder / "log").read_text(errors="replace").splitlines() if line.strip()]
    if code is None:
        problems.append("the launcher hangs")
    elif code == 0 and not (job.folder / "final.json").exists():
        problems.append("code 0, and no final loss")
    elif code not in (0, -signal.SIGKILL) and not any("bitwitness" in line for line in lines[-30:]):
        problems.append("no word of why it ended")
    if remaining:
        problems.append(f"{len(remaining)} processes are left")
    if lost := [name for name in there if name not in now and name != there[0]]:
        problems.append(f"lost: {lost}")
    for name in now:
        try:
            if bw.checkpoint.verify(job.checkpoints / name).damage:
                problems.append(f"{name} is damaged")
        except bw.BitwitnessError as error:
            problems.append(f"{name}: {error}")
    return {"code": code, "problems": problems, "last": lines[-1][:300] if lines else "",
            "seconds": round(time.monotonic() - job.began, 1)}  # fmt: skip


def main() -> int:
    """Run the trials; tell, and return 1 where one is not right."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trials", type=int, default=50)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--steps", type=int, default=18)
    parser.add_argument("--seed", type=int, default=3)
    parser.add_argument("--window", type=float, help="seconds in which to kill; by default as long as a recovery takes")
    parser.add_argument("--out", type=Path, default=HERE / "results")
    args = parser.parse_args()
    scratch, told = Path(tempfile.mkdtemp(prefix="recovery-")), []
    try:
        window = args.window
        if window is None:
            (scratch / "undisturbed").mkdir()
            window, usual = undisturbed(scratch / "undisturbed", args.ranks, args.steps)
            print(f"undisturbed: {usual}, {window:.1f} s from conviction to end", flush=True)
        for number in range(args.trials):
            folder = scratch / str(number)
            folder.mkdir()
            found = trial(folder, args.ranks, args.steps, random.Random(f"{args.seed} {number}"), window)
            told.append(found)
            print(json.dumps({"trial": number, **found}), flush=True)
            shutil.rmtree(folder, ignore_errors=True)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    codes = Counter(str(t["code"]) for t in told)
    bad = [t for t in told if t["problems"]]
    text = (
        f"# Kills in the middle of recoveries\n\n`python bench/recovery_kills.py --trials {args.trials} --ranks {args.ranks}`"
        "\n\n"
        f"{len(told)} kills ({sum(t['who'] == 'launcher' for t in told)} of launchers): exit codes {dict(codes)}; "
        f"{len(told) - len(bad)} right.\n\n" + "".join(f"- {t}\n" for t in bad)
    )
    print(text)
    (args.out / "recovery_kills.md").write_text(text)
    return int(bool(bad))


def undisturbed(folder: Path, ranks: int, steps: int) -> tuple[float, str]:
    """Return how many seconds pass from the conviction to the end of a job that nobody disturbs, and how that ended."""
    job = Job(folder, ranks, steps)
    try:
        job.await_conviction()
        convicted = time.monotonic()
        code = job.wait(_DEADLINE)
        final = folder / "final.json"
        return time.monotonic() - convicted, f"code {code}, {final.read_text() if final.exists() else 'no final loss'}"
    finally:
        job.end()


if __name__ == "__main__":
    sys.exit(main())
