"""Cases of a folder that msprobe recorded: ``dump.json`` with real or statistical data, taken as it is."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bitwitness.errors import UnreadError, UsageError
from bitwitness.files.reading import read_object
from bitwitness.oracle.eligible import functional_operator
from bitwitness.precheck.case import Case, NotJudged, Prepared, counted, first_floating, too_large
from bitwitness.precheck.literals import call_source
from bitwitness.precheck.made import made
from bitwitness.store.msprobe_tensor import read_tensor
from bitwitness.tap.opinfo import overridable
from bitwitness.trial.call import Call

KIND = "msprobe"
_HOMES = {"Functional": "torch.nn.functional", "Torch": "torch", "Tensor": "torch.Tensor", "Aten": "torch.ops.aten"}
_BARRED = (
    "rand",
    "normal",
    "bernoulli",
    "dropout",
    "multinomial",
    "empty",
    "from_file",
    "set_",
    "resize",
    "manual_seed",
    "save",
    "load",
)
_DEEPEST = 32  # containers inside one another
_SEEN = {"Min": "min", "Max": "max", "Mean": "mean", "Norm": "l2"}


def dumps_in(folder: Path) -> list[Path]:
    """Return the ``dump.json`` files of a folder, or of the steps and ranks in it."""
    return [folder / "dump.json"] if (folder / "dump.json").is_file() else sorted(folder.glob("**/dump.json"))


def msprobe_cases(dump: Path, *, alike: bool = True) -> Iterator[Case]:
    """Yield the forward calls of APIs in a dump, those alike once if so asked; with gradients where a backward was recorded.

    Raises `UnreadError` where the file is none, or damaged.
    """

    def cases() -> Iterator[tuple[str, Case]]:
        for name, entry in _data(str(dump)).items():
            parts = name.split(".")
            if parts[-1] == "forward" and parts[0] not in ("Module", "Cell") and isinstance(entry, Mapping):
                form = f"{_api(parts)} {_form(entry.get('input_args'))} {_form(entry.get('input_kwargs'))}"
                yield form if alike else name, _case(dump, name, parts, entry)

    yield from counted(cases())


def _case(dump: Path, name: str, parts: list[str], entry: Mapping[str, Any]) -> Case:
    given = [v for v in _values((entry.get("input_args"), entry.get("input_kwargs"))) if _is_tensor(v)]
    dtype = first_floating(str(v.get("dtype", "")).removeprefix("torch.") for v in given)
    api, made_of = _api(parts), {"kind": KIND, "dump": str(dump), "entry": name}
    refused = "" if _function(parts) else f"{api} is none of torch's functions that may be run from a recording"
    shapes = " ".join(str(v.get("shape")).replace(" ", "") for v in given)
    return Case(name, api, dtype, shapes, made_of, refused=refused)


def _api(parts: list[str]) -> str:
    """Return what an entry's name calls: ``Functional.linear``."""
    return ".".join(parts[:-2])


def _function(parts: list[str]) -> Any:
    """Return the function that an entry's name names, if it is one of torch's that may be run; else None."""
    home, names = _HOMES.get(parts[0]), parts[1:-2]
    if home is None or not names or any(n.strip("_").startswith(_BARRED) for n in names):
        return None
    if parts[0] == "Aten":
        return functional_operator(f"aten.{'.'.join(names)}")
    found: Any = torch
    for part in (*home.split(".")[1:], *names):
        if not part.isidentifier():
            return None
        found = getattr(found, part, None)
    return found if found is not None and found in overridable() else None


def _values(value: Any, depth: int = 0) -> Iterator[Any]:
    if depth > _DEEPEST:
        return
    if isinstance(value, list | tuple):
        for item in value:
            yield from _values(item, depth + 1)
    elif isinstance(value, Mapping) and "type" not in value:
        for item in value.values():
            yield from _values(item, depth + 1)
    else:
        yield value


def _is_tensor(value: Any) -> bool:
    return (
        isinstance(value, Mapping) and str(value.get("type", "")).endswith(("Tensor", "Parameter")) and "shape" in value
    )


def _form(value: Any) -> str:
    """Return what makes two calls alike: dtypes, shapes and other arguments."""
    return str([(v.get("dtype"), v.get("shape")) if _is_tensor(v) else v for v in _values(value)])


def prepare(made_of: Mapping[str, Any], device: torch.device) -> Prepared:
    """Return an entry as a call. Raises `NotJudged` for an argument that the file does not hold whole."""
    name, dump = made_of["entry"], Path(made_of["dump"])
    data = _data(str(dump))
    entry = data[name]
    function = _function(name.split("."))
    generator = torch.Generator().manual_seed(0)
    args = [_argument(v, dump, generator, device) for v in entry.get("input_args") or []]
    kwargs = {k: _argument(v, dump, generator, device) for k, v in (entry.get("input_kwargs") or {}).items()}
    home = _HOMES[name.split(".")[0]]
    source, tensors = call_source(f"{home}.{'.'.join(name.split('.')[1:-2])}", args, kwargs)
    gradients = f"{name.removesuffix('forward')}backward" in data
    return Prepared(Call(function, tuple(args), kwargs, gradients=gradients), {}, source, tensors)


@lru_cache(maxsize=2)
def _data(dump: str) -> dict[str, Any]:
    data = read_object(Path(dump), "msprobe's dump.json").get("data")
    if not isinstance(data, dict):
        raise UnreadError(f"{dump} has no object 'data'; expected the dump.json that msprobe writes")
    return data


def _argument(value: Any, dump: Path, generator: torch.Generator, device: torch.device, depth: int = 0) -> Any:
    if depth > _DEEPEST:
        raise NotJudged(f"its arguments are nested deeper than {_DEEPEST} containers")
    if isinstance(value, list):
        return [_argument(item, dump, generator, device, depth + 1) for item in value]
    if not isinstance(value, Mapping):
        return value
    if _is_tensor(value):
        return _tensor(value, dump, generator).to(device).requires_grad_(_may_require_grad(value))
    return _plain(str(value.get("type", "")), value.get("value", value.get("Max")), device)


def _plain(kind: str, value: Any, device: torch.device) -> Any:
    """Return an argument that is no tensor."""
    if kind in ("int", "float", "bool", "str"):
        return value
    if kind in ("torch.Size", "tuple", "list") and isinstance(value, list):
        return tuple(value)
    if kind == "slice" and isinstance(value, list):
        return slice(*value[:3])
    if kind == "torch.device":
        return device
    found = getattr(torch, str(value).removeprefix("torch."), None)
    if kind == "torch.dtype" and isinstance(found, torch.dtype):
        return found
    raise NotJudged(f"an argument of type {kind or 'unknown'} is not written whole")


def _may_require_grad(value: Mapping[str, Any]) -> bool:
    return bool(value.get("requires_grad")) and "float" in str(value.get("dtype"))


def _tensor(value: Mapping[str, Any], dump: Path, generator: torch.Generator) -> Tensor:
    name, shape = str(value.get("dtype")).removeprefix("torch."), value.get("shape")
    dtype = getattr(torch, name, None)
    if (
        not isinstance(dtype, torch.dtype)
        or not isinstance(shape, list)
        or not all(type(n) is int and n >= 0 for n in shape)
    ):
        raise NotJudged(f"a tensor of dtype {name!r} and shape {shape} cannot be made")
    if large := too_large(shape):
        raise NotJudged(large)
    file = value.get("data_name")
    if isinstance(file, str) and file not in ("", "-1") and Path(file).name == file:
        try:
            return read_tensor(dump.parent / "dump_tensor_data", file, name, tuple(shape))
        except UsageError as error:
            raise NotJudged(f"a kept value cannot be read: {error}") from error
    seen = {
        ours: value[theirs]
        for theirs, ours in _SEEN.items()
        if isinstance(value.get(theirs), int | float) and math.isfinite(value[theirs])
    }
    if isinstance(value.get("Max"), float) and value["Max"] == math.inf:
        seen["pos_inf"] = 1
    if isinstance(value.get("Min"), float) and value["Min"] == -math.inf:
        seen["neg_inf"] = 1
    return made(dtype, shape, None, seen, generator)
