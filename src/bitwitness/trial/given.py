"""What a user gives to be tried: a function with its inputs, checked, and what is said where they do not go together."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from bitwitness.errors import UsageError
from bitwitness.trial import variations
from bitwitness.trial.call import Call
from bitwitness.trial.module import as_function

_LONGEST_SAID = 200  # characters of an error: torch's may hold whole schemas


def checked(fn: Any, reference: Any) -> None:
    """Raise UsageError where one of them is nothing that can be called."""
    for what, one in (("the operator", fn), ("the reference", reference)):
        if one is not None and not callable(one):
            raise UsageError(
                f"{what} is {type(one).__name__} {str(one)[:_LONGEST_SAID]!r}; expected a function or a module"
            )


def call_of(
    fn: Callable[..., Any], inputs: Any, device: torch.device | str | None, *, gradients: bool, seed: int
) -> Call:
    """Return the call that is tried; a module's parameters and buffers come first among its arguments.

    Raises UsageError where there are no numbers among the inputs, or the device is none.
    """
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = {}
    if not isinstance(inputs, Tensor | Mapping | Sequence) or isinstance(inputs, str | bytes):
        what = "None" if inputs is None else f"{type(inputs).__name__} {str(inputs)[:_LONGEST_SAID]}"
        raise UsageError(f"the inputs are {what}; expected a tensor, a sequence of arguments or a mapping of them")
    if isinstance(inputs, Mapping):
        kwargs = dict(inputs)
    else:
        args = (inputs,) if isinstance(inputs, Tensor) else tuple(inputs)
    if isinstance(fn, nn.Module):
        args = (dict(fn.named_parameters()) | dict(fn.named_buffers()), *args)
    call = Call(as_function(fn), args, kwargs, gradients=gradients, seed=seed)
    if not call.tensors:
        raise UsageError(
            "there is no tensor among the inputs; expected a tensor, a sequence of arguments or a mapping of them"
        )
    if any(t.is_meta for t in call.tensors) and device is None:
        raise UsageError("a tensor among the inputs is on the meta device, which holds no numbers; give it some")
    if device is None:
        return call
    try:
        return variations.with_tensors(call, lambda t: t.detach().to(device))
    except (RuntimeError, AssertionError) as error:
        raise UsageError(f"device {str(device)!r} cannot be used here: {said(error)}") from error


def help_with(error: BaseException) -> str:
    """Return what to do next about an error of the operator's own."""
    if "use_reentrant=True" in str(error):
        return (
            "gradients of given tensors are taken here: checkpoint with use_reentrant=False, or judge without gradients"
        )
    return "give it inputs that it takes"


def said(error: BaseException) -> str:
    """Return the first line of an error, with its kind."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {(lines or [''])[0]}"[:_LONGEST_SAID]
