"""What led to a spike of the loss or the gradients: the learning rate, the optimizer's state, one rank, one layer, or data."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from bitwitness.finding import Finding, Severity
from bitwitness.monitor.edits import edited_weights
from bitwitness.monitor.rules.rule import Alert, Peers, View, named
from bitwitness.monitor.series import SeriesKey

_KEPT = 8  # steps around a spike
_FACTOR = float(np.log(3.0))  # what an update or a moment must exceed its usual by, to have led to something
_Z = 5.0
_FEW = 0.34  # of a kind's series, so that what moved is one layer and not all
_NAMED = 5
_PLURAL = {"moment1": "first moments", "moment2": "second moments", "update": "updates"}
_SAMPLES = 8  # that are named
_REMEMBERED, _SINCE = 8, 32
"""Alerts that are kept, and steps before a spike in which one may have led to it."""
_LEADING = ("moment1", "moment2", "update", "param")
_SEEN = 2  # updates before a spike that may have led to it


Grown = list[tuple[SeriesKey, float]]
"""Series that moved, and to how many times their usual."""
IndicesOf = Callable[[Sequence[str]], Sequence[int]]


class PostMortem:
    """Keeps the last steps, and says what they tell of a spike."""

    def __init__(self, indices_of: IndicesOf = lambda _hashes: ()) -> None:
        self._indices_of = indices_of
        self._steps: deque[View] = deque(maxlen=_KEPT)
        self._peers: deque[tuple[int, Peers]] = deque(maxlen=_KEPT)
        self._alerts: deque[tuple[int, Alert]] = deque(maxlen=_REMEMBERED)

    def step(self, view: View) -> None:
        """Keep a step."""
        self._steps.append(view)

    def alerted(self, step: int, alerts: Sequence[Alert]) -> None:
        """Keep what was alerted of a step that may lead to a spike later: of rates, updates, moments and weights."""
        self._alerts += [(step, one) for one in alerts if one.key.kind in _LEADING or one.key.metric == "lr"]

    def compared(self, step: int, peers: Peers) -> None:
        """Keep how this rank lay among the others at a step."""
        self._peers.append((step, peers))

    def of(self, step: int, rank: int) -> Finding:
        """Return the finding about a spike at the step that was kept last."""
        spike = self._steps[-1]
        cause, sentence, key = self._cause(spike)
        evidence: dict[str, Any] = {
            "cause": cause,
            "batch": list(spike.numbers.batch),
            "indices": list(self._indices_of(spike.numbers.batch)),
            "seen_before": self._batch_seen(spike),
            "steps": [self._told(view) for view in self._steps],
        }
        site = key.site.at(rank=rank, step=step)
        message = f"the spike of step {step}: {sentence}"
        return Finding("monitor.post_mortem", site, Severity.WARNING, message, evidence, step, rank)

    # -- what it says --------------------------------------------------------------------------------------------

    def _cause(self, spike: View) -> tuple[str, str, SeriesKey]:
        """Return the cause in a word, in a sentence, and where it is; what was there first is asked first."""
        earlier = list(self._steps)[-_SEEN - 1 : -1]  # the updates that the spike's forward has seen
        moved = _moved(spike, ("activation",))
        asked = (
            self._rate,
            lambda: next(filter(None, map(self._state, reversed(earlier))), None),
            self._apart,
            lambda: _one_layer(spike, moved),
            lambda: self._edited(earlier),
            lambda: self._weights(spike, earlier),
            lambda: None if self._is_large() else self._alone(spike),
        )
        return next(filter(None, (ask() for ask in asked)), None) or self._data(spike, moved, known=bool(earlier))

    def _data(self, spike: View, moved: Grown, *, known: bool) -> tuple[str, str, SeriesKey]:
        """Return that it was the data, which is what is left; ``known``: something is known of the steps before."""
        loss = SeriesKey("training", ".", None, "loss")
        batch = self._batch(spike)
        if moved and _is_input(moved[0][0]):
            key, factor = moved[0]
            return "data", f"the data: {named(key)} is {factor:.3g} times its usual ({batch})", key
        if (before := self._alerted_before(spike)) is not None:
            return before
        if known or "update" in spike.moved:
            who = "the data" if self._is_large() else "the data, or chance"
            text = f"{who}: updates and weights before it were as usual, which leaves the batch ({batch})"
            return "data", text, loss
        return "data", f"probably the data ({batch}): nothing else that was looked at moved before it", loss

    def _edited(self, earlier: list[View]) -> tuple[str, str, SeriesKey] | None:
        """Return that optimizers read larger gradients than before, while the backwards' own were as usual."""
        for view in reversed(earlier):
            rise = self._rise(view, "grad_reduced")
            if rise > _FACTOR and "grad" in view.moved and abs(self._rise(view, "grad")) < _FACTOR / 2:
                text = (
                    f"the gradients between backward and step: at step {view.numbers.step} the optimizer read them "
                    f"{np.exp(rise):.3g} times as large as before, and the backward left them as usual (clipping, a scale)"
                )
                return "edited", text, view.numbers.keys[int(view.moved["grad_reduced"].places[0])]
        return None

    def _alerted_before(self, spike: View) -> tuple[str, str, SeriesKey] | None:
        """Return the first alert of the last steps that may have led to it."""
        now = spike.numbers.step
        found = [(step, one) for step, one in self._alerts if now - _SINCE <= step < now]
        if not found:
            return None
        step, first = found[0]
        return "alerted_before", f"what was told of step {step}: {first.message}", first.key

    @staticmethod
    def _weights(spike: View, earlier: list[View]) -> tuple[str, str, SeriesKey] | None:
        """Return that a parameter changed, before the spike or without its update."""
        if earlier and (edited := edited_weights(earlier[-1], spike)) is not None:
            return edited
        if earlier and (weights := _moved(earlier[-1], ("param",))):
            key, factor = weights[0]
            return "one_layer", f"one layer: the {named(key)} changed before it, to {factor:.3g} times their usual", key
        if (weights := _moved(spike, ("param",))) and not _moved(spike, ("update",)):
            key, factor = weights[0]  # the optimizer did not do that
            text = f"one layer: the {named(key)} are {factor:.3g} times their usual, and its updates were as usual"
            return "one_layer", text, key
        return None

    @staticmethod
    def _alone(spike: View) -> tuple[str, str, SeriesKey] | None:
        """Return that a few parameters' gradients grew and no others': a batch moves them all."""
        for kind in ("grad", "grad_reduced"):
            grown = _moved(spike, (kind,))
            if grown and len(grown) < max(2.0, _FEW * np.isfinite(spike.moved[kind].sizes).sum()):
                key, factor = max(grown, key=lambda one: one[1])
                text = f"one layer: the {named(key)} is {factor:.3g} times its usual, and most others' are as usual"
                return "one_layer", text, key
        return None

    def _is_large(self) -> bool:
        """Tell whether the loss has doubled: what random batches do by themselves now and then is less."""
        losses = np.array([view.numbers.number("training", "loss") for view in self._steps])
        before = np.abs(losses[:-1][np.isfinite(losses[:-1])])
        return bool(before.size and not np.abs(losses[-1]) <= 2.0 * before.max())

    def _state(self, view: View) -> tuple[str, str, SeriesKey] | None:
        """Return that an optimizer's moments or updates moved at a step, and the gradients that they are made of did not."""
        at = f"the optimizer's state: at step {view.numbers.step}"
        rises = {kind: self._rise(view, kind) for kind in ("moment2", "moment1", "update")}
        if max(abs(self._rise(view, kind)) for kind in ("grad", "grad_reduced")) < _FACTOR / 2:
            for kind, rise in rises.items():
                if abs(rise) > _FACTOR:
                    key = view.numbers.keys[int(view.moved[kind].places[0])]
                    text = (
                        f"{at} all {_PLURAL[kind]} were {np.exp(rise):.3g} times their usual, while gradients were not"
                    )
                    return "optimizer_state", text, key
        for kinds in (("moment1", "moment2"), ("update",)):
            if found := [one for one in _moved(view, kinds) if not _gradient_moved(view, one[0])]:
                key, factor = found[0]
                text = f"{at} the {named(key)} was {factor:.3g} times its usual, while its gradient was not"
                return "optimizer_state", text + _and_more(len(found) - 1), key
        return None

    def _rise(self, view: View, kind: str) -> float:
        """Return by how much all of a kind rose together, as a logarithm, from what they were in the steps kept before."""
        before = [v.moved[kind].level for v in self._steps if kind in v.moved and v.numbers.step < view.numbers.step]
        return view.moved[kind].level - float(np.median(before)) if before and kind in view.moved else 0.0

    def _rate(self) -> tuple[str, str, SeriesKey] | None:
        """Return that a learning rate was far above its usual at one of the updates that the spike has seen."""
        steps = list(self._steps)
        for place, key in enumerate(steps[-1].numbers.keys):
            if key.metric != "lr":
                continue
            rates = [float(v.numbers.value[place]) if place < len(v.numbers.keys) else np.nan for v in steps[:-1]]
            before = [rate for rate in rates[:-_SEEN] if rate > 0]
            lately = [(rate, view) for rate, view in zip(rates, steps, strict=False) if rate > 0][-_SEEN:]
            if not before or not lately:
                continue
            rate, view = max(lately, key=lambda one: one[0])
            usual = float(np.median(before))
            if rate > 3.0 * usual:
                which = "" if key.name == "0" else f" of group {key.name}"
                text = (
                    f"the learning rate{which}: it was {rate:.3g} at step {view.numbers.step}, from {usual:.3g} before"
                )
                return "learning_rate", text, key
        return None

    def _apart(self) -> tuple[str, str, SeriesKey] | None:
        """Return what says that it is this rank alone, as far as ranks were compared up to here."""
        if not self._peers:
            return None
        _, peers = self._peers[-1]
        if peers.ranks < 3 or not np.isfinite(peers.distance[-2:]).any():
            return None
        wide = np.maximum(peers.spread, 0.1)
        with np.errstate(invalid="ignore"):
            z = np.nan_to_num(peers.distance / wide)
        if z[-2:].max() > 2 * _Z:
            key = peers.keys[int(np.argmax(z))]
            return "one_rank", "one rank: this one stood far from the others before it", key
        return None

    def _batch(self, spike: View) -> str:
        """Say which batch it was: by the hashes of its tensors, and its samples where they are known."""
        hashes, indices = list(dict.fromkeys(spike.numbers.batch)), self._indices_of(spike.numbers.batch)
        said = f"hash {', '.join(hashes[:2])}" if hashes else "hash not known"
        shown = ", ".join(map(str, indices[:_SAMPLES])) + (", …" if len(indices) > _SAMPLES else "")
        return f"{said}; samples {shown} of its data set" if indices else said

    def _batch_seen(self, spike: View) -> list[int]:
        """Return earlier steps, of those kept, that had the same batch."""
        batch = spike.numbers.batch
        return [v.numbers.step for v in self._steps if batch and v is not spike and v.numbers.batch == batch]

    @staticmethod
    def _told(view: View) -> dict[str, Any]:
        numbers = view.numbers
        told: dict[str, Any] = {
            "step": numbers.step,
            "loss": numbers.number("training", "loss"),
            "grad_norm": numbers.number("training", "grad_norm"),
            "lr": numbers.number("training", "lr"),
            "batch": list(numbers.batch),
        }
        for kind in ("activation", "grad", "moment2", "update"):
            if found := _moved(view, (kind,)):
                told[f"{kind}_moved"] = [f"{key.name} x{factor:.3g}" for key, factor in found[:_NAMED]]
        if "update" in view.moved:
            told["update_level"] = view.moved["update"].level
        return told


def _one_layer(spike: View, moved: Grown) -> tuple[str, str, SeriesKey] | None:
    """Return that few activations moved, and none of what the model was called with."""
    every = np.isfinite(spike.moved["activation"].sizes).sum() if "activation" in spike.moved else 0
    if not moved or len(moved) >= _FEW * max(1, every) or _is_input(moved[0][0]):
        return None
    key, factor = moved[0]
    return "one_layer", f"one layer: {named(key)} moved first, to {factor:.3g} times its usual", key


def _moved(view: View, kinds: tuple[str, ...]) -> Grown:
    """Return what of some kinds grew far beyond its usual, in the order in which the step made it, and how far."""
    return list(_moved_in(view, kinds))


def _and_more(others: int) -> str:
    return f" (and so of {others} others)" if others else ""


def _moved_in(view: View, kinds: tuple[str, ...]) -> Iterator[tuple[SeriesKey, float]]:
    sizes: dict[int, float] = {}
    for kind in kinds:
        moved = view.moved.get(kind)
        if moved is None:
            continue
        beyond = (moved.gap > _FACTOR) & (moved.scores > _Z) & (moved.seen >= 8)
        if kind == "activation":
            beyond &= ~view.losses[moved.places]
        sizes |= {int(p): float(np.exp(g)) for p, g in zip(moved.places[beyond], moved.gap[beyond], strict=True)}
    for place in view.first(sizes):
        yield view.numbers.keys[place], sizes[place]


def _gradient_moved(view: View, key: SeriesKey) -> bool:
    """Tell whether a parameter's gradient grew at the same step, which explains its moments and its update."""
    return any(other.name == key.name for other, _ in _moved(view, ("grad", "grad_reduced")))


def _is_input(key: SeriesKey) -> bool:
    """Tell whether a series is of what the model was called with."""
    return key.name == "." and (key.slot or "").startswith("in")
