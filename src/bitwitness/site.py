"""Where a value was seen, in one printable form that parses back and can be selected by glob.

``layers.3.mlp.fc1/addmm#0:forward.out0@r2.s40.m1`` reads: in module ``layers.3.mlp.fc1``, the first (``#0``) call of
operator ``addmm``, in the forward pass, its output 0, on rank 2, at step 40, micro-batch 1. The root module's path is
``.``; the part from ``@`` on is left out where rank and step go without saying.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import lru_cache

from bitwitness.errors import UsageError

PHASES = ("forward", "backward", "grad", "comm", "optim", "param")

_FORM = re.compile(
    # a key of a ModuleDict may hold any of the signs that part the rest, but for points
    r"(?P<module>[\s\S]+)/(?P<op>[^/]+)#(?P<call>\d+):(?P<phase>[a-z]+)\.(?P<slot>[\s\S]+?)"
    r"(?:@r(?P<rank>\d+)\.s(?P<step>\d+)\.m(?P<micro>\d+))?"
)


@dataclass(frozen=True, slots=True)
class Site:
    """One place where a value was seen.

    ``module`` is the path from the guarded root (``.`` for the root itself), ``op`` an operator's name without its
    overload (``addmm``) or what holds the value (``weight``, ``loss``), ``call`` counts the operator's calls inside one
    module within one forward or backward, ``slot`` names the value (``out0``, ``in1``, ``grad``).
    """

    module: str
    op: str
    call: int = 0
    phase: str = "forward"
    slot: str = "out0"
    rank: int | None = None
    step: int | None = None
    micro: int = 0

    def __str__(self) -> str:
        if self.rank is None or self.step is None:
            return self.short
        return f"{self.short}@r{self.rank}.s{self.step}.m{self.micro}"

    @property
    def short(self) -> str:
        """The form without rank, step and micro-batch: what globs are matched against."""
        return f"{self.module}/{self.op}#{self.call}:{self.phase}.{self.slot}"

    def at(self, *, rank: int, step: int, micro: int = 0) -> Site:
        """Return the same place on a given rank, step and micro-batch."""
        return replace(self, rank=rank, step=step, micro=micro)

    @classmethod
    def of_parameter(cls, name: str, phase: str) -> Site:
        """Return the site of a parameter or buffer (``phase`` "param") or of its gradient ("grad")."""
        module, _, leaf = name.rpartition(".")
        return site_at(module or ".", leaf, 0, phase, "value" if phase == "param" else "local")

    @classmethod
    def parse(cls, text: str) -> Site:
        """Read the printable form back; raise `UsageError` if it is not one."""
        found = _FORM.fullmatch(text)
        if found is None:
            raise UsageError(
                f"not a site: {text!r}; expected MODULE/OP#CALL:PHASE.SLOT with an optional @rR.sS.mM, "
                "for example layers.3.mlp.fc1/addmm#0:forward.out0"
            )
        part = found.groupdict()
        if part["phase"] not in PHASES:
            raise UsageError(f"not a site: {text!r}; phase {part['phase']!r} is none of {', '.join(PHASES)}")
        return cls(
            module=part["module"],
            op=part["op"],
            call=int(part["call"]),
            phase=part["phase"],
            slot=part["slot"],
            rank=None if part["rank"] is None else int(part["rank"]),
            step=None if part["step"] is None else int(part["step"]),
            micro=int(part["micro"] or 0),
        )


@lru_cache(maxsize=1 << 16)
def site_at(module: str, op: str, call: int, phase: str, slot: str) -> Site:
    """Return the place without rank and step: one object for all who name it, for each step of a recording names them all."""
    return Site(module, op, call, phase, slot)


@lru_cache(maxsize=1024)
def complete_glob(pattern: str) -> str:
    """Fill in the parts that a site pattern leaves out, so that ``layers.3.*`` means every value in that module.

    The parts are MODULE ``/`` OP ``#`` CALL ``:`` PHASE ``.`` SLOT; each missing one is ``*``.
    """
    head, colon, tail = pattern.partition(":")
    module, slash, op = head.partition("/")
    op = op if slash else "*"
    if "#" not in op:
        op += "#*"
    if not colon:
        tail = "*"
    elif "." not in tail:
        tail += ".*"
    return f"{module}/{op}:{tail}"


def matches(pattern: str, site: Site) -> bool:
    """Tell whether a site is selected by a glob (`complete_glob` tells how short forms are read)."""
    return fnmatchcase(site.short, complete_glob(pattern))
