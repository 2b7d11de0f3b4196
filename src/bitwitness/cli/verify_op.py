"""``bitwitness verify-op``: one operator, or one recorded call, on trial."""

from __future__ import annotations

import argparse
import contextlib
import sys
from typing import Any

from bitwitness.cli.options import add_json, add_quiet, answer
from bitwitness.errors import EXIT_FINDINGS, EXIT_UNREAD, UsageError


def add_parser(verbs: Any) -> None:
    """Add the verb."""
    parser = verbs.add_parser(
        "verify-op",
        help="one operator, a module, or a recorded call, against float64",
        description="Judges whether OP, a function or a module (FILE.py:NAME or package.module:NAME), computes what its dtype "
        "allows, forward and backward, in several ways; or one call of a recording (--run, --site). Exit code 0: it does (with "
        "a warning where it could do better); 1: it does not; 3: it could not be judged.",
    )
    parser.add_argument(
        "op", metavar="OP", nargs="?", help="FILE.py:NAME or package.module:NAME (torch.nn.functional:gelu)"
    )
    parser.add_argument("--inputs", metavar="NAME", help="FILE.py:NAME of a function that returns its arguments")
    parser.add_argument(
        "--shapes", metavar="AxB,C", help="instead: normal inputs of these shapes, which want gradients"
    )
    parser.add_argument("--dtype", default="float32", help="of those (default: float32)")
    parser.add_argument(
        "--reference", metavar="NAME", help="what OP should compute, in any dtype: run in float64 on the CPU"
    )
    parser.add_argument("--device", help="the device on trial (default: where the inputs are)")
    parser.add_argument("--run", metavar="RUN", help="a recording with tensors, or statistics")
    parser.add_argument(
        "--site", metavar="SITE", help="with --run: a call, as reports print it: layers.3.fc1/addmm#0:forward"
    )
    parser.add_argument("--benchmark", metavar="RUN2", help="with --run: the same call of another device's recording")
    add_json(parser, "everything as JSON; '-', the default, prints it instead of the text")
    add_quiet(parser)
    parser.set_defaults(main=main)


def main(args: argparse.Namespace) -> int:
    """Verify; return the exit code."""
    if (args.op is None) == (args.run is None):
        raise UsageError("expected an OP to verify, or --run RUN --site SITE for a recorded call; give one of the two")
    return _recorded(args) if args.run is not None else _operator(args)


def _operator(args: argparse.Namespace) -> int:
    from dataclasses import asdict

    from bitwitness.cli.named import named
    from bitwitness.cli.usable import usable
    from bitwitness.trial.verify import verify_op

    if args.device is not None:
        usable(args.device)
    fn = named(args.op)
    if (args.inputs is None) == (args.shapes is None):
        raise UsageError(
            "expected --inputs FILE.py:NAME or --shapes 64x256,256 for what OP is given; give one of the two"
        )
    inputs = _asked(args.inputs) if args.inputs is not None else _drawn(args.shapes, args.dtype)
    reference = named(args.reference) if args.reference is not None else None
    with contextlib.redirect_stdout(sys.stderr):  # what a kernel prints is none of the answer
        found = verify_op(fn, inputs, reference, device=args.device)
    _tell(args, str(found), asdict(found))
    return EXIT_FINDINGS if found.verdict == "fail" else 0 if found.judged else EXIT_UNREAD


def _recorded(args: argparse.Namespace) -> int:
    from bitwitness.precheck.distances import distances

    if args.site is None:
        raise UsageError(
            "expected --site with --run: which call of the recording, such as layers.3.fc1/addmm#0:forward"
        )
    found = distances(args.run, args.site, benchmark=args.benchmark, device=args.device or "cpu")
    _tell(args, str(found), found.as_dict())
    return EXIT_FINDINGS if found.verdict == "fail" else 0 if found.verdict in {"pass", "warn"} else EXIT_UNREAD


def _tell(args: argparse.Namespace, text: str, told: dict[str, Any]) -> None:
    from bitwitness.finding import to_jsonable

    answer(args, lambda: to_jsonable(told), lambda: print(text))


def _asked(name: str) -> Any:
    """Return what a user's function gives as inputs."""
    from bitwitness.cli.named import named

    try:
        found = named(name)()
    except UsageError:
        raise
    except Exception as error:
        raise UsageError(
            f"{name} raises {type(error).__name__}: {error}; expected a function that returns inputs"
        ) from error
    if found is None:
        raise UsageError(f"{name} returned None; expected a tensor, a sequence of arguments or a mapping of them")
    return found


def _drawn(shapes: str, dtype: str) -> list[Any]:
    """Return normal tensors of shapes such as ``64x256,256``."""
    import torch

    kind = getattr(torch, dtype, None)
    if not isinstance(kind, torch.dtype) or not kind.is_floating_point:
        raise UsageError(f"{dtype!r} is no floating dtype of torch's; expected float32, bfloat16, float16 or float64")
    generator = torch.Generator().manual_seed(0)
    found = []
    for shape in shapes.split(","):
        sides = shape.strip().split("x")
        if not all(side.isdecimal() for side in sides):
            raise UsageError(f"{shape!r} is no shape; expected numbers with x between them, such as 64x256,256")
        try:
            drawn = torch.randn([int(s) for s in sides], generator=generator)
        except RuntimeError as error:  # more than there is memory for, or than a tensor can have
            raise UsageError(f"a tensor of shape {shape} cannot be made here: {str(error).splitlines()[0]}") from error
        found.append(drawn.to(kind).requires_grad_())
    return found
