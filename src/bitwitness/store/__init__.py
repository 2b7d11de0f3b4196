"""The run folder: what a guarded run leaves behind, written as it goes, readable without us, and without torch.

Files that need torch say so in their first line; `tests/test_store.py` lists them.
"""

from bitwitness.store.claim import claim_folder, release_folder
from bitwitness.store.reader import read_events
from bitwitness.store.writer import RunWriter

__all__ = ["RunWriter", "claim_folder", "read_events", "release_folder"]
