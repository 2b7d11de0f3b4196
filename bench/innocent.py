"""Trainings as other people write them, each plain and under the guard: nothing may change, and nobody may be convicted.

    python bench/innocent.py
    python bench/innocent.py --only grad_dqn_clamp_data
    python bench/innocent.py --faults
    python bench/innocent.py --as-users --times 25 --steps-total 100000

Every script of ``tests/zoo`` runs in a process of its own, forked from one that has imported torch: plain, and as
``bitwitness run`` with a threshold that makes every step suspicious, so that every step is run again; with ``--as-users``,
as the guard is without settings. The line ``BITS …`` that it prints at its end (a hash of all parameters, buffers, optimizer
state and losses) and its exit code have to be the same. With ``--faults`` each runs twice more on a device that computes
wrongly; there, the parameters and the optimizers' state are compared, for a script may have logged the faulty loss. Writes
``bench/results/innocent.md`` (``innocent_long.md`` with ``--as-users``); exits with 1 if anything was disturbed or misjudged.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

from innocence.judging import IDLE, choose_fault, disturbed, misjudged, outcome_of, site_of
from innocence.processes import execute
from innocence.report import page
from innocence.runs import AS_USERS, QUESTIONED, ROOT, UNQUESTIONED, Found, Run, Task

ZOO = ROOT / "tests" / "zoo"


class Campaign:
    """All runs of one call of this program."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.scripts = sorted(path for path in ZOO.glob("*.py") if not args.only or path.stem in args.only)
        unknown = set(args.only or ()) - {path.stem for path in self.scripts}
        if unknown:
            sys.exit(f"no such script in {ZOO.relative_to(ROOT)}: {', '.join(sorted(unknown))}")
        self.found = Found()

    def _task(self, path: Path, seed: int, how: str, fault: str | None = None) -> Task:
        guarded = AS_USERS if self.args.as_users else QUESTIONED
        return Task(path, seed, how, self.args.times, UNQUESTIONED if how == "faulted plain" else guarded, fault)

    def _execute(self, tasks: Iterable[Task], done: Callable[[Task, Run], None]) -> None:
        args = self.args
        execute(tasks, jobs=args.jobs, timeout=args.timeout, fresh=args.fresh, done=done)

    def _seeds(self) -> Iterable[int]:
        """Yield seeds until enough optimizer steps were seen."""
        seed = 0
        while seed < self.args.repeat or sum(run.steps for run in self.found.plain.values()) < self.args.steps_total:
            yield seed
            seed += 1
            if not any(run.steps for run in self.found.plain.values()):
                break

    def run_plain(self) -> None:
        """Run every script plain, before anything of the guard is imported; with the first seed, twice."""

        def keep(task: Task, run: Run) -> None:
            key = (run.script, run.seed)
            if task.how == "counted":
                self.found.counted[run.script] = run
                return
            before = self.found.plain.setdefault(key, run)
            if before is not run and (before.bits, before.code) != (run.bits, run.code):
                self.found.unsteady.append(run.script)
            if run.bits is None or run.hung:
                last = run.stderr.strip().splitlines()[-1:] or [""]
                print(f"{run.script} (seed {run.seed}), plain: exit code {run.code}, bits {run.bits}: {last[0]}")

        for seed in self._seeds():
            again = [self._task(path, seed, "plain") for path in self.scripts]
            if seed == 0 and not self.args.once:
                again += again
            if self.args.fresh:
                again += [self._task(path, seed, "counted") for path in self.scripts]
            self._execute(again, keep)
        if self.args.fresh:
            for (script, _seed), run in self.found.plain.items():
                run.steps = self.found.counted[script].steps

    def run_guarded(self) -> None:
        """Run every script under the guard and compare."""

        def keep(_task: Task, run: Run) -> None:
            key = (run.script, run.seed)
            self.found.guarded[key] = run
            self.found.wrong[key] = wrong = disturbed(self.found.plain[key], run)
            verdicts = ", ".join(f"{n} {c}" for c, n in sorted(collections.Counter(run.causes).items())) or "none"
            print(
                f"{'WRONG' if wrong else 'ok   '} {run.script} (seed {run.seed}): {self.found.plain[key].steps} steps, "
                f"{run.held} held, {run.again} run again; bits {'OTHER' if 'other bits' in wrong else 'same'}; "
                f"exit {run.code}; verdicts: {verdicts}; {run.seconds:.1f} s"
                + (f"; failures {run.failures}" if run.failures else "")
                + ("".join(f"\n      {text}" for text in wrong)),
                flush=True,
            )
            if self.args.stderr:
                print(run.stderr)

        by_name = {path.stem: path for path in self.scripts}
        self._execute([self._task(by_name[script], seed, "guarded") for script, seed in self.found.plain], keep)

    def look_closer(self) -> None:
        """Tell, of runs with other bits, whether the training itself differs or only what the script keeps beside it."""
        again = [
            key for key, wrong in self.found.wrong.items() if "other bits" in wrong and self.found.plain[key].weights
        ]
        by_name = {path.stem: path for path in self.scripts}

        def keep(task: Task, run: Run) -> None:
            wrong = self.found.wrong[run.script, run.seed]
            same = run.weights == self.found.plain[run.script, run.seed].weights
            text = "other bits in what the script keeps beside the weights" if same else "other bits in the weights"
            wrong[wrong.index("other bits")] = text
            print(f"{run.script} (seed {task.seed}): {text}", flush=True)

        self._execute([self._task(by_name[script], seed, "guarded watched") for script, seed in again], keep)

    def run_faults(self) -> None:
        """Run every script on a device that computes wrongly: once, and every time."""
        if not self.args.fresh:
            self._execute(
                [self._task(path, 0, "counted") for path in self.scripts],
                lambda _task, run: self.found.counted.__setitem__(run.script, run),
            )
        by_name = {path.stem: path for path in self.scripts}
        # A device that is emulated runs some operators part by part: its healthy bits are not always those of the plain run.
        self._execute(
            [self._task(by_name[script], seed, "faulted plain", IDLE) for script, seed in self.found.plain],
            lambda _task, run: self.found.idle.__setitem__((run.script, run.seed), run),
        )
        tasks = []
        for script, seed in self.found.plain:
            for kind in ("transient", "persistent"):
                held = self.found.guarded[script, seed].held
                chosen = choose_fault(script, seed, kind, self.found.counted[script], held)
                if chosen is not None:
                    self.found.struck[script, seed, kind] = chosen
                    hows = ("faulted plain", "faulted guarded")
                    tasks += [(kind, self._task(by_name[script], seed, how, chosen[1])) for how in hows]
        kinds = {id(task): kind for kind, task in tasks}

        def keep(task: Task, run: Run) -> None:
            kind = kinds[id(task)]
            self.found.faulted[run.script, run.seed, kind, task.how] = run
            key = (run.script, run.seed, kind)
            pair = [self.found.faulted.get((*key, how)) for how in ("faulted plain", "faulted guarded")]
            if pair[0] is None or pair[1] is None:
                return
            free = self.found.free(run.script, run.seed)
            self.found.misjudged[key] = wrong = misjudged(kind, self.found.struck[key][0], free, pair[0], pair[1])
            site = site_of(self.found.struck[key][1])
            print(
                f"{'WRONG' if wrong else 'ok   '} {run.script} (seed {run.seed}), {kind} in {site}: "
                f"{outcome_of(free, pair[0], pair[1])}" + ("".join(f"\n      {text}" for text in wrong)),
                flush=True,
            )
            if self.args.stderr:
                print(pair[1].stderr)

        self._execute([task for _kind, task in tasks], keep)

    def write(self) -> str:
        """Return the report."""
        how = "without settings" if self.args.as_users else "with every step questioned and so run again"
        command = " ".join(["python bench/innocent.py", *sys.argv[1:]])
        return page(self.found, [path.stem for path in self.scripts], how=how, command=command)


def main() -> None:
    """Run the zoo."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", action="append", metavar="NAME", help="a script's name without .py; repeatable")
    parser.add_argument("--repeat", type=int, default=1, metavar="N", help="so many seeds")
    parser.add_argument("--steps-total", type=int, default=0, metavar="N", help="seeds until so many optimizer steps")
    parser.add_argument(
        "--faults", action="store_true", help="each script also with a transient and a persistent fault"
    )
    parser.add_argument("--as-users", action="store_true", help="the guard without settings, not every step questioned")
    parser.add_argument("--times", type=int, default=1, metavar="N", help="main loops so many times as long")
    parser.add_argument("--jobs", type=int, default=1, choices=(1, 2))
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds after which a run counts as hung")
    parser.add_argument("--once", action="store_true", help="do not run the scripts twice plain")
    parser.add_argument("--fresh", action="store_true", help="a fresh interpreter a run instead of a fork (slow)")
    parser.add_argument("--stderr", action="store_true", help="print what guarded runs say")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write what went wrong, by script")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results", help="folder for the report")
    args = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.path.insert(0, str(ROOT / "src"))  # this checkout's guard, whatever is installed
    campaign = Campaign(args)
    if not args.fresh:
        _import_once(campaign.scripts)
    campaign.run_plain()
    if not args.fresh:
        import bitwitness.cli  # noqa: F401  after the plain runs, which must know nothing of it
    campaign.run_guarded()
    campaign.look_closer()
    if args.faults:
        campaign.run_faults()
    text = campaign.write()
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / f"innocent{'_long' if args.as_users else ''}.md").write_text(text)
    if args.json is not None:
        by_script: dict[str, list[str]] = {path.stem: [] for path in campaign.scripts}
        for key, wrong in [*campaign.found.wrong.items(), *campaign.found.misjudged.items()]:
            by_script[key[0]] += wrong
        for script in campaign.found.unsteady:
            by_script[script].append("two plain runs differ")
        args.json.write_text(json.dumps(by_script, indent=1))
    sys.exit(1 if campaign.found.failed else 0)


def _import_once(scripts: Iterable[Path]) -> None:
    """Import what the scripts need, so that a fork has it already."""
    import torch
    import torch._dynamo
    import torch.distributions
    import torch.utils.data

    torch.set_num_threads(1)
    source = "\n".join(path.read_text() for path in scripts)
    for name in ("numpy", "transformers", "accelerate", "lightning"):
        if re.search(rf"^\s*(?:import|from) {name}\b", source, re.MULTILINE):
            __import__(name)


if __name__ == "__main__":
    main()
