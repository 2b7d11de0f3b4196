"""Which of torch's private names and attributes a release lacks: ``bitwitness doctor`` looks for them, and says so."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from functools import reduce
from typing import Any

import torch
from torch import nn

ATTRIBUTES: dict[str, tuple[Callable[[], Any], tuple[str, ...]]] = {
    "torch.Tensor": (lambda: torch.empty(0), ("_version", "_base", "_backward_hooks", "_post_accumulate_grad_hooks")),
    "torch.nn.Module": (nn.Module, ("_parameters", "_buffers", "_modules", "_forward_hooks", "_compiled_call_impl")),
    "torch.jit.ScriptModule": (lambda: torch.jit.script(nn.Identity()), ("_c", "_concrete_type")),
    "torch.autograd.graph.Node": (lambda: torch.ones(1, requires_grad=True).exp().grad_fn, ("_sequence_nr",)),
}
"""Private attributes of torch's objects: versions, hooks and parts are read where they are kept, for there is no way to ask."""

_LATER = (
    "torch._C._functorch.peek_interpreter_stack",
    "torch._functorch.pyfunctorch.temporarily_clear_interpreter_stack",
    "torch._C._dispatch_tls_is_dispatch_key_included",
    "torch._C._get_tracing_state",
    "torch._C._stash_obj_in_tls",
    "torch._C._is_key_in_tls",
    "torch._C._get_obj_in_tls",
    "torch.autograd.Variable._execution_engine.queue_callback",
    "torch.UntypedStorage._new_with_weak_ptr",
    "torch.nn.parallel.DistributedDataParallel._active_ddp_module",
    "torch.distributed.algorithms.Join.__enter__",
    "torch._foreach_norm",
    "torch._foreach_max",
    "torch.nn.utils.clip_grad._group_tensors_by_device_and_dtype",
    "torch.autograd._engine_run_backward",
    "torch.autograd._make_grads",
    "torch._decomp.decomposition_table",
    "torch.utils.data.dataloader._BaseDataLoaderIter._next_index",
    "torch.utils.data.dataloader._BaseDataLoaderIter._reset",
    "torch._dynamo.config",
    "torch._dynamo.utils.counters",
    "torch._dynamo.eval_frame._stance",
    "torch._dynamo.callback.callback_handler",
    "torch.distributed.distributed_c10d._world",
    "torch.distributed.distributed_c10d._get_default_store",
    "torch._C._distributed_c10d.AllgatherOptions",
    "torch.utils.checkpoint._checkpoint_hook",
    "torch.utils.checkpoint._recomputation_hook",
    "torch.distributed.fsdp._fully_shard._fsdp_param_group.FSDPParamGroup",
    "torch.distributed.checkpoint.state_dict_saver._save_state_dict",
)
"""Names that are looked up when they are needed; those above are looked up when this file is imported."""


def lacking(wanted: Iterable[str] = _LATER) -> list[str]:
    """Return the private names and attributes that bitwitness needs and this torch lacks."""
    read = ((kind, make, name) for kind, (make, names) in ATTRIBUTES.items() for name in names)
    absent = [f"{kind}.{name}" for kind, make, name in read if not hasattr(make(), name)]
    return [name for name in wanted if not _there(name)] + absent


def _there(name: str) -> bool:
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        try:
            module = importlib.import_module(".".join(parts[:length]))
            reduce(getattr, parts[length:], module)
        except ImportError:
            continue
        except AttributeError:
            return False
        return True
    return False
