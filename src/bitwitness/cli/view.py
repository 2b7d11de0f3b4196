"""``bitwitness view RUN [RUN]``: the model as a graph in the browser, coloured by what was found; a run that goes on, live."""

from __future__ import annotations

import argparse
import webbrowser
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bitwitness.cli.progress import progress_bar
from bitwitness.errors import UsageError

if TYPE_CHECKING:
    from bitwitness.view.scene import Scene


def add_parser(verbs: Any) -> None:
    """Add the verb."""
    parser = verbs.add_parser(
        "view",
        help="a recorded run as a graph in the browser, or two beside each other; a run that goes on, live",
        description="Serves a page for this machine's browser, at an address that nobody else knows, until Ctrl+C: the model's "
        "modules and operators, coloured by what was found; with two recordings what differs, and who made it. Meanwhile "
        "events and the loss of runs that go on.",
    )
    parser.add_argument(
        "runs", metavar="RUN", nargs="+", help="a run folder, or two to compare; of more, only what is live"
    )
    parser.add_argument(
        "--port", type=int, default=0, metavar="N", help="listen on this port of 127.0.0.1 (default: any)"
    )
    parser.add_argument("--no-browser", action="store_true", help="print the address, open nothing")
    parser.add_argument(
        "--no-explorer", action="store_true", help="only our own page, also where Model Explorer is there"
    )
    parser.add_argument("--step", type=int, metavar="N", help="only this step")
    parser.add_argument("--rank", type=int, metavar="N", help="only this rank")
    parser.add_argument(
        "--map", metavar="FILE", help="JSON object of module paths, A's name to B's, as compare takes it"
    )
    parser.add_argument(
        "--export", metavar="DIR", help="write graphs and node data in Model Explorer's format, and stop"
    )
    parser.set_defaults(main=main)


def main(args: argparse.Namespace) -> int:
    """Serve until interrupted, or export; return the exit code."""
    from bitwitness.store.answer import answer_of
    from bitwitness.store.folder import Run
    from bitwitness.view.live import Live
    from bitwitness.view.page import pages_of
    from bitwitness.view.server import Server

    runs = [Run(path).path for path in args.runs]
    if args.map is not None and len(runs) != 2:
        raise UsageError(f"--map names modules of two runs; {len(runs)} are given")
    if args.export is not None:
        return _export(args, runs)
    scene = scene_of(args, runs)
    with Server(pages_of(scene, Live(runs, answer_of), explorer=not args.no_explorer), args.port) as server:
        print(f"{server.address}\nfor a browser on this machine; Ctrl+C ends it", flush=True)
        if not args.no_browser:
            webbrowser.open(server.address)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print()
    return 0


def _export(args: argparse.Namespace, runs: list[Path]) -> int:
    from bitwitness.view.export import export

    if len(runs) > 2:
        raise UsageError(f"--export takes a run, or two that are compared; {len(runs)} are given")
    written = export(_opened(args, runs), Path(args.export))
    print(f"{len(written)} files in {args.export}; open a graph in Model Explorer, and load its node data there")
    return 0


def scene_of(args: argparse.Namespace, runs: list[Path]) -> Callable[[], Scene | None]:
    """Return what gives the scene: that of two recordings once, that of one as it grows; of other runs there is none."""
    from bitwitness.store.run import is_recording
    from bitwitness.view.growing import Growing

    if len(runs) > 2 or (len(runs) == 2 and not any(map(is_recording, runs))):
        return lambda: None
    if len(runs) == 2:
        compared = _opened(args, runs)
        return lambda: compared
    growing = Growing(runs[0], step=args.step, rank=args.rank)
    if (args.step, args.rank) != (None, None):
        growing.look()  # what was asked for and is not there is an error now, and not later
    return growing


def _opened(args: argparse.Namespace, runs: list[Path]) -> Scene:
    from bitwitness.comparison.matching.renamed import read_map
    from bitwitness.view.scene import one_run, two_runs

    if len(runs) == 1:
        return one_run(runs[0], step=args.step, rank=args.rank)
    modules = read_map(Path(args.map)) if args.map is not None else None
    with progress_bar("steps") as progress:
        return two_runs(runs[0], runs[1], step=args.step, rank=args.rank, modules=modules, progress=progress)
