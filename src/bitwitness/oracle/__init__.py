"""The float64 truth of an operator, live or recorded: what its result should be, and how far from that it may lie.

Three questions are answered, each from the operator's own inputs, and none raises for an operator that it cannot answer:

`compare_with_float64`
    A call that has just run: is its whole result within what its dtype allows?
`compare_recorded_with_float64`
    A call that was written to a recording: by how much does its worst element exceed what rounding allows?
`compare_row_with_float64`
    One row of a matrix product: which element is off, and what should it be?
"""

from bitwitness.oracle.live import Discrepancy, compare_with_float64
from bitwitness.oracle.product import Product, product_of
from bitwitness.oracle.recorded import compare_recorded_with_float64
from bitwitness.oracle.row import compare_row_with_float64
from bitwitness.oracle.worst import WorstElement

__all__ = [
    "Discrepancy",
    "Product",
    "WorstElement",
    "compare_recorded_with_float64",
    "compare_row_with_float64",
    "compare_with_float64",
    "product_of",
]
