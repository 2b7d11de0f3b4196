"""Sealing a checkpoint that is there: its files are hashed, and the tensors in them."""

from __future__ import annotations

import os
from pathlib import Path

from bitwitness.checkpoint.contents import Contents, contents_of, hashes_in
from bitwitness.checkpoint.filehash import hash_file
from bitwitness.checkpoint.manifest import Manifest, SealedFile, seal_of, write_manifest
from bitwitness.checkpoint.own import ours
from bitwitness.errors import UnreadError, UsageError
from bitwitness.files.shown import shown
from bitwitness.store.dcp import METADATA


def seal(path: str | os.PathLike[str], *, step: int | None = None) -> Manifest:
    """Seal a checkpoint as it is: write the hashes of its files and tensors beside it (of a folder: into it).

    Parameters
    ----------
    path
        A ``.safetensors`` file, a file of ``torch.save``, a folder of these (of Hugging Face, with an index), an index, or a
        folder of ``torch.distributed.checkpoint``. Nothing in it is unpickled that could run code: a file of ``torch.save``
        that holds more than tensors and plain values is sealed as bytes, without its tensors' names.
    step
        The training's step, to be kept in the seal.

    Returns
    -------
    Manifest
        What was written.

    Raises
    ------
    UsageError
        If there is no such file or folder.
    UnreadError
        If it is no checkpoint, is damaged or incomplete, or changes while it is read.
    UnwrittenError
        If the seal cannot be written.

    """
    place, contents = Path(path), contents_of(path)
    files = sealed_files(contents)
    with ours():
        found = hashes_in(contents)
    whole = [why for (name, _, _), why in found.unread.items() if name]
    if whole:
        raise UnreadError(f"{shown(place)} is damaged already, and was not sealed: {whole[0]}")
    unopened = next((why for (name, _, _), why in found.unread.items() if not name), None)
    if unopened is not None and contents.kind != "torch":
        raise UnreadError(f"{shown(place)} cannot be sealed: {unopened}")
    of = files[METADATA].sha256 if contents.kind == "dcp" else ""  # every save's metadata hold a number of its own
    manifest = Manifest(contents.kind, files, tuple(found.sealed), step, of=of)
    write_manifest(seal_of(place), manifest)
    return manifest


def sealed_files(contents: Contents) -> dict[str, SealedFile]:
    """Hash a checkpoint's files; raises `UnreadError` where one changes meanwhile or cannot be read."""
    files = {}
    for name in contents.files:
        try:
            one = hash_file(contents.folder / name)
        except UnreadError:
            raise
        except UsageError as error:  # there is none
            raise UnreadError(
                f"{shown(contents.folder)} is incomplete, and was not sealed: {shown(name)} is missing"
            ) from error
        if one is None:
            raise UnreadError(
                f"{shown(contents.folder / name)} changed while it was read; wait until it is whole, and seal it then"
            )
        files[name] = one
    return files
