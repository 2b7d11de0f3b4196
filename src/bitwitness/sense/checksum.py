"""The `checksum` sensor: every matrix product and fused attention of a deep step, forward and backward, and what runs between.

It sees a wrong element, row, column or tile of an operator's output, once it is larger than rounding explains: for
float32 about the eight upper mantissa bits of an ordinary element, for bfloat16 exponent bits; of convolutions and LSTM layers
what is coarser. It cannot see an input that was already wrong, nor operators without an identity (recurrent layers on
accelerators, say): `ChecksumSensor.coverage` names those that carry work with their share.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Any, Literal

import torch

from bitwitness.errors import UsageError
from bitwitness.finding import Finding
from bitwitness.oracle.product import READERS, Product, product_of
from bitwitness.oracle.row import compare_row_with_float64
from bitwitness.sense import checksum_attention
from bitwitness.sense.checksum_finding import Kind, Pending, brought_to_host, failure, kind_of, kind_told, overflow
from bitwitness.sense.checksum_product import check_product
from bitwitness.sense.checksum_reference import check_reference
from bitwitness.sense.checksums import check_between, check_layer, is_between, sees_last_bits, turns_of
from bitwitness.sense.flops import carries_flops, flops_of
from bitwitness.sense.invariant import Invariant, Signs
from bitwitness.sense.selftest import seen, self_test
from bitwitness.tap.compat import OpOverload
from bitwitness.tap.modules import ModuleTracker
from bitwitness.tap.operators import OpCall, OperatorTap, tensors_in
from bitwitness.tap.threads import working_elsewhere
from bitwitness.tap.turns import Turns, is_small

Scheme = Literal["signs", "reference"]
_LONGEST = 200  # characters of an error that is told
_STRIKES = 2  # dismissals of one kind
_LIMIT = 64  # findings a step: a faulty device fails hundreds of operators at once


class ChecksumSensor:
    """Handler for `bitwitness.tap.operators.OperatorTap`; ``drain`` turns what it noted into findings.

    Parameters
    ----------
    scheme
        ``signs``: our own; ``reference``: the reference systems' CheckSum, for bfloat16 products only.
    deferred
        Whether figures stay on the device until ``drain``, which then waits for it once. None: on accelerators. On the CPU a
        failed product is confirmed at once, element by element in float64, while its inputs are at hand.
    seed
        Seed of the weights' own generator.
    rows_one_in
        Of the large operators between products one in so many is checked on a step, by turns: they are many, and reading them
        is most of what they cost.

    elsewhere
        Names another thread of the script's that works, and may have changed a product's inputs meanwhile.

    Raises
    ------
    UsageError
        If the scheme is not known.

    """

    def __init__(
        self,
        scheme: Scheme = "signs",
        *,
        deferred: bool | None = None,
        seed: int = 0x5EED,
        rows_one_in: int = 2,
        elsewhere: Callable[[], str | None] = working_elsewhere,
    ) -> None:
        if scheme not in ("signs", "reference"):
            raise UsageError(f"checksum.scheme is {scheme!r}; expected 'signs' or 'reference'; set one of these")
        self._scheme, self._elsewhere = scheme, elsewhere
        self._deferred = deferred
        self._signs = Signs(seed)
        self._pending: list[Pending] = []
        self._seen: dict[str, int] = defaultdict(int)
        self._checked: dict[str, int] = defaultdict(int)
        self._calls: dict[str, int] = defaultdict(int)
        self.failed: dict[str, str] = {}
        """Operators whose check raised an error, and which."""
        self._strikes: Counter[Kind] = Counter()
        self.left_alone: set[Kind] = set()
        """Operators, identities and dtypes of which experiments have shown that the numbers are right nevertheless."""
        self._dropped = 0
        self._unconfirmed = 0
        self.largest_ratio = 0.0
        """The largest healthy residual over its threshold so far, of those that have reached the host."""
        self.one_in = 1
        """One operator in so many is checked, by turns; settle it between steps."""
        self._rows_one_in = rows_one_in
        self._turns, self._row_turns = Turns(), Turns()

    def select(self, func: OpOverload) -> bool:
        """Return whether an operator is looked at: those that carry FLOPs, and those whose rows have a checksum."""
        return carries_flops(func) or (self._scheme == "signs" and is_between(func))

    def __call__(self, call: OpCall) -> None:
        """Check one call, after it ran; on an accelerator, without waiting for it."""
        flops, by_row = flops_of(call), is_between(call.func)
        if not by_row:
            self._seen[call.op] += flops
        sharp = sees_last_bits(call.op)
        if not self._has_turn(call):
            call.checked = sharp  # in another step
            return
        with torch.no_grad():
            product = product_of(call) if call.op in READERS else None
            if product is not None and self._signs.last.of(product.a.mT) is not None:
                product = product.turned  # whose second factor has been read
            invariants = self._other(call) if product is None else self._product(call, product)
            if invariants is None:
                return
            call.checked = sharp
            self._checked[call.op] += call.outputs[0].numel() if by_row else flops
            self._calls[call.op] += 1
            for invariant in invariants:
                if not self.left_alone or kind_of(call, invariant) not in self.left_alone:
                    self._note(call, product, invariant)

    def _has_turn(self, call: OpCall) -> bool:
        turns = turns_of(call.op, self._rows_one_in)
        if turns == 1 and not is_between(call.func):
            return self._turns.has_one(self.one_in)
        if self._row_turns.is_among_many(call.op):
            return False
        small = is_small((*call.outputs[:1], *tensors_in(call.args[:2])))  # a workspace is not read
        return self._row_turns.has_one(self.one_in * (1 if small else turns))

    def _product(self, call: OpCall, product: Product) -> list[Invariant] | None:
        if not product.out.numel():
            return []
        if self._scheme == "reference":
            found = check_reference(product)
        else:
            found = check_product(product, self._signs, is_backward=call.phase == "backward")
        return None if found is None else [found]

    def _other(self, call: OpCall) -> list[Invariant] | None:
        """Check what is no product; an operator whose check cannot read what it is given is left out from then on."""
        if call.op in self.failed:
            return None
        try:
            return check_between(call, self._signs) if is_between(call.func) else self._layer(call)
        except Exception as error:
            self.failed[call.op] = f"{type(error).__name__}: {error}"[:_LONGEST]
            return None

    def _layer(self, call: OpCall) -> list[Invariant] | None:
        if self._scheme != "signs" or not all(t.layout is torch.strided for t in call.outputs):
            return None
        if call.op in checksum_attention.FORWARD:
            return checksum_attention.check_forward(call)
        if call.op in checksum_attention.BACKWARD:
            return checksum_attention.check_backward(call, self._signs)
        return check_layer(call, self._signs)

    def _note(self, call: OpCall, product: Product | None, invariant: Invariant) -> None:
        output = call.outputs[0]
        element = None
        on_host = output.device.type == "cpu" if self._deferred is None else not self._deferred
        if on_host:
            # A product's inputs may be overwritten as soon as this returns, so it is confirmed now or never.
            ratio = invariant.worst.item()
            if ratio <= 1:
                self.largest_ratio = max(self.largest_ratio, ratio)
                if invariant.overflowed is None or not invariant.overflowed:
                    return
            elif product is not None and self._scheme == "signs":
                element = compare_row_with_float64(product, int(invariant.index) // invariant.per_row)
                if not element.wrong or self._elsewhere() is not None:
                    self._unconfirmed += 1
                    return
        inner = None if product is None else int(product.a.shape[-1])
        by_columns = product is not None and product.by_columns
        self._pending.append(
            Pending(call.site(), invariant, output.dtype, tuple(output.shape), inner, element, by_columns)
        )

    def drain(self, step: int, rank: int) -> list[Finding]:
        """Return what failed since the last time; waits for each device once."""
        pending, self._pending = self._pending, []
        self._turns.next_step()
        self._row_turns.next_step()
        self._signs.next_step()
        found = []
        for noted, (worst, index, overflowed) in zip(
            pending, brought_to_host([p.invariant for p in pending]), strict=True
        ):
            if worst <= 1:
                self.largest_ratio = max(self.largest_ratio, worst)
                if not overflowed:
                    continue
            figures = noted.invariant.figures(worst, index, overflowed)
            if overflowed:
                found.append(overflow(noted, figures, step, rank))
            if not worst <= 1:
                found.append(failure(noted, figures, step, rank))
        self._dropped += max(0, len(found) - _LIMIT)
        return found[:_LIMIT]

    def dismissed(self, findings: list[Finding]) -> None:
        """Mind that experiments have shown the numbers behind some findings of this sensor to be right.

        An identity that is contradicted so twice is left alone: this kernel rounds in a way that nobody has measured.
        """
        kinds = {kind_told(finding) for finding in findings if finding.sensor == "checksum"}
        for kind in filter(None, kinds):
            self._strikes[kind] += 1
            if self._strikes[kind] >= _STRIKES:
                self.left_alone.add(kind)

    @property
    def checked_any(self) -> bool:
        """Whether any call that carries FLOPs was checked so far."""
        return any(self._flops_checked().values())

    @property
    def flops(self) -> dict[str, int]:
        """Floating-point operations seen so far, by operator."""
        return dict(self._seen)

    @property
    def checked_calls(self) -> dict[str, tuple[int, int]]:
        """Calls that were checked so far, by operator, and their floating-point operations, or elements where none count."""
        return {op: (count, self._checked[op]) for op, count in self._calls.items()}

    def _flops_checked(self) -> dict[str, int]:
        """Return the checked floating-point operations of those operators that do any."""
        return {op: self._checked.get(op, 0) for op in self._seen}

    def coverage(self) -> dict[str, Any]:
        """Return FLOPs seen and checked since the start, in all and by operator, and the shares of what is not checked."""
        total = sum(self._seen.values())
        by_operator = self._flops_checked()
        checked = sum(by_operator.values())
        missed = {op: seen - by_operator[op] for op, seen in self._seen.items()}
        return {
            "flops_seen": total,
            "flops_checked": checked,
            "share_checked": checked / total if total else 0.0,
            "by_operator": {op: {"seen": n, "checked": by_operator[op]} for op, n in sorted(self._seen.items())},
            "unchecked": {op: n / total for op, n in sorted(missed.items(), key=lambda m: -m[1]) if n},
            "largest_ratio": self.largest_ratio,
            "findings_dropped": self._dropped,
            "unconfirmed": self._unconfirmed,
            "left_alone": sorted(f"{op}: {name} ({dtype})" for op, name, dtype in self.left_alone),
        }


@self_test("checksum", "matrix products, attention and what runs between, forward and backward, on deep steps")
def _proof() -> str:
    generator = torch.Generator().manual_seed(1)
    found: list[list[Finding]] = []
    for spoil in (False, True):
        sensor = ChecksumSensor(elsewhere=lambda: None)

        def check(call: OpCall, sensor: ChecksumSensor = sensor, spoil: bool = spoil) -> None:
            if spoil:
                call.result[3, 5] *= -64.0
            sensor(call)

        a, b = (torch.randn(shape, generator=generator, dtype=torch.float32) for shape in ((64, 96), (96, 48)))
        with torch.no_grad(), OperatorTap(ModuleTracker(), check, sensor.select):
            torch.mm(a, b)
        found.append(sensor.drain(0, 0))
    return seen(*found)
