"""The report of one run or of two: the verdict first, then what to do, then the evidence; as HTML, Markdown and JSON."""

from bitwitness.report.build import build_report

__all__ = ["build_report"]
