"""A table of coverage in lines, for who wants to know what a watch cost, and what it could not check."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def told_of(table: Mapping[str, Any]) -> list[str]:
    """Return what a table of coverage tells beside its gaps: the price, the operators, the ranges, the loss scale."""
    lines = _price_lines(table.get("price") or {})
    operators = table.get("operators")
    if operators and operators.get("flops_seen"):
        lines += [f"not covered: {name}, {share:.1%} of the FLOPs" for name, share in operators["unchecked"].items()]
    lines += _range_lines(table)
    scale = table.get("loss_scale")
    lines += [scale["told"]] if scale and scale.get("told") else []
    return lines


def _range_lines(table: Mapping[str, Any]) -> list[str]:
    """Say how close the closest operators came to their dtype's largest number, and how much is too small for it."""
    rows = table.get("ranges") or []
    if not rows:
        return []
    shown = [f"{row['op']} {row['dtype']} {row['share_of_maximum']:.2g} ({row['where']})" for row in rows[:3]]
    lost = max(rows, key=lambda row: float(row["underflow"]))
    small = (
        f"; {lost['underflow']:.1%} of what {lost['op']} casts to {lost['dtype']} becomes zero"
        if lost["underflow"]
        else ""
    )
    return [f"range, as a share of the dtype's largest number: {', '.join(shown)}{small}"]


def _price_lines(price: Mapping[str, Any]) -> list[str]:
    """Say what the guard cost and what that bought."""
    if price.get("measured") is None:
        return []
    spent = f"price: {price['measured']:.2%} of the time, of {price['price']:.2%} allowed"
    deep = f"a deep step {price['deep_step_costs']:.1%} of a step, one step in {price['deep_every']} is deep"
    products, replicas = price["persistent_wrong_product_seen_within"], price["corrupt_replica_seen_within"]
    seen = f"a wrong product that persists is looked at within {products} steps, replicas that differ within {replicas}"
    lines = [
        f"{spent}: light steps {price['light']:.2%}, {deep}",
        f"bought: {seen}; the gradients of every step are watched",
    ]
    if price["exceeded"]:
        lines.append(
            "price: exceeded, because steps this short leave no room for less; larger batches cost less of their time"
        )
    return lines
