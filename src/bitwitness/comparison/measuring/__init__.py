"""How far two values are apart, how far rounding may bring them, and what they have to do with each other."""
