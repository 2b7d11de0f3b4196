"""Compiles the reader of tensors when the package is built, also for an editable install.

Where there is no C compiler the package is complete without it: torch's operators read then, three to ten times as slowly.
``CC`` names another compiler than ``cc``; ``CFLAGS`` come after our own ``-O3`` (``-O1`` compiles in a quarter of the time).
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from packaging.tags import platform_tags

FOLDER = Path("src/bitwitness/stats/native")
BUILT = "reader.so"
OPTIMIZED = "-O3"
# after whatever CFLAGS say: products are rounded before they are added, for the same bits on every processor
FLAGS = ["-std=c11", "-fno-fast-math", "-ffp-contract=off", "-fPIC", "-shared"]


class Compile(BuildHookInterface):  # type: ignore[type-arg]
    """Compiles, and adds what comes of it to the wheel."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:  # noqa: ARG002
        """Compile for a wheel of any version; a source distribution takes the sources."""
        if self.target_name != "wheel":
            return
        folder = Path(self.root) / FOLDER
        fresh = folder / f"{BUILT}.{os.getpid()}"
        compiler, chosen = shlex.split(os.environ.get("CC", "cc")), shlex.split(os.environ.get("CFLAGS", ""))
        command = [*compiler, OPTIMIZED, *chosen, *FLAGS, str(folder / "reader.c"), "-o", str(fresh)]
        try:
            subprocess.run(command, check=True, capture_output=True, text=True)  # noqa: S603 - the compiler of who builds
            fresh.replace(folder / BUILT)
        except (OSError, subprocess.CalledProcessError) as error:
            said = getattr(error, "stderr", "") or error
            print(f"bitwitness: built without its compiled reader, recording will cost more: {said}", file=sys.stderr)
            (folder / BUILT).unlink(missing_ok=True)  # of other sources perhaps
            fresh.unlink(missing_ok=True)
            return
        build_data["artifacts"].append(f"{FOLDER}/{BUILT}")
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{next(platform_tags())}"  # it knows nothing of Python
