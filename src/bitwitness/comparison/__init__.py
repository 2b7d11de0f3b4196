"""Where two runs part: their environments first, then their numbers."""
