"""What a replay needs of a step: what went into it, what the loss code did with it, the gradients, and what lies around."""
