"""The process of one script: plain, with its operators or optimizers listed, or under the guard."""

from __future__ import annotations

import atexit
import collections
import contextlib
import hashlib
import json
import os
import runpy
import sys
from pathlib import Path
from typing import Any, NoReturn

from forking import become, exit_code

from innocence.runs import Task


def watch_optimizers(folder: Path) -> None:
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


def list_operators(folder: Path) -> contextlib.AbstractContextManager[object]:
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


def _run(task: Task, folder: Path) -> int:
    """Run the script in this process and return what its exit code would be."""
    script = str(task.script)
    if task.how != "guarded":
        watch_optimizers(folder)
    if task.how.startswith(("guarded", "faulted")):
        from bitwitness.cli import main

        return exit_code(lambda: main(arguments(task, folder)))
    mode = list_operators(folder) if task.how == "counted" else contextlib.nullcontext()
    sys.argv = [script]
    sys.path.insert(0, str(task.script.parent))
    with mode:
        return exit_code(lambda: runpy.run_path(script, run_name="__main__"))


def arguments(task: Task, folder: Path) -> list[str]:
    """Return what follows ``bitwitness`` on the command line of a guarded run."""
    return ["run", "--config", str(folder / "config.toml"), "--out", str(folder / "run"), str(task.script)]


def start(task: Task, folder: Path, environment: dict[str, str]) -> NoReturn:
    """Be the process of one script."""
    os.setsid()
    os.environ.update(environment)
    os.chdir(folder / "cwd")
    become(lambda: _run(task, folder), folder / "stdout", folder / "stderr")
