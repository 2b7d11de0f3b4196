"""A rank that is killed, stopped, frozen or slowed at a random moment of the experiments: what becomes of the others.

    python bench/lost.py --trials 30

Each trial starts three or four ranks, with or without torchrun, that train a small GPT under guard (``act = protect``, every
step questioned, a deadline of six seconds), and strikes one rank within a drawn stage of the experiments. A trial depends on
its number and the seed; those that ``lost.jsonl`` holds already are not made again.

- kill (SIGKILL), stop (SIGSTOP), freeze (stopped for twice the deadline): the others must end within the deadline and a grace,
  with exit code 18 (17 where a device was convicted before), with a line that names the struck rank and no other.
- stall (the main thread sleeps for twice the deadline): the same, but where the others wait in the training's own collectives
  (healing) they may wait: the rank lives.
- slow (runs a tenth of the time): all must go on to the end, and nobody may be called lost.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from forking import Forked
from lost_job import __file__ as JOB
from lost_job import train

from bitwitness.errors import EXIT_CONVICTED, EXIT_RANK_LOST

Process = Forked | subprocess.Popen[bytes]
DEADLINE_S = 6.0
GRACE_S = 12.0  # the liveness check, the end of the interpreter, and a machine that others use, too
LONGEST_S = 20.0
AGENT_S = 32.0  # torchrun gives a stopped rank 30 seconds before it kills it
LIMIT_S = 90.0
HOWS = ("kill", "stop", "slow", "stall", "freeze")
STAGES = ("exchange", "replay", "elsewhere", "locate", "heal", "calibrate", "telling", "evidence", "stop barrier")
CALLS = {"exchange": 12, "replay": 4, "elsewhere": 2}


def draw(number: int, seed: int) -> dict[str, Any]:
    """Return trial ``number``: stages and ways by turns, the rest at random."""
    generator = random.Random(f"{seed}/{number}")
    stage = STAGES[number % len(STAGES)]
    size = generator.choice((3, 4))
    return {
        "number": number,
        "stage": stage,
        "how": HOWS[(number + 2 * (number // len(STAGES))) % len(HOWS)],
        "size": size,
        "victim": generator.randrange(size),
        "call": generator.randint(1, CALLS.get(stage, 1)),
        "delay": round(generator.uniform(0, 0.03), 4),
        "launcher": "torchrun" if number % 5 == 4 else "plain",
        "deadline": DEADLINE_S,
    }


def start(trial: dict[str, Any], folder: Path) -> list[Process]:
    """Start torchrun, or each rank by itself, forked from this process, which has imported torch."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    if trial["launcher"] == "torchrun":
        where = (
            "--rdzv-backend",
            "c10d",
            "--rdzv-endpoint",
            "localhost:0",
            "--log-dir",
            str(folder),
            "--redirects",
            "3",
        )
        size = ("--nproc-per-node", str(trial["size"]))
        with (folder / "agent.log").open("wb") as log:
            job = (*size, *where, JOB, json.dumps(trial), str(folder))
            command = [sys.executable, "-m", "torch.distributed.run", *job]
            return [subprocess.Popen(command, env=environment, stdout=log, stderr=log)]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(probe.getsockname()[1])}
    processes: list[Process] = []
    for rank in range(trial["size"]):
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(trial["size"])}
        processes.append(Forked(partial(train, trial, folder), folder / f"rank{rank}.log", environment | own))
    return processes


def attempt(trial: dict[str, Any]) -> dict[str, Any]:
    """Make a trial; return it with what was seen and what was wrong with it."""
    folder = Path(tempfile.mkdtemp(prefix="lost-"))  # no TemporaryDirectory: a fork's exit would remove it
    try:
        processes = start(trial, folder)
        codes: dict[int, int] = {}
        ended: dict[int, float] = {}
        waiting = {rank for rank in range(len(processes)) if not gone_for_good(trial, rank)}
        limit = time.time() + LIMIT_S
        while waiting - set(codes) and time.time() < limit:
            for rank in waiting - set(codes):
                code = processes[rank].poll()
                if code is not None:
                    codes[rank], ended[rank] = code, time.time()
            time.sleep(0.02)
        hung = sorted(waiting - set(codes))
        end_all(processes, folder)
        struck = folder / "struck"
        at = float(struck.read_text()) if struck.exists() else None
        logs = {log.relative_to(folder).as_posix(): log.read_text(errors="replace") for log in folder.rglob("*.log")}
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    others = [moment for rank, moment in ended.items() if trial["launcher"] == "torchrun" or rank != trial["victim"]]
    seen = {"codes": codes, "seconds": None if at is None else round(max(others, default=limit) - at, 1)}
    problems = unstruck(codes, logs) if at is None else judged(trial, codes, hung, logs, seen["seconds"])
    return {**trial, **seen, "struck": at is not None, "problems": problems, "said": lines(logs) if problems else []}


def gone_for_good(trial: dict[str, Any], rank: int) -> bool:
    """Tell whether a process is not expected to end by itself."""
    return trial["launcher"] == "plain" and rank == trial["victim"] and trial["how"] == "stop"


def end_all(processes: list[Process], folder: Path) -> None:
    """End what is left: the processes started here, and those that wrote down their numbers."""
    for process in processes:
        if process.poll() is None:
            process.kill()
    for pid in folder.glob("pid*"):
        with suppress(OSError, ValueError):
            number = int(pid.read_text())
            if JOB.encode() in Path(f"/proc/{number}/cmdline").read_bytes():
                os.kill(number, signal.SIGKILL)
    for process in processes:
        process.wait()


def unstruck(codes: dict[int, int], logs: dict[str, str]) -> list[str]:
    """Return what is wrong with a trial in which the drawn call did not come: it ends as the training does."""
    failed = [f"not struck, and rank {rank} ended with {code}" for rank, code in codes.items() if code == 1]
    return failed if any("Traceback" in text for text in logs.values()) else []


def judged(
    trial: dict[str, Any], codes: dict[int, int], hung: list[int], logs: dict[str, str], seconds: float
) -> list[str]:
    """Return what is wrong with how a trial ended."""
    problems = [f"rank {rank} hung" for rank in hung]
    told = "\n".join(logs.values())
    named = set(re.findall(r"\(rank ([\d, ]+) (?:does not answer|answers, but)", told))
    own = "".join(text for name, text in logs.items() if name != "agent.log")
    problems += ["a traceback"] if "Traceback" in own else []
    problems += ["the process aborted"] if "terminate called" in told else []
    if trial["how"] == "slow" or (trial["how"] == "stall" and trial["stage"] == "heal"):
        fine = {0, EXIT_CONVICTED} if trial["launcher"] == "plain" else {0, 1}
        problems += [f"rank {rank} ended with {code}" for rank, code in codes.items() if code not in fine]
        problems += ["a slow rank was called lost"] if "no longer be questioned" in told else []
        return problems
    wrong = named - {str(trial["victim"])}
    problems += [f"named rank {', '.join(sorted(wrong))}"] if wrong else []
    # Twenty replays' time where that is longer than what was configured (a loaded machine); the message tells.
    said = [float(text) for text in re.findall(r"\(deadline ([\d.]+) s\)", told)]
    allowed = max([trial["deadline"], *(s for s in said if s < LONGEST_S)]) + GRACE_S
    if trial["launcher"] == "torchrun":
        allowed += AGENT_S if trial["how"] != "kill" else 0
        by_agent = re.search(rf"rank\s*: {trial['victim']} ", logs["agent.log"]) and trial["how"] == "kill"
        problems += [] if named or by_agent else ["nobody named the rank"]
    else:
        others = {rank: code for rank, code in codes.items() if rank != trial["victim"]}
        convicted = "VERDICT" in told and trial["stage"] == "stop barrier"
        fine = {EXIT_RANK_LOST, EXIT_CONVICTED} if convicted else {EXIT_RANK_LOST}
        problems += [f"rank {rank} ended with {code}" for rank, code in others.items() if code not in fine]
        silent = [r for r in others if f"(rank {trial['victim']} " not in logs[f"rank{r}.log"]]
        problems += [f"rank {rank} named nobody" for rank in silent]
    problems += [f"took {seconds:g} s"] if seconds > allowed else []
    return problems


def lines(logs: dict[str, str]) -> list[str]:
    """Return the end of each log, for a problem's sake."""
    return [f"{name}: {text[-1500:]}" for name, text in sorted(logs.items())]


def table(trials: list[dict[str, Any]]) -> str:
    """Return the trials by stage and way as a Markdown table."""
    names = ("stage", "how", "trials", "struck", "longest, s", "wrong")
    lines = ["| " + " | ".join(names) + " |", "|" + "---|" * len(names)]
    for stage, how in sorted({(t["stage"], t["how"]) for t in trials}):
        those = [t for t in trials if (t["stage"], t["how"]) == (stage, how)]
        struck = [t for t in those if t["struck"]]
        longest = max((t["seconds"] for t in struck), default=0)
        row = (stage, how, len(those), len(struck), f"{longest:g}", sum(bool(t["problems"]) for t in those))
        lines.append("| " + " | ".join(map(str, row)) + " |")
    return "\n".join(lines)


def summary(trials: list[dict[str, Any]]) -> str:
    """Return one line for all trials."""
    struck = [t for t in trials if t["struck"]]
    wrong = sum(bool(t["problems"]) for t in trials)
    counts = Counter(t["how"] for t in struck)
    kinds = ", ".join(f"{count} {how}" for how, count in sorted(counts.items()))
    return f"{len(trials)} trials, {len(struck)} struck ({kinds}), {wrong} wrong"


def main() -> None:
    """Make the trials that are not made yet."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trials", type=int, default=30)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", type=int, nargs="*", help="numbers of single trials")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    record = args.out / "lost.jsonl"
    made: dict[int, dict[str, Any]] = {}
    if record.exists():
        made = {t["number"]: t for t in map(json.loads, record.read_text().splitlines()) if t["seed"] == args.seed}
    wanted = args.only if args.only is not None else list(range(args.trials))
    for number in wanted:
        if number in made:
            continue
        trial = {**attempt(draw(number, args.seed)), "seed": args.seed}
        made[number] = trial
        with record.open("a") as file:
            file.write(json.dumps(trial) + "\n")
        words = "; ".join(trial["problems"]) or ("right" if trial["struck"] else "not struck")
        what = f"{trial['how']} rank {trial['victim']} of {trial['size']} in {trial['stage']} ({trial['launcher']})"
        print(f"trial {number}: {what}: {words}, {trial['seconds']} s, {trial['codes']}", file=sys.stderr, flush=True)
    trials = [made[number] for number in wanted]
    result = f"{table(trials)}\n\n{summary(trials)}"
    print(result)
    command = f"python bench/lost.py --trials {args.trials} --seed {args.seed}"
    head = f"# A rank lost within the experiments\n\n`{command}`, deadline {DEADLINE_S:g} s"
    (args.out / "lost.md").write_text(f"{head}\n\n{result}\n")
    sys.exit(any(t["problems"] for t in trials))


if __name__ == "__main__":
    main()
