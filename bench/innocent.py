"""Trainings as other people write them, each plain and under the guard with every step questioned: nothing may change.

    python bench/innocent.py
    python bench/innocent.py --only grad_dqn_clamp_data
    python bench/innocent.py --steps-total 100000 --jobs 2
    python bench/innocent.py --faults

Every script of ``tests/zoo`` runs in a process of its own, forked from one that has imported torch: plain, and as
``bitwitness run`` with a threshold that makes every step suspicious, so that every step is run again. The line ``BITS …`` that
it prints at its end (a hash of all parameters, buffers, optimizer state and losses) and its exit code have to be the same, and
nobody may be convicted. With ``--faults`` each runs twice more on a device that computes wrongly; there, the parameters and the
optimizers' state are compared, for a script may have logged the faulty loss. Writes ``bench/results/innocent.md``; exits with
1 if anything was disturbed or misjudged.
"""

from __future__ import annotations

import argparse
import atexit
import collections
import contextlib
import hashlib
import json
import os
import re
import runpy
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
ZOO = ROOT / "tests" / "zoo"
CONVICTIONS = ("transient_hardware", "persistent_hardware", "corrupt_state")
STOPPED = 17
QUESTIONED = """act = "protect"
self_test = false
[trend]
z = 1e-9
warmup = 1
[replay]
rest = false
"""
UNQUESTIONED = """act = "observe"
self_test = false
[trend]
z = 1e9
[replay]
rest = false
"""
"""What a faulty device does to a training that nobody mends."""

PRODUCTS = ("addmm", "mm", "bmm", "baddbmm", "convolution", "convolution_backward", "mv", "_thnn_fused_gru_cell")
LOSSES = (
    "_log_softmax",
    "_log_softmax_backward_data",
    "nll_loss_forward",
    "nll_loss_backward",
    "mse_loss",
    "mse_loss_backward",
    "smooth_l1_loss",
    "huber_loss",
    "binary_cross_entropy",
    "binary_cross_entropy_with_logits",
    "sum",
    "mean",
)
NEVER = re.compile(
    r"rand|normal_|bernoulli|empty|ones|zeros|full|arange|scalar|expand|squeeze|transpose|^t:|permute|view|detach|clone|copy_"
    r"|lift|slice|select|split|chunk|unbind|_foreach|fill_|zero_|item|alias"
)
"""Operators that compute nothing, or draw."""


@dataclass
class Run:
    """What one run of one script left behind."""

    script: str
    seed: int
    bits: str | None = None
    weights: str | None = None
    code: int | None = None
    hung: bool = False
    seconds: float = 0.0
    steps: int = 0
    stderr: str = ""
    held: int = 0
    suspicions: int = 0
    again: int = 0
    verdicts: list[dict[str, Any]] = field(default_factory=list)
    failures: dict[str, Any] = field(default_factory=dict)
    not_covered: list[str] = field(default_factory=list)
    operators: dict[str, int] = field(default_factory=dict)

    @property
    def causes(self) -> list[str]:
        """The causes of its verdicts, as the tool calls them."""
        return [str(_cause(verdict)) for verdict in self.verdicts]


@dataclass(frozen=True)
class Task:
    """One run to be made: plain, counted (plain, its operators listed), guarded or faulted."""

    script: Path
    seed: int
    how: str
    fault: str | None = None


def _cause(verdict: dict[str, Any]) -> object:
    evidence = verdict.get("evidence")
    inside = evidence.get("cause") if isinstance(evidence, dict) else None
    return verdict.get("cause") or inside


# ---- the child ----------------------------------------------------------------------------------------------------------


def _watch_optimizers(folder: Path) -> None:
    """Leave the number of optimizer steps, and a hash of all that the optimizers hold, in the folder when the process ends."""
    import torch
    from torch.optim.optimizer import register_optimizer_step_post_hook

    optimizers: dict[int, torch.optim.Optimizer] = {}
    steps = [0]

    def count(optimizer: torch.optim.Optimizer, *_args: object) -> None:
        steps[0] += 1
        optimizers.setdefault(id(optimizer), optimizer)

    def leave() -> None:
        digest = hashlib.sha256()
        for optimizer in optimizers.values():
            for parameter in (p for group in optimizer.param_groups for p in group["params"]):
                state = optimizer.state.get(parameter, {})
                for tensor in (parameter, *(value for value in state.values() if isinstance(value, torch.Tensor))):
                    digest.update(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        (folder / "weights").write_text(digest.hexdigest())
        (folder / "steps").write_text(str(steps[0]))

    register_optimizer_step_post_hook(count)
    atexit.register(leave)


def _list_operators(folder: Path) -> contextlib.AbstractContextManager[object]:
    """Return a mode that counts the operators with a floating result, by name and phase."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    seen: collections.Counter[str] = collections.Counter()

    class Listing(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, _types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
        ) -> Any:
            result = func(*args, **(kwargs or {}))
            first = result[0] if isinstance(result, tuple | list) and result else result
            if isinstance(first, torch.Tensor) and first.is_floating_point() and not first.is_sparse:
                phase = "backward" if torch._C._current_autograd_node() is not None else "forward"
                if torch.is_grad_enabled() or phase == "backward":
                    seen[f"{func._schema.name.split('::')[-1]}:{phase}"] += 1
            return result

    atexit.register(lambda: (folder / "operators").write_text(json.dumps(seen)))
    return Listing()


def _run_child(task: Task, folder: Path) -> int:
    """Run the script in this process and return what its exit code would be."""
    script = str(task.script)
    if task.how != "guarded":
        _watch_optimizers(folder)
    if task.how.startswith(("guarded", "faulted")):
        from bitwitness.cli import main

        return _code(lambda: main(_arguments(task, folder)))
    mode = _list_operators(folder) if task.how == "counted" else contextlib.nullcontext()
    sys.argv = [script]
    sys.path.insert(0, str(task.script.parent))
    with mode:
        return _code(lambda: runpy.run_path(script, run_name="__main__"))


def _arguments(task: Task, folder: Path) -> list[str]:
    return ["run", "--config", str(folder / "config.toml"), "--out", str(folder / "run"), str(task.script)]


def _code(call: Callable[[], object]) -> int:
    """Call; return the exit code that Python would give the process."""
    try:
        result = call()
    except SystemExit as stop:
        if stop.code is None or isinstance(stop.code, int):
            return int(stop.code or 0)
        print(stop.code, file=sys.stderr)
        return 1
    except BaseException:
        traceback.print_exc()
        return 1
    return result if isinstance(result, int) else 0


def _child(task: Task, folder: Path, environment: dict[str, str]) -> None:
    """Never returns: becomes the process of one script."""
    code = 70
    try:
        os.setsid()
        for number, name in ((1, "stdout"), (2, "stderr")):
            os.dup2(os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.environ.update(environment)
        os.chdir(folder / "cwd")
        code = _run_child(task, folder)
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(BaseException):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code & 0xFF)


# ---- the parent ---------------------------------------------------------------------------------------------------------


@dataclass
class Running:
    """A process under way."""

    task: Task
    folder: Path
    pid: int
    began: float


def _start(task: Task, scratch: Path, number: int, *, fresh: bool) -> Running:
    folder = scratch / f"{number:06d}"
    (folder / "cwd").mkdir(parents=True)
    environment = {"ZOO_SEED": str(task.seed), "OMP_NUM_THREADS": "1"}
    (folder / "config.toml").write_text(UNQUESTIONED if task.how == "faulted plain" else QUESTIONED)
    if task.fault is not None:
        (folder / "faults.toml").write_text(task.fault)
        environment["BITWITNESS_INJECT"] = str(folder / "faults.toml")
    sys.stdout.flush()
    sys.stderr.flush()
    if fresh and task.how != "counted":
        guarded = ["-m", "bitwitness", *_arguments(task, folder)]
        command = [sys.executable, *(guarded if task.how != "plain" else [str(task.script)])]
        with (folder / "stdout").open("wb") as out, (folder / "stderr").open("wb") as err:
            process = subprocess.Popen(
                command,
                cwd=folder / "cwd",
                env={**os.environ, **environment, "PYTHONPATH": str(ROOT / "src")},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,
            )
        process.returncode = 0  # we wait for it ourselves
        return Running(task, folder, process.pid, time.monotonic())
    pid = os.fork()
    if pid == 0:
        _child(task, folder, environment)
    return Running(task, folder, pid, time.monotonic())


def _text(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""


def _finish(running: Running, status: int | None, seconds: float) -> Run:
    folder = running.folder
    run = Run(running.task.script.stem, running.task.seed, seconds=seconds, hung=status is None)
    run.code = None if status is None else os.waitstatus_to_exitcode(status)
    lines = [line for line in _text(folder / "stdout").splitlines() if line.startswith("BITS ")]
    run.bits = lines[0][5:].strip() if len(lines) == 1 else None
    run.stderr = _text(folder / "stderr")
    run.weights = _text(folder / "weights") or None
    run.steps = int(_text(folder / "steps") or 0)
    run.operators = json.loads(_text(folder / "operators") or "{}")
    for path in sorted((folder / "run").glob("rank*/events.jsonl")):
        _read_events(run, path)
    shutil.rmtree(folder, ignore_errors=True)
    return run


def _read_events(run: Run, path: Path) -> None:
    again = set()
    for line in _text(path).splitlines():
        try:
            event = json.loads(line)
        except json.JSONDecodeError:
            continue
        evidence = event.get("evidence") or {}
        if any(name.startswith("replay") for name in evidence.get("hash_by_execution") or ()):
            again.add(event.get("step"))
        if event.get("type") == "verdict":
            run.verdicts.append(event)
        if event.get("type") == "note" and event.get("message") == "coverage":
            run.held += evidence.get("steps", {}).get("held", 0)
            run.suspicions += evidence.get("suspicions", 0)
            run.failures.update(evidence.get("failures") or {})
            run.not_covered += evidence.get("not_covered") or []
    run.again += len(again)


def execute(
    tasks: Iterable[Task],
    *,
    jobs: int,
    timeout: float,
    fresh: bool,
    done: Callable[[Task, Run], None],
) -> None:
    """Run the tasks, so many at a time, each in a process of its own; hand each run to ``done``."""
    waiting, active = iter(tasks), list[Running]()
    scratch = tempfile.mkdtemp(prefix="innocent-")  # no TemporaryDirectory: a child's exit would remove it
    try:
        number, exhausted = 0, False
        while active or not exhausted:
            while len(active) < jobs and not exhausted:
                task = next(waiting, None)
                if task is None:
                    exhausted = True
                else:
                    active.append(_start(task, Path(scratch), number, fresh=fresh))
                    number += 1
            for running in list(active):
                pid, status = os.waitpid(running.pid, os.WNOHANG)
                seconds = time.monotonic() - running.began
                if pid == 0 and seconds <= timeout:
                    continue
                if pid == 0:
                    os.killpg(running.pid, signal.SIGKILL)
                    os.waitpid(running.pid, 0)
                active.remove(running)
                done(running.task, _finish(running, status if pid else None, seconds))
            time.sleep(0.005)
    finally:
        for running in active:
            os.killpg(running.pid, signal.SIGKILL)
        shutil.rmtree(scratch, ignore_errors=True)


# ---- judgements ---------------------------------------------------------------------------------------------------------


def disturbed(plain: Run, guarded: Run) -> list[str]:
    """Return what went wrong in a guarded run without faults; empty if nothing did."""
    if guarded.hung:
        return ["hang"]
    wrong = []
    if guarded.code != plain.code:
        wrong.append(f"exit code {guarded.code} instead of {plain.code}")
        if guarded.code is not None and guarded.code < 0:
            wrong.append("crash")
    if guarded.bits is None and plain.bits is not None:
        wrong.append("no bits")
    elif guarded.bits != plain.bits:
        wrong.append("other bits")
    count = collections.Counter(cause for cause in guarded.causes if cause in CONVICTIONS)
    wrong += [f"{number} times {cause}" for cause, number in sorted(count.items())]
    return wrong


def misjudged(kind: str, operator: str, free: Run, unmended: Run, mended: Run) -> list[str]:
    """Return what went wrong in a guarded run on a faulty device; empty if it was right, or said that it cannot know."""
    if mended.hung:
        return ["hang"]
    wrong = []
    causes = set(mended.causes)
    healed = _acted(mended, "healed") and not _acted(mended, "skipped")
    stopped = mended.code == STOPPED
    if kind == "transient" and "persistent_hardware" in causes:
        wrong.append("a transient called persistent")
    if kind == "persistent" and "transient_hardware" in causes:
        wrong.append("a persistent fault called transient")
    if "corrupt_state" in causes:
        wrong.append("called corrupt state")
    if stopped and "persistent_hardware" not in causes:
        wrong.append("stopped without a conviction")
    if not stopped and mended.code not in {free.code, unmended.code}:
        wrong.append(f"exit code {mended.code}")
    if healed and not stopped and mended.weights != free.weights:
        wrong.append("healed, but not to the healthy weights")
    elif not stopped and not _acted(mended, "skipped") and mended.weights not in {free.weights, unmended.weights}:
        wrong.append("weights of neither the healthy nor the faulty device")
    named = named_operators(mended)
    if named and operator not in named:
        wrong.append(f"named {', '.join(sorted(named))} instead of {operator}")
    return wrong


def _acted(run: Run, action: str) -> bool:
    return any(verdict.get("action") == action for verdict in run.verdicts)


def named_operators(run: Run) -> set[str]:
    """Return the operators that a persistent verdict's message names."""
    found: set[str] = set()
    for verdict in run.verdicts:
        if _cause(verdict) == "persistent_hardware":
            found.update(re.findall(r"/(\w+)#\d+:(?:forward|backward)", str(verdict.get("message"))))
    return found


IDLE = '[[fault]]\nsite = "*"\nkind = "multiply"\nfactor = 64.0\nfrom_step = 1000000000\n'
"""A fault that never strikes."""


def choose_fault(script: str, seed: int, kind: str, counted: Run, held: int) -> tuple[str, str] | None:
    """Return an operator that the script has and the TOML text of a fault in it; None if it has none to strike."""
    names = [name for name in counted.operators if not NEVER.search(name)]
    pools = [
        [name for name in names if name.split(":")[0] in PRODUCTS],
        [name for name in names if name.split(":")[0] in LOSSES],
        names,
    ]
    lot = zlib.crc32(f"{script} {kind} {seed}".encode())
    pool = pools[lot % 3] or pools[0] or names
    if not pool:
        return None
    site = sorted(pool)[(lot // 3) % len(pool)]
    operator = site.partition(":")[0]
    first = max(4, int(0.6 * (held or counted.steps)))
    once = "times = 1\n" if kind == "transient" else ""
    text = (
        f'[[fault]]\nsite = "*/{site}"\nkind = "multiply"\nfactor = 64.0\npattern = "all"\nfrom_step = {first}\n{once}'
    )
    return operator, text


# ---- the campaign -------------------------------------------------------------------------------------------------------


class Campaign:
    """All runs of one call of this program."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.scripts = sorted(path for path in ZOO.glob("*.py") if not args.only or path.stem in args.only)
        unknown = set(args.only or ()) - {path.stem for path in self.scripts}
        if unknown:
            sys.exit(f"no such script in {ZOO.relative_to(ROOT)}: {', '.join(sorted(unknown))}")
        self.plain: dict[tuple[str, int], Run] = {}
        self.guarded: dict[tuple[str, int], Run] = {}
        self.counted: dict[str, Run] = {}
        self.faulted: dict[tuple[str, int, str, str], Run] = {}
        self.idle: dict[tuple[str, int], Run] = {}
        self.wrong: dict[tuple[str, int], list[str]] = {}
        self.struck: dict[tuple[str, int, str], tuple[str, str]] = {}
        self.misjudged: dict[tuple[str, int, str], list[str]] = {}
        self.unsteady: list[str] = []

    def _execute(self, tasks: Iterable[Task], done: Callable[[Task, Run], None]) -> None:
        args = self.args
        execute(tasks, jobs=args.jobs, timeout=args.timeout, fresh=args.fresh, done=done)

    def _seeds(self) -> Iterable[int]:
        """Yield seeds until enough optimizer steps were seen."""
        seed = 0
        while seed < self.args.repeat or sum(run.steps for run in self.plain.values()) < self.args.steps_total:
            yield seed
            seed += 1
            if not any(run.steps for run in self.plain.values()):
                break

    def run_plain(self) -> None:
        """Run every script plain, before anything of the guard is imported; with the first seed, twice."""

        def keep(task: Task, run: Run) -> None:
            key = (run.script, run.seed)
            if task.how == "counted":
                self.counted[run.script] = run
                return
            before = self.plain.setdefault(key, run)
            if before is not run and (before.bits, before.code) != (run.bits, run.code):
                self.unsteady.append(run.script)
            if run.bits is None or run.hung:
                last = run.stderr.strip().splitlines()[-1:] or [""]
                print(f"{run.script} (seed {run.seed}), plain: exit code {run.code}, bits {run.bits}: {last[0]}")

        for seed in self._seeds():
            again = [Task(path, seed, "plain") for path in self.scripts]
            if seed == 0 and not self.args.once:
                again += again
            if self.args.fresh:
                again += [Task(path, seed, "counted") for path in self.scripts]
            self._execute(again, keep)
        if self.args.fresh:
            for (script, _seed), run in self.plain.items():
                run.steps = self.counted[script].steps

    def run_guarded(self) -> None:
        """Run every script under the guard and compare."""

        def keep(_task: Task, run: Run) -> None:
            key = (run.script, run.seed)
            self.guarded[key] = run
            self.wrong[key] = wrong = disturbed(self.plain[key], run)
            verdicts = ", ".join(f"{n} {c}" for c, n in sorted(collections.Counter(run.causes).items())) or "none"
            print(
                f"{'WRONG' if wrong else 'ok   '} {run.script} (seed {run.seed}): {self.plain[key].steps} steps, "
                f"{run.held} held, {run.again} run again; bits {'same' if run.bits == self.plain[key].bits else 'OTHER'}; "
                f"exit {run.code}; verdicts: {verdicts}; {run.seconds:.1f} s"
                + (f"; failures {run.failures}" if run.failures else "")
                + ("".join(f"\n      {text}" for text in wrong)),
                flush=True,
            )
            if self.args.stderr:
                print(run.stderr)

        by_name = {path.stem: path for path in self.scripts}
        self._execute([Task(by_name[script], seed, "guarded") for script, seed in self.plain], keep)

    def look_closer(self) -> None:
        """Tell, of runs with other bits, whether the training itself differs or only what the script keeps beside it."""
        again = [key for key, wrong in self.wrong.items() if "other bits" in wrong and self.plain[key].weights]
        by_name = {path.stem: path for path in self.scripts}

        def keep(task: Task, run: Run) -> None:
            wrong = self.wrong[run.script, run.seed]
            same = run.weights == self.plain[run.script, run.seed].weights
            text = "other bits in what the script keeps beside the weights" if same else "other bits in the weights"
            wrong[wrong.index("other bits")] = text
            print(f"{run.script} (seed {task.seed}): {text}", flush=True)

        self._execute([Task(by_name[script], seed, "guarded watched") for script, seed in again], keep)

    def run_faults(self) -> None:
        """Run every script on a device that computes wrongly: once, and every time."""
        if not self.args.fresh:
            self._execute(
                [Task(path, 0, "counted") for path in self.scripts],
                lambda _task, run: self.counted.__setitem__(run.script, run),
            )
        by_name = {path.stem: path for path in self.scripts}
        # A device that is emulated runs some operators part by part: its healthy bits are not always those of the plain run.
        self._execute(
            [Task(by_name[script], seed, "faulted plain", IDLE) for script, seed in self.plain],
            lambda _task, run: self.idle.__setitem__((run.script, run.seed), run),
        )
        tasks = []
        for script, seed in self.plain:
            for kind in ("transient", "persistent"):
                held = self.guarded[script, seed].held
                chosen = choose_fault(script, seed, kind, self.counted[script], held)
                if chosen is not None:
                    self.struck[script, seed, kind] = chosen
                    hows = ("faulted plain", "faulted guarded")
                    tasks += [(kind, Task(by_name[script], seed, how, chosen[1])) for how in hows]
        kinds = {id(task): kind for kind, task in tasks}

        def keep(task: Task, run: Run) -> None:
            kind = kinds[id(task)]
            self.faulted[run.script, run.seed, kind, task.how] = run
            key = (run.script, run.seed, kind)
            pair = [self.faulted.get((*key, how)) for how in ("faulted plain", "faulted guarded")]
            if pair[0] is None or pair[1] is None:
                return
            free = replace(self.plain[run.script, run.seed], weights=self.idle[run.script, run.seed].weights)
            self.misjudged[key] = wrong = misjudged(kind, self.struck[key][0], free, pair[0], pair[1])
            print(
                f"{'WRONG' if wrong else 'ok   '} {run.script} (seed {run.seed}), {kind} in {_site(self.struck[key][1])}: "
                f"{_outcome(free, pair[0], pair[1])}" + ("".join(f"\n      {text}" for text in wrong)),
                flush=True,
            )
            if self.args.stderr:
                print(pair[1].stderr)

        self._execute([task for _kind, task in tasks], keep)

    @property
    def failed(self) -> bool:
        """Whether anything was disturbed or misjudged."""
        return bool(self.unsteady) or any(self.wrong.values()) or any(self.misjudged.values())

    def write(self) -> str:
        """Return the report in Markdown."""
        runs = list(self.guarded.values())
        bad = [key for key, wrong in self.wrong.items() if wrong]

        def count(word: str) -> int:
            return sum(any(word in text for text in wrong) for wrong in self.wrong.values())

        convicted = sum(any(cause in CONVICTIONS for cause in run.causes) for run in runs)
        rows = [
            ("scripts", len(self.scripts)),
            ("guarded runs", len(runs)),
            ("optimizer steps", sum(self.plain[run.script, run.seed].steps for run in runs)),
            ("steps that the guard held", sum(run.held for run in runs)),
            ("steps run again", sum(run.again for run in runs)),
            ("runs with a device or state convicted", convicted),
            ("runs with other bits", count("other bits") + count("no bits")),
            ("runs with another exit code", count("exit code")),
            ("crashes", count("crash")),
            ("hangs", count("hang")),
            ("runs in which a part of the guard failed, and did without", sum(bool(run.failures) for run in runs)),
            ("scripts that do not repeat themselves", len(self.unsteady)),
        ]
        lines = [
            "# Innocent trainings",
            "",
            f"`python bench/innocent.py {' '.join(sys.argv[1:])}`".replace(" `", "`"),
            "",
            "Every script of `tests/zoo`, plain and under `bitwitness run` with every step questioned and so run again.",
            "",
            "| | count |",
            "|---|---|",
            *(f"| {name} | {number:,} |" for name, number in rows),
            "",
            "| script | runs | steps | held | run again | verdicts | bits | exit code | seconds, plain / guarded | wrong |",
            "|---|---|---|---|---|---|---|---|---|---|",
            *(self._row(path.stem) for path in self.scripts),
        ]
        if self.misjudged:
            lines += ["", *self._faults()]
        print(
            f"{len(runs)} guarded runs, {len(bad)} of them wrong: {', '.join(sorted({name for name, _ in bad})) or 'none'}"
        )
        return "\n".join(lines) + "\n"

    def _row(self, script: str) -> str:
        keys = sorted(key for key in self.guarded if key[0] == script)
        runs = [self.guarded[key] for key in keys]
        plains = [self.plain[key] for key in keys]
        verdicts = collections.Counter(cause for run in runs for cause in run.causes)
        same = sum(run.bits == plain.bits for run, plain in zip(runs, plains, strict=True))
        codes = sum(run.code == plain.code for run, plain in zip(runs, plains, strict=True))
        wrong = sorted({text for key in keys for text in self.wrong[key]})
        if script in self.unsteady:
            wrong.append("two plain runs differ")
        failed = sorted({f"the guard failed in its {part}" for run in runs for part in run.failures})
        seconds = [sum(run.seconds for run in some) / max(1, len(some)) for some in (plains, runs)]
        cells = [
            script,
            len(runs),
            sum(run.steps for run in plains),
            sum(run.held for run in runs),
            sum(run.again for run in runs),
            ", ".join(f"{number} {cause}" for cause, number in sorted(verdicts.items())) or "0",
            "same" if same == len(runs) else f"{len(runs) - same} other",
            "same" if codes == len(runs) else f"{len(runs) - codes} other",
            f"{seconds[0]:.1f} / {seconds[1]:.1f}",
            "; ".join(wrong + failed) or "–",
        ]
        return "| " + " | ".join(str(cell) for cell in cells) + " |"

    def _faults(self) -> list[str]:
        outcomes: dict[str, collections.Counter[str]] = {}
        rows = []
        for (script, seed, kind), wrong in sorted(self.misjudged.items()):
            both = [self.faulted[script, seed, kind, how] for how in ("faulted plain", "faulted guarded")]
            outcome = _outcome(self.plain[script, seed], both[0], both[1])
            outcomes.setdefault(kind, collections.Counter())["WRONG" if wrong else outcome] += 1
            site = _site(self.struck[script, seed, kind][1])
            rows.append(f"| {script} | {seed} | {kind} | `{site}` | {outcome} | {'; '.join(wrong) or '–'} |")
        lines = ["## On a device that computes wrongly", "", "| fault | outcome | runs |", "|---|---|---|"]
        for kind, counter in sorted(outcomes.items()):
            lines += [f"| {kind} | {outcome} | {number} |" for outcome, number in sorted(counter.items())]
        return [
            *lines,
            "",
            "| script | seed | fault | operator | outcome | wrong |",
            "|---|---|---|---|---|---|",
            *rows,
        ]


def _site(text: str) -> str:
    return text.partition('site = "')[2].partition('"')[0]


def _outcome(free: Run, unmended: Run, mended: Run) -> str:
    """Say in a few words what became of a fault."""
    if mended.hung:
        return "hang"
    if not mended.verdicts:
        harmless = unmended.weights == free.weights and unmended.code == free.code
        return "no effect" if harmless else "no verdict"
    causes = "+".join(sorted(set(mended.causes)))
    if "persistent_hardware" in causes:
        return f"{causes}, {'operator named' if named_operators(mended) else 'no operator named'}"
    if _acted(mended, "skipped"):
        return f"{causes}, the step skipped"
    return f"{causes}, {'the healthy weights' if mended.weights == free.weights else 'not the healthy weights'}"


def main() -> None:
    """Run the zoo."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", action="append", metavar="NAME", help="a script's name without .py; repeatable")
    parser.add_argument("--repeat", type=int, default=1, metavar="N", help="so many seeds")
    parser.add_argument("--steps-total", type=int, default=0, metavar="N", help="seeds until so many optimizer steps")
    parser.add_argument(
        "--faults", action="store_true", help="each script also with a transient and a persistent fault"
    )
    parser.add_argument("--jobs", type=int, default=1, choices=(1, 2))
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds after which a run counts as hung")
    parser.add_argument("--once", action="store_true", help="do not run the scripts twice plain")
    parser.add_argument("--fresh", action="store_true", help="a fresh interpreter a run instead of a fork (slow)")
    parser.add_argument("--stderr", action="store_true", help="print what guarded runs say")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write what went wrong, by script")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results", help="folder for innocent.md")
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
    (args.out / "innocent.md").write_text(text)
    if args.json is not None:
        by_script: dict[str, list[str]] = {path.stem: [] for path in campaign.scripts}
        for key, wrong in [*campaign.wrong.items(), *campaign.misjudged.items()]:
            by_script[key[0]] += wrong
        for script in campaign.unsteady:
            by_script[script].append("two plain runs differ")
        args.json.write_text(json.dumps(by_script, indent=1))
    sys.exit(1 if campaign.failed else 0)


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
