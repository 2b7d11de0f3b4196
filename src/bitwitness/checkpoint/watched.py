"""Seals the checkpoints that a script writes, and verifies those that it reads, by patching what it calls for that.

What is patched: ``torch.save`` and ``torch.load``; ``save_file``, ``load_file`` and ``safe_open`` of safetensors;
``torch.distributed.checkpoint.save`` (and through it ``async_save`` in a thread) and ``load``; ``os.replace``, ``os.rename``,
``os.remove`` and ``os.unlink``, so that a seal follows its file. Only names of files are followed: what is written into an
open file or a buffer is passed on.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist

from bitwitness.checkpoint.inmemory import SMALLEST, hashes_of_state, size_of
from bitwitness.checkpoint.manifest import seal_of
from bitwitness.checkpoint.own import is_ours, ours
from bitwitness.checkpoint.sealer import Sealer, Written
from bitwitness.checkpoint.steps import is_part
from bitwitness.checkpoint.verifying import Checked, verify
from bitwitness.errors import TrainingStopped, UsageError
from bitwitness.tap.imports import when_imported
from bitwitness.tap.patching import replaced

_DCP = "torch.distributed.checkpoint"
_JUST_NOW_S = 60.0  # a file that was verified so short a time ago, and not written since, is not read once more
_FILES = (".pt", ".pth", ".bin", ".ckpt", ".safetensors", ".tar", ".pkl")


@dataclass(slots=True)
class Told:
    """What became known of checkpoints.

    Attributes
    ----------
    read
        A checkpoint that was read and is not, whole, what was sealed.
    differs
        Tensors that were not in a file, read back, what they had been in memory.
    path
        Which file or folder.
    error
        Our own.

    """

    path: Path | None = None
    read: Checked | None = None
    differs: list[str] = field(default_factory=list)
    unread: str = ""
    error: Exception | None = None


class WatchedCheckpoints:
    """Watches a script's checkpoints while entered.

    Parameters
    ----------
    tell
        Told of damage, from the thread that reads or writes; may raise `TrainingStopped` while something is read.

    """

    def __init__(self, tell: Callable[[Told], None]) -> None:
        self._tell = tell
        self._stack = ExitStack()
        self._sealer = Sealer(self._differs, self._failed)
        self._pid = -1
        self._checked: dict[tuple[Any, ...], float] = {}
        self.verified = 0

    @property
    def sealed(self) -> int:
        """How many checkpoints were sealed."""
        return self._sealer.sealed

    def __enter__(self) -> Self:
        self._pid = os.getpid()
        for owner in (torch, torch.serialization):
            self._put(owner, "save", self._saving("torch", "f", 1))
            self._put(owner, "load", self._loading("f", 0))
        for name, wrap in (
            ("replace", self._renaming),
            ("rename", self._renaming),
            ("remove", self._removing),
            ("unlink", self._removing),
        ):
            self._put(os, name, wrap)
        self._stack.enter_context(when_imported("safetensors.torch", self._patch_safetensors))
        self._stack.enter_context(when_imported(_DCP, self._patch_dcp))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()
        if os.getpid() == self._pid:
            self._sealer.close()
        self._pid = -1

    def _put(self, owner: Any, name: str, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        self._stack.enter_context(replaced(owner, name, wrap))

    def _patch_safetensors(self) -> None:
        module, package = sys.modules["safetensors.torch"], sys.modules["safetensors"]
        self._put(module, "save_file", self._saving("safetensors", "filename", 1))
        self._put(module, "load_file", self._loading("filename", 0))
        for owner in (module, package):
            if hasattr(owner, "safe_open"):
                self._put(owner, "safe_open", self._loading("filename", 0))

    def _patch_dcp(self) -> None:
        for owner, name in ((_DCP, "save"), (f"{_DCP}.state_dict_saver", "save")):
            self._put(sys.modules[owner], name, self._saving_dcp)
        for owner, name in ((_DCP, "load"), (f"{_DCP}.state_dict_loader", "load")):
            self._put(sys.modules[owner], name, self._loading_dcp)

    # -- what is put in their places -----------------------------------------------------------------------------

    @property
    def _live(self) -> bool:
        return os.getpid() == self._pid and not is_ours()

    def _saving(self, kind: str, keyword: str, position: int) -> Callable[..., Any]:
        def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
            def save(*args: Any, **kwargs: Any) -> Any:
                path = _path(kwargs.get(keyword, args[position] if len(args) > position else None))
                if path is None or not self._live:
                    return original(*args, **kwargs)
                with ours():
                    content = args[0] if args else kwargs.get("obj", kwargs.get("tensors"))
                    tensors = self._quietly(lambda: self._before(path, content))
                    result = original(*args, **kwargs)
                    if tensors is not None:
                        self._quietly(lambda: self._sealer.put(Written(path, kind, tensors)))
                return result

            return _like(save, original)

        return wrap

    def _before(self, path: Path, content: Any) -> Any:
        self._sealer.forget(path)
        return hashes_of_state(content) if size_of(content) >= SMALLEST else None

    def _loading(self, keyword: str, position: int) -> Callable[..., Any]:
        def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
            def load(*args: Any, **kwargs: Any) -> Any:
                path = _path(kwargs.get(keyword, args[position] if len(args) > position else None))
                if path is None or not self._live:
                    return original(*args, **kwargs)
                with ours():
                    self._verify(path)
                    return original(*args, **kwargs)

            return _like(load, original)

        return wrap

    def _saving_dcp(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def save(*args: Any, **kwargs: Any) -> Any:
            path = _path(kwargs.get("checkpoint_id")) or _path(getattr(kwargs.get("storage_writer"), "path", None))
            if path is None or is_part(path) or not self._live:
                return original(*args, **kwargs)
            with ours():
                written = self._quietly(lambda: self._before_dcp(path, kwargs))
                result = original(*args, **kwargs)
                if written is not None:
                    self._quietly(lambda: self._after_dcp(written, kwargs))
            return result

        return _like(save, original)

    def _before_dcp(self, path: Path, kwargs: dict[str, Any]) -> Written:
        rank, size = _ranks(kwargs)
        if rank == 0:
            self._sealer.forget(path)
        if kwargs.get("planner") is None:
            from bitwitness.checkpoint.planners import HashingSavePlanner

            kwargs["planner"] = HashingSavePlanner()
        return Written(path, "dcp", (), rank, size)

    def _after_dcp(self, written: Written, kwargs: dict[str, Any]) -> None:
        written.tensors = tuple(getattr(kwargs["planner"], "sealed", ()))
        self._sealer.put(written)

    def _loading_dcp(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def load(*args: Any, **kwargs: Any) -> Any:
            path = _path(kwargs.get("checkpoint_id")) or _path(getattr(kwargs.get("storage_reader"), "path", None))
            if path is None or not self._live:
                return original(*args, **kwargs)
            with ours():
                self._verify(path, _ranks(kwargs))
                return original(*args, **kwargs)

        return _like(load, original)

    def _renaming(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def rename(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            if self._live and len(args) == 2 and not kwargs:
                source, target = map(_path, args)
                if source is not None and target is not None:
                    with ours():
                        self._quietly(lambda: self._sealer.moved(source, target))
            return result

        return _like(rename, original)

    def _removing(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def remove(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            path = _path(args[0]) if len(args) == 1 and not kwargs else None
            if path is not None and path.suffix in _FILES and self._live:
                with ours():
                    self._quietly(lambda: self._sealer.forget(path))
            return result

        return _like(remove, original)

    # -- looking -------------------------------------------------------------------------------------------------

    def _verify(self, path: Path, share: tuple[int, int] = (0, 1)) -> None:
        """Hold what is about to be read against its seal, if it has one; raises nothing but `TrainingStopped`."""
        try:
            seal = seal_of(path)
            if not seal.exists():
                return
            found = path.stat()
            known = (os.path.abspath(path), found.st_ino, found.st_mtime_ns, seal.stat().st_mtime_ns)
            now = time.monotonic()
            # Hugging Face opens a file once for each of its parts. What is in a folder its own time does not tell.
            if not path.is_dir() and now - self._checked.get(known, -_JUST_NOW_S) < _JUST_NOW_S:
                return
            self._checked[known] = now
            checked = verify(path, share=share)
            self.verified += 1
            if not checked.intact:
                self._tell(Told(path, read=checked))
        except TrainingStopped:
            raise
        except (UsageError, OSError) as error:
            told = Told(path, unread=str(error))
            self._quietly(lambda: self._tell(told))
        except Exception as error:
            self._failed(error)

    def _differs(self, path: Path, tensors: list[str]) -> None:
        self._tell(Told(path, differs=tensors))

    def _quietly(self, action: Callable[[], Any]) -> Any:
        try:
            return action()
        except Exception as error:
            self._failed(error)
            return None

    def _failed(self, error: Exception) -> None:
        self._tell(Told(error=error))


def _path(named: Any) -> Path | None:
    """Return the path that a call names; None for open files and buffers, and names in bytes."""
    if not isinstance(named, str | os.PathLike) or not os.fspath(named):
        return None
    text = os.fspath(named)
    return Path(text) if isinstance(text, str) and "\0" not in text and "://" not in text else None


def _ranks(kwargs: dict[str, Any]) -> tuple[int, int]:
    if kwargs.get("no_dist") or not (dist.is_available() and dist.is_initialized()):
        return 0, 1
    group = kwargs.get("process_group")
    return dist.get_rank(group), dist.get_world_size(group)


def _like(ours_: Callable[..., Any], original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function with the name and the signature of the one it stands for."""
    ours_.__name__ = getattr(original, "__name__", ours_.__name__)
    ours_.__doc__ = getattr(original, "__doc__", None)
    ours_.__wrapped__ = original  # type: ignore[attr-defined]
    return ours_
