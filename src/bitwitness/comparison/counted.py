"""How much of a step was compared, and what of it has no counterpart in the other run."""

from __future__ import annotations

from bitwitness.comparison.concluded import LISTED
from bitwitness.comparison.differences import Differences
from bitwitness.comparison.matching.frame import Node
from bitwitness.comparison.measuring.allowance import group_agrees
from bitwitness.comparison.report import Report
from bitwitness.comparison.rewriting.settled import SettledModules


def count_compared(report: Report, differences: Differences, settled: SettledModules) -> None:
    """Add to a report how many values of a step were compared, how many differ, and what has no counterpart."""
    alignment = differences.alignment
    report.rows += len(differences.change_of)
    report.differing += sum(change > 0 for change in differences.change_of.values())
    # A batch that only one run computes is told of as a whole.
    both = min(differences.a.micros, differences.b.micros)
    lone_a, lone_b = ([n for n in nodes if n.micro < both] for nodes in (alignment.only_a, alignment.only_b))
    report.matched += len(alignment.pairs)
    for group in alignment.groups:
        if group_agrees(differences.a, differences.b, group):
            report.matched += max(len(group.a), len(group.b))
            report.groups.append(([node.site for node in group.a], [node.site for node in group.b]))
        else:
            lone_a += group.a
            lone_b += group.b
    report.shared_parts += sum(pair.a.kind != "op" for pair in alignment.pairs)
    report.lone_parts += sum(node.kind != "op" for node in (*lone_a, *lone_b))
    names = {pair.b.module: pair.a.module for pair in alignment.pairs if pair.a.module != pair.b.module}
    # What is inside a module whose results agree is matched by these, however it is written there.
    cleared = sum(map(settled.clears, lone_a)) + sum(settled.clears(node, names) for node in lone_b)
    report.lone += len(lone_a) + len(lone_b) - cleared
    report.matched += cleared
    _list(report.only_a, lone_a)
    _list(report.only_b, lone_b)


def _list(sites: list[str], nodes: list[Node]) -> None:
    for node in nodes:
        if node.site not in sites and len(sites) < LISTED:
            sites.append(node.site)
