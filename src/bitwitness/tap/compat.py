"""Torch's private names: all that bitwitness calls, each with the reason, and with what newer releases have instead.

A new release of torch is read against this file alone. Private attributes of torch's objects (``tensor._version``) cannot be
gathered like names; `tap.lacking` lists them, and looks for both.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._compile import _disable_dynamo as not_compiled
from torch._library.custom_ops import OPDEFS, CustomOpDef
from torch._ops import OpOverload
from torch.autograd.function import _HookMixin as NodeHooks
from torch.autograd.grad_mode import _unsafe_preserve_version_counter as keeping_versions
from torch.nn.modules.batchnorm import _NormBase as RunningNorm
from torch.nn.utils import clip_grad
from torch.nn.utils.stateless import _reparametrize_module as reparametrized
from torch.overrides import _get_current_function_mode_stack as function_modes
from torch.overrides import _pop_mode as pop_function_mode
from torch.overrides import _push_mode as push_function_mode
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    is_traceable_wrapper_subclass,
    is_traceable_wrapper_subclass_type,
)
from torch.utils._python_dispatch import _disable_current_modes as without_dispatch_modes
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack as dispatch_modes
from torch.utils._python_dispatch import _pop_mode as pop_dispatch_mode
from torch.utils._python_dispatch import _push_mode as push_dispatch_mode
from torch.utils._pytree import tree_flatten, tree_map

__all__ = [
    "OPDEFS",
    "CustomOpDef",
    "NodeHooks",
    "OpOverload",
    "RunningNorm",
    "TorchDispatchMode",
    "dispatch_modes",
    "function_modes",
    "is_traceable_wrapper_subclass",
    "is_traceable_wrapper_subclass_type",
    "keeping_versions",
    "not_compiled",
    "pop_dispatch_mode",
    "pop_function_mode",
    "push_dispatch_mode",
    "push_function_mode",
    "reparametrized",
    "tree_flatten",
    "tree_map",
    "without_dispatch_modes",
]

Context = AbstractContextManager[Any]
# -- modes: torch has no public way to ask which are on, nor to set one aside that stands below another -------------------

dispatch_depth: Callable[[], int] = torch._C._len_torch_dispatch_stack
unheard: Callable[[], Context] = torch._C.DisableTorchFunction
"""Functions that are called inside reach no function mode and no tensor's own ``__torch_function__``."""
plain_tensors: Callable[[], Context] = torch._C.DisableTorchFunctionSubclass  # the same for tensors alone
heard: Callable[[], Context] = torch._C._EnableTorchFunction  # undoes `unheard`; torch has it for its compiler
undispatched: Callable[[], Context] = torch._C._DisableTorchDispatch
"""No dispatch mode sees what runs inside; unlike `without_dispatch_modes`, at the price of a flag."""
uncast: Callable[[], Context] = torch._C._DisableAutocast
"""No autocast changes a dtype inside, of any device; ``torch.autocast(enabled=False)`` wants to know which."""
enable_grad: Callable[[bool], None] = torch._C._set_grad_enabled  # what torch.no_grad calls, at a fifth of its price
free_storage_ref: Callable[[int], None] = torch.UntypedStorage._free_weak_ref  # without the Python around it

# -- autograd: what nodes were made in which order tells a forward's from those before and after --------------------------

sequence_number: Callable[[], int] = torch._C._autograd._get_sequence_nr
"""The number of the next node; 2.14 has ``autograd.graph.node_creation_hook``, which would be called for each one."""
current_node: Callable[[], Any] = torch._C._current_autograd_node
"""The node whose backward runs in this thread; None outside of backwards. No release has a public one."""
saving_hooks: Callable[[bool], Any] = torch._C._autograd._top_saved_tensors_default_hooks
push_saving_hooks: Callable[[Any, Any], None] = torch._C._autograd._push_saved_tensors_default_hooks
pop_saving_hooks: Callable[[], Any] = torch._C._autograd._pop_saved_tensors_default_hooks
"""A replay saves tensors as the training did; ``saved_tensors_hooks`` cannot tell which hooks are on."""
BACKWARD = (torch.autograd, "_engine_run_backward")
"""What every ``backward()`` and every ``autograd.grad`` calls. No release has a hook before and after a whole backward."""
MAKE_GRADS = (torch.autograd, "_make_grads")
"""What makes the gradients that a backward starts from where the script gave none."""
TENSOR_PROPERTIES = vars(torch._C.TensorBase)


def queue_after_backward(action: Callable[[], None]) -> None:
    """Have ``action`` called when the backward that runs now has computed everything; callbacks run in queueing order.

    The only way to run before DistributedDataParallel's own last callback. Public as ``torch.autograd.graph.queue_callback``
    from 2.15 on.
    """
    torch.autograd.Variable._execution_engine.queue_callback(action)


# -- threads: autograd computes an accelerator's gradients in threads of its own, where a ContextVar has its default --------

_ERASES = hasattr(torch._C, "_remove_obj_from_tls")  # not in 2.12


def carry(key: str) -> None:
    """Mark this thread, and the threads in which autograd runs what this thread asks for meanwhile, until `carry_no_more`."""
    torch._C._stash_obj_in_tls(key, True)  # noqa: FBT003


def carry_no_more(key: str) -> None:
    """Take the mark away, so that nothing is left whose end would need the interpreter when the thread ends."""
    if _ERASES:
        torch._C._remove_obj_from_tls(key)
    else:
        torch._C._stash_obj_in_tls(key, False)  # noqa: FBT003


def carries(key: str) -> bool:
    """Tell whether this thread is marked, or runs a backward that a marked one asked for."""
    return torch._C._is_key_in_tls(key) and bool(torch._C._get_obj_in_tls(key))


# -- what decides how something is computed ------------------------------------------------------------------------------

mkldnn_enabled: Callable[[], bool] = torch._C._get_mkldnn_enabled
enable_mkldnn: Callable[[bool], None] = torch._C._set_mkldnn_enabled
"""``torch.backends.mkldnn.flags`` sets it, and cannot be asked."""
SCRIPTED_CONTAINERS: tuple[type, ...] = (torch._C.ScriptDict, torch._C.ScriptList)
CLIPPING = (clip_grad, "_group_tensors_by_device_and_dtype")
"""What every clipping function calls before it writes, also one that a script imported by name before we came."""


def default_device_mode() -> Any:
    """Return the function mode behind ``torch.set_default_device``, which torch keeps at the bottom; None without."""
    return getattr(getattr(torch, "_GLOBAL_DEVICE_CONTEXT", None), "device_context", None)


def being_traced() -> bool:
    """Tell whether ``torch.jit.trace`` is recording what runs now; ``torch.jit.is_tracing`` imports much."""
    return torch._C._get_tracing_state() is not None


def in_transform() -> bool:
    """Tell whether a transform of ``torch.func`` runs, whose tensors are none that could be kept."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def outside_transforms() -> Context:
    """Compute meanwhile as if no transform of ``torch.func`` ran: its tensors are none that a check of our own could use."""
    if not in_transform():
        return nullcontext()
    from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

    context: Context = temporarily_clear_interpreter_stack()
    return context


def storage_of(pointer: int) -> torch.UntypedStorage | None:
    """Return the storage that a weak reference leads to; None once nothing uses it. Tensors' own weakrefs miss aliases."""
    found: torch.UntypedStorage | None = torch.UntypedStorage._new_with_weak_ptr(pointer)
    return found


# -- dynamo: only where the script has loaded it, for that takes seconds --------------------------------------------------


def dynamo(part: str = "") -> Any:
    """Return torch's compiler, or a module of its own; None where the script has not loaded it."""
    return sys.modules.get("torch._dynamo" + (part and f".{part}"))


def compiled_frames() -> int:
    """Return how many frames dynamo has compiled in this process."""
    utils = dynamo("utils")
    return 0 if utils is None else int(utils.counters["frames"]["total"])


def compiles_backward() -> bool:
    """Tell whether torch compiles whole backwards, the hooks in them included."""
    return bool(getattr(dynamo("config"), "compiled_autograd", False))


def has_default_stance() -> bool:
    """Tell whether dynamo is loaded and compiles as it does by default; ``torch.compiler`` can set a stance, not tell it."""
    frame = dynamo("eval_frame")
    return frame is not None and bool(frame._stance.stance == "default")


# -- activation checkpointing: no release shows what a region saves and what it recomputes ---------------------------------


def first_saved() -> tuple[Any, str]:
    """Return where torch looks the hooks up under which a region's first forward saves its tensors."""
    return sys.modules["torch.utils.checkpoint"], "_checkpoint_hook"


def saved_again() -> tuple[Any, str]:
    """Return the same for its recomputation."""
    return sys.modules["torch.utils.checkpoint"], "_recomputation_hook"


# -- ranks ---------------------------------------------------------------------------------------------------------------


def process_groups() -> list[Any]:
    """Return this process's process groups; none where there is no default group."""
    module: Any = sys.modules.get("torch.distributed.distributed_c10d")
    return list(module._world.pg_map) if module is not None and module.is_initialized() else []


def operations_begun(group: Any) -> int:
    """Return how many collectives a group has begun. Raises RuntimeError where its backend does not count."""
    return int(group._get_sequence_number_for_group())


def timeouts(group: Any) -> list[float]:
    """Return after how many seconds each backend of a group gives up; may raise where a backend has no options."""
    backends = [group._get_backend(device) for device in group._device_types]
    return [backend.options._timeout.total_seconds() for backend in backends]


def default_store() -> Any:
    """Return the store that the default process group was made with."""
    return dist.distributed_c10d._get_default_store()


def all_gather_options() -> Any:
    """Return options for an all-gather called on a group itself, past the default group's bookkeeping."""
    from torch._C._distributed_c10d import AllgatherOptions

    return AllgatherOptions()


def running_wrapper() -> Any:
    """Return the DistributedDataParallel whose forward runs now; None outside of any."""
    return nn.parallel.DistributedDataParallel._active_ddp_module


def fsdp_module() -> ModuleType:
    """Return the module whose functions reduce FSDP2's gradients; public hooks see them only reduced."""
    return sys.modules["torch.distributed.fsdp._fully_shard._fsdp_param_group"]


def fsdp_groups(module: nn.Module) -> list[Any]:
    """Return FSDP2's parameter groups of a module, one up to 2.13, perhaps several later; none where it is no FSDP2 module."""
    ask = getattr(module, "_get_fsdp_state", None)
    if ask is None:
        return []
    state = ask()
    groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
    return [group for group in groups if group is not None]


def reaches_modes() -> bool:
    """Tell whether operators of this thread are shown to the modes on torch's stack; nothing public tells it."""
    return bool(torch._C._dispatch_tls_is_dispatch_key_included(torch._C.DispatchKey.Python))


def step_hooks(optimizer: torch.optim.Optimizer) -> list[Any]:
    """Return the functions that torch calls around an optimizer's steps: everybody's, and those of this one alone."""
    module: Any = importlib.import_module("torch.optim.optimizer")
    every = module._global_optimizer_pre_hooks, module._global_optimizer_post_hooks
    own = optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks
    return [hook for hooks in (*every, *own) for hook in list(hooks.values())]


def decompositions() -> dict[OpOverload, Callable[..., Any]]:
    """Return torch's operators written in simpler ones; the table is public only as one for an exported graph."""
    return importlib.import_module("torch._decomp").decomposition_table  # type: ignore[no-any-return]


def on_cpu(func: OpOverload) -> Callable[..., Any] | None:
    """Return what runs an operator's kernel for the CPU under the modes that are on, past the operator itself."""
    keys = torch._C.DispatchKey.CPU, torch._C.DispatchKey.CompositeExplicitAutograd
    found = next((key for key in keys if func.has_kernel_for_dispatch_key(key)), None)
    return None if found is None else lambda *args, **kwargs: func._op_dk(found, *args, **kwargs)


def save_alone(state_dict: dict[str, Any], **how: Any) -> None:
    """Write a checkpoint of torch DCP of one process.

    ``dcp.save`` is the same after a warning that torch.distributed is off, which under ``-W error`` fails, and which a thread
    cannot turn off for itself.
    """
    from torch.distributed.checkpoint import state_dict_saver

    state_dict_saver._save_state_dict(state_dict, no_dist=True, **how)


def ignored_by_ddp(module: torch.nn.Module) -> frozenset[str]:
    """Return which parameters and buffers of a module the script had DistributedDataParallel leave to each rank.

    ``_set_params_and_buffers_to_ignore_for_model`` is torch's only way to say so, and the attribute is where it keeps it.
    """
    return frozenset(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
