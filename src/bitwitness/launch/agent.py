"""One attempt on this node: torch's elastic agent, in a process of its own, on the devices that are fit.

``python -m bitwitness.launch.agent ORDER REPORT``. The agent never restarts ranks by itself: whether, and on which devices,
the launcher decides, who reads why they ended.
"""

from __future__ import annotations

import os
import sys
import time
import uuid
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bitwitness.errors import UsageError
from bitwitness.launch.order import Order, Report, read_order, write_report
from bitwitness.launch.quarantine import Quarantine
from bitwitness.launch.slots import environment_for, healthy, slots_here
from bitwitness.store.launched import launch_lives, launches_in

_PAUSE_S = 1.0  # between two tries to meet the other nodes


def main(order_file: str, report_file: str) -> int:
    """Follow an order; return 0 where every rank ended well, else 1."""
    order, report = read_order(Path(order_file)), Report()

    def tell() -> None:
        write_report(Path(report_file), report)

    try:
        if order.keep_for:
            _keep(order)
        else:
            _follow(order, report, tell)
    except UsageError as error:
        report.ended, report.message = "usage", str(error)
    finally:
        tell()
    return int(report.ended != "finished")


def _follow(order: Order, report: Report, tell: Callable[[], None]) -> None:
    slots = slots_here(order.ranks + order.spares, os.environ)
    fit = healthy(slots, Quarantine(order.quarantine).entries())
    chosen = fit[: order.ranks]
    report.left_out = [slot.to_dict() for slot in slots if slot not in fit]
    report.slots = [slot.to_dict() for slot in chosen]
    if len(chosen) < order.least:
        report.ended = "no_slots"
        return
    os.environ.update({**order.environment, **environment_for(chosen)})
    until = time.monotonic() + order.join_s
    while not _tried(order, len(chosen), report, tell) and not report.ended:
        if time.monotonic() > until:
            report.ended = "rendezvous"
            return
        time.sleep(_PAUSE_S)  # a node that is earlier meets the store of the attempt before, which is about to end


def _tried(order: Order, ranks: int, report: Report, tell: Callable[[], None]) -> bool:
    """Run the ranks once; return False where the nodes did not even meet."""
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import launch_agent

    args = _arguments(order, ranks)
    from torch.distributed.run import config_from_args

    try:
        config, program, arguments = config_from_args(args)
    except (ValueError, AssertionError, RuntimeError) as error:
        raise UsageError(f"torchrun's options: {error}") from error
    config.run_id = f"{config.run_id}-{order.attempt}"
    config.logs_specs = _Noting.around(config.logs_specs, report, tell)
    try:
        launch_agent(config, program, arguments)
        report.ended = "finished"
    except ChildFailedError as error:
        ends = sorted(error.failures.items(), key=lambda one: one[1].timestamp)
        report.ended, report.failures = "failed", {rank: failure.exitcode for rank, failure in ends}
    except SignalException as error:
        report.ended, report.message = "signalled", f"{error.sigval.name}"
    except Exception as error:  # the rendezvous' own errors are many, and those of its store are torch's RuntimeErrors
        report.message = f"{type(error).__name__}: {error}"
        report.ended = "rendezvous" if report.ranks else ""
        return False
    return True


def _keep(order: Order) -> None:
    """Keep the store in which the nodes meet, if this is its host, as long as another launcher of the job lives."""
    from torch.distributed.elastic.rendezvous import RendezvousParameters
    from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import create_backend

    args = _arguments(order, 1)
    if args.rdzv_backend != "c10d":
        return
    where = {"backend": "c10d", "endpoint": args.rdzv_endpoint, "run_id": f"{args.rdzv_id}-kept"}
    try:
        kept = create_backend(RendezvousParameters(**where, min_nodes=1, max_nodes=1))
    except Exception:  # it is elsewhere, and has ended
        return
    while any(launch_lives(file) for file in launches_in(order.keep_for)):
        time.sleep(_PAUSE_S)
    del kept


def _arguments(order: Order, ranks: int) -> Namespace:
    """Return what torchrun would have read; alone, a node needs no meeting place, as torchrun has it."""
    from torch.distributed.run import get_args_parser, parse_min_max_nnodes

    args: Namespace = get_args_parser().parse_args([*order.options, "--", *order.command])
    args.nproc_per_node, args.max_restarts = str(ranks), 0
    args.module, args.no_python, args.run_path = order.module, not order.python, False
    try:
        alone = parse_min_max_nnodes(args.nnodes)[1] == 1
    except (ValueError, RuntimeError) as error:
        raise UsageError(f"--nnodes {args.nnodes}: expected a number or MIN:MAX") from error
    static = args.rdzv_backend == "static" and not args.rdzv_endpoint and args.master_port is None
    if args.standalone or (alone and static):
        args.rdzv_backend, args.rdzv_endpoint, args.rdzv_id = "c10d", "localhost:0", str(uuid.uuid4())
    args.master_port = 29500 if args.master_port is None else args.master_port
    return args


class _Noting:
    """Stands before torch's choice of logs, which is asked when ranks are about to be started, and told their numbers."""

    @classmethod
    def around(cls, inner: Any, report: Report, tell: Callable[[], None]) -> Any:
        """Return ``inner``, a `LogsSpecs`, with its ``reify`` noting the ranks in ``report``."""
        reify = inner.reify

        def noting(envs: dict[int, dict[str, str]]) -> Any:
            report.ranks = [int(envs[local]["RANK"]) for local in sorted(envs)]
            report.world_size = int(next(iter(envs.values()))["WORLD_SIZE"])
            tell()
            return reify(envs)

        inner.reify = noting
        return inner


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:3]))
