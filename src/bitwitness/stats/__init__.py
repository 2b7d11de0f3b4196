"""What a tensor's numbers look like: full statistics, cheap features of all gradients, a hash of the bits."""

from bitwitness.stats import reader
from bitwitness.stats.digest import HashBatch, bit_hash, in_hex, same_bits
from bitwitness.stats.features import Features, features_of
from bitwitness.stats.figures import figures_of
from bitwitness.stats.moving import Moving
from bitwitness.stats.parts import read, sketch_of
from bitwitness.stats.sketch import exact_sketch, sketch, sketch_rows
from bitwitness.stats.summary import Stats, exact_l2, stats_of
from bitwitness.stats.total import change_sizes, copy_all, marks_of, norms_of, total_of

__all__ = [
    "Features",
    "HashBatch",
    "Moving",
    "Stats",
    "bit_hash",
    "change_sizes",
    "copy_all",
    "exact_l2",
    "exact_sketch",
    "features_of",
    "figures_of",
    "in_hex",
    "marks_of",
    "norms_of",
    "read",
    "reader",
    "same_bits",
    "sketch",
    "sketch_of",
    "sketch_rows",
    "stats_of",
    "total_of",
]
