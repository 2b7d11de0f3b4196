"""What all pages stand on: templates that escape, scripts and styles of our own, and a policy that lets nothing else act."""

from __future__ import annotations

import base64
import hashlib
from importlib.resources import files
from typing import Any


def templates() -> Any:
    """Return the environment of the templates, whose text is escaped; raises ImportError where Jinja2 is not installed."""
    import jinja2

    folder = jinja2.FunctionLoader(lambda name: asset("templates", name))
    return jinja2.Environment(
        loader=folder, autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )


def policy(scripts: list[str], style: str) -> str:
    """Return a page's Content-Security-Policy: these scripts and this style alone may act, and no request leaves."""
    allowed = " ".join(_hash(script) for script in scripts)
    rest = "img-src data:; base-uri 'none'; form-action 'none'"
    return f"default-src 'none'; script-src {allowed}; style-src {_hash(style)}; {rest}"


def _hash(script: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"


def asset(*parts: str) -> str:
    """Return a file of the report's own, or one that is vendored, by the parts of its path."""
    return files("bitwitness.report").joinpath(*parts).read_text(encoding="utf-8").replace("\r\n", "\n")


def marked(own: str) -> Any:
    """Return our own text as one that is not to be escaped: a script, a style sheet, data that `embedded` made safe."""
    from markupsafe import Markup

    return Markup(own)  # noqa: S704 - see above
