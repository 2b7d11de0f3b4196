"""The launcher of one node: attempt after attempt, each on the devices that are fit, until the training ends."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

from bitwitness.config.variables import RESUME_BEFORE
from bitwitness.errors import EXIT_CONVICTED, EXIT_INTERNAL, EXIT_INTERRUPTED, EXIT_TERMINATED, UsageError
from bitwitness.files.shown import shown
from bitwitness.finding import Device
from bitwitness.launch.child import run_bounded
from bitwitness.launch.decide import Limits, Next, Policy
from bitwitness.launch.ended import End, Ended, ended_of, runs_of_attempt
from bitwitness.launch.history import History
from bitwitness.launch.nodes import await_others, together
from bitwitness.launch.order import Order, Report, read_report, write_order
from bitwitness.launch.quarantine import EXPIRES, Quarantine, key_of

_OTHERS_S = 20.0  # beyond the time that other nodes' ranks have to end
"""Tells the ranks of a relaunch which checkpoints are to be trusted: those of before this step."""


@dataclass(frozen=True, slots=True)
class Job:
    """What is launched on this node.

    Attributes
    ----------
    out
        The launcher's folder; each attempt's run folder is in it.
    command, python, module
        What each rank runs; see `bitwitness.launch.order.Order`. ``{run}`` in it stands for the attempt's run folder.
    ranks, spares, least
        Ranks of this node, devices kept for them, and the fewest to go on with.
    options
        torchrun's.
    alone
        Whether this is the only node.
    shutdown_s, join_s
        Seconds that ranks have to end when they are asked to, and that this node waits for the others.

    """

    out: Path
    command: list[str]
    python: bool
    module: bool
    ranks: int
    spares: int = 0
    least: int = 1
    options: list[str] = field(default_factory=list)
    alone: bool = True
    shutdown_s: float = 30.0
    join_s: float = 600.0
    expires: timedelta = EXPIRES
    environment: dict[str, str] = field(default_factory=dict)


class Launcher:
    """Launches a job, and relaunches it.

    Parameters
    ----------
    job
        What.
    limits
        How often.
    quarantine
        The list of devices that are left out, and that convicted ones are added to.

    """

    def __init__(self, job: Job, limits: Limits, quarantine: Quarantine, *, quiet: bool = False) -> None:
        quarantine.entries()  # one that is damaged is said now, and not when it matters
        self._job = job
        self._policy = Policy(limits, resume_before=_told(os.environ))
        self._quarantine = quarantine
        self._quiet = quiet
        self.history = History(job.out, job.alone)

    def run(self) -> int:
        """Run the job to its end; return the exit code. Whatever ends this process is written down, and ends the ranks."""
        try:
            follows = self._attempts()
        except BaseException as error:
            state, code = _interruption(error)
            self.history.closes(state, f"the launcher was {state} ({type(error).__name__}), and ended its ranks", code)
            raise
        self.history.closes("finished" if follows.code == 0 else "stopped", follows.why, follows.code)
        self._say(follows.why, loud=follows.code != 0)
        if not self._job.alone and self.history.attempts[-1]["end"] == End.NO_SLOTS:
            self._run_agent(self._order(0, self._job.out, keep_for=str(self._job.out)))
        return follows.code

    def _attempts(self) -> Next:
        number = 0
        while True:
            number += 1
            run = self._job.out / f"attempt-{number}"
            self.history.begins(number, run, self._policy.resume_before)
            report, code = self._run_agent(self._order(number, run))
            ended = self._ended(number, run, report, code)
            follows = self._put_away(self._policy.after(ended), ended, run, report)
            self.history.follows(follows)
            if not follows.again:
                return follows
            self._say(self._about(ended, number + 1), loud=True)

    def _order(self, number: int, run: Path, keep_for: str = "") -> Order:
        job = self._job
        resume = self._policy.resume_before
        environment = {} if resume is None else {RESUME_BEFORE: str(resume)}
        return Order(
            attempt=number,
            ranks=job.ranks,
            spares=job.spares,
            least=job.least,
            quarantine=os.path.abspath(self._quarantine.path),
            options=job.options,
            command=[part.replace("{run}", str(run)) for part in job.command],
            python=job.python,
            module=job.module,
            environment={**{k: v.replace("{run}", str(run)) for k, v in job.environment.items()}, **environment},
            join_s=job.join_s,
            keep_for=keep_for,
        )

    def _run_agent(self, order: Order) -> tuple[Report | None, int]:
        """Have an agent follow an order; return its report and its exit code."""
        with tempfile.TemporaryDirectory(prefix="bitwitness-launch-") as scratch:
            order_file, report_file = Path(scratch) / "order.json", Path(scratch) / "report.json"
            write_order(order_file, order)
            command = [sys.executable, "-m", "bitwitness.launch.agent", str(order_file), str(report_file)]

            def watched() -> bool:
                if not order.keep_for:
                    self.history.beat()
                return report_file.exists()

            code = run_bounded(command, dict(os.environ), self._job.shutdown_s, watched)
            return read_report(report_file), code

    def _ended(self, number: int, run: Path, report: Report | None, code: int) -> Ended:
        """Return why an attempt ended, here and, where there are more nodes, as all of them see it."""
        ended = ended_of(report, code, runs_of_attempt(run))
        self.history.ended(ended, report)
        if self._job.alone:
            return ended
        patience = self._job.shutdown_s + _OTHERS_S
        others = await_others(self._job.out, self.history.path, number, patience)
        return together(ended_of(report, code, runs_of_attempt(run)), others)

    def _put_away(self, follows: Next, ended: Ended, run: Path, report: Report | None) -> Next:
        """Put into quarantine what is convicted, as far as it is this node's: each launcher keeps its own list."""
        here = {str(name) for row in report.slots for name in row["names"]} if report is not None else set()
        for device in follows.quarantine:
            if key_of(device) in here:
                self._quarantine.add(
                    device, ended.message, run=os.path.abspath(run), step=ended.step, expires=self._job.expires
                )
                self._say(f"{_short(device)} is in quarantine: {ended.message}", loud=True)
            elif self._job.alone:
                why = f"{_short(device)} is none of the devices that ranks are put on here ({', '.join(sorted(here))})"
                why = f"{ended.message}; {why}, so it cannot be left out"
                return Next(again=False, code=EXIT_CONVICTED, why=why)
        return follows

    def _about(self, ended: Ended, number: int) -> str:
        resume = self._policy.resume_before
        before = "" if resume is None else f", from a checkpoint of before step {resume}"
        left = self._policy.limits.relaunches - self._policy.relaunches
        return f"{ended.message}; attempt {number} begins{before} ({left} more relaunches are allowed)"

    def _say(self, text: str, *, loud: bool) -> None:
        if loud or not self._quiet:
            sys.stderr.write(f"bitwitness launch: {shown(text, None)}\n")
            sys.stderr.flush()


def _told(environ: Mapping[str, str]) -> int | None:
    """Return the step that whoever launches here says already: of an earlier job in the same folder of checkpoints.

    Raises
    ------
    UsageError
        If it is no step.

    """
    text = environ.get(RESUME_BEFORE, "")
    if text and not (text.isascii() and text.isdecimal() and len(text) < 19):
        raise UsageError(f"{RESUME_BEFORE} = {shown(text)} in the environment; expected a step, 0 or more")
    return int(text) if text else None


def _interruption(error: BaseException) -> tuple[str, int]:
    if isinstance(error, KeyboardInterrupt):
        return "interrupted", EXIT_INTERRUPTED
    if isinstance(error, UsageError):
        return "failed", error.exit_code
    if isinstance(error, Exception):
        return "failed", EXIT_INTERNAL
    return "terminated", EXIT_TERMINATED


def _short(device: Device) -> str:
    return f"{key_of(device)} ({device.kind} slot {device.index} on {device.host})"
