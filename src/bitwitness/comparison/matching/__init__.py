"""Which rows of one run are held against which of the other: ranks, micro-batches, steps, nodes."""
