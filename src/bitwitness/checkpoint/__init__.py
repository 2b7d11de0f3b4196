"""``bw.checkpoint``: checkpoints that are sealed when written and verified when read.

    import bitwitness as bw

    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    step = bw.checkpoint.load(state, "checkpoints") or 0    # the newest that is sealed and intact
    bw.checkpoint.save(state, "checkpoints", step)          # whole and sealed, or not there

`seal` and `verify` do the same for checkpoints of others: `torch.save`, safetensors, Hugging Face, DCP.
"""

from bitwitness.checkpoint.loading import load
from bitwitness.checkpoint.manifest import Manifest
from bitwitness.checkpoint.saving import Saving, save
from bitwitness.checkpoint.sealing import seal
from bitwitness.checkpoint.steps import latest
from bitwitness.checkpoint.verifying import Checked, Damage, verify

__all__ = ["Checked", "Damage", "Manifest", "Saving", "latest", "load", "save", "seal", "verify"]
