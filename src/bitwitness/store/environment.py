"""What a run's numbers depend on beside its code: versions, variables, torch's switches, seeds, hyperparameters, first weights.

Recorded so that two runs can be compared before their numbers are (``bitwitness diff-env``). Variables go through an
allow-list of names and name beginnings, and none whose name speaks of a secret is kept.
"""

from __future__ import annotations

import hashlib
import os
import platform
import random
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim.optimizer import Optimizer

from bitwitness.stats import bit_hash, in_hex
from bitwitness.store.redact import HIDDEN, says_secret

_PREFIXES = (
    "ASCEND_", "ATB_", "BITWITNESS_", "CUBLAS_", "CUDA_", "CUDNN_", "FSDP_", "GLOO_", "GOMP_", "HCCL_", "HIP_", "KMP_", "MKL_",
    "MS_", "NCCL_", "NPU_", "NVIDIA_TF32", "NVTE_", "OMP_", "OPENBLAS_", "PYTORCH_", "ROCM_", "TASK_QUEUE_", "TORCH_",
    "TORCHINDUCTOR_", "XLA_",
)  # fmt: skip
_NAMES = frozenset({
    "ACL_PRECISION_MODE", "INF_NAN_MODE_ENABLE", "INF_NAN_MODE_FORCE_DISABLE", "LOCAL_WORLD_SIZE", "PYTHONHASHSEED",
    "WORLD_SIZE",
})  # fmt: skip
_PACKAGES = (
    "accelerate", "deepspeed", "flash_attn", "lightning", "numpy", "torch", "torch_npu", "torchvision", "transformers",
    "triton",
)  # fmt: skip
_LONGEST = 200  # characters of a variable: what numbers depend on is a switch or a path, not a document


def variables(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables that numbers may depend on."""
    return {
        name: HIDDEN if says_secret(name) else value[:_LONGEST]
        for name, value in sorted(environ.items())
        if name in _NAMES or name.startswith(_PREFIXES)
    }


def versions() -> dict[str, str]:
    """Return the versions of what computes: Python, the platform, and the packages that are loaded."""
    found = {
        "python": platform.python_version(),
        "platform": platform.machine(),
        "cpu": torch.backends.cpu.get_cpu_capability(),
    }
    for name in _PACKAGES:
        version = getattr(sys.modules.get(name), "__version__", None)
        if version is not None:
            found[name] = str(version)
    found["cuda"] = str(torch.version.cuda)
    found["cudnn"] = _tried(lambda: str(torch.backends.cudnn.version()))
    return found


def switches() -> dict[str, Any]:
    """Return torch's settings of determinism and precision."""
    readers: dict[str, Callable[[], Any]] = {
        "deterministic_algorithms": torch.are_deterministic_algorithms_enabled,
        "deterministic_warn_only": torch.is_deterministic_algorithms_warn_only_enabled,
        "float32_matmul_precision": torch.get_float32_matmul_precision,
        "default_dtype": lambda: str(torch.get_default_dtype()),
        "threads": torch.get_num_threads,
        "cudnn.benchmark": lambda: torch.backends.cudnn.benchmark,
        "cudnn.deterministic": lambda: torch.backends.cudnn.deterministic,
        "cudnn.allow_tf32": lambda: torch.backends.cudnn.allow_tf32,
        "cuda.matmul.allow_tf32": lambda: torch.backends.cuda.matmul.allow_tf32,
        "cuda.matmul.reduced_fp16": lambda: torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction,
        "cuda.matmul.reduced_bf16": lambda: torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction,
        "sdpa.flash": torch.backends.cuda.flash_sdp_enabled,
        "sdpa.mem_efficient": torch.backends.cuda.mem_efficient_sdp_enabled,
        "sdpa.math": torch.backends.cuda.math_sdp_enabled,
    }
    return {name: _tried(read) for name, read in readers.items()}


def _tried(read: Callable[[], Any]) -> Any:
    with suppress(Exception):  # a build of torch may lack it
        return read()
    return None


def random_states() -> dict[str, Any]:
    """Return torch's seed and hashes of all host generators' states, without disturbing them."""
    numbers = np.random.get_state(legacy=False)  # noqa: NPY002 - the global state is what scripts use
    return {
        "torch_seed": torch.initial_seed(),
        "torch_state": _digest(torch.get_rng_state().numpy().tobytes()),
        "numpy_state": _digest(repr(numbers).encode()),
        "python_state": _digest(repr(random.getstate()).encode()),
    }


def weights(model: nn.Module) -> dict[str, str]:
    """Return a hash of each parameter and buffer as it is now, on this rank."""
    with torch.no_grad():
        named = [*model.named_parameters(), *model.named_buffers()]
        hashes = [bit_hash(value.detach()).cpu() for _, value in named]
    return {name: in_hex(value) for (name, _), value in zip(named, hashes, strict=True)}


def hyperparameters(optimizers: Iterable[Optimizer]) -> list[dict[str, Any]]:
    """Return each optimizer's kind and its groups' settings, with how many parameters they hold."""
    found = []
    for optimizer in optimizers:
        groups = [
            {**{k: v for k, v in group.items() if k != "params" and _plain(v)}, "parameters": len(group["params"])}
            for group in optimizer.param_groups
        ]
        found.append({"kind": type(optimizer).__name__, "groups": groups})
    return found


def _plain(value: Any) -> bool:
    return isinstance(value, int | float | str | bool | None) or (
        isinstance(value, tuple | list) and all(map(_plain, value))
    )


def script() -> dict[str, str]:
    """Return the main script's name and a hash of its text."""
    path = getattr(sys.modules.get("__main__"), "__file__", None)
    if path is None or not os.path.isfile(path):  # noqa: PTH113 - a plain string from Python itself
        return {}
    return {"name": Path(path).name, "sha256": hashlib.sha256(Path(path).read_bytes()).hexdigest()}


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def describe(model: nn.Module, environ: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Return what is known when a training begins, ready for JSON; what cannot be read is None."""
    parts: dict[str, Callable[[], Any]] = {
        "versions": versions,
        "variables": lambda: variables(os.environ if environ is None else environ),
        "switches": switches,
        "random": random_states,
        "script": script,
        "weights": lambda: weights(model),
    }
    return {name: _tried(read) for name, read in parts.items()}
