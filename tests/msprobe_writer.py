"""Writes folders as msprobe does, from the format's description alone: shares no code with the reader."""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch


def described(
    x: torch.Tensor, file: str | None = None, *, md5: bool = False, framework: str = "torch"
) -> dict[str, Any]:
    """What dump.json says of a tensor."""
    dtype = x.dtype
    x = x.abs() if x.is_complex() else x
    real = x.is_floating_point() and x.numel() > 0
    empty = not x.numel()
    entry: dict[str, Any] = {
        "type": f"{framework}.Tensor",
        "dtype": str(dtype) if framework == "torch" else str(dtype)[6:].capitalize(),
        "shape": list(x.shape),
        "Max": None if empty else x.amax().item(),
        "Min": None if empty else x.amin().item(),
        "Mean": x.mean().item() if real else None,
        "Norm": (x.norm().item() if x.dim() else x.item()) if real else None,
        "requires_grad": x.requires_grad,
    }
    if md5:
        entry["md5"] = f"{zlib.crc32(x.contiguous().view(torch.uint8).numpy().tobytes()):08x}"
    if file is not None:
        entry["data_name"] = file
    return entry


def scalar(value: Any) -> dict[str, Any]:
    return {"type": type(value).__name__, "value": value}


def call(
    args: Sequence[Any] = (), output: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None, **more: Any
) -> dict[str, Any]:
    """A forward entry."""
    return {"input_args": list(args), "input_kwargs": dict(kwargs or {}), "output": list(output), **more}


def back(arrived: Sequence[Any], left: Sequence[Any]) -> dict[str, Any]:
    """A backward entry."""
    return {"input": list(arrived), "output": list(left)}


def write(
    folder: Path,
    data: Mapping[str, Any],
    *,
    step: int = 0,
    rank: str = "rank0",
    parents: Mapping[str, Any] | None = None,
    stacks: Mapping[str, Any] | None = None,
    tensors: Mapping[str, torch.Tensor] | None = None,
) -> Path:
    """One rank's folder of one step; returns it."""
    place = folder / f"step{step}" / rank
    place.mkdir(parents=True)
    head = {"task": "statistics", "level": "mix", "framework": "pytorch", "dump_data_dir": None}
    (place / "dump.json").write_text(json.dumps({**head, "data": data}))
    (place / "construct.json").write_text(json.dumps(parents or {}))
    (place / "stack.json").write_text(json.dumps(stacks or {}))
    for name, tensor in (tensors or {}).items():
        (place / "dump_tensor_data").mkdir(exist_ok=True)
        torch.save(tensor, place / "dump_tensor_data" / name)
    return place


X = torch.arange(12.0).reshape(3, 4) - 5
W = torch.ones(2, 4)
Y = X @ W.T
LINEAR = "Module.blocks.0.fc.Linear"
BLOCK = "Module.blocks.0.Block"


def step_of_a_model() -> tuple[dict[str, Any], dict[str, Any]]:
    x, w, y = described(X), described(W), described(Y)
    data = {
        "Functional.linear.0.forward": call([x, w], [y]),
        f"{LINEAR}.forward.0": call([x], [y], parameters={"weight": w}),
        "Tensor.__matmul__.0.forward": call([y, described(Y.T)], [described(Y @ Y.T)]),
        "Functional.dropout.0.forward": call([y, scalar(0.1), scalar(True)], [y], {"inplace": scalar(False)}),
        "Tensor.__matmul__.1.forward": call([y, described(Y.T)], [described(Y @ Y.T)]),
        f"{BLOCK}.forward.0": call([[x, [y]]], [y, {"loss": y, "parts": [None, y]}], {"mask": x}, parameters={}),
        "Functional.mse_loss.0.forward": call([y, y], [described(torch.tensor(-2.5))]),
        "Distributed.all_reduce.0.forward": call(
            [y], [], {"op": {"type": "torch.distributed.ReduceOp", "value": "SUM"}}
        ),
        "Aten.mm.default.0.forward": call([x, described(W.T)], [y]),
        "Tensor.__matmul__.1.backward": back([described(Y @ Y.T)], [y, None]),
        f"{LINEAR}.parameters_grad.0": {"weight": [w]},
        f"{LINEAR}.backward.0": back([y], [x]),
    }
    parents = {
        "Functional.linear.0.forward": f"{LINEAR}.forward.0",
        f"{LINEAR}.forward.0": f"{BLOCK}.forward.0",
        "Tensor.__matmul__.0.forward": f"{BLOCK}.forward.0",
        "Tensor.__matmul__.1.forward": f"{BLOCK}.forward.0",
        "Tensor.__matmul__.1.backward": f"{BLOCK}.backward.0",
        "Functional.dropout.0.forward": f"{BLOCK}.forward.0",
        "Functional.mse_loss.0.forward": None,
        "Aten.mm.default.0.forward": "optimizer",
    }
    return data, parents
