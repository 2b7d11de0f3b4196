"""One operator, or a whole module, on trial: against float64, against itself again, and in ways that kernels get wrong."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bitwitness.errors import UsageError
from bitwitness.numerics import is_inexact
from bitwitness.oracle.opclass import has_products, is_linear, is_pointwise
from bitwitness.stats import same_bits
from bitwitness.trial import variations
from bitwitness.trial.call import Call, Results
from bitwitness.trial.given import call_of, checked, help_with, said
from bitwitness.trial.judging import judge_all
from bitwitness.trial.module import as_function
from bitwitness.trial.oracle import Oracle
from bitwitness.trial.quantisation import loss
from bitwitness.trial.result import FAIL, NOT_JUDGED, NOTE, PASS, WARN, worst
from bitwitness.trial.soft import NOTED, Soft, changes_nothing, is_same, kinked, odd, overflows
from bitwitness.trial.verification import Check, Verification

_REPEATS = 3


def verify_op(
    fn: Callable[..., Any],
    inputs: Tensor | Sequence[Any] | Mapping[str, Any],
    reference: Callable[..., Any] | None = None,
    *,
    device: torch.device | str | None = None,
    gradients: bool = True,
    variations: bool = True,
    seed: int = 0,
) -> Verification:
    """Judge whether an operator computes what its dtype allows, forward and backward.

    Parameters
    ----------
    fn
        The operator: any function of tensors, a custom operator, a kernel, a whole module.
    inputs
        Its arguments: one tensor, a sequence of positional ones, or a mapping of keyword ones. They are not changed. Gradients
        are judged of those that require one (of a module's parameters, too).
    reference
        What it should compute, written for any dtype and the CPU; it is run in float64. Without one, ``fn`` itself is run in
        float64 on the CPU: that finds what a kernel does wrong in its dtype, on its device, but not a wrong formula.
    device
        Where ``fn`` is run; by default where its inputs are.
    gradients
        Whether to judge gradients.
    variations
        Whether to try it in other ways, too: again, in other layouts, on parts of the batch, on numbers that are small, large,
        special, or whose sums are exact.
    seed
        Of the output gradients and of what is drawn.

    Raises
    ------
    UsageError
        If there is no tensor among the inputs, or ``fn`` raises on them.

    """
    checked(fn, reference)
    call = call_of(fn, inputs, device, gradients=gradients, seed=seed)
    reference = as_function(reference, like=fn) if reference is not None else None
    return Trial(call, reference).run(everything=variations)


class Trial:
    """The checks of one call, one after the other."""

    def __init__(self, call: Call, reference: Callable[..., Any] | None = None) -> None:
        self._call = call
        self._reference = reference
        self._checks: list[Check] = []
        self._deterministic = True
        self._batch_invariant: bool | None = None

    def run(self, *, everything: bool = True) -> Verification:
        """Return the verdict. Raises UsageError where the call itself raises."""
        try:
            first = self._seeded(self._call)
        except (Exception, SystemExit) as error:
            raise UsageError(f"the operator raises on its inputs: {said(error)}; {help_with(error)}") from error
        if not first.outputs and not first.changed:
            raise UsageError("the operator returned no tensor; expected a tensor, or a container of some")
        oracle = Oracle(self._call, first, self._reference)
        check, oracle = self._as_given(first, oracle)
        self._checks.append(check)
        base = self._checks[0].verdict
        if everything:
            self._repeat(first, oracle)
            if base in (PASS, WARN):
                self._vary(first, oracle)
        verdict = self._verdict()
        return Verification(
            WARN if verdict == NOT_JUDGED else verdict,
            self._reason(verdict),
            tuple(self._checks),
            self._deterministic,
            self._batch_invariant,
            tuple(f.name() for f in oracle.mode.operators) if base != NOT_JUDGED else (),
        )

    def _as_given(self, first: Results, oracle: Oracle) -> tuple[Check, Oracle]:
        """Judge the first run; where it quantises and the reference does not, it and all others against what it quantises."""
        found = self._judged("as given", first, oracle)
        if found.verdict != FAIL or self._reference is None:
            return found, oracle
        own = Oracle(self._call, first)
        try:
            lost, beyond = loss(own, oracle)
        except Exception:  # kernels that the CPU cannot run quantise unseen
            return found, oracle
        kernel = self._judged("as given", first, own) if lost else found
        if kernel.verdict in (FAIL, NOT_JUDGED):
            worse = next((o for o in found.outputs if o.slot == beyond and o.verdict == FAIL), None)
            return replace(found, reason=f"{beyond}: {worse.reason}") if worse else found, oracle
        self._reference = None
        reason = f"{lost}; the kernel is within rounding of what it quantises"
        return replace(kernel, verdict=WARN, reason=reason), own

    def _verdict(self) -> str:
        """Return the worst verdict; what was judged as it was given may refuse to be tried in other ways."""
        aside = {NOTE} if self._checks[0].verdict == NOT_JUDGED else {NOTE, NOT_JUDGED}
        return worst(c.verdict for c in self._checks if c.verdict not in aside)

    def _reason(self, verdict: str) -> str:
        """Return why it is the verdict: what the first check of that kind says; not being judged comes before warnings."""
        first = self._checks[0]
        if verdict == PASS:
            return ""
        if verdict != FAIL and first.verdict == NOT_JUDGED:
            return first.reason
        found = next(c for c in self._checks if c.verdict == verdict)
        return found.reason if found is first else f"{found.name}: {found.reason}"

    def _seeded(self, call: Call) -> Results:
        with torch.random.fork_rng():
            torch.manual_seed(call.seed)
            return call.run()

    def _judged(self, name: str, results: Results, oracle: Oracle, *, soft: Soft | None = None) -> Check:
        """Judge all results of a run; ``soft``: tells where a failure is only a warning, and what it means."""
        try:
            outputs, reason = judge_all(results, oracle)
        except Exception as error:
            what = "the reference" if self._reference is not None else "the operator"
            return Check(name, NOT_JUDGED, f"{what} cannot be run in float64 on the CPU: {said(error)}")
        if not reason and name == "as given" and oracle.unsteady:
            reason = (
                f"it depends on more than its inputs: {oracle.unsteady} is another when it is run again in float64, too"
            )
        verdict = worst(o.verdict for o in outputs) if not reason else NOT_JUDGED
        if not reason and verdict != PASS:
            bad = next(o for o in outputs if o.verdict == verdict)
            reason = f"{bad.slot}: {bad.reason}"
        if verdict == FAIL and soft is not None and all(soft(o) for o in outputs if o.verdict == FAIL):
            verdict, reason = WARN, f"{soft(bad)}: {reason}"
        if verdict == WARN and name in NOTED:
            verdict = NOTE
        return Check(name, verdict, reason, outputs)

    def _repeat(self, first: Results, oracle: Oracle) -> None:
        """Run it again: other bits are no error where they are within what rounding allows, but they are told."""
        for _ in range(_REPEATS - 1):
            again = self._seeded(self._call)
            if not first.differs_at(again):
                continue
            self._deterministic = False
            check = self._judged("again, on the same inputs", again, oracle)
            if check.verdict == PASS:
                check = replace(check, verdict=WARN, reason="other bits than before, within what rounding allows")
            elif check.verdict == NOT_JUDGED:
                check = replace(check, reason="other bits than before")
            self._checks.append(check)
            return
        self._checks.append(Check("again, on the same inputs", PASS))

    def _vary(self, first: Results, oracle: Oracle) -> None:
        for name, call in variations.layouts(self._call):
            self._try(name, call, oracle)
        self._batch(first, oracle)
        for name, call in variations.scales(self._call):
            self._try(name, call, soft=overflows)
        if is_linear(oracle.mode.operators):
            self._try("integers, whose sums are exact", variations.integers(self._call))
        products = has_products(oracle.mode.operators)
        for name, call in variations.specials(self._call):
            if name == "zeros and subnormal numbers":
                soft = partial(kinked, alone=is_pointwise(oracle.mode.operators))
                self._try(name, call, soft=soft, excuse=self._other_meaning)
            else:
                soft = partial(odd, products=products, largest=name == "the largest numbers")
                excuse = partial(self._for_nothing, before=oracle) if name in ("NaN", "infinities") else None
                self._try(name, replace(call, gradients=False), soft=soft, excuse=excuse)

    def _try(
        self,
        name: str,
        call: Call,
        oracle: Oracle | None = None,
        *,
        soft: Soft | None = None,
        excuse: Callable[[Call, Results, Oracle], tuple[str, str] | None] | None = None,
    ) -> None:
        """Add what is said of a variation; ``excuse``: says what it is instead where what fails there is no error, and why."""
        try:
            found = self._seeded(call)
        except Exception as error:  # an operator may refuse a layout, or numbers: it does not compute wrongly then
            self._checks.append(Check(name, NOT_JUDGED, f"it refuses: {said(error)}"))
            return
        oracle = oracle or Oracle(call, found, self._reference)
        check = self._judged(name, found, oracle, soft=soft)
        if check.verdict == FAIL and self._reference is not None and excuse and (why := excuse(call, found, oracle)):
            check = replace(check, verdict=why[0], reason=f"{why[1]}: {check.reason}")
        self._checks.append(check)

    def _other_meaning(self, call: Call, found: Results, oracle: Oracle) -> tuple[str, str] | None:
        """Tell where numbers that a variation made up are none that both are written for: they differ in float64, too."""
        if not all(bool(t.isfinite().all()) for t in found.slots().values() if is_inexact(t)):
            return None
        own = Oracle(call, found).exact
        return None if is_same(own, oracle.exact) else (WARN, "the reference makes something else of it in float64")

    def _for_nothing(self, call: Call, found: Results, oracle: Oracle, *, before: Oracle) -> tuple[str, str] | None:
        """Tell where NaN in the reference's results comes of zero times what is no number: a number there changes nothing."""
        finite = Oracle(variations.with_tensors(call, _numbers_instead), found, self._reference)
        same = changes_nothing(found, oracle.exact, finite.exact, before.exact)
        return (NOTE, "zero times what is no number") if same else None

    def _batch(self, first: Results, whole: Oracle) -> None:
        """Run it on parts of its batch: other bits are told, a result outside of what rounding allows is a failure."""
        for parts in variations.batch_parts(self._call, first.outputs):
            tried = [self._part(which, call, first, whole) for which, call in parts]
            if all(check is not None for check, _ in tried):
                self._checks += [check for check, _ in tried if check is not None]
                known = [same for _, same in tried if same is not None]
                self._batch_invariant = all(known) if known else None
                return

    def _part(self, which: slice, call: Call, first: Results, whole: Oracle) -> tuple[Check | None, bool | None]:
        """Judge it on some rows, and tell whether their bits are those of the whole; nothing where they are no such rows."""
        try:
            found = self._seeded(call)
            rows = [t[which] for t in first.outputs]
            if [t.shape for t in rows] != [t.shape for t in found.outputs]:
                return None, None
            oracle = Oracle(call, found, self._reference)
            check = self._judged(_rows(which), found, oracle)
            if check.verdict == NOT_JUDGED or not _independent(whole, oracle, which):
                return check, None
        except Exception:
            return None, None
        return check, all(same_bits(a.detach(), b.detach()) for a, b in zip(rows, found.outputs, strict=True))


def _numbers_instead(tensor: Tensor) -> Tensor:
    plain = tensor.detach()
    return plain.nan_to_num(3.0, 3.0, 3.0) if plain.is_floating_point() else plain


def _rows(which: slice) -> str:
    last = which.stop - 1
    return (
        f"row {last} of the batch alone" if which.start == last else f"rows {which.start} to {last} of the batch alone"
    )


def _independent(whole: Oracle, part: Oracle, which: slice) -> bool:
    """Whether rows of a batch do not depend on one another: those of a part are those of the whole, in float64."""
    return all(
        torch.allclose(a[which].double(), b.double(), rtol=1e-9, atol=1e-12, equal_nan=True)
        for a, b in zip(whole.exact.outputs, part.exact.outputs, strict=True)
        if not a.is_complex()
    )
