"""What a comparison of two recordings found, and what of them it could not look at."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Any

from bitwitness.comparison.gradients.cause import SOME_FACTOR
from bitwitness.comparison.measuring.allowance import roundoff
from bitwitness.comparison.measuring.describe import RECORD_OPERATORS
from bitwitness.comparison.precisions.otherwise import Otherwise, in_words
from bitwitness.comparison.suspect import Exceeding, Suspect
from bitwitness.finding import to_jsonable

SCHEMA = 2
"""Of what `Report.to_dict` returns; counted up when a field changes its meaning or goes."""
_SHARED_ENOUGH = 0.5
"""Share of operators that have a counterpart, below which two runs are not the same computation, and equal rest says nothing.

Another attention kernel, or a fused optimizer, leaves some 5 to 30 % without one of their own; two unrelated models, most.
"""


@dataclass(slots=True)
class Report:
    """What a comparison found.

    Attributes
    ----------
    a, b
        The two recordings: their paths, and whose format they are in.
    first
        The first operator that made an error; None if none did.
    parting
        The first in the order of execution whose inputs agree and whose results do not.
    cause
        What happened to all gradients at once, if one thing did: a factor, a clipping, gradients that were not zeroed.
    suspects
        All that made one, those that exceed what rounding explains most first.
    only_a, only_b
        Operators that one run alone has.
    groups
        Groups of operators that stand against others, with the same result.
    rows, differing
        Compared values, and those of them that differ at all.
    matched, lone
        Operators (of all steps) that have a counterpart, and those that have none. ``shared_parts``, ``lone_parts``: the same
        of modules, parameters, gradients and updates.
    exceeding
        Results that differ by more than rounding explains and have no recorded reason, in order.
    unexplained
        The first result that differs by more than rounding explains, with a reason or without.
    nearest
        Of the results that differ by no more than rounding explains, the one that comes nearest to that.
    noise
        The largest relative change that a single operator's rounding explained.
    problems
        What could not be read or compared.
    modules
        The names that modules of A have in B.
    notes
        How the two were lined up, one sentence each; ``given``: how the first batch differs of which only gradients and updates
        were compared; ``left_out``: which of them tell of steps that only one run has, without
        which no answer is whole.
    unaligned
        Steps that were not given the same batch, and were not compared; ``unaligned_from`` is the first.
    in_parts
        That one run recorded the parts of a model alone, and which: nothing was compared then.
    shifted
        From which step's weights the other run starts, where steps do not have the same number.
    conditions
        Under what other conditions the runs were made, in words: a model in evaluation mode.
    precisions
        The dtypes in which A and B compute, where they compute in different ones throughout.
    operators, kept
        Whether operators were compared, and the values themselves.
    cleared
        How many operators (of all steps) differ by more than rounding inside modules whose results agree: ways of writing, and
        branches that lead nowhere. ``made_up_for``: the first module among them whose results differ, though nothing of that is
        left later.
    otherwise
        What is computed by other operators in each run, in a dtype too coarse to tell whether by the same formula; in order.
    merged
        The runs are spread differently over ranks; all ranks were put together.

    """

    a: str = ""
    b: str = ""
    first: Suspect | None = None
    parting: Suspect | None = None
    cause: Suspect | None = None
    suspects: list[Suspect] = field(default_factory=list)
    only_a: list[str] = field(default_factory=list)
    only_b: list[str] = field(default_factory=list)
    groups: list[tuple[list[str], list[str]]] = field(default_factory=list)
    rows: int = 0
    differing: int = 0
    steps: int = 0
    noise: float = 0.0
    exceeding: list[Exceeding] = field(default_factory=list)
    unexplained: Exceeding | None = None
    nearest: Exceeding | None = None
    problems: list[str] = field(default_factory=list)
    modules: dict[str, str] = field(default_factory=dict)
    merged: bool = False
    conditions: str = ""
    notes: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    given: str = ""
    unaligned: list[str] = field(default_factory=list)
    unaligned_from: float = math.inf
    shifted: str = ""
    in_parts: str = ""
    precisions: tuple[str, str] | None = None
    operators: bool = True
    kept: bool = False
    matched: int = 0
    lone: int = 0
    shared_parts: int = 0
    lone_parts: int = 0
    cleared: int = 0
    made_up_for: Exceeding | None = None
    otherwise: dict[Otherwise, None] = field(default_factory=dict)

    def note(self, text: str) -> None:
        """Note how runs were lined up, once."""
        if text not in self.notes:
            self.notes.append(text)

    @property
    def status(self) -> str:
        """Tell ``fine``, ``findings`` or ``unread``: something could not be read or compared, beside findings or not."""
        if self.problems or self.unaligned or self.in_parts or not self.rows or self.unlike:
            return "unread"
        return "fine" if self.first is None and not self.exceeding else "findings"

    @property
    def unlike(self) -> bool:
        """Whether the two structures share too little to be compared: of operators, and of modules, parameters and gradients.

        A loop, or a kernel that is taken apart in one run, has many operators in one module that both have.
        """
        parts = self.shared_parts + self.lone_parts
        return self.matched < _SHARED_ENOUGH * (self.matched + self.lone) and self.shared_parts < _SHARED_ENOUGH * (
            parts or 1
        )

    @property
    def conclusion(self) -> str:
        """One sentence for all."""
        if self.in_parts:
            return f"not the same pieces: {self.in_parts}; no operator is accused: record both with bw.Recorder(model)"
        if self.first is not None and not self._parted_unseen and self.first.step < self.unaligned_from:
            return self._parts_at(self.first)
        if self.unaligned:
            return (
                f"the runs were not given the same batch, or not in the same pieces ({self.unaligned[0]}), so that no operator "
                "is accused: record both with the same batch, or name steps that had it (--steps)"
            )
        if not self.rows:
            return "nothing could be compared"
        if self.unlike:
            return (
                f"the structures share too little to be compared: {self.lone} operators of {self.matched + self.lone} have no "
                "counterpart; are these two runs of one model? (--map gives modules' other names)"
            )
        unread = f"; NOT ALL: {len(self.problems)} things could not be read or compared" if self.problems else ""
        lone = f"; {self.lone} operators have no counterpart and were not compared" if self.lone else ""
        lone += "".join(f"; {text}" for text in self.left_out)
        lone += f"; of steps whose batch differs ({self.given}) gradients and updates alone" if self.given else ""
        if not self.differing:
            return f"no difference: everything that was compared is equal{lone}{unread}"
        if self.exceeding:
            other = f"; {in_words(self.otherwise)}" if self.precisions and self.otherwise else ""
            return (
                f"the runs differ by more than rounding, first at {self.exceeding[0]}, and what made it was not recorded: "
                f"{self._hint}{other}{lone}{unread}"
            )
        return f"{self._rounding_only}{lone}{unread}"

    def _parts_at(self, first: Suspect) -> str:
        """Say where the runs part, beside what explains all gradients and what comes before all operators."""
        said = f"{self._elsewhere}the runs part at {first.site} (rank {first.rank}, step {first.step}): {first.text}"
        more = []
        if self.cause is not None and self.cause is not first and self.cause.step == first.step:
            # What an argument, a wrong result or an operator more explains needs no guess at the same factor's cause.
            known = f": {SOME_FACTOR}" if first.reason in ("argument", "computed", "missing") else ""
            more.append(self.cause.text.removesuffix(known))
        if self.unlike:
            count = f"{self.lone} operators of {self.matched + self.lone}"
            more.append(f"{count} have no counterpart, which is too many to be sure")
        # A precision is told in what rounding explains; how the parameters are held comes of it.
        under = [self.conditions] if self.conditions else []
        return "; ".join([said, *more, *under] if self.precisions else [*under, said, *more])

    @property
    def _rounding_only(self) -> str:
        nearest = f"; but {in_words(self.otherwise)}" if self.otherwise else ""
        nearest += "" if self.nearest is None else f"; the nearest to that is {self.nearest}"
        if self.precisions is not None:
            coarse = max(self.precisions, key=roundoff)
            how = f"the runs compute in {' against '.join(self.precisions)}"
            how += f" ({self.conditions})" if self.conditions else ""
            return f"rounding of {coarse}: {how}, and no operator differs by more than that explains{nearest}"
        said = "no operator differs by more than rounding explains"
        if self.cleared:
            said = f"what modules return differs by no more than rounding explains ({self.cleared} operators inside do)"
        if self.made_up_for is not None:
            said = f"{said}, but for {self.made_up_for}, of which nothing is left in what follows"
        return f"reordering-level differences only: {said}{nearest}"

    @property
    def _elsewhere(self) -> str:
        """What the first difference follows from, where steps were lined up by weights and are given other batches."""
        if not self.shifted or self.first is None or not self.first.text.startswith("input "):
            return ""
        return f"{self.shifted}, but it is given another batch (stale weights, or another place in the data): "

    @property
    def _parted_unseen(self) -> bool:
        """Whether the runs differed before the first that is named, without anything recorded to have made it."""
        return self.first is not None and bool(self.exceeding) and self.exceeding[0].step < self.first.step

    @property
    def _hint(self) -> str:
        """What to record, for what made a difference to be seen."""
        if not self.operators:
            return RECORD_OPERATORS
        if not self.kept:
            return "record the values themselves (--content tensors)"
        return "save what lies before it (bw.save), or record more steps"

    def to_dict(self) -> dict[str, Any]:
        """Return it ready for JSON, without the table."""
        found = {
            "schema": SCHEMA,
            "status": self.status,
            "conclusion": self.conclusion,
            "compared": self.rows,
            "first": None if self.first is None else self.first.to_dict(),
            "gradients": None if self.cause is None else self.cause.to_dict(),
            "first_with_agreeing_inputs": None if self.parting is None else self.parting.to_dict(),
            "suspects": [suspect.to_dict() for suspect in self.suspects],
            "only_in_a": self.only_a,
            "only_in_b": self.only_b,
            "written_otherwise": [one._asdict() for one in self.otherwise],
            "equivalent": [{"a": a, "b": b} for a, b in self.groups],
            "renamed": self.modules,
            "ranks_merged": self.merged,
            "differing": self.differing,
            "matched": self.matched,
            "without_counterpart": self.lone,
            "conditions": self.conditions or None,
            "precisions": None if self.precisions is None else list(self.precisions),
            "exceeding": [asdict(one) for one in self.exceeding],
            "nearest": None if self.nearest is None else asdict(self.nearest),
            "lined_up": self.notes,
            "unaligned": self.unaligned,
            "steps": self.steps,
            "noise": self.noise,
            "problems": self.problems,
        }
        return dict(to_jsonable(found))
