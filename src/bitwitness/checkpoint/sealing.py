"""Sealing a checkpoint that is there: its files are hashed, and the tensors in them."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from bitwitness.checkpoint.contents import Contents, contents_of, hashes_in
from bitwitness.checkpoint.filehash import hash_file
from bitwitness.checkpoint.manifest import Manifest, SealedFile, seal_of, write_manifest
from bitwitness.checkpoint.own import ours
from bitwitness.errors import UnreadError, UsageError
from bitwitness.files.reading import read_bytes
from bitwitness.files.shown import shown
from bitwitness.store.dcp import METADATA

_LARGEST_METADATA = 512 << 20


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
    manifest = Manifest(contents.kind, files, tuple(found.sealed), step, checked=True, of=save_of(contents))
    write_manifest(seal_of(place), manifest)
    return manifest


def sealed_files(contents: Contents, names: tuple[str, ...] | None = None) -> dict[str, SealedFile]:
    """Hash a checkpoint's files, or those named; raises `UnreadError` where one changes meanwhile or cannot be read."""
    files = {}
    for name in contents.files if names is None else names:
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


def save_of(contents: Contents) -> str:
    """Return which save a DCP checkpoint is of: every save's metadata hold a number of its own."""
    if contents.kind != "dcp":
        return ""
    data = read_bytes(contents.folder / METADATA, "the .metadata of a DCP checkpoint", _LARGEST_METADATA)
    return hashlib.sha256(data, usedforsecurity=False).hexdigest()
