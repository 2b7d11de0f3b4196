"""``bw.checkpoint``: checkpoints that are sealed when written and verified when read.

    import bitwitness as bw

    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    step = bw.checkpoint.load(state, "checkpoints") or 0    # the newest that is sealed and intact
    bw.checkpoint.save(state, "checkpoints", step)          # whole and sealed, or not there

`seal` and `verify` do the same for checkpoints of others: `torch.save`, safetensors, Hugging Face, DCP. Each name is imported
when it is first used: half a second goes into torch DCP, which not every training wants.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bitwitness.checkpoint.loading import load
    from bitwitness.checkpoint.manifest import Manifest
    from bitwitness.checkpoint.saving import Saving, save
    from bitwitness.checkpoint.sealing import seal
    from bitwitness.checkpoint.steps import latest
    from bitwitness.checkpoint.verifying import Checked, Damage, verify

__all__ = ["Checked", "Damage", "Manifest", "Saving", "latest", "load", "save", "seal", "verify"]

_HOMES = {
    "Checked": "verifying",
    "Damage": "verifying",
    "Manifest": "manifest",
    "Saving": "saving",
    "latest": "steps",
    "load": "loading",
    "save": "saving",
    "seal": "sealing",
    "verify": "verifying",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'bitwitness.checkpoint' has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(import_module(f"bitwitness.checkpoint.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
