"""One training, and whoever watches it: its hooks, the moments of a step, the count of steps, the run folder."""
