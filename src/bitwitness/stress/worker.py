"""The process of one device: it does what it is told and answers with fingerprints; it ends when nobody listens any more."""

from __future__ import annotations

import os
import re
import signal
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, replace
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from bitwitness.device import this_device
from bitwitness.stats.local import as_bytes
from bitwitness.stress.catalogue import Outside, Plan, SetPass, workloads_of
from bitwitness.stress.model import model_of
from bitwitness.stress.tally import fingerprint_of
from bitwitness.stress.workload import Workload
from bitwitness.tap.compat import tree_map
from bitwitness.tap.ownwork import REFERENCE, own_work
from bitwitness.trial.call import Copied, Results, as_laid_out, output_gradients

_MOST_KEPT = 4
"""Different results of one batch whose values are kept for whoever asks; a device that errs each time errs in as many ways."""
_BACKENDS = {"cuda": "nccl", "npu": "hccl", "xpu": "xccl"}

_LACKING = re.compile(
    r"not implemented|not support|unsupported|must be|[Ee]xpected .*(type|Half|Float|Double)", re.DOTALL
)
"""What a backend says of a dtype that it has no kernel for."""

Answer = dict[str, Any]


def serve(connection: Connection, plan: Plan, slot: int, outside: Outside, port: int) -> None:
    """Serve one device until the connection is closed or ``end`` is asked for."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # whoever started the test ends it
    core = _alone(plan, slot)
    with suppress(EOFError, BrokenPipeError, ConnectionResetError), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            with outside.around(slot) as set_pass:
                device = _Device(plan, slot, outside, port, set_pass)
                connection.send(device.told() | {"core": core})
                while (asked := connection.recv())["do"] != "end":
                    connection.send(device.answer(asked))
        except (EOFError, OSError):
            raise
        except Exception as error:
            connection.send({"raised": f"{type(error).__name__}: {error}"})
    os._exit(0)  # a process group that others have left is not waited for


def _alone(plan: Plan, slot: int) -> int | None:
    """Give the process one thread, and a core of its own where cores are what is tested; return the core."""
    os.environ["LOCAL_RANK"] = str(plan.devices[slot])
    torch.set_num_threads(1)
    if plan.kind != "cpu" or len(plan.devices) < 2:
        return None
    try:
        cores = sorted(os.sched_getaffinity(0))
        core = cores[plan.devices[slot] % len(cores)]
        os.sched_setaffinity(0, {core})
    except (AttributeError, OSError):  # another system than Linux, or a container that forbids it
        return None
    return core


class _Device:
    """What one device process knows."""

    def __init__(self, plan: Plan, slot: int, outside: Outside, port: int, set_pass: SetPass) -> None:
        self._plan, self._slot, self._port, self._set_pass = plan, slot, port, set_pass
        self._where = plan.device(slot)
        self._workloads = workloads_of(plan, outside)
        self._kept: dict[str, dict[str, Tensor]] = {}
        if plan.kind != "cpu":
            torch.get_device_module(plan.kind).set_device(self._where)
        os.environ.setdefault(
            "TORCH_NCCL_BLOCKING_WAIT", "1"
        )  # a peer that hangs raises here, and does not end this process
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without it, cuBLAS promises no equal bits
        torch.set_deterministic_debug_mode(
            "warn"
        )  # as use_deterministic_algorithms, without its import of the compiler
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        self._do: Mapping[str, Callable[[Mapping[str, Any]], Answer]] = {
            "run": self._run,
            "tensors": self._tensors,
            "group": self._group,
        }

    def told(self) -> Answer:
        """Return who this is."""
        return {"pid": os.getpid(), "device": asdict(this_device(self._where)), "model": model_of(self._where)}

    def answer(self, asked: Mapping[str, Any]) -> Answer:
        """Do what is asked; what goes wrong is an answer, too."""
        try:
            with warnings.catch_warnings(record=True) as heard:
                warnings.simplefilter("always")
                found = self._do[asked["do"]](asked)
        except Exception as error:
            lacking = isinstance(error, NotImplementedError) or _LACKING.search(str(error))
            return {"unsupported" if lacking else "raised": f"{type(error).__name__}: {_first_line(error)}"}
        unsteady = next((str(one.message) for one in heard if "deterministic" in str(one.message)), "")
        return found | {"nondeterministic": _first_line(unsteady)} if unsteady else found

    def _run(self, asked: Mapping[str, Any]) -> Answer:
        """Run a workload several times; return a fingerprint for each run."""
        self._set_pass(asked["pass"])
        self._kept.clear()
        copied, given = self._prepared(self._workloads[asked["workload"]], asked["variant"])
        runs: list[str] = []
        for _ in range(asked["repeats"]):
            results = copied.run(copied.call.fn, given)
            slots = {name: tensor.detach() for name, tensor in results.slots().items()}
            runs.append(fingerprint_of(slots))
            if runs[-1] not in self._kept and len(self._kept) < _MOST_KEPT:
                self._kept[runs[-1]] = slots
        return {"runs": runs}

    def _prepared(self, workload: Workload, variant: int) -> tuple[Copied, list[Tensor | None]]:
        """Return the work with its inputs on the device, and its output gradients: drawn once, by the host."""
        with own_work(REFERENCE):  # what the host draws is no emulated device's to spoil
            call = workload.call(variant, self._slot if workload.collective else 0)
            copied = self._moved(call.on(lambda tensor: as_laid_out(tensor).to(self._where)))
            if not any(copy.requires_grad for copy in copied.copies):
                return copied, []
            shaped = Results(tuple(copied.run(call.fn, [None]).outputs))
            return copied, output_gradients(shaped.outputs, call.seed)

    def _moved(self, copied: Copied) -> Copied:
        """Return a call that names this device where it named the one that it was made for."""

        def there(value: Any) -> Any:
            return self._where if isinstance(value, torch.device) else value

        args, kwargs = tree_map(there, (copied.args, dict(copied.kwargs)))
        return replace(copied, args=args, kwargs=kwargs)

    def _tensors(self, asked: Mapping[str, Any]) -> Answer:
        """Return the values behind a fingerprint, if the last batch had it."""
        kept = self._kept.get(asked["fingerprint"])
        if kept is None:
            return {"slots": None}
        plain = {name: tensor.contiguous().cpu() for name, tensor in kept.items()}
        return {
            "slots": {
                name: (str(t.dtype), tuple(t.shape), as_bytes(t.contiguous()).numpy().tobytes())
                for name, t in plain.items()
            }
        }

    def _group(self, _asked: Mapping[str, Any]) -> Answer:
        """Enter the group of all devices."""
        limit = timedelta(seconds=self._plan.deadline / 2)
        store = TCPStore("127.0.0.1", self._port, is_master=False, timeout=limit)
        dist.init_process_group(
            _BACKENDS.get(self._plan.kind, "gloo"),
            store=PrefixStore("group", store),
            rank=self._slot,
            world_size=len(self._plan.devices),
            timeout=limit,
        )
        return {}


def _first_line(text: object) -> str:
    return (str(text).strip().splitlines() or [""])[0][:300]
