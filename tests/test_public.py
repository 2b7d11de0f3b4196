"""The public names, and what importing them costs."""

from __future__ import annotations

import subprocess
import sys

import pytest

import bitwitness as bw


def test_public_names_are_sorted_and_there() -> None:
    assert bw.__all__ == sorted(bw.__all__)
    for name in bw.__all__:
        assert getattr(bw, name).__name__ == name


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(AttributeError, match="Guard"):
        bw.Gard  # noqa: B018 - asking is the test


def test_importing_the_package_or_asking_for_help_imports_no_torch() -> None:
    code = "import sys, bitwitness, bitwitness.cli; bitwitness.cli.parser(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
