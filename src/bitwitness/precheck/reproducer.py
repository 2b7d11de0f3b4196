"""A failing case as a Python file that runs alone: it needs torch and safetensors, and a file of tensors beside it."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Collection, Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from bitwitness.errors import UsageError
from bitwitness.files.shown import shown
from bitwitness.files.writing import new_file, write_text
from bitwitness.precheck.callsource import call_from_literals
from bitwitness.precheck.summary import worst_output
from bitwitness.trial.result import CaseResult

_ALLOWED = "allowed"
"""Key in the file of tensors, beside ``t0``, ``t1``, …: what each element of the result may be off by."""


def write_reproducer(
    folder: str | os.PathLike[str],
    result: CaseResult,
    *,
    call_source: str,
    tensors: Mapping[str, Tensor],
    requires_grad: Collection[str] = (),
    seed: int = 0,
    allowed: Tensor | None = None,
    device: str = "cpu",
) -> Path:
    """Write a file that runs the case alone, and exits 1 as long as its worst output is off by more than is allowed.

    It runs the call in its dtype on the device (or on one that is named on its command line) and in float64 on the CPU,
    compares the output that the verdict rests on, prints the worst element, and exits 0 once that is right; 2 where it cannot
    tell. Nothing but `call_source`, taken apart and written anew, and the ``repr`` of plain values gets into its code.

    Parameters
    ----------
    folder
        Where; it exists. The files are named after the case.
    result
        Of a case with at least one output.
    call_source
        A Python expression of literals, ``tensors["name"]`` and names of torch's:
        ``torch.nn.functional.gelu(tensors["x"], approximate="tanh")``. A method is called as ``torch.Tensor.add_(…)``.
    tensors
        The tensors that it names; their strides are kept, but for memory that overlaps itself.
    requires_grad
        Names of those whose gradients are the result's ``grad0``, ``grad1``, …, in the order of ``tensors``.
    seed
        Of the global generators, and of the output gradients, which are drawn as `bitwitness.trial.call.output_gradients` does.
    allowed
        What each element may be off by, in the shape of the output; without, only the result's worst element is looked at.
    device
        Where the case failed: ``cuda``, ``npu:0``.

    Returns
    -------
    Path
        The Python file; beside it lies a ``.safetensors`` file of the same name.

    Raises
    ------
    UsageError
        If the case has no output, the call is more than literals, or a tensor is of a kind that no file can hold.
    UnwrittenError
        If the system refuses.

    """
    output = worst_output(result)
    if output is None:
        raise UsageError(f"{shown(result.name)} has no output that a file could compare")
    call, wide = call_from_literals(call_source, tensors)
    names = {name: f"t{number}" for number, name in enumerate(tensors)}
    kept = {names[name]: _plain(tensor) for name, tensor in tensors.items()}
    if allowed is not None:
        if tuple(allowed.shape) != tuple(output.shape):
            raise UsageError(f"what is allowed has shape {list(allowed.shape)}, the output {list(output.shape)}")
        kept[_ALLOWED] = allowed.detach().cpu().to(torch.float64).contiguous()
    told: dict[str, Any] = {
        "CASE": shown(result.name),
        "SLOT": str(output.slot),
        "AT": [int(index) for index in output.at],
        "ALLOWED": float(output.allowed),
        "SEEN": [float(output.value), float(output.expected)],
        "SEED": int(seed),
        "DEVICE": str(device),
        "TENSORS": {str(name): _layout(tensors[name], key, name in requires_grad) for name, key in names.items()},
    }
    place = Path(folder) / f"{safe_name(result.name)}.py"
    with new_file(place.with_suffix(".safetensors"), binary=True) as file:
        file.write(_bytes(kept))
    literals = "\n".join(f"{name} = {_literal(value)}" for name, value in told.items())
    template = files("bitwitness.precheck").joinpath("reproducer.py.txt").read_text(encoding="utf-8")
    parts = {"# LITERALS": literals, "# CALL": f"    return {call}", "# WIDE": f"    return {wide}"}
    write_text(place, "\n".join(parts.get(line.strip(), line) for line in template.splitlines()) + "\n")
    return place


def safe_name(name: str) -> str:
    """Return a name as one of a file on any system: what is special replaced, cut, and kept apart from others by a hash."""
    plain = re.sub(r"[^A-Za-z0-9-]+", "_", name[:500]).strip("_-")[:80] or "case"
    digest = hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()[:8]
    return f"repro_{plain}_{digest}"


def _layout(tensor: Tensor, key: str, requires_grad: bool) -> tuple[str, list[int], bool, bool]:
    return key, list(tensor.stride()), tensor.is_complex(), bool(requires_grad)


def _plain(tensor: Tensor) -> Tensor:
    """Return a tensor as a file can hold it: on the CPU, contiguous, complex numbers as pairs."""
    if tensor.layout is not torch.strided:
        raise UsageError(f"a tensor of layout {tensor.layout} cannot be kept for a reproducer; expected a dense one")
    tensor = tensor.detach().cpu().resolve_neg()
    return (torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor).contiguous().clone()


def _bytes(kept: dict[str, Tensor]) -> bytes:
    try:
        found: bytes = save(kept)
    except (KeyError, RuntimeError, ValueError) as error:
        dtypes = sorted({str(tensor.dtype) for tensor in kept.values()})
        raise UsageError(f"no file can hold tensors of {', '.join(dtypes)}: {shown(error)}") from error
    return found


def _literal(value: Any) -> str:
    """Return a plain value as ASCII that Python reads; floats that have no literal by ``float``."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_literal(key)}: {_literal(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_literal(item) for item in value) + "]"
    if isinstance(value, float):
        return f'float("{value!r}")'
    return ascii(value)
