"""One run folder for the ranks of a job of which each trains by itself (pipelines, experts, gradients reduced by hand).

Nobody knows which of the ranks will ask, so there is no collective: whoever asks first takes the folder, and tells the others
through the store that the job's process group was made with.
"""

from __future__ import annotations

from contextlib import suppress
from datetime import timedelta
from uuid import uuid4

import torch.distributed as dist

from bitwitness.store import claim_folder
from bitwitness.tap.compat import default_store


def in_job() -> bool:
    """Return whether this process is one of several ranks of a job."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def job_name() -> str | None:
    """Return a name that the ranks of this job have in common, and no other job's; None for one process alone."""
    if not in_job():
        return None
    with suppress(RuntimeError, NotImplementedError):
        found = default_store().compare_set("bitwitness/job", "", uuid4().hex)
        return found.decode() if isinstance(found, bytes) else str(found)
    return None


def job_folder(out: str, deadline_s: float) -> tuple[str, bool]:
    """Return the folder that the job's ranks share for ``out``, and whether this rank was the first to ask.

    A rank's second model goes with the others' second. One that waits in vain for the first to claim it takes a folder alone.
    """
    store = default_store()
    name = f"bitwitness/folders/{out}"
    number = store.add(f"{name}/{dist.get_rank()}", 1)
    taken, path = f"{name}/{number}/taken", f"{name}/{number}/path"
    if store.add(taken, 1) > 1:
        with suppress(RuntimeError):
            store.wait([path], timedelta(seconds=deadline_s))
            return store.get(path).decode(), False
    claimed = str(claim_folder(out))
    store.set(path, claimed)
    return claimed, True
