"""Numbers of modules on request: attention's entropy and largest logit, a router's shares and balance, kurtosis."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the field's habit
from torch import Tensor, nn

from bitwitness.config.monitoring import MonitorConfig
from bitwitness.tap.ownwork import in_own_work, in_replay, own_work
from bitwitness.tap.patching import replaced

_QUERIES = 1024  # of a long sequence, evenly spread, so that the logits of one head stay small
_EXPERTS = 1024  # beyond that an output is no router's


class Kurtosis:
    """The fourth standardised moment of what a module returns: 3 for normal values, more where a few are far out."""

    def wants(self, module: nn.Module, path: str, root: nn.Module) -> bool:
        """Tell that every module has an output."""
        del module, path, root
        return True

    def of(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
    ) -> Iterator[tuple[str, str | None, Tensor]]:
        """Yield it of the first result."""
        del module, args, kwargs
        first = result[0] if isinstance(result, tuple | list) and result else result
        if isinstance(first, Tensor) and first.is_floating_point() and first.numel() > 1:
            values = first.detach().float()
            off = values - values.mean()
            square = off.square()
            yield "kurtosis", "out0", square.square().mean() / square.mean().square().clamp_min(1e-30)


class Router:
    """What share of the tokens each expert gets, and how even the shares are (1: perfectly).

    A router is a module beside ``experts`` that is called router or gate; it returns a logit or a probability an expert.
    """

    def wants(self, module: nn.Module, path: str, root: nn.Module) -> bool:
        """Tell a router by its name and by what is beside it."""
        del module
        parent, _, name = path.rpartition(".")
        try:
            beside = root.get_submodule(parent)
        except AttributeError:
            return False
        return name in ("router", "gate", "wg", "router_layer") and "experts" in beside._modules

    def of(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
    ) -> Iterator[tuple[str, str | None, Tensor]]:
        """Yield the shares of first choices, and their evenness."""
        del module, args, kwargs
        first = result[0] if isinstance(result, tuple | list) and result else result
        if not isinstance(first, Tensor) or not first.is_floating_point() or not 1 < first.shape[-1] <= _EXPERTS:
            return
        experts = first.shape[-1]
        chosen = first.detach().reshape(-1, experts).argmax(-1)
        shares = torch.bincount(chosen, minlength=experts).float() / max(1, len(chosen))
        for number in range(experts):
            yield "expert_share", f"e{number}", shares[number]
        entropy = -(shares * shares.clamp_min(1e-30).log()).sum()
        yield "balance", None, entropy / math.log(experts)


class Attention:
    """Entropy of the attention's weights, and its largest logit, from query and key; while entered.

    Seen is what goes through `torch.nn.functional.scaled_dot_product_attention`.

    Parameters
    ----------
    seen
        Called with the metric's name and number, of the module that runs now.
    fail
        Told of an error; no attention is looked at any more then.

    """

    def __init__(self, seen: Callable[[str, Tensor], None], fail: Callable[[str, BaseException], None]) -> None:
        self._seen = seen
        self._fail = fail
        self._stack = ExitStack()

    def attach(self) -> None:
        """Look at the calls from now on."""
        self.detach()
        self._stack.enter_context(replaced(F, "scaled_dot_product_attention", self._wrapped))

    def detach(self) -> None:
        """Look no more."""
        self._stack.close()

    def _wrapped(self, original: Callable[..., Tensor]) -> Callable[..., Tensor]:
        @functools.wraps(original)
        def attention(query: Tensor, key: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            result = original(query, key, *args, **kwargs)
            if not (torch.compiler.is_compiling() or in_own_work() or in_replay()):
                try:
                    with own_work(), torch.no_grad():
                        self._look(query.detach(), key.detach(), args, kwargs)
                except Exception as error:
                    self.detach()
                    self._fail("attention", error)
            return result

        return attention

    def _look(self, query: Tensor, key: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        mask = args[1] if len(args) > 1 else kwargs.get("attn_mask")
        causal = args[3] if len(args) > 3 else kwargs.get("is_causal", False)
        scale = kwargs.get("scale") or 1.0 / math.sqrt(query.shape[-1])
        if kwargs.get("enable_gqa"):
            key = key.repeat_interleave(query.shape[-3] // key.shape[-3], -3)
        length = query.shape[-2]
        rows = torch.arange(0, length, max(1, length // _QUERIES), device=query.device)
        logits = query[..., rows, :].float() @ key.float().transpose(-2, -1) * scale
        if causal:
            future = torch.arange(key.shape[-2], device=query.device) > rows[:, None]
            logits = logits.masked_fill(future, -torch.inf)
        if isinstance(mask, Tensor):
            part = mask[..., rows, :] if mask.shape[-2] == length else mask
            logits = logits.masked_fill(~part, -torch.inf) if part.dtype == torch.bool else logits + part
        weights = logits.softmax(-1)
        entropy = -(weights * weights.clamp_min(1e-30).log()).sum(-1)
        self._seen("entropy", entropy.nanmean())
        self._seen("max_logit", logits.amax())


def metrics_of(config: MonitorConfig) -> list[Kurtosis | Router]:
    """Return what is computed of each module's call, as it was asked for."""
    found: list[Kurtosis | Router] = []
    if "kurtosis" in config.metrics:
        found.append(Kurtosis())
    if "router" in config.metrics:
        found.append(Router())
    return found
